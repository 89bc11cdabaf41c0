"""Environments as tensors.

protocol   what a tensor environment must say, and the episodes made of it
random     random numbers of many environments at once
names      which names mean one
vector     one behind ``core.VectorEnv``
minatar    five games on a board of 10×10
cartpole, acrobot, mountaincar, maze
"""

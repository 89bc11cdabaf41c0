"""Tensor environments: N copies of an environment as batched tensor operations.

protocol   the interface ``TensorEnv``, and episodes with autoreset and time limit
names      from ``Config.env`` to a tensor environment
vector     a tensor environment as a ``core.VectorEnv``
minatar    the five MinAtar games
cartpole, acrobot, mountaincar, maze
"""

"""Code for accelerators: CUDA graphs, streams, torch.compile and hand-written kernels.

graphs       capture a function's kernels and replay them with one launch
streams      streams that run beside the current one
compiling    functions that can be switched to torch.compile
fused_radam  gradient clipping and RAdam for K agents in three Triton kernels
kernels      the Triton kernels
"""

"""Hand-written Triton kernels. Each has an equivalent in plain torch that tests compare it with."""

"""Hand-written GPU kernels, each beside the plain torch code that it must equal."""

"""MinAtar's five games as tensors."""

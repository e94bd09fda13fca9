"""Evidence for the kernels."""

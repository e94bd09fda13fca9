"""Attention for Hopper GPUs: the kernels, and the operator that calls them."""

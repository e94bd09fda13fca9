"""Attention for Hopper GPUs: kernels, and the operator made of them."""

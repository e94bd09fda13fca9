"""Tools for tracing functions with JAX: scopes of operations, split gradients."""

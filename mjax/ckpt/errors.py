"""Errors of checkpoints that programs without JAX also need."""


class FinalError(RuntimeError):
    """A failure that every further attempt would repeat."""

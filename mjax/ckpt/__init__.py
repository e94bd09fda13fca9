"""Saving and restoring the training state."""

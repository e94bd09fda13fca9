"""Attention: one entry point, explicit capabilities per backend."""

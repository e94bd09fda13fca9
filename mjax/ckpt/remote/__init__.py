"""Saved steps in an object store, beside those of the work dir."""

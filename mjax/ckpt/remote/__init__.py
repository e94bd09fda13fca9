"""Copies of saved steps in an object store."""

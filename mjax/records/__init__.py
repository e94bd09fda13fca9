"""Formats of the files that a run writes and that other programs read."""

"""Claims about what is seen of a run."""

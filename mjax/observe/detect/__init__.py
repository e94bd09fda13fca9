"""Find what is slow or stuck in the times of a run: pure functions over arrays."""

"""Time to start a process group, by phase, and its growth with the size."""

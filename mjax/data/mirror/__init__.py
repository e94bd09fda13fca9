"""Remote files in blocks, each of which several hosts of a run keep."""

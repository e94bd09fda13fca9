"""Remote files in blocks, each kept by several hosts of a run."""

"""The transformer, its configuration, and counts of parameters and FLOPs."""

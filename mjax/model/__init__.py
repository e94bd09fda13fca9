"""The transformer, its configuration, and its counts."""

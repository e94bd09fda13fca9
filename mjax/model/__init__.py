"""The transformer, its configuration, its counts."""

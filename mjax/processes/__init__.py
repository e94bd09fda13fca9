"""The processes of a run: start, key-value store, agreement."""

"""The processes of a run: start, hosts, key-value store, agreement."""

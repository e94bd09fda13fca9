"""The processes of a run: start, hosts, texts that they share."""

"""Rules over logs: the lines that make an event, its action, and its record."""

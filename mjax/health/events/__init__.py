"""Rules over logs: which lines make an event, what to do, and what to write down."""

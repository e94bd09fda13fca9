"""Rules over logs: which lines are an event, which action follows, what is recorded."""

"""The text of a compiled step: parsed, walked and counted, without a model of time."""

"""Evaluate models: loss and bits per byte of a text, and tasks of lm-eval."""

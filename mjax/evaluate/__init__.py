"""How good a model is: loss and bits per byte of a text, and tasks of lm-eval."""

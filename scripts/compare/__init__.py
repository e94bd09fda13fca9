"""Compare ways to train on held-out loss: a grid of runs, verdicts, and a page."""

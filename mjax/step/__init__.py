"""One training step: gradients, optimizer, state."""

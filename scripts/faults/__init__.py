"""Evidence for bad input, faults and checkpoints."""

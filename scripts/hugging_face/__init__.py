"""Evidence that models equal those of transformers."""

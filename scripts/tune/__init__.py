"""Evidence for fine-tuning."""

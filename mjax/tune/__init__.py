"""Fine-tuning with low-rank adapters: PEFT files, merged weights."""

"""Fine-tuning with low-rank adapters: files of PEFT, merged weights."""

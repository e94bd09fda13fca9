"""Fine-tuning with low-rank adapters: options, files of PEFT, merged weights."""

"""What is measured on a GPU: `scripts.gpu_report` and `scripts.tune_attention`."""

"""Hugging Face models: folders with safetensors and a config.json."""

"""Models in the form of Hugging Face: folders of safetensors and a config.json."""

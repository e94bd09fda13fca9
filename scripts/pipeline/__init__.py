"""Evidence for pipelines."""

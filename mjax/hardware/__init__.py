"""GPUs, described topologies, and XLA options."""

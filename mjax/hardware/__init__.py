"""GPUs, topologies that are described, and options of XLA."""

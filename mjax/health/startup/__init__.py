"""How long a process group takes to start, phase by phase, and how that grows."""

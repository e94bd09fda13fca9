"""Find slow or stuck parts of a run from its times, with pure functions over arrays."""

"""Windows of the profiler: what each device ran in a step, and where that belongs."""

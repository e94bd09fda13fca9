"""Profiler windows: the operations of each device in a step, and their places in it."""

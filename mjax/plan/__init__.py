"""Planner: what a compiled step will do on a cluster that need not exist."""

"""Planner: read from a compiled step what it will do on a cluster that need not
exist."""

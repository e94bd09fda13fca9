"""Runs that recover from failures: a driver, an agent on each host, and a policy."""

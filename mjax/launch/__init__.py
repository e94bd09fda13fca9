"""Runs that heal themselves: a driver, an agent on each host, and a policy."""

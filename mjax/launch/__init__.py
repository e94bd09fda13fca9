"""Run training that recovers from failures: a driver, an agent per host, a policy."""

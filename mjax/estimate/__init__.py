"""Memory and time of a step, estimated before it runs."""

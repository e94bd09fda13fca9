"""Memory and time of a step by closed formulas."""

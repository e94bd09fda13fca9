"""Performance of a host under load, compared with baselines and other hosts."""

"""Performance of devices and hosts under load, compared with baselines and others."""

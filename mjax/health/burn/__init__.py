"""Performance of devices and hosts under load, against baselines and other hosts."""

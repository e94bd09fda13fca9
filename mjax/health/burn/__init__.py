"""What devices and hosts reach under load, against baselines and other hosts."""

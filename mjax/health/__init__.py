"""Healthy hosts: what is wrong with a machine before a run is, and who is to blame."""

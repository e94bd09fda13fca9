"""Schedulers of clusters, tried on one machine."""

"""Trackers: services that show the metrics of many runs."""

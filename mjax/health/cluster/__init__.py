"""The cluster file: what a cluster should be, compared with what it is."""

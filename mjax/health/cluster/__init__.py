"""The cluster file: the specification of a cluster, compared with its real state."""

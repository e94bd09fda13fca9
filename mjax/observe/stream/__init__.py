"""The way from a run's files to the store: collector, wire, NATS, quota, metrics.

Enters: a work dir that grows. Leaves: batches at an ingester, which answers how far
each file is stored.
"""

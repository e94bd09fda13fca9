"""From a run's files to the store: collector, wire, NATS, quota, metrics.

Enters: a work dir that grows. Leaves: batches at an ingester, which answers how much of
each file is stored.
"""

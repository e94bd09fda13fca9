"""Move a run's files to the store: collector, wire format, NATS, quota, metrics.

Enters: a growing work dir. Leaves: batches at an ingester, which replies with the
stored size of each file.
"""

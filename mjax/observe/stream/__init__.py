"""Move a run's files to the store: collector, wire format, NATS, quota, metrics.

Input: a growing work dir. Output: batches at an ingester, which replies with the
stored size of each file.
"""

"""Everything around the steps of a run: loop, metrics, reports, work dir."""

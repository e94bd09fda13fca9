"""Performance-critical ops, one folder each: api, reference, one file per backend."""

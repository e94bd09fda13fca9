"""Hot operators, one folder each: api, reference, one file per backend."""

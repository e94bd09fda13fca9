"""The checks, one module per subject. Each module defines a tuple `CHECKS`."""

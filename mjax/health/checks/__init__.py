"""The checks, one module per subject. Each module defines a tuple `CHECKS`.

The docstring of the function of a check is a statement that is true on a healthy host.
"""

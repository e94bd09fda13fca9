"""Train language models with JAX on GPU meshes.

Start reading at `mjax.train`; the reading tour is in the README.
"""

__version__ = "0.1.0"

"""Set up every test session: 8 simulated devices, annotations checked."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# The shapes and types that the code declares are checked in tests, not in production.
install_import_hook("mjax", "beartype.beartype")

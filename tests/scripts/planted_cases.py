"""Small kernels with one fault each, and one without, for the reader to tell apart."""

import jax
import jax.numpy as jnp

from scripts.kernels.compiled_kernels import KernelCase
from tests.kernels.planted_kernels import product, staged, twice


def cases() -> dict[str, KernelCase]:
    """Return the kernels; a name says what is wrong with it."""
    square = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    wide = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    wider = jax.ShapeDtypeStruct((64, 640), jnp.bfloat16)
    tall = jax.ShapeDtypeStruct((2048, 64), jnp.bfloat16)
    return {
        "sound": KernelCase(function=product, args=(square, square)),
        "serialised products": KernelCase(function=product, args=(square, wide)),
        "spilled registers": KernelCase(function=product, args=(square, wider)),
        "no matrix product, no bulk copy": KernelCase(function=twice, args=(square,)),
        "too much shared memory": KernelCase(function=staged, args=(tall,)),
        "no kernel": KernelCase(function=jnp.sin, args=(square,)),
    }

"""Kernels to compile in tests: planted faults, and a selection of the shipped ones."""

import jax
import jax.numpy as jnp

from scripts.kernels.compiled_kernels import KernelCase
from scripts.kernels.kernel_table import shipped_cases
from tests.kernels.planted_kernels import product, staged, twice


def cases() -> dict[str, KernelCase]:
    """Return fault -> small kernel with that fault, and one kernel without a fault."""
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


def selected() -> dict[str, KernelCase]:
    """Return the shipped kernels at their common shapes, and those with all options."""
    return {
        name: case
        for name, case in shipped_cases().items()
        if name.endswith(("all, 8 heads a key", "128, bfloat16, window"))
        or name in ("attention 64, bfloat16, window", "attention 128, bfloat16, prefix")
        or name in ("LayerNorm 2048, backward", "RMSNorm 8192, backward")
    }

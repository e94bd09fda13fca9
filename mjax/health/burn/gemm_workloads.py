"""GEMMs on devices: their speed, and bitwise correctness.

Input: a `Bench` and a dtype. Output: `Measured`. Runs in a process that `health burn`
starts; `workloads` defines the values.
"""

import collections
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mjax.health.burn import patterns
from mjax.health.burn.device_bench import (
    AXIS,
    Bench,
    check_place,
    per_device,
    rate,
    scatter,
)
from mjax.health.burn.host_workloads import repeat
from mjax.health.burn.measurements import BUDGET_S, Measured, Outcome

_CPU_SIZE, _GPU_SIZE = 512, 8192
"""Rows of a GEMM on a CPU and on a GPU. The first takes milliseconds on two cores, and
the second is the usual size to reach the peak rate of a GPU."""
_EXACT_GPU_SIZE = 4096
"""Rows of the exact GEMM on a GPU. It gives enough tiles for all parts of a GPU, and
the host checks the result in 0.1 s."""
_DIVISOR = 64
"""Divisor of random bytes. It gives factors from -2 to 2, which are exact in bfloat16
and float16, and rounded in float8."""


def gemm(bench: Bench, dtype: str) -> list[Measured]:
    """Time the GEMM on each device."""
    n, found = _size(bench), []
    a, b = (patterns.random_factor(n, patterns.SEED + i) for i in range(2))
    for name, device in bench.devices.items():
        x, y = (_as_factor(jax.device_put(f, device), dtype, _DIVISOR) for f in (a, b))
        check_place(_product(x, y), device)
        seconds = bench.time(lambda x=x, y=y: _product(x, y))
        found.append(rate(f"gemm.{dtype}.{name}", 2 * n**3 / 1e12, seconds))
    return found


def bits(bench: Bench, dtype: str) -> list[Measured]:
    """Compare the bits of a GEMM across devices and repeats; check an exact GEMM."""
    counts = _digests(bench, dtype)
    wrong = [patterns.different_bits(counts), *_inexact(bench, dtype)]
    notes = [text for text in wrong if text]
    outcome: Outcome = "wrong" if notes else "right"
    runs = min(sum(found.values()) for found in counts.values())
    note = "; ".join(notes) or f"{runs} equal results on each of {', '.join(counts)}"
    return [Measured(name=f"bits.{dtype}", outcome=outcome, note=note)]


def _digests(bench: Bench, dtype: str) -> dict[str, collections.Counter[str]]:
    """Return how often each digest of the same GEMM occurred, for each device.

    One program runs on all devices at once: two programs might add in different orders,
    and so give different bits. The same program has the same order on all GPUs of a
    model (docs.nvidia.com/cuda/cublas, results reproducibility).
    """
    n = _size(bench)
    sharding = jax.NamedSharding(bench.mesh, PartitionSpec(AXIS))
    shape = (len(bench.devices), n, n)

    def on_all(seed: int) -> jax.Array:
        factor = patterns.random_factor(n, seed)[None]
        spread = jax.make_array_from_callback(shape, sharding, lambda _: factor)
        return _as_factor(spread, dtype, _DIVISOR)

    x, y = on_all(patterns.SEED), on_all(patterns.SEED + 1)
    run = per_device(bench.mesh, lambda x, y: _digest(_product(x[0], y[0])))
    counts = {name: collections.Counter[str]() for name in bench.devices}
    for _ in repeat(BUDGET_S[bench.task.form]):
        for name, digest in bench.shards(run(x, y)).items():
            counts[name][digest.tobytes().hex()] += 1
    return counts


def _inexact(bench: Bench, dtype: str) -> Sequence[str | None]:
    """Return a text on the errors of an exact GEMM for each device, or None."""
    n = min(_size(bench), _EXACT_GPU_SIZE)
    a, b = (patterns.small_factor(n, patterns.SEED + i) for i in range(2))
    found = []
    for name, device in bench.devices.items():
        x, y = (_as_factor(jax.device_put(f, device), dtype, 1) for f in (a, b))
        wrong = patterns.wrong_rows(a, b, np.asarray(_product(x, y)))
        found.append(wrong and f"{name} {wrong}")
    return found


def _size(bench: Bench) -> int:
    return _CPU_SIZE if bench.is_cpu else _GPU_SIZE


@functools.partial(jax.jit, static_argnums=(1, 2))
def _as_factor(x: jax.Array, dtype: str, divisor: int) -> jax.Array:
    """Convert bytes to numbers of a dtype; int8 stays as it is."""
    return x if dtype == "int8" else (x.astype(jnp.float32) / divisor).astype(dtype)


@jax.jit
def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply x y^T, with sums in float32 or int32.

    Both factors are read along their rows, the only layout that Hopper tensor cores
    support for 8 bits (cuBLAS, cublasLtMatmul, docs.nvidia.com/cuda/cublas).
    """
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (1,)), ((), ())),
        precision="highest" if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
    )


def _digest(x: jax.Array) -> jax.Array:
    """Return [1, 2] uint32 that depend on the bits of x and on their positions.

    Sums modulo 2^32 do not depend on the order. The weights of the first sum are odd,
    so one wrong number always changes it.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
    place = jnp.arange(bits.size, dtype=jnp.uint32)
    mixed = scatter(bits ^ (bits >> 15))
    weighted = (bits * (2 * place + 1), (mixed ^ (mixed >> 13)) * (scatter(place) | 1))
    return jnp.stack([jnp.sum(one, dtype=jnp.uint32) for one in weighted])[None]

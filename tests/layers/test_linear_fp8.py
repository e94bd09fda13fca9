"""Projections in 8 bits over tp: against float32, and against one device."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from mjax.layers import fp8
from mjax.layers.linear import Joined, column_parallel, row_parallel
from mjax.mesh import collectives
from mjax.mesh.axes import DP, PP
from tests.training import make_mesh

BATCH, LENGTH, D, F, TP = 2, 64, 96, 128, 8
SPECS = {
    "x": PartitionSpec(None, "tp"),
    "w_in": PartitionSpec(None, "tp"),
    "w_out": PartitionSpec("tp"),
}
ROUNDING = 2.0**-3
"""Largest relative error of a value in e5m2; in e4m3 it is half of this."""


def arguments(dtype: Any) -> dict[str, jax.Array]:
    shapes = {"x": (BATCH, LENGTH, D), "w_in": (D, F), "w_out": (F, D)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    # Outputs of unit variance: tanh would magnify relative errors where it saturates.
    return {
        name: (
            jax.random.normal(key, shape) / shape[0] ** (0.5 * (name != "x"))
        ).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def mapped(tp: int, per_device: Callable[[Any], Any], out_specs: Any) -> Any:
    def varying(a: dict[str, jax.Array]) -> Any:
        out = per_device(jax.tree.map(collectives.vary, a))
        # The other axes have size 1: a sum over them changes only the type.
        return lax.psum(out, (PP, *DP))

    return jax.jit(
        jax.shard_map(
            varying,
            mesh=make_mesh((1, 1, 1, tp)),
            in_specs=(SPECS,),
            out_specs=out_specs,
        )
    )


def loss(
    x: jax.Array, joined: tuple[Joined, Joined], num_chunks: int, *, in_fp8: bool
) -> tuple[jax.Array, jax.Array]:
    """In and out again; the sum of the outputs, weighted, and the outputs."""
    width = F // lax.axis_size("tp")
    (up,) = column_parallel(x, joined[0], [width], num_chunks, in_fp8=in_fp8)
    y = row_parallel([jnp.tanh(up)], joined[1], num_chunks, in_fp8=in_fp8)
    y = y.astype(jnp.float32)
    at = collectives.sequence_offset(y.shape[1]) + jnp.arange(y.shape[1])
    return jnp.sum(y * jnp.cos(at)[None, :, None]), y


def run_step(tp: int, num_chunks: int, *, in_fp8: bool) -> Any:
    def per_device(a: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def f(a: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            joined = Joined(a["w_in"]), Joined(a["w_out"])
            return loss(a["x"], joined, num_chunks, in_fp8=in_fp8)

        grads, y = jax.grad(f, has_aux=True)(a)
        return grads | {"y": y}

    return mapped(tp, per_device, SPECS | {"y": SPECS["x"]})


@functools.cache
def result(tp: int, num_chunks: int, in_fp8: bool) -> dict[str, np.ndarray]:
    dtype = jnp.bfloat16 if in_fp8 else jnp.float32
    found = run_step(tp, num_chunks, in_fp8=in_fp8)(arguments(dtype))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), found)


def errors(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict:
    """Norm of the difference over the norm, for each array."""
    return {
        name: np.linalg.norm(found[name] - want[name]) / np.linalg.norm(want[name])
        for name in want
    }


@pytest.mark.parametrize("num_chunks", [1, 8])
def test_a_projection_in_8_bits_is_near_float32(num_chunks: int):
    found = errors(result(TP, num_chunks, True), result(1, 1, False))
    # An output or a gradient passes two matmuls, whose factors are rounded
    # independently; of the four at most two are gradients.
    bound = ROUNDING * np.hypot(np.sqrt(2), np.sqrt(2) / 2)
    for name, error in found.items():
        assert 2.0**-9 < error < bound, name  # above the rounding of bfloat16


@pytest.mark.parametrize("num_chunks", [1, 3, 8])
def test_the_mesh_changes_8_bits_no_more_than_16(num_chunks: int):
    """Shards have scales of their own, but powers of two round alike."""
    found = errors(result(TP, num_chunks, True), result(1, 1, True))
    # What differs is the order of sums, so values that are quantised afterwards differ
    # by a unit of bfloat16. At most 1/16 of them (1/32 in e5m2) then go to the next
    # value of 8 bits, off by 1/8 (1/4): these are root mean squares of one operand of
    # either format. A wrong scale of a shard is off by 1/2.
    bound = np.hypot(16**-0.5 / 8, 32**-0.5 / 4)
    assert max(found.values()) < bound


def test_a_quantised_weight_adds_its_gradient_to_the_total():
    everywhere = PartitionSpec()

    def per_device(a: dict[str, jax.Array]) -> list[jax.Array]:
        weights = a["w_in"], a["w_out"]

        def gradients(joined: tuple[Joined, Joined]) -> Any:
            return jax.grad(lambda j: loss(a["x"], j, 8, in_fp8=True)[0])(joined)

        plain = gradients((Joined(weights[0]), Joined(weights[1])))
        totals = [jnp.full_like(w, 2, jnp.float32) for w in weights]
        first, second = map(fp8.quantise_weight, weights)
        added = gradients((Joined(first, totals[0]), Joined(second, totals[1])))
        ordinary = [p.weight.astype(jnp.float32) for p in plain]
        differences = [d.total - 2 - p for d, p in zip(added, ordinary, strict=True)]
        return [
            lax.pmax(jnp.abs(d).max() / jnp.abs(p).max(), "tp")
            for d, p in zip(differences, ordinary, strict=True)
        ]

    found = mapped(TP, per_device, [everywhere] * 2)(arguments(jnp.bfloat16))
    assert max(map(float, found)) < 2.0**-8  # the ordinary gradient is bfloat16


def test_operands_cross_tp_in_8_bits_and_partial_sums_in_16():
    step = run_step(TP, 8, in_fp8=True)
    text = step.lower(arguments(jnp.bfloat16)).as_text()
    sent = re.findall(r"stablehlo\.collective_permute.*-> tensor<[\dx]*x(\w+)>", text)
    # 7 other shards: x forward and, again, backward; the gradient of the output; the
    # partial sums of both matmuls that are added up over tp.
    assert {dtype: sent.count(dtype) for dtype in sent} == {
        "f8E4M3FN": 14,
        "f8E5M2": 7,
        "bf16": 14,
    }

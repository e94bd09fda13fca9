"""What ZeRO sends in a step, counted in the compiled program: how much, and when."""

import dataclasses
import functools
from typing import Any

import jax
import pytest

from mjax.mesh.axes import AxisSizes
from mjax.plan.hlo.analysis import Collective, analyse
from mjax.plan.hlo.parse import parse
from tests.training import TINY, Layout, compile_gradients, make_program

MODEL = dataclasses.replace(TINY, layers=5, window=(None,))
ROWS = 16
BYTES = 4  # float32; XLA for CPUs would widen bfloat16


@functools.cache
def sent(layout: Layout) -> tuple[Collective, ...]:
    text = compile_gradients(make_program(layout, MODEL, rows=ROWS)).as_text()
    pp, dp_replicate, dp_shard, tp = layout.mesh
    sizes = AxisSizes(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    found = analyse(parse(text), sizes, gpus_per_node=dp_shard * tp).collectives
    return tuple(c for c in found if c.dtype == "f32")  # targets are counted in int32


def elements(layout: Layout, *kinds: str, tier: str | None = None) -> float:
    """Count what a device sends in a step; the loss is one number."""
    return sum(
        c.wire_bytes * c.runs / BYTES
        for c in sent(layout)
        if c.kind in kinds and tier in (None, c.tier) and c.wire_bytes > 16
    )


def sizes_of_model() -> tuple[int, int]:
    """Count the parameters of the layers, and of the ends."""
    params = make_program(Layout((1, 1, 1, 1), 0), MODEL).abstract_state.params
    blocks = params.pop("blocks")
    return count(blocks), count(params)


def count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.slow
def test_zero_3_sends_half_as_much_again_as_plain_data_parallelism():
    """1.5 x for the layers; the ends are gathered once, and cost what they cost there.

    Nothing is gathered for the recompute alone: the backward pass has it with the same
    weights.
    """
    layers, ends = sizes_of_model()
    share = 7 / 8
    plain, zero_3 = Layout((1, 1, 8, 1), zero=0), Layout((1, 1, 8, 1), zero=3)
    # With the loss, one number.
    assert elements(plain, "all-reduce") == pytest.approx(
        2 * share * (layers + ends), abs=2
    )
    assert elements(plain, "all-gather", "reduce-scatter") == 0
    assert elements(zero_3, "all-gather") == share * (2 * layers + ends)
    assert elements(zero_3, "reduce-scatter") == share * (layers + ends)
    assert elements(zero_3, "all-reduce") == 0


@pytest.mark.slow
def test_accumulation_sends_once_a_step():
    kinds = "all-gather", "reduce-scatter", "all-reduce"
    one, four = (Layout((1, 2, 2, 1), zero=2, microbatches=m) for m in (1, 4))
    for tier in ("node", "network"):
        assert elements(four, *kinds, tier=tier) == elements(one, *kinds, tier=tier)


@pytest.mark.slow
def test_zero_3_crosses_the_replicas_once_a_step():
    """MiCS: each microbatch stays in the node, the sum of them crosses."""
    one, three = (Layout((1, 2, 2, 1), zero=3, microbatches=m) for m in (1, 4))
    layers, ends = sizes_of_model()
    assert elements(three, "reduce-scatter", tier="node") == 4 * (layers + ends) / 2
    across = {c.kind for c in sent(three) if c.tier == "network"}
    assert across == {"all-reduce"}
    for layout in (one, three):
        # An all-reduce of 2 sends its operand once.
        assert elements(layout, "all-reduce", tier="network") == (layers + ends) / 2


def test_hsdp_crosses_the_replicas_with_a_share_of_the_gradients():
    """MiCS, two hops: scatter inside dp_shard, then 1/dp_shard of the bytes across."""
    layout = Layout((1, 2, 2, 1), zero=2)
    layers, ends = sizes_of_model()
    assert elements(layout, "reduce-scatter", tier="node") == (layers + ends) / 2
    assert elements(layout, "all-reduce", tier="network") == (layers + ends) / 2
    across = [c for c in sent(layout) if c.tier == "network" and c.wire_bytes > 16]
    assert {c.axes for c in across} == {("dp_replicate",)}

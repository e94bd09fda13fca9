"""Shards on two nodes: what crosses nodes in one step and in two; no GPU is needed."""

import functools
import math

import jax
import pytest

from mjax.config.step import BatchConfig
from mjax.mesh.axes import SHARDS, AxisSizes
from mjax.mesh.rules import dim_of
from mjax.model.config import ModelConfig
from mjax.plan.hlo.analysis import Collective, analyse
from mjax.plan.hlo.parse import parse
from tests.plan.compiled import compiled_text, described_program

pytestmark = pytest.mark.plan

SMALL_BYTES = 2**14
"""Below it are scalars."""
MODEL = ModelConfig(
    layers=5,
    d_model=512,
    heads=8,
    kv_heads=4,
    d_ff=2048,
    vocab_size=1024,
    block="serial",
    activation="swiglu",
)


@functools.cache
def compiled(nodes: int) -> tuple[tuple[Collective, ...], int]:
    """Return what ZeRO-2 sends over 16 shards, and the number of sharded entries."""
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_node=nodes, dp_shard=16 // nodes, tp=1)
    program = described_program(
        sizes,
        model=MODEL,
        batch=BatchConfig(size=64),
        seq_len=1024,
    )
    text = compiled_text(program, "gradients", xla_backend_optimization_level=0)
    found = analyse(parse(text), sizes).collectives
    entries = sum(
        math.prod(leaf.shape)
        for leaf in jax.tree.leaves(program.abstract_state.params)
        if dim_of(leaf.sharding.spec, SHARDS[0]) is not None
    )
    large = tuple(c for c in found if c.role == "dp" and c.wire_bytes > SMALL_BYTES)
    return large, entries


def sent(found: tuple[Collective, ...], kind: str, tier: str) -> int:
    return sum(
        c.wire_bytes * c.runs for c in found if c.kind == kind and c.tier == tier
    )


def test_two_steps_cross_nodes_with_a_sixteenth_of_the_weights():
    """One step passes 15/16 through the eight cards of a node, two steps 8/16."""
    one, _ = compiled(1)
    two, entries = compiled(2)
    for kind, item_bytes in (("all-gather", 2), ("reduce-scatter", 4)):
        whole = item_bytes * entries
        assert sent(two, kind, "network") == pytest.approx(whole / 16, rel=1e-3)
        assert sent(two, kind, "node") == pytest.approx(whole * 7 / 8, rel=1e-3)
        one_card = sent(one, kind, "network") / 8
        assert one_card == pytest.approx(whole * 15 / 16 / 8, rel=1e-3)
        assert sent(two, kind, "network") < 0.6 * one_card
    groups = {(c.tier, c.group_size, c.group_size_in_node) for c in two}
    assert groups == {("network", 2, 1), ("node", 8, 8)}
    assert {(c.group_size, c.group_size_in_node) for c in one} == {(16, 8)}


def test_products_overlap_both_steps_of_every_layer_in_the_loops():
    two, _ = compiled(2)
    in_loops = [c for c in two if c.runs > 1]
    assert {(c.kind, c.tier) for c in in_loops} == {
        (kind, tier)
        for kind in ("all-gather", "reduce-scatter")
        for tier in ("node", "network")
    }
    assert all(c.is_overlapped for c in in_loops)

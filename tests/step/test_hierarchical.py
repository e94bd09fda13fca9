"""Shards that communicate in two steps, between nodes and inside: as one device."""

import dataclasses
import functools

import pytest

from mjax.pipeline.config import PipelineConfig
from mjax.plan.hlo.analysis import analyse
from mjax.plan.hlo.parse import parse
from tests.training import (
    ONE_DEVICE,
    TINY,
    Gradients,
    Layout,
    compile_gradients,
    gradients,
    largest_error,
    make_program,
    partition_of,
)

MODEL = dataclasses.replace(TINY, layers=4, remat="dots")
TOLERANCE = 5e-6
"""float32: sums over 128 tokens and 8 devices, added in another order."""


@functools.cache
def gradients_of(layout: Layout) -> tuple[Gradients, str]:
    program = make_program(layout, MODEL)
    compiled = compile_gradients(program)
    found = gradients(program, compiled, partition_of(layout, MODEL))
    return found, compiled.as_text()


@pytest.mark.parametrize(
    "layout",
    [
        Layout((1, 1, 8, 1), 2, nodes=4),
        Layout((1, 2, 4, 1), 3, nodes=2),
        Layout((2, 1, 4, 1), 2, 2, PipelineConfig(chunks=2), nodes=2),
        pytest.param(Layout((1, 1, 8, 1), 1, nodes=2), marks=pytest.mark.slow),
        pytest.param(Layout((1, 2, 4, 1), 2, nodes=2), marks=pytest.mark.slow),
        pytest.param(Layout((1, 1, 4, 2), 3, 2, nodes=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_steps_train_as_one_device_does(layout: Layout):
    found, text = gradients_of(layout)
    want, _ = gradients_of(ONE_DEVICE)
    assert found.loss == pytest.approx(want.loss, rel=TOLERANCE)
    error, name = largest_error(found, want)
    assert error < TOLERANCE, name
    sizes = layout.sizes
    groups = {
        (c.kind, c.axes, c.group_size, c.tier)
        for c in analyse(parse(text), sizes, sizes.dp_shard * sizes.tp).collectives
        if c.kind in ("all-gather", "reduce-scatter") and c.axes != ("tp",)
    }
    steps = {
        ("dp_node", sizes.dp_node, "network"),
        ("dp_shard", sizes.dp_shard, "node"),
    }
    kinds = ["all-gather"] + ["reduce-scatter"] * (layout.zero > 1)
    assert groups == {
        (kind, (axis,), size, tier) for kind in kinds for axis, size, tier in steps
    }

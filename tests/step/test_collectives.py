"""What the compiled step sends: as much as docs/parallelism.md says, where it says."""

import dataclasses
import functools

import jax
import pytest

from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.plan.hlo.collectives import PlacedCollective, list_collectives
from mjax.plan.hlo.parse import Array, parse
from tests.training import LENGTH, ONE_DEVICE, ROWS, TINY, Layout, make_program

TP = ("tp",)
SHARD = ("dp_shard",)
LAYERS = 4
MODEL = dataclasses.replace(TINY, layers=LAYERS, remat="none")


@functools.cache
def compiled(layout: Layout, model: ModelConfig = MODEL) -> list[PlacedCollective]:
    program = make_program(layout, model)
    step = program.trace().lower()
    module = parse(str(step.compile().as_text()))
    return list(list_collectives(module, AxisSizes(**program.mesh.shape)))


def in_layers(found: list[PlacedCollective], axes: tuple[str, ...], loops: int = 1):
    """Count the collectives of forward and backward layer scan together."""
    kinds = [c.kind for c in found if c.axes == axes and c.num_loops == loops]
    return {kind: kinds.count(kind) for kind in set(kinds)}


def test_one_device_sends_nothing() -> None:
    assert compiled(ONE_DEVICE) == []


@pytest.mark.parametrize(
    ("block", "remat", "gathers", "scatters"),
    [
        # Forward plus backward.
        ("parallel", "none", 1 + 1, 1 + 1),
        ("serial", "none", 2 + 2, 2 + 2),
        ("parallel", "full", 1 + 2, 1 + 1),
        ("serial", "full", 2 + 4, 2 + 3),
    ],
)
def test_a_layer_enters_and_leaves_tensor_parallelism(
    block, remat, gathers, scatters
) -> None:
    model = dataclasses.replace(MODEL, block=block, remat=remat)
    found = compiled(Layout((1, 1, 1, 4), zero=2), model)
    assert in_layers(found, TP) == {"all-gather": gathers, "reduce-scatter": scatters}


def test_cross_entropy_sends_numbers_per_position_not_logits() -> None:
    found = compiled(Layout((1, 1, 1, 4), zero=2))
    reduced = [c for c in found if c.axes == TP and c.kind == "all-reduce"]
    # Maximum, sum and target logit of each position; scalars and norm gradients.
    per_position = 3 * ROWS * LENGTH * 4
    norms = (LAYERS + 1) * MODEL.d_model * 4
    optimizer_scalars = 4096
    assert (
        sum(c.result_bytes for c in reduced) <= per_position + norms + optimizer_scalars
    )
    local_vocab = MODEL.padded_vocab // 4
    logits = [(ROWS, LENGTH, v) for v in (local_vocab, MODEL.padded_vocab)]
    assert not [c for c in found for x in c.results if x.dims[-3:] in logits]


@pytest.mark.slow
def test_zero_2_scatters_gradients_and_zero_1_all_reduces_them() -> None:
    def result_bytes(zero: int, kind: str) -> int:
        """Of a layer after the loop and the ends, and of one in the loop each turn."""
        found = compiled(Layout((1, 1, 8, 1), zero=zero))
        return sum(
            c.result_bytes * (LAYERS - 1 if c.num_loops else 1)
            for c in found
            if c.kind == kind and c.axes == SHARD
        )

    params = jax.tree.leaves(make_program(ONE_DEVICE, MODEL).abstract_state.params)
    num_bytes = sum(leaf.size for leaf in params) * 4
    assert result_bytes(1, "all-reduce") >= num_bytes
    assert result_bytes(1, "reduce-scatter") == 0
    assert result_bytes(2, "reduce-scatter") == num_bytes / 8
    assert result_bytes(2, "all-reduce") < num_bytes / 8


@pytest.mark.slow
def test_zero_3_gathers_a_layer_in_the_loop_and_again_in_the_backward_pass() -> None:
    for remat in ("full", "dots"):
        model = dataclasses.replace(MODEL, remat=remat)
        found = compiled(Layout((1, 1, 8, 1), zero=3), model)
        leaves = len(jax.tree.leaves(make_program(ONE_DEVICE).init().params["blocks"]))
        gathers = [c for c in found if c.num_loops == 1 and c.kind == "all-gather"]
        scatters = [c for c in found if c.num_loops == 1 and c.kind == "reduce-scatter"]
        assert sum(len(c.results) for c in gathers) == 2 * leaves
        assert sum(len(c.results) for c in scatters) == leaves


def test_gathers_move_the_compute_dtype_and_never_the_masters() -> None:
    program = make_program(Layout((1, 1, 8, 1), zero=2), MODEL, compute="bfloat16")
    # Before XLA:CPU widens bfloat16, which its collectives do not know.
    text = program.trace().lower().as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line]
    assert gathers
    assert all("bf16" in line.rsplit("->")[-1] for line in gathers)


def test_a_collective_that_is_started_and_awaited_is_listed_once() -> None:
    """As GPU executables have them, where a start returns its operands too."""
    tp = "replica_groups=mesh['dp_shard'=1,'tp'=4] {'tp'}, dimensions={0}"
    pair = "(f32[4,8]{1,0}, bf16[2]{0})"
    text = f"""HloModule started, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[4,8], y: bf16[2]) -> f32[16,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %y = bf16[2]{{0}} parameter(1)
  %start = ((f32[4,8]{{1,0}}), f32[16,8]{{1,0}}) all-gather-start(%x), {tp}
  %done = f32[16,8]{{1,0}} all-gather-done(%start)
  %start.1 = ({pair}, {pair}) all-reduce-start(%x, %y), {tp}
  ROOT %done.1 = {pair} all-reduce-done(%start.1)
}}
"""
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=4)
    found = list(list_collectives(parse(text), sizes))
    x, y, whole = Array("f32", (4, 8)), Array("bf16", (2,)), Array("f32", (16, 8))
    assert [(c.kind, c.operands, c.results, c.axes) for c in found] == [
        ("all-gather", (x,), (whole,), TP),
        ("all-reduce", (x, y), (x, y), TP),
    ]
    assert found[0].result_bytes == 16 * 8 * 4

"""The pipelined step is the step of one device, and sends what it should and where."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.pipeline.partition import EMPTY
from mjax.plan.hlo.collectives import PlacedCollective, list_collectives
from mjax.plan.hlo.parse import Array, parse
from mjax.step.program import Program
from tests.training import (
    EVERY_OPTION,
    LENGTH,
    ONE_DEVICE,
    TINY,
    Gradients,
    Layout,
    compile_gradients,
    gradients,
    largest_error,
    losses,
    make_batch,
    make_program,
    partition_of,
)

# Float32 sums over 16 rows of 16 positions and 16 layers, in another order: of the
# largest entry of a leaf. A pipeline that loses or doubles one microbatch is off by
# more than 1e-2.
TOLERANCE = 2e-5

ROWS = 16
DEEP = dataclasses.replace(TINY, layers=16, window=(6, None))
EVERY_OPTION_DEEP = dataclasses.replace(EVERY_OPTION, layers=14)

WITH_DP = Layout((4, 1, 2, 1), 2, 8, PipelineConfig(chunks=2, idle="compute"))
WITH_TP = Layout(
    (4, 1, 1, 2),
    1,
    8,
    PipelineConfig(schedule="gpipe", idle="compute", uneven_layers=True),
)
HSDP_AND_TP = Layout(
    (2, 2, 1, 2), 2, 4, PipelineConfig(chunks=3, stash="input", uneven_layers=True)
)
# More tp than key/value heads; a chunk changes after two ticks; idle slots and missing
# layers are skipped.
FEW_HEADS = Layout(
    (2, 1, 1, 4), 0, 2, PipelineConfig(chunks=2, idle="skip", uneven_layers=True)
)
FIVE_LAYERS = dataclasses.replace(EVERY_OPTION, layers=5, window=(6,), rope=(True,))
# dp_shard splits heads and feed-forward width where it does not divide the model's.
NARROW = dataclasses.replace(
    TINY, layers=2, d_model=30, heads=4, kv_heads=1, head_dim=8, window=(None,)
)
WIDE_DP = Layout((1, 1, 4, 2), 2, 2, PipelineConfig(chunks=2))
CASES = [
    (DEEP, WITH_DP),
    pytest.param(FIVE_LAYERS, FEW_HEADS, marks=pytest.mark.slow),
    pytest.param(NARROW, WIDE_DP, marks=pytest.mark.slow),
    pytest.param(DEEP, Layout((8, 1, 1, 1), 0, 16), marks=pytest.mark.slow),
    (EVERY_OPTION_DEEP, WITH_TP),
    pytest.param(EVERY_OPTION_DEEP, HSDP_AND_TP, marks=pytest.mark.slow),
]

TRAINED_MODEL = dataclasses.replace(
    TINY, layers=5, dropout=0.1, tie_embeddings=True, remat="dots"
)
TRAINED = Layout((2, 1, 2, 2), 2, 4, PipelineConfig(chunks=2, uneven_layers=True))


@functools.cache
def compiled(model: ModelConfig, layout: Layout) -> tuple[Program, Any]:
    program = make_program(layout, model, rows=ROWS)
    return program, compile_gradients(program)


@functools.cache
def one_device(model: ModelConfig) -> Gradients:
    return gradients(*compiled(model, ONE_DEVICE), partition_of(ONE_DEVICE, model))


def sent(model: ModelConfig, layout: Layout) -> list[PlacedCollective]:
    program, executable = compiled(model, layout)
    module = parse(executable.as_text())
    return list(list_collectives(module, AxisSizes(**program.mesh.shape)))


@pytest.fixture(scope="module")
def trained() -> Program:
    return make_program(TRAINED, TRAINED_MODEL)


@pytest.fixture(scope="module")
def plain() -> Program:
    return make_program(ONE_DEVICE, TRAINED_MODEL)


# ------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize(
    ("model", "layout"), CASES, ids=["dp", "few-heads", "narrow", "8", "tp", "hsdp-tp"]
)
def test_a_pipeline_has_the_loss_and_gradients_of_one_device(
    model: ModelConfig, layout: Layout
) -> None:
    got = gradients(*compiled(model, layout), partition_of(layout, model))
    want = one_device(model)
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    error, leaf = largest_error(got, want)
    assert error <= TOLERANCE, leaf
    # Norms of gradients and weights go over all slots.
    assert got.empty == 0


@pytest.mark.slow
def test_a_pipelined_run_has_the_losses_of_one_device(
    trained: Program, plain: Program
) -> None:
    """Four steps of LAMB with dropout and an evaluation, as in test_step."""
    np.testing.assert_allclose(losses(trained), losses(plain), rtol=1e-5)


def test_a_pipeline_predicts_the_token_that_one_device_does(
    trained: Program, plain: Program
) -> None:
    logits = []
    for program in (trained, plain):
        tokens = make_batch(program, 0)["tokens"]
        params = program.init().params
        logits.append(program.next_token_logits(params, tokens, jnp.int32(5)))
    # Equal infinities, of padded tokens, are close.
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------- the same state


@pytest.mark.slow
def test_a_pipelined_step_leaves_the_state_where_it_is_declared(
    trained: Program,
) -> None:
    state, _ = trained.train_step(trained.init(), make_batch(trained, 0))
    placed = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim),
        state,
        trained.abstract_state,
    )
    assert all(jax.tree.leaves(placed))
    empty = partition_of(TRAINED, TRAINED_MODEL).layer_of_slot == EMPTY
    assert empty.any()
    for leaf in jax.tree.leaves(state.params["blocks"]):
        assert not np.asarray(leaf)[empty].any()


@pytest.mark.slow
def test_a_bad_gradient_of_one_stage_is_skipped_by_all(trained: Program) -> None:
    state = trained.init()
    blocks = state.params["blocks"]
    # In the first slot of the last stage.
    slot = blocks["mlp"]["w_out"].shape[0] // 2
    blocks["mlp"]["w_out"] = blocks["mlp"]["w_out"].at[slot, 0].set(jnp.inf)
    before = jax.device_get((state.params, state.opt_state))
    after, metrics = trained.train_step(state, make_batch(trained, 0))
    assert int(metrics["skipped"]) == 1
    assert int(after.step) == int(after.guard.num_skipped) == 1
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((after.params, after.opt_state)),
        before,
    )


# ------------------------------------------------------------------------ what is sent


def tick_loops(found: list[PlacedCollective]) -> dict[str, list[PlacedCollective]]:
    """Give the collectives of each loop over ticks, these in order."""
    loops: dict[str, list[PlacedCollective]] = {}
    for c in found:
        if c.site.loops:
            loops.setdefault(c.site.loops[0].body, []).append(c)
    return {
        name: inside
        for name, inside in loops.items()
        if any(c.kind == "collective-permute" for c in inside)
    }


def directions(inside: list[PlacedCollective]) -> list[int]:
    """Say of each permute of one tick by how many stages it goes on."""
    steps = []
    for permute in [c for c in inside if c.kind == "collective-permute"]:
        pairs = permute.groups.members.tolist()
        stages = {(a * 4 // 8, b * 4 // 8) for a, b in pairs}
        assert len(pairs) == 8
        (step,) = {(b - a) % 4 for a, b in stages}
        steps.append(step)
    return sorted(steps)


@pytest.mark.parametrize(
    ("model", "layout", "local_length"),
    [(DEEP, WITH_DP, LENGTH), (EVERY_OPTION_DEEP, WITH_TP, LENGTH // 2)],
    ids=["dp", "tp"],
)
def test_activations_go_one_stage_on_and_gradients_one_stage_back(
    model: ModelConfig, layout: Layout, local_length: int
) -> None:
    found = sent(model, layout)
    permutes = [c for c in found if c.kind == "collective-permute"]
    assert {c.axes for c in permutes} == {("pp",)}
    # One microbatch's, split over tp along the sequence.
    local_rows = ROWS // layout.microbatches // layout.mesh[2]
    one_array = (Array("f32", (local_rows, local_length, model.d_model)),)
    assert {c.results for c in permutes} == {one_array}
    ways = Counter(tuple(directions(inside)) for inside in tick_loops(found).values())
    if layout is WITH_DP:
        # Warm-up and cool-down in two parts each, with pieces and without.
        assert ways == {(1,): 2, (1, 3): 1, (3,): 2}
    else:
        # GPipe's two directions have no tick in common.
        assert set(ways) == {(1,), (3,)}


def test_data_parallelism_communicates_in_warm_up_and_cool_down_only() -> None:
    loops = tick_loops(sent(DEEP, WITH_DP))
    ways = {name: tuple(directions(inside)) for name, inside in loops.items()}
    of_dp = {
        (ways[name], c.kind)
        for name, inside in loops.items()
        for c in inside
        if c.axes != ("pp",)
    }
    assert of_dp == {((1,), "all-gather"), ((3,), "reduce-scatter")}
    for inside in loops.values():
        for c in inside:
            assert c.axes in (("pp",), ("dp_shard",))


def test_a_tick_gathers_a_stage_th_of_a_chunk() -> None:
    found = sent(DEEP, WITH_DP)
    program, _ = compiled(DEEP, WITH_DP)
    blocks = jax.tree.leaves(program.abstract_state.params["blocks"])
    # A norm's scale has no second dim that could be cut: it goes before and after.
    matrices = [x for x in blocks if x.ndim > 2]
    piece = sum(x.size for x in matrices) * 4 // (4 * 2) // 4
    inside = [c for c in found if c.num_loops > 0 and c.axes == ("dp_shard",)]
    gathered = sum(c.result_bytes for c in inside if c.kind == "all-gather")
    scattered = sum(c.result_bytes for c in inside if c.kind == "reduce-scatter")
    assert gathered == piece
    assert scattered == piece // 2


def test_tensor_parallelism_alone_communicates_inside_a_tick() -> None:
    found = sent(EVERY_OPTION_DEEP, WITH_TP)
    in_ticks = [c for c in found if c.num_loops > 0]
    others = [c for c in in_ticks if c.kind != "collective-permute"]
    assert {c.axes for c in others} == {("tp",)}
    assert {c.kind for c in others} >= {"all-gather", "reduce-scatter"}

"""The state in a run's layout and in canonical form: the same layers, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.config.optim import OptimConfig
from mjax.mesh.axes import AxisSizes
from mjax.pipeline.config import PipelineConfig
from mjax.pipeline.partition import EMPTY, split
from mjax.plan.hlo.collectives import list_collectives
from mjax.plan.hlo.parse import parse
from mjax.step import optim
from mjax.step.optim import guard_init
from mjax.step.state import TrainState, saved_form
from tests.layer_slots import in_order, in_slots
from tests.training import ONE_DEVICE, TINY, Layout, make_mesh, make_program

MODEL = dataclasses.replace(TINY, layers=8, d_model=36, head_dim=4, norm_bias=True)
"""D = 36 over dp_shard=2 leaves 18, which pp=4 does not divide: norms stay whole."""

EVEN = split(8, num_stages=4, num_chunks=2)
UNEVEN = split(8, num_stages=2, num_chunks=3, uneven=True)
PLAIN_STAGES = split(8, num_stages=4, num_chunks=1)

LAYOUTS = {
    "even": (Layout((4, 1, 2, 1), 2, 4, PipelineConfig(chunks=2)), EVEN),
    "uneven": (
        Layout((2, 1, 2, 2), 1, 2, PipelineConfig(chunks=3, uneven_layers=True)),
        UNEVEN,
    ),
    "canonical": (Layout((4, 1, 1, 2), 0, 4), PLAIN_STAGES),
}


@pytest.fixture(scope="module")
def programs():
    return {name: make_program(layout, MODEL) for name, (layout, _) in LAYOUTS.items()}


@pytest.fixture(scope="module")
def drawn():
    """The state of one device without a pipeline."""
    return make_program(ONE_DEVICE, MODEL).init()


@pytest.fixture(scope="module")
def trained(drawn):
    """The same with moments that are not zero, negative zeros among them."""
    rng = np.random.default_rng(0)

    def moment(x):
        x = rng.normal(size=x.shape).astype(x.dtype)
        return jnp.asarray(np.where(np.abs(x) < 0.1, np.float32(-0.0), x))

    adam = drawn.opt_state["adam"]
    adam = adam._replace(
        mu=jax.tree.map(moment, adam.mu), nu=jax.tree.map(moment, adam.nu)
    )
    return dataclasses.replace(drawn, opt_state=drawn.opt_state | {"adam": adam})


def assert_same_bits(got, wanted):
    """Compare bits: also the sign of a zero."""

    def compare(a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()

    jax.tree.map(compare, got, wanted)


def assert_placed_as(state, abstract):
    def check(x, s):
        assert (x.shape, x.dtype) == (s.shape, s.dtype)
        assert x.sharding.is_equivalent_to(s.sharding, x.ndim)

    jax.tree.map(check, state, abstract)


def as_stored(canonical, program, partition):
    """Place a canonical state in the layout of a run."""
    placed = jax.tree.map(lambda s: s.sharding, program.abstract_state)
    return jax.device_put(in_slots(canonical, partition), placed)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (4, 1, 8), (4, 2, 8), (2, 3, 9), (1, 3, 8), (3, 2, 13)]
)
def test_slots_and_back_is_exact_and_leaves_all_but_the_blocks(sizes):
    num_stages, num_chunks, num_layers = sizes
    cut = split(num_layers, num_stages=num_stages, num_chunks=num_chunks, uneven=True)
    layers = jnp.arange(1.0, num_layers + 1).at[0].set(-0.0)
    # Every number of stages divides 12 and none but one divides 1.
    blocks = {"w": layers[:, None], "v": jnp.tile(layers[:, None], (1, 12))}
    mesh = make_mesh((num_stages, 1, 1, 1))
    saved = TrainState(
        step=jnp.zeros((), jnp.int32),
        rng=jnp.zeros(2, jnp.uint32),
        params={"blocks": blocks, "head": {"w": layers}},
        opt_state=(),
        guard=guard_init(),
    )

    def placed(path, x):
        is_block = jax.tree_util.DictKey("blocks") in path
        spec = (
            PartitionSpec("pp", *[None] * (x.ndim - 1)) if is_block else PartitionSpec()
        )
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    abstract = jax.tree_util.tree_map_with_path(placed, in_slots(saved, cut))
    form = saved_form(abstract, cut, mesh)
    saved = jax.device_put(saved, jax.tree.map(lambda s: s.sharding, form.abstract))
    stored = form.to_run(saved)
    assert_placed_as(stored, abstract)
    assert stored.params["head"]["w"] is saved.params["head"]["w"]
    expected = [0 if i == EMPTY else layers[i] for i in cut.layer_of_slot]
    np.testing.assert_array_equal(stored.params["blocks"]["w"][:, 0], expected)
    assert_same_bits(stored, in_slots(saved, cut))
    assert_same_bits(form.of_run(stored), saved)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_partition_draws_the_same_layers_in_their_places(name, programs, drawn):
    state = programs[name].init()
    assert_placed_as(state, programs[name].abstract_state)
    assert_same_bits(state, in_slots(drawn, LAYOUTS[name][1]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_canonical_form_has_the_layers_in_order_and_the_way_back_is_exact(
    name, programs, trained
):
    program, partition = programs[name], LAYOUTS[name][1]
    state = as_stored(trained, program, partition)
    saved = program.to_saved(state)
    assert_placed_as(saved, program.abstract_saved)
    assert_same_bits(saved, trained)
    back = program.from_saved(saved)
    assert_placed_as(back, program.abstract_state)
    assert_same_bits(back, state)


def test_without_a_pipeline_the_state_is_saved_as_it_is(programs):
    program = programs["canonical"]
    assert program.abstract_saved is program.abstract_state
    state = object()
    assert program.to_saved(state) is state
    assert program.from_saved(state) is state


@pytest.mark.parametrize("name", ["even", "uneven"])
def test_only_leaves_that_no_stage_count_divides_are_gathered_whole(name, programs):
    """All others cross by one all-to-all over pp, one after the other."""
    program = programs[name]
    num_stages = program.mesh.shape["pp"]
    held = local_bytes_of_blocks(program.abstract_state)
    for move, abstract in (
        (program.to_saved, program.abstract_state),
        (program.from_saved, program.abstract_saved),
    ):
        # A jit around it would have to take over its compiler options.
        assert isinstance(move, functools.partial)
        (jitted,) = move.args
        compiled = jitted.lower(leaves_of_blocks(abstract)).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None
        assert memory is not None
        sizes = AxisSizes(**program.mesh.shape)
        found = list(list_collectives(parse(text), sizes))
        assert {c.axes for c in found} == {("pp",)}
        assert {c.kind for c in found} <= {"all-to-all", "all-gather"}
        for gathered in (c for c in found if c.kind == "all-gather"):
            assert move is program.to_saved
            (whole,) = gathered.results
            assert all(n % num_stages for n in whole.dims[1:])
        sent = sum(c.result_bytes for c in found if c.kind == "all-to-all")
        assert 0 < sent <= sum(held)
        # What arrives, in its place and in order: of one leaf, not of all of them.
        assert memory.temp_size_in_bytes <= 3 * max(held)


def local_bytes_of_blocks(abstract):
    """List what one device holds of each leaf of the blocks."""
    return [
        leaf.dtype.itemsize * int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        for leaf in leaves_of_blocks(abstract)
    ]


def leaves_of_blocks(tree):
    return [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jax.tree_util.DictKey("blocks") in path
    ]


def test_a_checkpoint_of_one_partition_restores_onto_another(
    tmp_path, programs, trained
):
    checkpoints = Checkpoints(tmp_path, CkptConfig(keep=1))
    saving = programs["even"]
    state = saving.to_saved(as_stored(trained, saving, EVEN))
    checkpoints.save(1, lambda: state, {})
    assert checkpoints.wait()
    for name in ("uneven", "canonical"):
        program, partition = programs[name], LAYOUTS[name][1]
        restored = checkpoints.restore(program.abstract_saved)
        assert restored is not None
        state = program.from_saved(restored.state)
        assert_placed_as(state, program.abstract_state)
        assert_same_bits(state, in_slots(trained, partition))
    checkpoints.close()


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_an_update_leaves_empty_slots_zero_and_treats_the_others_as_layers(name):
    rng = np.random.default_rng(0)
    shape = (UNEVEN.num_layers, 4, 3)
    params, grads = (
        {"blocks": {"w": jnp.asarray(rng.normal(size=shape), jnp.float32)}}
        for _ in range(2)
    )
    yes = {"blocks": {"w": True}}
    tx = optim.build_optimizer(
        OptimConfig(name=name), num_steps=4, stacked=yes, decayed=yes
    )

    @jax.jit
    def two_steps(params, grads):
        opt_state = tx.init(params)
        for _ in range(2):
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return params, opt_state

    plain = two_steps(params, grads)
    stored = two_steps(in_slots(params, UNEVEN), in_slots(grads, UNEVEN))
    empty = UNEVEN.layer_of_slot == EMPTY
    assert empty.any()
    for leaf in (stored[0], stored[1]["adam"].mu, stored[1]["adam"].nu):
        assert not np.asarray(leaf["blocks"]["w"])[empty].any()
    # The clipped norm is summed over another order: float32, 96 addends.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        in_order(stored, UNEVEN),
        plain,
    )

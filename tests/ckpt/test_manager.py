"""Checkpoints: bitwise round trips, refusals, failed writes."""

import dataclasses
import resource
import time
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mjax.ckpt.manager import Checkpoints, CkptConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: optax.OptState


# A failed write of Orbax leaves callbacks to an event loop that is closed by then.
noise_of_failed_writes = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def sharding(rows, columns, *spec):
    mesh = jax.make_mesh(
        (rows, columns), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2
    )
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_state(where, *, width=8, step=3):
    rng = np.random.default_rng(0)
    params = {
        "embed": rng.normal(size=(16, width)).astype(np.float32),
        "blocks": {"w": rng.normal(size=(4, width)).astype(jnp.bfloat16)},
    }
    params = jax.tree.map(lambda leaf: jax.device_put(leaf, where), params)
    replicated = NamedSharding(where.mesh, PartitionSpec())
    state = State(jnp.int32(step), params, optax.adamw(1e-3).init(params))
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, where if leaf.ndim else replicated), state
    )


def abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        state,
    )


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@contextmanager
def files_of_at_most(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_for_a_minute(manager):
    for _ in range(600):
        manager.check()
        time.sleep(0.1)


@pytest.fixture
def opened(tmp_path):
    managers = []

    def open_(keep=3):
        for manager in managers:
            manager.wait()
        managers.append(Checkpoints(tmp_path / "checkpoints", keep=keep))
        return managers[-1]

    yield open_
    for manager in managers:
        manager.close()


def test_a_state_comes_back_bitwise_in_a_new_manager(opened):
    state = make_state(sharding(4, 2, "rows", "columns"))
    first = opened()
    first.save(3, state, {"next_step": 3, "config": {"seed": 1}})
    first.wait()
    second = opened()
    assert second.latest_step() == 3
    assert second.restore_run() == {"next_step": 3, "config": {"seed": 1}}
    assert_same(second.restore(abstract(state)), state)


@pytest.mark.parametrize(
    "where", [(2, 4, "rows", "columns"), (4, 2, None, "rows"), (1, 8), (2, 2, "rows")]
)
def test_a_state_comes_back_on_other_shardings(opened, where):
    state = make_state(sharding(4, 2, "rows", "columns"))
    opened().save(3, state, {})
    other = abstract(make_state(sharding(*where)))
    manager = opened()
    restored = manager.restore(other)
    assert_same(restored, state)
    for leaf, wanted in zip(
        jax.tree.leaves(restored), jax.tree.leaves(other), strict=True
    ):
        assert leaf.sharding == wanted.sharding


def test_buffers_may_be_donated_right_after_save(opened):
    state = make_state(sharding(4, 2, "rows"))
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)
    manager = opened()
    manager.save(3, state, {})
    spoil = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    wanted = abstract(state)
    jax.block_until_ready(spoil(state))
    manager.wait()
    assert_same(manager.restore(wanted), before)


def test_the_newest_k_steps_are_kept(opened):
    manager = opened(keep=2)
    for step in (1, 2, 3, 4):
        manager.save(step, make_state(sharding(4, 2, "rows"), step=step), {})
    manager.wait()
    assert sorted(path.name for path in manager._directory.iterdir()) == ["3", "4"]
    assert opened(keep=2).latest_step() == 4


def test_saving_a_saved_step_again_does_nothing(opened):
    state = make_state(sharding(8, 1))
    manager = opened()
    manager.save(3, state, {"try": 1})
    manager.save(3, state, {"try": 2})
    manager.wait()
    assert manager.restore_run() == {"try": 1}


def test_another_width_is_refused_with_the_leaves(opened):
    opened().save(3, make_state(sharding(8, 1)), {})
    other = abstract(make_state(sharding(8, 1), width=12))
    with pytest.raises(ValueError, match="another model") as caught:
        opened().restore(other)
    assert "params.embed: saved float32[16, 8], this run float32[16, 12]" in str(
        caught.value
    )
    assert "and 1 more" in str(caught.value)


def test_absent_and_additional_leaves_are_refused_by_name(opened):
    state = make_state(sharding(8, 1))
    opened().save(3, state, {})
    other = abstract(state)
    other.params["bias"] = other.params.pop("embed")
    with pytest.raises(ValueError, match=r"params\.bias: saved absent") as caught:
        opened().restore(other)
    assert "params.embed: saved float32[16, 8], this run absent" in str(caught.value)


def test_restoring_from_an_empty_folder_says_so(opened):
    with pytest.raises(RuntimeError, match="no checkpoint in"):
        opened().restore({})


def test_a_damaged_checkpoint_is_named(opened):
    state = make_state(sharding(8, 1))
    manager = opened()
    manager.save(3, state, {})
    manager.wait()
    metadata = manager._directory / "3" / "state" / "_METADATA"
    metadata.write_bytes(metadata.read_bytes()[:20])
    with pytest.raises(RuntimeError, match=r"cannot read the checkpoint .*/3:"):
        opened().restore(abstract(state))


@noise_of_failed_writes
def test_a_write_that_fails_is_raised_and_the_next_save_succeeds(opened):
    state = make_state(sharding(8, 1), width=4096)
    manager = opened()
    manager.save(1, state, {})
    manager.wait()
    with files_of_at_most(50_000):
        manager.save(2, state, {})
        with pytest.raises(RuntimeError, match="a checkpoint was not saved"):
            manager.wait()
    assert opened().latest_step() == 1
    manager.check()
    manager.save(3, state, {})
    manager.wait()
    assert opened().latest_step() == 3


@noise_of_failed_writes
def test_a_failed_write_is_raised_by_check_too(opened):
    state = make_state(sharding(8, 1), width=4096)
    manager = opened()
    with files_of_at_most(50_000):
        manager.save(2, state, {})
        with pytest.raises(RuntimeError, match="a checkpoint was not saved"):
            check_for_a_minute(manager)
    manager.check()


@pytest.mark.parametrize("field", ["every", "keep"])
def test_a_cadence_below_one_is_refused(field):
    with pytest.raises(ValueError, match=f"--ckpt.{field} must be at least 1, not 0"):
        CkptConfig(**{field: 0})

"""Checkpoints: bitwise round trips, refusals, damage, failed writes."""

import dataclasses
import errno
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.ckpt import arrays
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.recovery import LostError
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import Store
from tests.ckpt.states import (
    abstract,
    assert_same,
    flip_a_bit,
    make_newer,
    make_state,
    saved,
    sharding,
)


def two_steps(opened, **config):
    """Save steps 1 and 2; return the manager, and the states by step."""
    manager = opened(**config)
    where = sharding(8, 1, "columns", "rows")
    states = {step: make_state(where, width=256, step=step) for step in (1, 2)}
    for step, state in states.items():
        saved(manager, state, step)
    assert [attempt.error for attempt in manager.attempts()] == [None, None]
    return manager, states


# -------------------------------------------------------------------------- round trips


def test_a_state_comes_back_bitwise_in_a_new_manager(opened):
    state = make_state(sharding(4, 2, "rows", "columns"))
    facts = {"next_step": 3, "config": {"seed": 1}}
    saved(opened(), state, 3, **facts)
    manager = opened()
    newest, restored = manager.newest(), manager.restore(abstract(state))
    assert (newest.step, newest.run) == (3, facts)
    assert (restored.step, restored.run, restored.put_aside) == (3, facts, ())
    assert_same(restored.state, state)
    assert restored.bytes_read == newest.num_bytes


@pytest.mark.parametrize(
    "where", [(2, 4, "rows", "columns"), (4, 2, None, "rows"), (1, 8), (2, 2, "rows")]
)
def test_a_state_comes_back_on_other_shardings(opened, where):
    state = make_state(sharding(4, 2, "rows", "columns"))
    saved(opened(), state, 3)
    other = abstract(make_state(sharding(*where)))
    restored = opened().restore(other).state
    assert_same(restored, state)
    for leaf, wanted in zip(
        jax.tree.leaves(restored), jax.tree.leaves(other), strict=True
    ):
        assert leaf.sharding == wanted.sharding


def test_nothing_saved_is_nothing_restored(opened):
    manager = opened()
    assert manager.newest() is None
    assert manager.restore(abstract(make_state(sharding(8, 1)))) is None


def test_a_step_that_uses_the_buffers_again_does_not_change_what_is_saved(
    opened, blocked
):
    state = make_state(sharding(4, 2, "rows"), width=4096)
    wanted = abstract(state)
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)
    manager = opened()
    manager.save(3, lambda: state, {})
    spoil = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    jax.block_until_ready(spoil(state))
    blocked.set()
    assert manager.wait()
    assert_same(manager.restore(wanted).state, before)


def test_a_copy_shares_no_memory_with_the_devices(opened):
    """On a CPU np.asarray copies nothing; jax then declines to donate, by version."""
    state = make_state(sharding(4, 2, "rows"))
    copy = opened().save(3, lambda: state, {})
    views = [
        np.asarray(shard.data) for shard in state.params["embed"].addressable_shards
    ]
    pieces = [piece.array() for piece in copy.leaves["params.embed"].pieces]
    assert len(pieces) == 4
    assert not any(np.shares_memory(a, b) for a in views for b in pieces)


def test_the_host_memory_of_a_save_is_used_again_without_mixing_the_steps(opened):
    manager = opened()
    where = sharding(8, 1)
    copies = [
        manager.save(step, lambda step=step: make_state(where, step=step), {})
        for step in (1, 2)
    ]
    assert manager.wait()
    pieces = [copy.leaves["params.embed"].pieces[0].data for copy in copies]
    assert np.shares_memory(*pieces)
    shutil.rmtree(manager.store.path(2))
    first = make_state(where, step=1)
    assert_same(opened().restore(abstract(first)).state, first)


def test_a_restored_state_can_be_donated_on_every_device(opened):
    """Replicas read once must not be one buffer that each device writes into."""
    state = make_state(sharding(8, 1), width=4096)
    saved(opened(), state, 3)
    restored = opened().restore(abstract(state)).state.params["embed"]
    added = jax.jit(lambda x: x + 1, donate_argnums=0)(restored)
    expected = np.asarray(state.params["embed"]) + 1
    for shard in added.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected)


def test_saving_a_saved_step_again_does_nothing(opened):
    state = make_state(sharding(8, 1))
    manager = opened()
    assert manager.save(3, lambda: state, {"try": 1}) is not None
    assert manager.save(3, lambda: state, {"try": 2}) is None
    assert manager.wait()
    assert manager.newest().run == {"try": 1}
    assert opened().restore(abstract(state)).step == 3


# ---------------------------------------------------------------------------- retention


def test_the_newest_k_steps_are_kept(opened):
    manager = opened(keep=2)
    for step in (1, 2, 3, 4):
        saved(manager, make_state(sharding(4, 2, "rows"), step=step), step)
    assert manager.store.steps() == [3, 4]
    assert [attempt.removed for attempt in manager.attempts()] == [(), (), (1,), (2,)]


def test_steps_with_the_lowest_held_out_loss_are_kept(opened):
    manager = opened(keep=1, keep_best=1)
    for step, loss in enumerate((2.0, 1.0, None, 3.0), start=1):
        saved(manager, make_state(sharding(8, 1), step=step), step, eval_loss=loss)
    assert manager.store.steps() == [2, 4]


# ---------------------------------------------------------------- other models, formats


def test_another_width_is_refused_with_the_leaves(opened):
    saved(opened(), make_state(sharding(8, 1)), 3)
    other = abstract(make_state(sharding(8, 1), width=12))
    with pytest.raises(ValueError, match="another model") as caught:
        opened().restore(other)
    assert "params.embed: saved float32[16, 8], this run float32[16, 12]" in str(
        caught.value
    )
    assert "and 1 more" in str(caught.value)
    assert opened().store.steps() == [3]


def test_absent_and_additional_leaves_are_refused_by_name(opened):
    state = make_state(sharding(8, 1))
    saved(opened(), state, 3)
    other = abstract(state)
    other.params["bias"] = other.params.pop("embed")
    with pytest.raises(ValueError, match=r"params\.bias: saved absent") as caught:
        opened().restore(other)
    assert "params.embed: saved float32[16, 8], this run absent" in str(caught.value)


def test_a_newer_format_is_refused_and_stays_where_it_is(opened):
    manager, states = two_steps(opened)
    make_newer(manager.store.path(2))
    says = r"2/checkpoint.json has format 2, .* reads up to 1; install the version"
    with pytest.raises(ValueError, match=says):
        opened().newest()
    with pytest.raises(ValueError, match=says):
        opened().restore(abstract(states[2]))
    assert manager.store.steps() == [1, 2]


def test_folders_of_others_are_left_alone(opened):
    manager, states = two_steps(opened)
    foreign = ("notes", "3.old", "007", "best", "x.damaged", "y.unfinished-1", "-4")
    for name in foreign:
        (manager.store.directory / name).mkdir()
    again = opened(keep=1)
    assert again.restore(abstract(states[2])).step == 2
    saved(again, make_state(sharding(8, 1)), 3)
    names = {path.name for path in manager.store.directory.iterdir()}
    assert names == {*foreign, "3"}


# ------------------------------------------------------------------------------- damage


def test_a_damaged_newest_step_is_put_aside_and_the_one_before_restored(opened):
    manager, states = two_steps(opened)
    flip_a_bit(manager.store.path(2))
    again = opened()
    restored = again.restore(abstract(states[1]))
    assert restored.step == 1
    assert_same(restored.state, states[1])
    [line] = restored.put_aside
    [(name, reason)] = again.store.quarantined().items()
    assert name == "2.damaged"
    assert line == f"{again.store.directory / name}: {reason}"
    assert reason.startswith("2/state: ")
    # The run goes on and comes to the same step again.
    saved(again, states[2], 2)
    assert again.store.steps() == [1, 2]


@pytest.mark.parametrize("name", ["checkpoint.json", "pieces.0.json"])
def test_a_step_without_its_lists_is_damaged(opened, name):
    manager, states = two_steps(opened)
    (manager.store.path(2) / name).unlink()
    [line] = opened().restore(abstract(states[1])).put_aside
    assert line.endswith(f": 2/{name} is missing")


def test_newest_passes_over_a_damaged_manifest_and_changes_nothing(opened):
    manager, _ = two_steps(opened)
    (manager.store.path(2) / "checkpoint.json").write_text("{")
    assert opened().newest().step == 1
    assert manager.store.steps() == [1, 2]


def test_steps_behind_which_the_run_goes_back_are_renamed_and_not_deleted(opened):
    manager, states = two_steps(opened)
    again = opened(unfit=lambda step, run: "it is too new" if step > 1 else "")
    assert again.newest().step == 1
    assert again.store.steps() == [1, 2]
    restored = again.restore(abstract(states[1]))
    assert restored.step == 1
    assert_same(restored.state, states[1])
    aside = manager.store.directory / "2.rolled-back"
    assert restored.put_aside == (f"{aside}: it is too new",)
    assert again.store.quarantined() == {"2.rolled-back": "it is too new"}
    SavedStep(aside).verify()
    saved(again, states[2], 2)
    assert opened().restore(abstract(states[2])).put_aside == ()


def test_a_run_that_would_go_back_behind_all_steps_is_refused(opened):
    manager, _ = two_steps(opened)
    again = opened(unfit=lambda step, run: f"step {step} is too new")
    with pytest.raises(ValueError, match="checkpoints is of use: step 1 is too new"):
        again.newest()
    assert manager.store.steps() == [1, 2]


def test_a_step_to_go_back_behind_stays_on_a_read_only_store(opened, read_only):
    manager, states = two_steps(opened)
    again = opened(unfit=lambda step, run: "it is too new" if step > 1 else "")
    assert again.restore(abstract(states[1])).step == 1
    assert manager.store.steps() == [1, 2]
    assert opened().restore(abstract(states[1])).step == 1


@pytest.fixture
def read_only(monkeypatch):
    """Refuse every rename in the store, as a read-only mount does."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Store, "quarantine", refuse)


def test_damage_on_a_read_only_store_is_remembered_in_the_work_dir(
    opened, tmp_path, read_only
):
    manager, states = two_steps(opened)
    flip_a_bit(manager.store.path(2))
    restored = opened().restore(abstract(states[1]))
    assert restored.step == 1
    assert "2 (not renamed: Read-only file system)" in restored.put_aside[0]
    lines = (tmp_path / "checkpoints.jsonl").read_text().split("\n")
    record = json.loads([line for line in lines if line][-1])
    assert (record["event"], record["step"]) == ("quarantined", 2)
    again = opened().restore(abstract(states[1]))
    assert (again.step, again.put_aside) == (1, ())


def test_a_run_whose_steps_are_all_damaged_does_not_begin_anew(opened):
    manager, states = two_steps(opened)
    for step in (1, 2):
        flip_a_bit(manager.store.path(step))
    with pytest.raises(LostError, match="no intact checkpoint is left") as caught:
        opened().restore(abstract(states[1]))
    for name in ("1.damaged", "2.damaged", "--restart-from-scratch"):
        assert name in str(caught.value)
    for start in (1, 2):  # nor when it is started again
        with pytest.raises(LostError, match=r"2\.damaged"):
            opened().restore(abstract(states[start]))


def test_a_read_only_store_with_damaged_steps_only_is_not_a_new_run(
    opened, tmp_path, read_only
):
    manager, states = two_steps(opened)
    for step in (1, 2):
        flip_a_bit(manager.store.path(step))
    for _ in range(2):
        with pytest.raises(LostError, match="no intact checkpoint is left"):
            opened().restore(abstract(states[1]))


def test_a_store_that_lost_everything_is_not_a_new_run(opened):
    manager, states = two_steps(opened)
    shutil.rmtree(manager.store.directory)
    says = "step 2 of this run was saved, and .* has no checkpoint at all; mount it"
    with pytest.raises(LostError, match=says):
        opened().newest()
    with pytest.raises(LostError, match=says):
        opened().restore(abstract(states[1]))


@pytest.mark.parametrize("code", ["UNAVAILABLE", "PERMISSION_DENIED"])
def test_a_store_that_does_not_answer_says_nothing_of_the_step(
    opened, monkeypatch, code
):
    manager, states = two_steps(opened)

    def fail(*_):
        raise ValueError(f"{code}: Error reading")

    with monkeypatch.context() as patched:
        patched.setattr(arrays.Reader, "read", fail)
        with pytest.raises(
            RuntimeError, match=f"cannot be read now: {code}.*; check its perm"
        ):
            opened().restore(abstract(states[1]))
    assert manager.store.steps() == [1, 2]
    assert opened().restore(abstract(states[1])).step == 2


# ------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    "field", ["every", "keep", "keep_every", "timeout_s", "local_every"]
)
def test_a_cadence_below_one_is_refused(field):
    flag = field.replace("_", "-")
    with pytest.raises(ValueError, match=rf"--ckpt\.{flag} must be at least 1, got 0"):
        dataclasses.replace(CkptConfig(), **{field: 0})


def test_a_patience_below_the_cadence_is_refused():
    with pytest.raises(ValueError, match=r"must be at least --ckpt\.every 4, got 3;"):
        CkptConfig(every=4, max_unsaved=3)
    assert CkptConfig(every=4).unsaved_limit == 40

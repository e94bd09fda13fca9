"""Saves that cannot be written: told, cleaned up, tried again, given up."""

import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import jax.numpy as jnp
import pytest

from mjax.ckpt import arrays, saving, store
from mjax.ckpt.manager import Answer
from tests.ckpt.states import (
    PATIENCE_S,
    abstract,
    assert_same,
    attempts,
    make_state,
    saved,
    sharding,
)


@contextmanager
def files_of_at_most(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def stalled(manager):
    return (
        "): a write has not ended after 1 s; check that "
        f"{manager.store.directory} responds, then repeat the command"
    )


def test_nothing_is_deleted_before_the_newest_is_committed(opened, short_pauses):
    manager = opened(keep=1)
    saved(manager, make_state(sharding(8, 1), width=4096), 1)
    with files_of_at_most(50_000):
        manager.save(2, lambda: make_state(sharding(8, 1), width=4096), {})
        attempts(manager, lambda found: len(found) > 2)
        assert manager.store.steps() == [1]
    assert manager.wait()
    assert manager.store.steps() == [2]


def test_a_write_that_fails_is_told_cleaned_up_and_tried_until_it_succeeds(
    opened, short_pauses
):
    state = make_state(sharding(8, 1), width=4096)
    manager = opened()
    with files_of_at_most(50_000):
        manager.save(2, lambda: state, {})
        found = attempts(manager, lambda found: len(found) > 1)
        assert [attempt.number for attempt in found[:2]] == [1, 2]
        for attempt in found[:2]:
            assert str(attempt.error).startswith("process 0: ")
        assert [attempt.pause_s for attempt in found[:2]] == [0.002, 0.004]
    assert manager.wait()
    found = attempts(
        manager, lambda found: any(attempt.error is None for attempt in found)
    )
    assert found[-1].number > 2
    assert [path.name for path in manager.store.directory.iterdir()] == ["2"]
    assert_same(opened().restore(abstract(state)).state, state)


def test_what_a_failed_write_left_is_gone_before_the_next(opened, monkeypatch):
    monkeypatch.setattr(saving, "_FIRST_PAUSE_S", 60.0)
    manager = opened()
    with files_of_at_most(50_000):
        manager.save(2, lambda: make_state(sharding(8, 1), width=4096), {})
        attempts(manager, bool)
        assert manager.store.unfinished() == []


def test_a_newer_save_takes_the_place_of_one_that_cannot_be_written(
    opened, monkeypatch
):
    monkeypatch.setattr(saving, "_FIRST_PAUSE_S", 60.0)  # ended by the newer one
    where = sharding(8, 1)
    manager = opened()
    with files_of_at_most(50_000):
        manager.save(2, lambda: make_state(where, width=4096, step=2), {})
        attempts(manager, bool)
    newer = make_state(where, width=4096, step=3)
    saved(manager, newer, 3)
    assert manager.store.steps() == [3]
    assert_same(manager.restore(abstract(newer)).state, newer)


def test_the_last_save_is_given_up_after_some_attempts(opened, short_pauses):
    manager = opened()
    with files_of_at_most(50_000):
        manager.save(
            2, lambda: make_state(sharding(8, 1), width=4096), {}, is_last=True
        )
        assert not manager.wait()
    found = manager.attempts()
    assert len(found) == 8
    assert found[-1].pause_s is None


def test_a_run_that_cannot_save_stops_after_max_unsaved_steps(opened, monkeypatch):
    monkeypatch.setattr(saving, "_FIRST_PAUSE_S", 60.0)
    manager = opened(every=2, max_unsaved=4)
    with files_of_at_most(50_000):
        manager.save(2, lambda: make_state(sharding(8, 1), width=4096), {})
        attempts(manager, bool)
    assert manager.ask(4) is Answer.ACCEPTED
    assert manager.ask(5) is Answer.HOPELESS
    assert manager.ask(5, is_last=True) is Answer.ACCEPTED
    says = manager.why_unsaved(5)
    assert says.startswith("nothing was saved since step 0, 5 steps ago")
    assert "--ckpt.max-unsaved 4" in says
    assert "process 0: " in says


def test_a_run_whose_store_hangs_stops_too(opened, blocked, monkeypatch):
    manager = opened(every=2, max_unsaved=4, timeout_s=1)
    manager.save(2, lambda: make_state(sharding(8, 1)), {})
    assert manager.ask(9) is Answer.BUSY
    now_s = time.monotonic()
    monkeypatch.setattr(saving.time, "monotonic", lambda: now_s + 2)
    assert manager.ask(4) is Answer.BUSY
    assert manager.ask(9) is Answer.HOPELESS
    assert manager.why_unsaved(9).endswith(stalled(manager))
    monkeypatch.undo()
    blocked.set()
    assert manager.wait()


def test_a_last_save_into_a_store_that_hangs_is_given_up(
    opened, blocked, monkeypatch, capsys
):
    manager = opened(timeout_s=1)
    manager.save(2, lambda: make_state(sharding(8, 1)), {}, is_last=True)
    clock = itertools.count(time.monotonic(), 0.4)
    with monkeypatch.context() as patched:
        patched.setattr(saving, "_POLL_S", 0.001)
        patched.setattr(saving.time, "monotonic", lambda: next(clock))
        assert not manager.wait()
        assert manager.why_last_unsaved(2).endswith(stalled(manager))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == ("warning: a write has not ended after 1 s; still waiting for it")
    assert len(said) == 9
    blocked.set()
    assert manager.wait()


@pytest.mark.parametrize("hangs", ["_METADATA", "checkpoint.json"])
def test_a_program_ends_although_its_store_hangs(tmp_path, hangs):
    """Also where Orbax waits for the store on a thread of an executor."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "import jax.numpy as jnp\n"
        "from etils import epath\n"
        "from mjax.ckpt import saving\n"
        "from mjax.ckpt.config import CkptConfig\n"
        "from mjax.ckpt.manager import Checkpoints\n"
        "path_class = type(epath.Path('/'))\n"
        "write, hung = path_class.write_text, []\n"
        "def hang(self, *args, **kwargs):\n"
        "    if self.name == sys.argv[2]:\n"
        "        hung.append(self.name)\n"
        "        time.sleep(3600)\n"
        "    return write(self, *args, **kwargs)\n"
        "path_class.write_text = hang\n"
        "saving._LONGEST_PAUSE_S = 0.1\n"
        "checkpoints = Checkpoints(Path(sys.argv[1]), CkptConfig(timeout_s=1))\n"
        "checkpoints.save(1, lambda: {'x': jnp.zeros(4)}, {}, is_last=True)\n"
        "while not hung: time.sleep(0.01)\n"
        "checkpoints.close()\n"
        "sys.exit(93)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), hangs],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 93, done.stderr


def test_a_merge_that_went_wrong_is_no_save(opened, monkeypatch, short_pauses):
    """What a restore opens is what is read back."""
    manager = opened(keep=1)
    saved(manager, make_state(sharding(8, 1)), 1)
    manager.attempts()
    merge_parts = arrays.merge_parts

    def merge_and_cut(folder):
        merge_parts(folder)
        index = folder / arrays.STATE / "manifest.ocdbt"
        index.write_bytes(index.read_bytes()[:-3])

    with monkeypatch.context() as patched:
        patched.setattr(arrays, "merge_parts", merge_and_cut)
        manager.save(2, lambda: make_state(sharding(8, 1)), {})
        [first, *_] = attempts(manager, bool)
        assert "read back: " in str(first.error)
        assert manager.store.steps() == [1]
    assert manager.wait()
    assert manager.store.steps() == [2]


def test_a_save_is_put_off_while_the_one_before_is_written(opened, blocked):
    state = make_state(sharding(8, 1))
    manager = opened()
    assert manager.ask(1) is Answer.ACCEPTED
    manager.save(1, lambda: state, {})
    assert manager.ask(2) is Answer.BUSY
    assert manager.ask(2, is_last=True) is Answer.ACCEPTED
    blocked.set()
    assert manager.wait()
    assert manager.ask(2) is Answer.ACCEPTED


def test_no_space_is_noticed_before_anything_is_written(opened, monkeypatch):
    state = make_state(sharding(8, 1))
    manager = opened()
    usage = shutil.disk_usage(manager.store.directory.parent)
    full = usage._replace(free=100)
    monkeypatch.setattr(saving, "_FIRST_PAUSE_S", 60.0)
    with monkeypatch.context() as patched:
        patched.setattr(store.shutil, "disk_usage", lambda _: full)
        manager.save(1, lambda: state, {})
        [attempt] = attempts(manager, bool)
    error = str(attempt.error)
    assert error.startswith("no space: the checkpoint takes 0.0 MB, and ")
    assert error.endswith("MB left; make room there")
    assert list(manager.store.directory.iterdir()) == []


def test_to_keep_fewer_steps_is_advised_only_if_one_could_be_deleted(tmp_path):
    full = store.Store(str(tmp_path))
    for step, advises in ((1, False), (2, True)):
        (tmp_path / str(step)).mkdir()
        with pytest.raises(OSError, match="no space") as caught:
            full.begin(3, 1 << 60)
        assert ("keep fewer steps" in str(caught.value)) is advises


def test_a_state_that_cannot_be_copied_is_a_failed_try(opened, short_pauses):
    manager = opened()

    def no_memory():
        raise MemoryError("cannot allocate")

    assert manager.save(1, no_memory, {}, is_last=True) is None
    assert not manager.wait()
    assert {attempt.error for attempt in manager.attempts()} == {
        "process 0: cannot allocate"
    }


def test_a_thread_that_died_is_no_secret(opened, monkeypatch):
    def die(*_):
        raise KeyError("a bug")

    manager = opened()
    monkeypatch.setattr(arrays, "merge_parts", die)
    manager.save(1, lambda: {"x": jnp.zeros(2)}, {})
    with pytest.raises(RuntimeError, match="writes checkpoints has died"):
        manager.wait()


# -------------------------------------------------- parameters that are not finite


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_that_are_not_finite_are_not_saved(opened, value, dtype):
    """The attempt is over at once: the same copy would be refused again."""
    good = {"params": {"w": jnp.arange(8.0, dtype=dtype)}, "count": jnp.int32(1)}
    bad = {"params": {"w": good["params"]["w"].at[5].set(value)}, "count": jnp.int32(2)}
    manager = opened(every=1, max_unsaved=1)
    saved(manager, good, 1)
    manager.save(2, lambda: bad, {})
    assert not manager.wait()
    first, second = manager.attempts()
    assert (first.error, second.pause_s, second.number) == (None, None, 1)
    assert second.error == (
        "process 0: params.w [(0, 8)] has values that are not finite: this state is "
        "not saved"
    )
    assert manager.store.steps() == [1]
    assert manager.store.unfinished() == []
    assert manager.ask(3) is Answer.HOPELESS
    assert opened().restore(abstract(good)).step == 1


def test_only_parameters_must_be_finite(opened):
    """The running mean of a guard may begin as an infinity."""
    state = {"params": {"w": jnp.ones(3)}, "guard": jnp.float32(jnp.inf)}
    saved(opened(), state, 1)
    assert_same(opened().restore(abstract(state)).state, state)


def test_a_copy_for_the_host_is_not_made_of_them_either(opened, tmp_path, capsys):
    good = {"params": {"w": jnp.ones(8)}}
    manager = opened(local_dir=str(tmp_path / "host"))
    assert manager.restore(abstract(good)) is None
    for step, value in ((1, 0.0), (2, jnp.nan)):
        state = {"params": {"w": jnp.full(8, value)}}
        manager.copy(step, lambda state=state: state, {})
        manager._copies.wait()
    assert "params.w [(0, 8)] has values that are not finite" in capsys.readouterr().err
    assert opened(local_dir=str(tmp_path / "host")).restore(abstract(good)).step == 1

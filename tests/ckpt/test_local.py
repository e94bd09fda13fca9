"""Copies on the host: what comes back, from where, and what is said."""

import dataclasses
import json
import shutil
import threading
from unittest.mock import Mock

import pytest

from mjax import trainer
from mjax.ckpt import placing
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.host_copy import HostMemory
from mjax.ckpt.local import LocalCopies, Offer
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.recovery import LostError, by_path, leaf_of
from mjax.cli import exit_codes
from mjax.config.command_line import Command
from mjax.config.train import TrainConfig, to_json
from mjax.data.dataset import Dataset
from mjax.data.tokenizers import BytesTokenizer
from mjax.processes.agreement import Agreement
from mjax.run import prepare
from mjax.run.init_from import open_weights
from tests.ckpt.states import (
    abstract,
    assert_same,
    flip_a_bit,
    make_state,
    saved,
    sharding,
)


@pytest.fixture(scope="module")
def states():
    where = sharding(8, 1, "columns", "rows")
    return {step: make_state(where, width=64, step=step) for step in range(1, 7)}


@pytest.fixture
def local_dir(tmp_path):
    return tmp_path / "host"


@pytest.fixture
def started(opened, local_dir, states):
    """Open and restore, as a run does when it starts."""

    def start(**config):
        manager = opened(local_dir=str(local_dir), **config)
        return manager, manager.restore(abstract(states[1]))

    return start


def copied(manager, state, step, **facts):
    """Copy, and wait until it is written."""
    manager.copy(step, lambda: state, facts)
    assert manager._copies is not None
    manager._copies.wait()


def folders(local_dir):
    """Return the folders of the copies by step; all must be of one run."""
    return {int(path.name): path for path in local_dir.glob("*/process-0/[0-9]*")}


def test_boxes_of_a_copy_come_back_bitwise(local_dir, states):
    copies = LocalCopies(str(local_dir), "run", 0)
    assert copies.offers() == []
    offers = [Offer(step=step, copy_id=f"id {step}") for step in (1, 2, 3)]
    for offer in offers:
        leaves = by_path(states[offer.step])
        copies.save(offer, lambda leaves=leaves: leaves, {"next_step": offer.step})
        copies.wait()
    assert copies.offers() == offers[1:]
    leaves = by_path(abstract(states[2]))
    wanted = {n: (leaf_of(x), placing.own_boxes(x)) for n, x in leaves.items()}
    host, run = copies.read(offers[1], wanted)
    assert run == {"next_step": 2}
    assert_same(placing.place(host, leaves), by_path(states[2]))
    with pytest.raises(DamagedError, match="not the copy that was offered"):
        copies.read(Offer(step=2, copy_id="another"), wanted)


def test_a_copy_newer_than_the_store_is_restored_and_is_not_saved(started, states):
    manager, _ = started()
    saved(manager, states[2], 2)
    copied(manager, states[3], 3, next_step=3)
    again, restored = started(every=1, max_unsaved=1)
    assert (restored.step, restored.store_step) == (3, 2)
    assert (restored.run, restored.put_aside) == ({"next_step": 3}, ())
    assert restored.source == "copies on the hosts"
    assert_same(restored.state, states[3])
    assert "nothing was saved since step 2" in again.why_unsaved(3)
    saved(again, states[3], 3)  # a run may end with the step of its copy
    assert again.store.steps() == [2, 3]


@pytest.mark.parametrize("store_step", [3, 4])
def test_the_store_wins_over_a_copy_that_is_not_newer(started, states, store_step):
    manager, _ = started()
    copied(manager, states[3], 3)
    saved(manager, states[store_step], store_step)
    again, restored = started()
    assert (restored.step, restored.store_step) == (store_step, store_step)
    assert restored.source == str(manager.store.path(store_step))
    assert again.save(store_step, lambda: states[store_step], {}) is None


def test_a_damaged_copy_gives_way_to_the_one_before_then_to_the_store(
    started, states, local_dir
):
    manager, _ = started()
    saved(manager, states[1], 1)
    for step in (2, 3):
        copied(manager, states[step], step)
    flip_a_bit(folders(local_dir)[3])
    _, restored = started()
    [line] = restored.put_aside
    assert line.startswith("the copies of step 3 on the hosts: ")
    assert_same(restored.state, states[2])
    flip_a_bit(folders(local_dir)[2])
    _, restored = started()
    assert (restored.step, len(restored.put_aside)) == (1, 1)
    assert_same(restored.state, states[1])


def test_copies_of_an_abandoned_future_do_not_come_back(started, states, local_dir):
    manager, _ = started()
    saved(manager, states[1], 1)
    for step in (2, 6):
        copied(manager, states[step], step)
    flip_a_bit(folders(local_dir)[6])
    again, restored = started()
    assert restored.step == 2
    assert [*folders(local_dir)] == [2]
    copied(again, states[3], 3)
    assert {*folders(local_dir)} == {2, 3}


def test_copies_that_cannot_be_deleted_are_said(started, states, local_dir, capsys):
    manager, _ = started()
    saved(manager, states[1], 1)
    copied(manager, states[2], 2)
    flip_a_bit(folders(local_dir)[2])

    def refuse(*_):
        raise OSError("Read-only file system")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalCopies, "_unfinished", refuse)
        _, restored = started()
    assert restored.step == 1
    said = capsys.readouterr().err
    assert "process 0 could not delete abandoned copies in" in said
    assert "Read-only file system" in said


@pytest.mark.parametrize("error", [RuntimeError("out of memory\nat"), MemoryError()])
def test_a_copy_that_fails_at_once_is_said_and_the_run_goes_on(
    started, states, local_dir, capsys, error
):
    manager, _ = started()

    def fail(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostMemory, "copy", fail)
        copied(manager, states[1], 1)
    said = capsys.readouterr().err
    reason = str(error).split("\n")[0] or "MemoryError"
    assert "warning: process 0 could not copy the state to" in said
    assert said.endswith(f": {reason}\n")
    copied(manager, states[2], 2)
    assert [*folders(local_dir)] == [2]


def test_a_copy_is_left_out_while_the_one_before_is_written(
    started, states, local_dir, blocked
):
    manager, _ = started()
    manager.copy(1, lambda: states[1], {})
    copies = threading.Thread(target=copied, args=(manager, states[2], 2))
    copies.start()
    copies.join(0.2)
    blocked.set()
    copies.join(60)
    assert [*folders(local_dir)] == [1]


def test_copies_of_no_use_without_a_store_are_no_new_run(started, states, local_dir):
    manager, _ = started()
    copied(manager, states[2], 2)
    flip_a_bit(folders(local_dir)[2])
    says = "never written, and no copy is of use:\n  the copies of step 2 on the hosts"
    with pytest.raises(LostError, match=says) as caught:
        started()
    assert "--restart-from-scratch" in str(caught.value)
    with pytest.raises(LostError, match=says):
        started()


def test_copies_stand_in_for_a_store_that_lost_everything(started, states):
    manager, _ = started()
    saved(manager, states[1], 1)
    copied(manager, states[2], 2)
    shutil.rmtree(manager.store.directory)
    again, restored = started()
    assert (restored.step, restored.store_step) == (2, 0)
    assert again.newest() is None


def test_a_copied_work_dir_is_another_run(started, states, tmp_path, local_dir):
    manager, _ = started()
    copied(manager, states[2], 2)
    twin = tmp_path / "twin"
    twin.mkdir()
    shutil.copy(tmp_path / "checkpoints.jsonl", twin)
    other = Checkpoints(twin, CkptConfig(local_dir=str(local_dir)))
    assert other.restore(abstract(states[1])) is None
    other.close()
    assert [*folders(local_dir)] == [2]


# --------------------------------------------------------------------- at the start


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 5}, "seed: 0 there, 5 in this run"),
        ({"steps": 3}, "--steps must be at least the 4 steps .*, got 3"),
        ({}, "the data are not those of the copy: fingerprint other there, same now"),
    ],
)
def test_a_state_of_another_run_is_refused_wherever_it_comes_from(change, says):
    config = TrainConfig(steps=4)
    fingerprint = "same" if change else "other"
    dataset = Mock(Dataset, fingerprint="same", tokenizer=BytesTokenizer())
    facts = {
        "config": json.loads(to_json(config)),
        "data_fingerprint": fingerprint,
    }
    with pytest.raises(ValueError, match=says):
        prepare.check_facts(
            dataclasses.replace(config, **change), dataset, 4, facts, "the copy"
        )


def test_a_store_behind_a_url_is_not_moved_aside(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    config = TrainConfig(work_dir=str(path))
    ckpt = dataclasses.replace(config.ckpt, dir="gs://bucket/run")
    config = dataclasses.replace(config, ckpt=ckpt)
    command = Command(recipe="debug", restart_from_scratch=True)
    with pytest.raises(ValueError, match="cannot move gs://bucket/run aside; give ano"):
        prepare._look_at_work_dir(config, command)
    assert [*tmp_path.iterdir()] == [path]


def test_damage_of_what_init_from_names_is_one_line(opened, states, tmp_path, capsys):
    manager = opened()
    saved(manager, states[1], 1)
    path = manager.store.path(1)
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(RuntimeError) as caught:
        open_weights(str(tmp_path), TrainConfig().model, {}, Agreement("test"))
    assert trainer._refused(caught.value) == exit_codes.FAILED
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: 1/checkpoint.json ")

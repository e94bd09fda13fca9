"""The folder of steps: names, retention, what a kill or a refusal leaves."""

import os
from pathlib import Path

import pytest

from mjax.ckpt.config import Retention
from mjax.ckpt.manifest import MAIN_FILE, Manifest, write_manifest
from mjax.ckpt.store import Store, kind_of


def commit(store, step, eval_loss=None):
    folder = store.begin(step, 0)
    run = {"eval_loss": eval_loss}
    described = Manifest(step=step, save_id="a", leaves={}, part_sums=[], run=run)
    (folder / MAIN_FILE).write_text(write_manifest(described))
    store.commit(folder, step)


def names(store):
    return sorted(path.name for path in store.directory.iterdir())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "step") for name in ("0", "7", "120")),
        *((name, "quarantined") for name in ("7.damaged", "7.damaged-2")),
        *((name, "quarantined") for name in ("7.rolled-back", "7.rolled-back-2")),
        ("7.unfinished-00ff", "unfinished"),
        *(
            (name, None)
            for name in ("", "007", "-7", "7 ", "\u0667", "7.old", "x.damaged")
        ),
        *((name, None) for name in ("7.damaged-", "a.unfinished-1", "7.unfinished-")),
    ],
)
def test_folders_are_known_by_their_names(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(last=2), {4, 5}),
        (Retention(last=1, every=2), {2, 4, 5}),
        (Retention(last=1, best=2), {1, 3, 5}),  # 4 was not evaluated
        (Retention(last=1, every=3, best=1), {3, 5}),
        (Retention(last=9), {1, 2, 3, 4, 5}),
        (Retention(last=0), {5}),
    ],
)
def test_a_step_stays_if_any_rule_keeps_it_and_the_newest_always(rule, kept):
    losses = {1: 0.5, 2: 0.9, 3: 0.4, 4: None, 5: 0.7}
    assert rule.stays(losses) == kept
    assert rule.stays({}) == set()


def test_prune_deletes_the_others_and_says_which(tmp_path):
    store = Store(tmp_path / "a" / "b")
    for step, loss in ((1, 0.5), (2, 0.1), (3, None), (4, 0.9)):
        commit(store, step, loss)
    (store.path(2) / MAIN_FILE).write_text("damaged")  # no step to any rule
    (store.directory / "9.damaged").mkdir()
    assert store.prune(Retention(last=1, best=1), newest=4) == [3]
    assert names(store) == ["1", "2", "4", "9.damaged"]


def test_a_step_that_is_refused_takes_no_good_one_s_place(tmp_path):
    """As after a start on a store that could not be changed, and now can be."""
    store = Store(tmp_path)
    for step in (100, 150, 200):
        commit(store, step, None)
    refused = [(200, store.manifest(200).save_id)]
    assert store.prune(Retention(last=1), newest=150, refused=refused) == [100]
    assert names(store) == ["150", "200"]


def test_a_loss_that_is_no_number_is_not_the_best():
    losses = {5: 2.0, 10: float("nan"), 20: 1.0, 30: None}
    assert Retention(last=1, best=1).stays(losses) == {20, 30}


def test_a_step_appears_only_when_it_is_committed(tmp_path):
    store = Store(tmp_path / "steps")
    assert (store.steps(), store.unfinished(), store.quarantined()) == ([], [], {})
    folder = store.begin(7, 0)
    assert store.steps() == []
    assert store.unfinished() == [folder.name]
    store.commit(folder, 7)
    assert (store.steps(), store.unfinished()) == ([7], [])


def test_every_file_is_on_the_disk_before_the_step_appears(tmp_path, monkeypatch):
    store = Store(tmp_path)
    folder = store.begin(7, 0)
    (folder / "state" / "_METADATA").write_text("{}")
    synced, fsync = [], os.fsync

    def note(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(path.relative_to(tmp_path).as_posix())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    store.commit(folder, 7)
    name = folder.name
    names = [f"{name}/state/_METADATA", f"{name}/state", name, "."]
    assert synced == names


def test_what_a_dead_process_left_is_deleted_before_the_next_save(tmp_path):
    store = Store(tmp_path)
    left = store.begin(7, 0)
    (left / "state" / "data").write_text("half")
    (tmp_path / "mine.unfinished-not").mkdir()
    new = store.begin(8, 0)
    assert names(store) == [new.name, "mine.unfinished-not"]


def test_a_step_that_is_there_already_is_put_aside_by_a_new_one(tmp_path):
    store = Store(tmp_path)
    for loss in (1.0, 2.0, 3.0):
        commit(store, 7, loss)
    assert names(store) == ["7", "7.damaged", "7.damaged-2"]
    assert store.manifest(7).run["eval_loss"] == 3.0


def test_quarantine_keeps_everything_and_the_reason(tmp_path):
    store = Store(tmp_path)
    commit(store, 7)
    aside = store.quarantine(7, "a flipped bit")
    assert (aside.name, store.steps()) == ("7.damaged", [])
    assert store.quarantined() == {"7.damaged": "a flipped bit"}
    assert (aside / MAIN_FILE).exists()
    (aside / "damaged.json").unlink()
    assert store.quarantined() == {"7.damaged": "the reason was not recorded"}


def test_relative_folders_stay_the_same_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("steps")
    monkeypatch.chdir("/")
    assert Path(os.fspath(store.directory)) == tmp_path / "steps"

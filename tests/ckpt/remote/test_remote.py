"""Steps that are copied to an object store, and brought back."""

import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mjax.ckpt.fence import TakenOverError
from mjax.ckpt.manager import Answer, Checkpoints
from mjax.ckpt.manifest import DamagedError, seal
from mjax.ckpt.remote import local_check
from mjax.ckpt.remote.steps import RemoteSteps
from mjax.ckpt.remote.uploader import Upload
from mjax.stores.objects import RefusedError, UnavailableError
from tests.ckpt.remote.conftest import URL, Open
from tests.ckpt.states import abstract, assert_same, make_state, saved, sharding
from tests.stores.memory import MemoryStore

WHERE = sharding(8, 1)


def state(step: int):
    return make_state(WHERE, step=step)


def save(manager: Checkpoints, *steps: int, **facts) -> list[Upload]:
    """Save steps one by one, each uploaded before the next."""
    found: list[Upload] = []
    for step in steps:
        saved(manager, state(step), step, **facts)
        manager.attempts()
        assert manager.finish_uploads() == ""
        found += manager.uploads()
    return found


def uploaded(manager: Checkpoints) -> list[Upload]:
    """Wait until an upload has succeeded or failed."""
    while not (found := manager.uploads()):
        time.sleep(0.001)
    return found


def commits(objects: MemoryStore) -> list[int]:
    return RemoteSteps(objects).steps()


def without_work_dir(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run")


def test_a_step_in_the_store_restores_the_same_bits_in_an_empty_work_dir(
    run: Open, objects: MemoryStore, tmp_path: Path
):
    (upload,) = save(run(), 3, seed=7)
    assert (upload.step, upload.error, upload.tries) == (3, None, 1)
    assert upload.describe().startswith(f"checkpoint 3 is in {URL}: ")
    before = {
        path.relative_to(tmp_path / "run" / "checkpoints" / "3"): path.read_bytes()
        for path in (tmp_path / "run" / "checkpoints" / "3").rglob("*")
        if path.is_file()
    }
    without_work_dir(tmp_path)
    manager = run(claims=False)
    restored = manager.restore(abstract(state(3)))
    assert restored is not None
    assert_same(restored.state, state(3))
    assert restored.run == {"seed": 7}
    assert f"copied from {URL}" in restored.source
    after = tmp_path / "run" / "checkpoints" / "3"
    assert {p.relative_to(after) for p in after.rglob("*") if p.is_file()} == {*before}
    assert all((after / name).read_bytes() == data for name, data in before.items())


def test_the_newest_step_is_known_before_anything_is_fetched(run: Open, tmp_path: Path):
    save(run(), 3, 6)
    without_work_dir(tmp_path)
    manager = run(claims=False)
    newest = manager.newest()
    assert newest is not None
    assert newest.step == 6
    assert manager.where(6) == URL
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_work_dir_that_is_newer_is_not_replaced(run: Open, objects: MemoryStore):
    first = run()
    save(first, 3)
    objects.before = away
    saved(first, state(6), 6)
    first.close()
    objects.before = lambda method, name: None
    restored = run(claims=False).restore(abstract(state(6)))
    assert restored is not None
    assert restored.step == 6
    assert "copied" not in restored.source


def away(method: str, name: str) -> None:
    raise UnavailableError(f"cannot {method} {URL}/{name}: connection refused")


def test_a_store_that_is_away_is_told_once_and_caught_up_with(
    run: Open, objects: MemoryStore
):
    manager = run(keep=2)
    save(manager, 1)
    objects.before = away
    told: list[Upload] = []
    for step in (2, 3, 4, 5):
        saved(manager, state(step), step)
        assert [attempt.error for attempt in manager.attempts()] == [None]
        told += manager.uploads()
    told = told or uploaded(manager)
    assert manager.ask(6) is Answer.ACCEPTED
    count = len(objects.calls)
    while len(objects.calls) < count + 5:  # it is tried again, in silence
        time.sleep(0.001)
    assert [upload.error is None for upload in told + manager.uploads()] == [False]
    assert "connection refused; training goes on" in told[0].describe()
    objects.before = lambda method, name: None
    assert manager.finish_uploads() == ""
    assert commits(objects) == [4, 5]
    newest, before = manager.uploads()
    assert (newest.step, before.step) == (5, 4)
    assert newest.tries > 1
    assert "at try" in newest.describe()


def test_an_upload_does_not_hold_up_the_next_save(run: Open, objects: MemoryStore):
    manager = run()
    goes_on = threading.Event()

    def hold(method: str, name: str) -> None:
        assert method != "upload" or goes_on.wait(60)

    objects.before = hold
    for step in (1, 2):
        saved(manager, state(step), step)
        manager.attempts()
    assert manager.ask(3) is Answer.ACCEPTED
    assert commits(objects) == []
    goes_on.set()
    assert manager.finish_uploads() == ""
    assert commits(objects) == [1, 2]


def test_a_step_stays_in_the_work_dir_while_it_is_uploaded(
    run: Open, objects: MemoryStore
):
    manager = run(keep=1)
    begun, goes_on = threading.Event(), threading.Event()

    def hold(method: str, name: str) -> None:
        if method == "upload":
            begun.set()
            goes_on.wait(60)

    objects.before = hold
    saved(manager, state(1), 1)
    manager.attempts()
    assert begun.wait(60)
    saved(manager, state(2), 2)
    manager.attempts()
    assert manager.store.steps() == [1, 2]
    goes_on.set()
    assert manager.finish_uploads() == ""
    assert commits(objects) == [2]


def test_what_a_killed_upload_left_is_used_and_is_no_step(
    run: Open, objects: MemoryStore, tmp_path: Path
):
    manager = run()
    sent: list[str] = []

    def die(method: str, name: str) -> None:
        if method == "upload":
            sent.append(name)
            if len(sent) == 3:
                raise SystemExit

    objects.before = die
    saved(manager, state(3), 3)
    manager.attempts()
    with pytest.raises(RuntimeError, match="has died"):
        uploaded(manager)
    assert commits(objects) == []
    objects.before = lambda method, name: None
    objects.calls.clear()
    again = run()
    assert again.finish_uploads() == ""
    again_sent = [name for method, name in objects.calls if method == "upload"]
    assert not {*again_sent} & {*sent[:2]}
    assert commits(objects) == [3]
    without_work_dir(tmp_path)
    restored = run(claims=False).restore(abstract(state(3)))
    assert restored is not None
    assert_same(restored.state, state(3))


def test_a_half_written_step_is_not_restored_and_is_deleted(
    run: Open, objects: MemoryStore, tmp_path: Path
):
    save(run(), 1, 2)
    half = [name for name in objects.kept if name.startswith("steps/2/")]
    del objects.kept["commits/2.json"]
    without_work_dir(tmp_path)
    manager = run()
    restored = manager.restore(abstract(state(1)))
    assert restored is not None
    assert restored.step == 1
    save(manager, 3)
    assert not {*half} & {*objects.kept}
    assert commits(objects) == [1, 3]


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("checkpoint.json", "changed"),
        ("checkpoint.json", "missing"),
        ("pieces.0.json", "changed"),
        ("state/", "changed"),
        ("state/", "missing"),
        ("state/", "cut"),
    ],
)
def test_a_damaged_object_is_named_and_the_step_before_is_taken(
    run: Open, objects: MemoryStore, tmp_path: Path, how: str, file: str
):
    save(run(), 1, 2)
    name = max(
        (n for n in objects.kept if n.startswith("steps/2/") and f"/{file}" in n),
        key=lambda n: len(objects.kept[n].data),
    )
    match how:
        case "changed":
            objects.damage(name)
        case "missing":
            del objects.kept[name]
        case "cut":
            objects.write(name, objects.kept[name].data[:-1])
    without_work_dir(tmp_path)
    manager = run(claims=False)
    restored = manager.restore(abstract(state(1)))
    assert restored is not None
    assert restored.step == 1
    assert_same(restored.state, state(1))
    (warning,) = restored.put_aside
    assert warning.startswith(f"step 2 of {URL}: ")
    assert f"{URL}/{name}" in warning
    manager.claim("", 0)
    assert commits(objects) == [1]
    assert [step for step, _ in RemoteSteps(objects).aside()] == [2]
    save(manager, 2)
    assert commits(objects) == [1, 2]
    without_work_dir(tmp_path)
    again = run(claims=False).restore(abstract(state(2)))
    assert again is not None
    assert_same(again.state, state(2))


def test_a_step_that_was_uploaded_damaged_is_fetched_once(
    run: Open, objects: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after damage between the check of a step and its upload."""
    monkeypatch.setattr(local_check, "check", lambda *args: None)
    manager = run()
    save(manager, 1)
    objects.before = away
    saved(manager, state(2), 2)
    damage_largest_file(tmp_path / "run" / "checkpoints" / "2" / "state")
    objects.before = lambda method, name: None
    manager.attempts()
    assert manager.finish_uploads() == ""
    without_work_dir(tmp_path)
    manager = run(claims=False)
    restored = manager.restore(abstract(state(1)))
    assert restored is not None
    assert restored.step == 1
    assert (tmp_path / "run" / "checkpoints" / "2.damaged").exists()
    assert not (tmp_path / "run" / "checkpoints" / "2.damaged-2").exists()
    assert "the bytes that were uploaded, but is damaged" in restored.put_aside[-1]
    manager.claim("", 0)
    assert commits(objects) == [1]


def damage_largest_file(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def test_a_damaged_commit_is_named_and_replaced_by_the_next_save(
    run: Open, objects: MemoryStore, tmp_path: Path
):
    save(run(), 1, 2)
    objects.damage("commits/2.json")
    without_work_dir(tmp_path)
    manager = run(claims=False)
    restored = manager.restore(abstract(state(1)))
    assert restored is not None
    assert restored.step == 1
    assert f"{URL}/commits/2.json" in restored.put_aside[0]
    manager.claim("", 0)
    save(manager, 2)
    assert RemoteSteps(objects).commit(2).step == 2


def test_a_commit_cannot_name_files_outside_of_the_step(
    run: Open, objects: MemoryStore
):
    save(run(), 1)
    text = objects.kept["commits/1.json"].data.decode()
    body = json.loads(text.partition("\n")[2])
    body["files"]["../../evil"] = body["files"].pop("checkpoint.json")
    objects.write("commits/1.json", seal(body).encode())
    with pytest.raises(DamagedError, match="outside of the step"):
        RemoteSteps(objects).commit(1)


def test_the_store_replaces_a_step_that_is_damaged_in_the_work_dir(
    run: Open, tmp_path: Path
):
    save(run(), 1, 2)
    damage_largest_file(tmp_path / "run" / "checkpoints" / "2" / "state")
    restored = run(claims=False).restore(abstract(state(2)))
    assert restored is not None
    assert restored.step == 2
    assert_same(restored.state, state(2))
    assert "2.damaged" in restored.put_aside[0]
    assert "copied from" in restored.source


def test_a_work_dir_whose_steps_are_lost_is_restored(run: Open, tmp_path: Path):
    save(run(), 1, 2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    manager = run(claims=False)
    newest = manager.newest()
    assert newest is not None
    restored = manager.restore(abstract(state(2)))
    assert restored is not None
    assert restored.step == 2


def test_old_steps_are_deleted_in_the_store_by_its_own_rules(
    run: Open, objects: MemoryStore
):
    manager = run(keep=3, keep_every=4, remote_keep=1)
    uploads = save(manager, *range(1, 7))
    assert commits(objects) == [4, 6]
    assert objects.folders("steps") == ["4", "6"]
    assert uploads[-1].removed == (5,)
    assert "; removed 5" in uploads[-1].describe()
    assert manager.store.steps() == [4, 5, 6]


def test_a_step_that_the_run_has_gone_back_behind_is_passed_over(
    run: Open, objects: MemoryStore, tmp_path: Path
):
    save(run(), 1, 2, 3)

    def unfit(step, facts):
        return "it has read what is left out" if step > 1 else ""

    without_work_dir(tmp_path)
    manager = run(unfit=unfit, claims=False)
    restored = manager.restore(abstract(state(1)))
    assert restored is not None
    assert restored.step == 1
    manager.claim("", 0)
    assert commits(objects) == [1]
    save(manager, 2)
    assert commits(objects) == [1, 2]


def test_another_run_is_refused(run: Open, objects: MemoryStore):
    save(run("one"), 1)
    count = len(objects.kept)
    manager = run("two", claims=False)  # it could go on with that run
    with pytest.raises(ValueError, match="cannot move"):
        manager.check_nothing_remote()
    (manager._work_dir / "checkpoints.jsonl").write_text(
        json.dumps({"event": "started", "step": 0, "run_id": "0123456789abcdef"})
    )
    with pytest.raises(ValueError, match=r"steps of another run: .*Give another URL"):
        run("two")
    assert len(objects.kept) == count


def test_a_store_of_another_run_stays_as_it_is_if_it_was_away_at_the_start(
    run: Open, objects: MemoryStore, tmp_path: Path
):
    two = run("two")
    save(two, 1)
    two.close()
    objects.kept.clear()
    one = run("one")
    save(one, 10, 11, 12)
    one.close()
    before = dict(objects.kept)
    objects.before = away
    two = run("two", keep=1, remote_wait_s=1)
    objects.before = lambda method, name: None
    saved(two, state(2), 2)
    two.attempts()
    assert "has the steps of another run" in two.finish_uploads()
    assert objects.kept == before


def test_of_two_starts_the_one_that_came_last_writes(run: Open, tmp_path: Path):
    first = run("one")
    save(first, 1)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")  # the same run, twice
    second = run("copy")
    saved(first, state(2), 2)
    first.attempts()
    while first.ask(3) is not Answer.HOPELESS:
        time.sleep(0.001)
    assert "another start has taken over" in first.why_unsaved(3)
    assert "the same command uploads it" in first.finish_uploads()
    assert second.finish_uploads() == ""


def test_a_late_start_of_an_older_generation_is_refused(run: Open):
    save(run(launch="a", generation=4), 1)
    with pytest.raises((TakenOverError, RuntimeError), match="has taken over"):
        run("other", launch="a", generation=3)


def test_a_store_that_refuses_is_an_error_before_anything_is_made(
    run: Open, objects: MemoryStore, tmp_path: Path
):
    def deny(method: str, name: str) -> None:
        if method == "write":
            raise RefusedError(f"--ckpt.remote {URL}: AccessDenied")

    objects.before = deny
    with pytest.raises(ValueError, match="AccessDenied"):
        run()
    assert [*(tmp_path / "run").iterdir()] == []


def test_a_store_that_is_away_at_the_start_is_an_error_without_steps_here(
    run: Open, objects: MemoryStore, capfd
):
    objects.before = away
    with pytest.raises(RuntimeError, match=r"is not known\. Start again"):
        run()
    objects.before = lambda method, name: None
    save(run(), 1)
    objects.before = away
    manager = run()
    assert "the run goes on from the work dir" in capfd.readouterr().err
    restored = manager.restore(abstract(state(1)))
    assert restored is not None
    saved(manager, state(2), 2)
    manager.attempts()
    objects.before = lambda method, name: None
    assert manager.finish_uploads() == ""
    assert commits(objects) == [1, 2]


def test_the_state_that_is_uploaded_is_that_of_the_save(run: Open, tmp_path: Path):
    """Donated buffers, and saves that follow at once, change nothing of it."""
    manager = run()
    for step in (1, 2):
        saved(manager, state(step), step)
        manager.attempts()
    assert manager.finish_uploads() == ""
    without_work_dir(tmp_path)
    restored = run(claims=False).restore(abstract(state(2)))
    assert restored is not None
    leaf = np.asarray(restored.state.params["embed"])
    assert leaf.tobytes() == np.asarray(state(2).params["embed"]).tobytes()

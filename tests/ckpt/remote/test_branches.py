"""Runs that go back to an older step: their new branch wins, whatever its numbers."""

from pathlib import Path

import pytest

from mjax.ckpt.journal import age_of, new_save_id, origin_of, start_of
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.remote.steps import RemoteSteps
from tests.ckpt.remote.conftest import URL, Open
from tests.ckpt.remote.test_remote import (
    away,
    commits,
    damage_largest_file,
    save,
    state,
    without_work_dir,
)
from tests.ckpt.states import abstract, assert_same, saved
from tests.stores.memory import MemoryStore


def restored_step(manager: Checkpoints) -> int:
    restored = manager.restore(abstract(state(1)))
    assert restored is not None
    assert_same(restored.state, state(restored.step))
    return restored.step


def fall_back_while_the_store_is_away(
    run: Open, objects: MemoryStore, tmp_path: Path
) -> Checkpoints:
    """Upload steps 1, 4 and 10; lose 10 in the work dir, and go on from 4 to 6."""
    first = run()
    save(first, 1, 4, 10)
    first.close()
    damage_largest_file(tmp_path / "run" / "checkpoints" / "10" / "state")
    objects.before = away
    second = run(claims=False)
    assert restored_step(second) == 4
    second.claim("", 0)
    saved(second, state(6), 6)
    second.attempts()
    return second


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_branch_of_a_fallback_wins_over_higher_steps_of_the_store(
    run: Open, objects: MemoryStore, tmp_path: Path, capfd, is_killed: bool
):
    second = fall_back_while_the_store_is_away(run, objects, tmp_path)
    if is_killed:
        second.close()
    objects.before = lambda method, name: None
    if is_killed:
        second = run(claims=False)
        assert restored_step(second) == 6
        second.claim("", 0)
    assert second.finish_uploads() == ""
    assert commits(objects) == [1, 4, 6]
    (reason,) = RemoteSteps(objects).aside().values()
    said = f"step 10 of {URL} is put aside there: {reason}"
    assert "on a newer branch" in reason
    assert said in capfd.readouterr().err
    second.close()
    without_work_dir(tmp_path)
    assert restored_step(run(claims=False)) == 6


def test_a_branch_of_another_machine_wins_over_higher_steps_here(
    run: Open, objects: MemoryStore, tmp_path: Path
):
    """Steps, and copies on the host, that another machine never saw."""
    local = {"local_dir": str(tmp_path / "ram"), "local_every": 1}
    here = run("here", claims=False, **local)
    assert here.restore(abstract(state(1))) is None
    here.claim("", 0)
    save(here, 1, 4)
    objects.before = away
    saved(here, state(8), 8)
    here.copy(9, lambda: state(9), {})
    here.close()
    objects.before = lambda method, name: None
    there = run("there", claims=False)
    assert restored_step(there) == 4
    there.claim("", 0)
    save(there, 6)
    there.close()
    again = run("here", claims=False, **local)
    restored = again.restore(abstract(state(1)))
    assert restored is not None
    assert restored.step == 6
    assert_same(restored.state, state(6))
    (left,) = restored.put_aside
    assert left.startswith(f"{tmp_path}/here/checkpoints/8.rolled-back: a later start")
    again.claim("", 0)
    save(again, 8)
    assert commits(objects) == [4, 6, 8]


def test_a_start_that_continues_a_branch_puts_nothing_aside(
    run: Open, objects: MemoryStore
):
    for steps in ((1, 2), (3,)):
        manager = run(claims=False)
        manager.restore(abstract(state(1)))
        manager.claim("", 0)
        save(manager, *steps)
        manager.close()
    assert commits(objects) == [1, 2, 3]
    starts = [start_of(commit.save_id) for _, commit in RemoteSteps(objects).commits()]
    assert starts == [1, 1, 2]
    assert RemoteSteps(objects).aside() == {}


def test_a_save_id_names_run_and_start():
    new = new_save_id("0123456789abcdef", 12)
    assert (origin_of(new), start_of(new)) == ("0123456789abcdef", 12)
    for old in ("", "id", "0123456789abcdef", "0123456789abcdef-0123456789abcdef"):
        assert start_of(old) == 0
    assert age_of(6, new_save_id("a", 2)) > age_of(10, new_save_id("a", 1))
    assert age_of(10, new_save_id("a", 1)) > age_of(6, new_save_id("a", 1))

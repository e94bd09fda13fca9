"""The tasks of docs/tasks.md: their order, what fails, and the page."""

import sys
from pathlib import Path

import pytest

from scripts.tasks import page
from scripts.tasks.__main__ import ALL, do, in_order
from scripts.tasks.place import Place, Task, TaskFailedError


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(folder=tmp_path, shared=tmp_path / "shared")


def results() -> dict[int, dict]:
    return {
        number: {
            "commit": "0abcdef",
            "failed": "",
            "commands": [f"mjax do {number} | less", "mjax more"],
            "seconds": 1.25,
            "notes": ["it holds: 3"],
        }
        for number in range(1, 26)
    }


def test_every_task_of_the_page_is_there():
    assert sorted(ALL) == list(range(1, 26))


def test_what_a_task_needs_is_done_before_it():
    order = in_order(sorted(ALL))
    assert sorted(order) == sorted(ALL)
    for task in ALL.values():
        for before in task.needs:
            assert order.index(before) < order.index(task.number)


def test_a_command_with_another_exit_code_fails_the_task(place: Place):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    place.run(command, shown="python wrong.py", code=3)
    with pytest.raises(TaskFailedError, match="ended with 3, not 0"):
        place.run(command, shown="python wrong.py")


def test_commands_of_a_user_are_timed_and_shown_once_and_checks_are_not(place: Place):
    command = [sys.executable, "-c", "print(7)"]
    for _ in range(2):
        place.run(command, shown=["python", str(place.folder / "a.py")])
    seconds = place.seconds
    assert seconds > 0
    assert place.ask(sys.executable, "print('[7]')") == [7]
    assert place.seconds == seconds
    assert place.shown == ["python a.py"]


def test_what_does_not_hold_fails_the_task(place: Place):
    place.need(True, "it holds", 3)
    assert place.notes == ["it holds: 3"]
    with pytest.raises(TaskFailedError, match="not so: it holds; found 4"):
        place.need(False, "it holds", 4)


def test_a_failed_task_is_a_row_that_says_so(tmp_path: Path):
    def fail(place: Place) -> None:
        place.need(False, "anything")

    row = do(Task(number=1, do=fail), tmp_path)
    assert "not so: anything" in row["failed"]


def test_the_page_has_each_command_and_its_seconds():
    text = page.filled(page.PAGE.read_text(), results())
    rows = [line for line in text.split("\n") if line.startswith("| mjax |")]
    assert len(rows) == 25
    assert "`mjax do 3 \\| less`; `mjax more`: 1.2 s. it holds: 3" in rows[2]
    assert text.count(" | `mjax do 3 \\| less` | 1.2 |") == 1
    assert page.filled(text, results()) == text


def test_a_missing_result_is_refused():
    with pytest.raises(KeyError):
        page.filled(page.PAGE.read_text(), {1: results()[1]})

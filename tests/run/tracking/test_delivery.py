"""Rows reach a tracker in order, and no tracker stops or slows a run."""

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mjax.run.tracking.delivery import Delivery
from mjax.run.tracking.tracker import RunFacts

PATIENCE_S = 60.0


class Recording:
    """A tracker that stores what it receives."""

    def __init__(self, *, takes_back: bool = False) -> None:
        self.takes_back = takes_back
        self.calls: list[Any] = []

    def start(self, run: RunFacts, config: Any) -> None:
        self.calls.append(("start", run.id, run.start_step, dict(config)))

    def scalars(self, step: int, metrics: Any) -> None:
        self.calls.append((step, dict(metrics)))

    def finish(self, ending: str) -> None:
        self.calls.append(ending)

    @property
    def steps(self) -> list[int]:
        return [call[0] for call in self.calls if isinstance(call[0], int)]


class Failing(Recording):
    """Raises a given number of times, in the calls of some steps or in start."""

    def __init__(
        self,
        times: int,
        *,
        at: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        super().__init__()
        self.times, self.at = times, at
        self.error = error or ConnectionError("nobody listens\nsecond line")

    def _fail(self, step: int | None) -> None:
        if step == self.at and self.times > 0:
            self.times -= 1
            raise self.error

    def start(self, run: RunFacts, config: Any) -> None:
        self._fail(None)
        super().start(run, config)

    def scalars(self, step: int, metrics: Any) -> None:
        self._fail(step)
        super().scalars(step, metrics)


class Blocked(Recording):
    """Blocks in the first row until released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def scalars(self, step: int, metrics: Any) -> None:
        self.entered.set()
        self.release.wait(PATIENCE_S)
        super().scalars(step, metrics)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def deliver(tmp_path: Path, said: list[str]) -> Callable[..., Delivery]:
    def make(
        tracker: Any, *, start_step: int = 0, run: str = "a", max_queued: int = 100
    ) -> Delivery:
        facts = RunFacts(
            id=run,
            name="demo",
            work_dir=tmp_path,
            start_number=1,
            start_step=start_step,
        )
        return Delivery(
            *("mine", tracker, facts, {"seed": 0}, said.append),
            max_queued=max_queued,
            first_pause_s=0.01,
        )

    return make


def rows(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1.0 / step, "mfu": None} for step in steps]


def send(delivery: Delivery, *steps: int, ending: str = "done") -> None:
    for row in rows(*steps):
        delivery.send(row)
    delivery.finish(ending, patience_s=PATIENCE_S)


def test_a_tracker_gets_the_run_its_numbers_and_its_end(deliver, said) -> None:
    tracker = Recording()
    send(deliver(tracker), 1, 2, ending="stopped")
    assert tracker.calls == [
        ("start", "a", 0, {"seed": 0}),
        (1, {"loss": 1.0}),
        (2, {"loss": 0.5}),
        "stopped",
    ]
    assert said == []


def test_a_step_that_is_repeated_after_a_rollback_is_sent_once(deliver, said) -> None:
    tracker = Recording()
    send(deliver(tracker), 1, 2, 3, 4)
    send(deliver(tracker, start_step=2), 3, 4, 5)
    assert tracker.steps == [1, 2, 3, 4, 5]
    assert [text for text in said if "steps 3 to 4 were sent before" in text] == said
    assert len(said) == 1


def test_an_evaluation_that_was_cut_short_follows_for_the_step_of_the_start(
    deliver,
) -> None:
    tracker = Recording()
    send(deliver(tracker), 1, 2)
    delivery = deliver(tracker, start_step=2)
    delivery.send({"step": 2, "eval_loss": 3.0})
    send(delivery, 3)
    assert tracker.calls[-3:-1] == [(2, {"eval_loss": 3.0}), (3, {"loss": 1 / 3})]


def test_a_tracker_that_takes_steps_back_gets_them_again(deliver, said) -> None:
    tracker = Recording(takes_back=True)
    send(deliver(tracker), 1, 2, 3)
    send(deliver(tracker, start_step=1), 2, 3)
    assert tracker.steps == [1, 2, 3, 2, 3]
    assert said == []


def test_what_another_run_sent_from_the_same_folder_does_not_count(deliver) -> None:
    tracker = Recording()
    send(deliver(tracker), 1, 2)
    send(deliver(tracker, run="b"), 1, 2)
    assert tracker.steps == [1, 2, 1, 2]


def test_a_damaged_note_of_what_was_sent_counts_as_none(deliver, tmp_path) -> None:
    tracker = Recording()
    send(deliver(tracker), 1, 2)
    (tmp_path / "tracking" / "mine.json").write_text("{")
    send(deliver(tracker, start_step=2), 3)
    assert tracker.steps == [1, 2, 3]


def test_a_tracker_that_is_down_at_the_start_gets_everything_later(
    deliver, said
) -> None:
    tracker = Failing(7)
    delivery = deliver(tracker)
    for row in rows(1, 2):
        delivery.send(row)
    until_s = time.monotonic() + PATIENCE_S
    while tracker.steps != [1, 2] and time.monotonic() < until_s:
        time.sleep(0.01)
    delivery.finish("done", patience_s=PATIENCE_S)
    assert tracker.steps == [1, 2]
    assert said == [
        "warning: mine does not accept the metrics; training continues and the "
        "call is repeated: "
        "ConnectionError: nobody listens"
    ]


def test_a_library_that_ends_the_process_is_a_tracker_that_is_down(
    deliver, said
) -> None:
    tracker = Failing(1, at=2, error=SystemExit(3))
    send(deliver(tracker), 1, 2, 3)
    assert tracker.calls[1:] == [
        *((step, {"loss": 1.0 / step}) for step in (1, 2, 3)),
        "done",
    ]
    assert said == [
        "warning: mine does not accept the metrics; training continues and the "
        "call is repeated: "
        "SystemExit: 3"
    ]


def test_a_row_that_is_never_taken_does_not_hold_up_the_next(deliver, said) -> None:
    tracker = Failing(3, at=2)
    delivery = deliver(tracker)
    for row in rows(1, 2, 3):
        delivery.send(row)
    until_s = time.monotonic() + PATIENCE_S
    while tracker.steps != [1, 3] and time.monotonic() < until_s:
        time.sleep(0.01)
    delivery.finish("done", patience_s=PATIENCE_S)
    assert tracker.steps == [1, 3]
    assert said[1:] == [
        "warning: mine: 1 rows were not sent; metrics.jsonl has all of them"
    ]


def test_a_full_queue_drops_and_counts_and_never_waits(deliver, said) -> None:
    tracker = Blocked()
    delivery = deliver(tracker, max_queued=3)
    delivery.send(rows(1)[0])
    assert tracker.entered.wait(PATIENCE_S)
    for row in rows(*range(2, 8)):
        delivery.send(row)
    delivery.finish("done", patience_s=0.1)
    assert said == [
        "warning: mine: 7 rows were not sent; metrics.jsonl has all of them"
    ]
    tracker.release.set()


def test_the_end_of_a_run_does_not_wait_for_a_tracker_that_is_down(
    deliver, said
) -> None:
    tracker = Failing(10**9)
    delivery = deliver(tracker)
    for row in rows(1, 2):
        delivery.send(row)
    delivery.finish("done", patience_s=math.inf)
    assert said[1:] == [
        "warning: mine: 2 rows were not sent; metrics.jsonl has all of them"
    ]
    assert "done" not in tracker.calls


HANGING = """
import atexit, pathlib, sys, threading
from mjax.run import ending
from mjax.run.tracking.delivery import Delivery
from mjax.run.tracking.tracker import RunFacts

class Hanging:
    takes_back = False
    def start(self, run, config):
        atexit.register(threading.Event().wait)
        started.set()
        threading.Event().wait()
    def scalars(self, step, metrics): ...
    def finish(self, ending): ...

started = threading.Event()
run = RunFacts(
    id="a", name="a", work_dir=pathlib.Path(sys.argv[1]), start_number=1, start_step=0
)
delivery = Delivery("mine", Hanging(), run, {}, print)
started.wait()
delivery.send({"step": 1, "loss": 1.0})
delivery.finish("done", patience_s=0.1)
ending.leave(0)
"""


def test_a_library_that_waits_at_exit_does_not_hold_up_the_process(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "mine: 1 rows were not sent" in done.stdout

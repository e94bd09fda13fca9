"""The live line: its parts, omissions, and that it overwrites no text."""

import errno
import io
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from mjax.config.command_line import Command
from mjax.config.train import TrainConfig
from mjax.estimate.memory import Estimate
from mjax.run import report, terminal
from mjax.run.terminal import Memory, Progress, duration, fitted, quantity

GIB = 2**30


def row(step: int, *, loss: float = 2.0, mfu: float | None = None) -> dict[str, object]:
    return {"step": step, "loss": loss, "mfu": mfu, "tokens_per_s": 12_345.0}


def progress(
    start_step: int = 0, num_steps: int = 100, memory=lambda: None
) -> Progress:
    return Progress(start_step=start_step, num_steps=num_steps, memory=memory)


def test_before_the_first_step_the_line_says_where_a_resumed_run_stands() -> None:
    assert progress(start_step=40).parts(0.0) == [
        "step 40/100 40%",
        "waiting for the first step",
    ]


def test_the_line_has_everything_that_is_known() -> None:
    shown = progress(memory=lambda: Memory(used=30 * GIB, available=80 * GIB))
    shown.add(row(1), 10.0)
    shown.add(row(2, mfu=0.412), 12.0)
    assert shown.parts(12.0) == [
        "step 2/100 2%",
        "loss 2.0000",
        "3:16 min left",
        "12.3k tokens/s",
        "MFU 41.2%",
        "memory 30.0 of 80 GiB",
    ]


def test_the_time_left_leaves_out_the_first_step_and_counts_down() -> None:
    shown = progress(start_step=90)
    shown.add(row(91), 500.0)  # it compiled
    assert not any("left" in part for part in shown.parts(500.0))
    shown.add(row(92), 502.0)
    shown.add(row(93), 504.0)
    assert "14 s left" in shown.parts(504.0)
    assert "13 s left" in shown.parts(505.0)
    assert "12 s left" in shown.parts(900.0)  # a step that hangs


def test_the_loss_is_smoothed_and_one_that_is_not_finite_is_shown() -> None:
    shown = progress()
    shown.add(row(1, loss=4.0), 0.0)
    shown.add(row(2, loss=2.0), 1.0)
    mean = (0.95 * 4.0 + 2.0) / 1.95
    assert f"loss {mean:.4f}" in shown.parts(1.0)
    shown.add(row(3, loss=float("nan")), 2.0)
    assert "loss nan" in shown.parts(2.0)
    shown.add(row(4, loss=2.0), 3.0)
    assert "loss nan" not in shown.parts(3.0)


@pytest.mark.parametrize("width", [1, 5, 20, 40, 60, 80, 200])
def test_a_narrow_terminal_gets_the_first_parts_only(width: int) -> None:
    parts = ["step 2/100 2%", "loss 2.0000", "3:16 min left", "12.3k tokens/s"]
    line = fitted(parts, width)
    assert len(line) < max(width, 1)
    shown = "  ".join(parts)
    assert shown.startswith(line)
    if width > len(shown):
        assert line == shown


def test_times_and_quantities_are_short() -> None:
    times = [duration(s) for s in (0.4, 59.6, 200, 3600, 18_480, 187_200)]
    assert times == ["0 s", "1:00 min", "3:20 min", "1:00 h", "5:08 h", "2 d 4 h"]
    assert [quantity(n) for n in (830.4, 12_345, 4_560_000, 2e9)] == [
        *("830", "12.3k", "4.56M", "2G")
    ]
    assert [quantity(n) for n in (999.4, 999.6, 999_400, 999_600, 999.6e6)] == [
        *("999", "1k", "999k", "1M", "1G")
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_that_shows_colors_gets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert terminal.painted("warning: x", Terminal()) == "\x1b[33mwarning: x\x1b[0m"
    assert terminal.painted("step 1", Terminal()) == "step 1"
    assert terminal.painted("warning: x", io.StringIO()) == "warning: x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.painted("warning: x", Terminal()) == "warning: x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert terminal.painted("warning: x", Terminal()) == "warning: x"


def test_a_notebook_gets_a_log_in_place_of_a_live_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shell command of a notebook has a terminal that keeps every redrawn line."""
    monkeypatch.setenv("TERM", "xterm-color")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert terminal.shows_live_line(Terminal())
    monkeypatch.setenv("JPY_PARENT_PID", "1")  # as Jupyter sets it for its kernels
    assert not terminal.shows_live_line(Terminal())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert not report.shows_details(Command(verbose=False))


PROGRAM = """
import sys, time
from mjax.run.terminal import LiveLine, Progress
live = LiveLine(Progress(start_step=0, num_steps=9, memory=lambda: None))
live.add({"step": 1, "loss": 2.0, "mfu": None, "tokens_per_s": 1e3})
time.sleep(0.4)
live.say("a line of the run [with] brackets, " + "long " * 30)
print("an error of a library", file=sys.stderr)
sys.stderr.write("half a ")
time.sleep(0.4)
sys.stderr.write("line\\n")
live.say("warning: a yellow one")
live.add({"step": 2, "loss": 2.0, "mfu": None, "tokens_per_s": 1e3})
time.sleep(0.4)
live.close()
"""


def screen(output: str) -> list[str]:
    """Return the text that a terminal of unlimited width would show."""
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            lines.append("")
            column = 0
        elif token == "\x1b[2K":
            lines[-1] = ""
        elif token.startswith("\x1b["):
            assert token[-1] in "mhl", f"it moves the cursor: {token!r}"
        else:
            line = lines[-1].ljust(column)
            lines[-1] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return lines


@pytest.mark.parametrize("no_color", [False, True])
def test_the_live_line_overwrites_nothing_but_itself(no_color: bool) -> None:
    """A real terminal: the program writes to a pty whose screen is emulated."""
    outside, inside = pty.openpty()
    colors = {"NO_COLOR": "1"} if no_color else {}
    changed = ("NO_COLOR", "JPY_PARENT_PID")
    clean = {name: v for name, v in os.environ.items() if name not in changed}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=inside,
        stderr=inside,
        env=clean | {"TERM": "xterm", "COLUMNS": "60"} | colors,
    )
    os.close(inside)
    output = b""
    while True:
        ready, _, _ = select.select([outside], [], [], 60)
        try:
            found = os.read(outside, 4096) if ready else b""
        except OSError:  # the program has ended
            break
        if not found:
            break
        output += found
    os.close(outside)
    assert process.wait(60) == 0
    text = output.decode()
    lines = [line.rstrip() for line in screen(text) if line.strip()]
    assert lines[:-1] == [
        ("a line of the run [with] brackets, " + "long " * 30).rstrip(),
        "an error of a library",
        "half a line",
        "warning: a yellow one",
    ]
    assert lines[-1].startswith("step 2/9 22%  loss 2.0000")
    assert ("\x1b[33m" in text) == (not no_color)


@pytest.mark.parametrize(
    ("is_terminal", "verbose", "shows"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
def test_the_start_is_told_in_full_in_a_log_or_with_v(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, verbose: bool, shows: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert report.shows_details(Command(verbose=verbose)) == shows


def test_the_short_start_keeps_warnings_and_the_memory_in_all() -> None:
    needed = Estimate(
        state=GIB, compute_copy=0, gradients=0, stash=0, working_set=GIB // 2
    )
    lines = ["model: a\nattention: b", "pipeline: c", "  in all  3", "warning: d"]
    lines.append("warm-up: e")
    config = TrainConfig(device_memory_gib=8.0)
    assert [*report.brief(lines, config, needed)] == [
        *("model: a", "pipeline: c", "warning: d", "warm-up: e"),
        "memory: 1.5 GiB of 8.0 GiB a device, estimated",
    ]


class ClosableTerminal(io.TextIOWrapper):
    """A terminal of Western European characters, which can be closed."""

    is_closed = False

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="latin-1")

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.is_closed:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


def test_what_a_terminal_cannot_show_is_escaped_and_nothing_else(monkeypatch) -> None:
    shown = ClosableTerminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("NO_COLOR", "1")
    live = terminal.LiveLine(progress())
    live.say("warning: x.py:100: \u4e2d \xe4")
    live.close()
    assert b"warning: x.py:100: \\u4e2d \xe4" in shown.bytes.getvalue()


def test_a_terminal_that_is_closed_does_not_stop_a_run(monkeypatch) -> None:
    shown = ClosableTerminal()
    monkeypatch.setattr(sys, "stdout", shown)
    live = terminal.LiveLine(progress())
    shown.is_closed = True
    live.say("warning: nobody reads this")
    time.sleep(0.5)  # it is drawn again
    live.close()
    print("nor this", flush=True)
    sys.stdout.close()

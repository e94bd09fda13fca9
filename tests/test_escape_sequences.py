"""No text of another process, a model or a person controls the terminal."""

import io
import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import mjax
from mjax.launch import local, messages

ROOT = Path(__file__).parents[1]
TITLE = "\x1b]0;evil\x07"
EVIL = f"{TITLE}\x9b2J\u202egnp\r\x1b[1;31mred\x1b[0m"
SHOWN = r"\x1b]0;evil\x07\x9b2J\u202egnp\r"
RED = "\x1b[1;31mred\x1b[0m"


def on_terminal(words: list[str], cwd: Path, **env: str) -> str:
    """Return what a program writes to a terminal, on both streams."""
    outside, inside = pty.openpty()
    process = subprocess.Popen(
        words,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=inside,
        stderr=inside,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"} | env,
    )
    os.close(inside)
    output = b""
    while select.select([outside], [], [], 120)[0]:
        try:
            output += os.read(outside, 4096)
        except OSError:  # the program has ended
            break
    os.close(outside)
    process.wait(60)
    return output.decode().replace("\r\n", "\n")


def in_program(code: str, cwd: Path) -> str:
    """Return what a part of a program of mjax writes to a terminal."""
    begin = "import sys; sys.argv = ['-m']\n"
    return on_terminal([sys.executable, "-c", begin + code], cwd)


@pytest.mark.parametrize(
    "words",
    [
        ["mjax", f"--{EVIL}"],
        ["mjax", "train", "--recipe", EVIL],
        ["mjax.train", "--recipe", EVIL],
        ["mjax.train", "--recipe", "debug", "--init-from", EVIL],
        ["mjax.generate", EVIL, "--prompt", "x"],
        ["mjax.evaluate", EVIL, "--held-out"],
        ["mjax.ckpt", "ls", EVIL],
        ["mjax.tune", "export", EVIL, "out"],
        ["mjax.data", EVIL],
        ["mjax.plan", "--recipe", EVIL],
        ["mjax.pipeline", EVIL],
        ["mjax.mesh", f"--{EVIL}"],
        ["mjax.launch", "status", "--work-dir", EVIL],
        ["mjax.observe", "stuck", "--work-dir", EVIL],
        ["mjax.observe", EVIL],
        ["mjax.health", EVIL],
        ["mjax.health", "check", "--report", EVIL],
        ["mjax.doctor", f"--{EVIL}"],
    ],
    ids=lambda words: " ".join(w for w in words if "evil" not in w),
)
def test_a_program_shows_the_escape_sequences_of_its_input(words, tmp_path):
    command = [sys.executable, "-m", *words]
    shown = on_terminal(command, tmp_path)
    assert "evil" in shown
    plain = shown.replace("\x1b[1;31m", "").replace("\x1b[0m", "")
    assert mjax.printable(plain) == plain
    assert "\x1b]" not in shown


def test_a_pipe_gets_every_byte(tmp_path):
    words = [sys.executable, "-m", "mjax.generate", EVIL, "--prompt", "x"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, env=os.environ | {"PYTHONPATH": ROOT}
    )
    assert EVIL.encode() in done.stderr


def test_a_line_of_rank_0_cannot_control_the_terminal_of_the_launcher(tmp_path):
    """A character may be written in two parts, and bytes may be no characters."""
    code = f"""
from pathlib import Path
from mjax.launch import local
log, text = Path("rank-0.log"), {EVIL!r}.encode() + "\\u00e9\\n".encode()
place = 0
for end in (len(text) - 2, len(text)):
    log.write_bytes(text[:end])
    place = local._copy(log, place)
assert place == len(text)
log.write_bytes(text + b"\\x9b2J\\n")
assert local._copy(log, place) == len(text) + 4
"""
    assert in_program(code, tmp_path) == f"{SHOWN}{RED}\u00e9\n\\x9b2J\n"


def test_a_pipe_gets_the_log_of_rank_0_as_it_is(tmp_path, capfdbinary):
    log = tmp_path / "rank-0.log"
    log.write_bytes(EVIL.encode() + b"\x9b\xc3")
    assert local._copy(log, 0) == len(EVIL.encode()) + 2
    assert capfdbinary.readouterr().out == EVIL.encode() + b"\x9b\xc3"


def test_a_generated_text_cannot_control_the_terminal(tmp_path):
    code = f"""
from types import SimpleNamespace as Of
from mjax.generate import terminal
pieces = [Of(text=piece, finished=None) for piece in ("a", {EVIL!r}, "\\r", "b\\n")]
class Engine:
    max_len = 9
    def submit(self, request): pass
    is_idle = property(lambda self: not pieces)
    def step(self): return [pieces.pop(0)]
request = Of(prompt=(), sampling=Of(max_tokens=1))
terminal._answer(Engine(), request, is_bounded=False)
"""
    assert in_program(code, tmp_path) == f"a{SHOWN}{RED}\\rb\n\n"


def test_text_above_the_live_line_cannot_control_the_terminal(tmp_path):
    code = f"""
import logging
from mjax.run.terminal import LiveLine, Progress
live = LiveLine(Progress(start_step=0, num_steps=9, memory=lambda: None))
live.say({"said " + EVIL!r})
print({"out " + EVIL!r})
print({"err " + EVIL!r}, file=sys.stderr)
live.close()
print({"last " + EVIL!r})
"""
    shown = in_program(code, tmp_path)
    assert "step 0/9 0%" in shown  # the live line is drawn
    assert "\x1b[?25h" in shown  # and the cursor is back
    assert f"said {SHOWN}\\x1b[1;31mred" in shown
    for begin in ("out", "err", "last"):
        assert f"{begin} {SHOWN}\x1b[1;31mred" in shown
    assert not {"\x1b]", "\x9b", "\u202e", "\x07"} & {*shown}
    assert TITLE not in shown


def test_a_progress_bar_of_a_library_is_redrawn_on_stderr_alone():
    stream = io.StringIO()
    bar, text = mjax.Screen(stream, redraws=True), mjax.Screen(stream)
    bar.write("\r1%")
    bar.write("\r2%\r")
    text.write("\r3%")
    assert stream.getvalue() == "\r1%\r2%\\r\\r3%"


def hello(**changes: object) -> bytes:
    fields = {"type": "hello", "version": 2, "token": "t", "host": "a"}
    fields |= {"address": "b", "pid": 1, "facts": {}}
    return json.dumps(fields | changes).encode()


def decoded(line: bytes) -> messages.First:
    return messages.decode(msgspec.json.Decoder(messages.First), line)


@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_driver_knows_an_agent_by_a_printable_name(is_ascii):
    rank = {"rank": 0, "generation": 1, "pid": 2, "last_lines": f"a\n{EVIL}"}
    changes = {"host": f"h\n{TITLE}", "facts": {TITLE: EVIL}, "ranks": [rank]}
    line = hello(**changes)
    if not is_ascii:
        line = json.dumps(json.loads(line), ensure_ascii=False).encode()
    taken = decoded(line)
    assert isinstance(taken, messages.Hello)
    assert taken.host == r"h\n\x1b]0;evil\x07"
    ((name, text),) = taken.facts.items()
    assert (name, text[: len(SHOWN)]) == (r"\x1b]0;evil\x07", SHOWN)
    assert taken.ranks[0].last_lines.startswith(f"a\n{SHOWN}")


def test_the_reason_of_a_command_is_printable_and_its_flags_are_exact():
    fields = {"type": "command", "version": 2, "token": "t", "name": "evict"}
    line = json.dumps(fields | {"reason": EVIL, "flags": [EVIL]}).encode()
    taken = decoded(line)
    assert isinstance(taken, messages.Command)
    assert taken.reason.startswith(SHOWN)
    assert taken.flags == [EVIL]


def test_ranks_are_numbers_in_a_message_that_is_escaped():
    line = json.dumps(
        {"type": "stacks", "generation": 1, "stacks": {"3": f"a\n{TITLE}"}}
    ).encode()
    taken = messages.decode(msgspec.json.Decoder(messages.FromAgent), line)
    assert isinstance(taken, messages.Stacks)
    assert taken.stacks == {3: "a\n\\x1b]0;evil\\x07"}


def test_a_message_of_another_protocol_is_refused_escaped_or_not():
    for line in (b'{"type": "hello"}', b'{"type": "hello\\u001b"}', b'["\\u001b"]'):
        with pytest.raises(msgspec.DecodeError):
            decoded(line)


def test_what_is_printable_stays():
    text = (
        "a\tb\n\u00e9 \u4e2d \U0001f468\u200d\U0001f469 \u0645\u06cc\u200c \u00a0\u3000"
    )
    assert mjax.printable(text) == text
    assert mjax.printable("\t\n", kept="") == r"\t\n"


@pytest.mark.parametrize("value", [b'"\xff"', b"[" * 100_000 + b"]" * 100_000])
def test_bytes_that_are_no_message_close_a_connection_and_raise_nothing_else(value):
    decoder = msgspec.json.Decoder(messages.Hello)
    with pytest.raises(msgspec.DecodeError):
        messages.decode(decoder, b'{"type":"hello","facts":{},"x":' + value + b"}")

"""`python -m mjax.generate MODEL --chat`, over a pipe and in a terminal."""

import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from mjax.generate.__main__ import main
from mjax.generate.engine import Answer, Engine, answer_all
from mjax.generate.opened import open_model
from mjax.generate.requests import Request, Sampling
from tests.generate.server.process import ROOT, TEMPLATE, make_run
from tests.training import make_mesh

GREEDY = ["--temperature", "0", "--tokens", "6"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_run(tmp_path_factory.mktemp("chat") / "work", seq_len=128)


@pytest.fixture
def hold(run, monkeypatch, capsys):
    """Return a function that chats over a pipe: exit code, stdout, stderr."""

    def chat(lines: str, *words: str, model: str = run) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = main([model, "--chat", *words])
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return chat


@pytest.fixture(scope="module")
def offline(run: str):
    """Return a function that continues a text with the engine alone."""
    opened = open_model(run, make_mesh((1, 1, 1, 1)), dtype="float32")
    engine = Engine(opened, slots=1, max_len=128)

    def answer(prompt: str, **sampling) -> Answer:
        given = {"max_tokens": 6, "temperature": 0.0} | sampling
        request = Request(prompt=tuple(prompt.encode()), sampling=Sampling(**given))
        return answer_all(engine, [request])[0]

    return answer


def test_each_turn_continues_the_conversation_by_the_template(hold, offline):
    words = ["--tokens", "6", "--seed", "7", "--temperature", "0.8"]
    code, out, _ = hold("hi\n\nand you\n", *words)
    assert code == 0
    begun = "[user]hi\n[assistant]"
    first = offline(begun, seed=7, temperature=0.8).text
    turns = f"{begun}{first}\n[user]and you\n[assistant]"
    second = offline(turns, seed=8, temperature=0.8).text
    assert out == f"{first}\n{second}\n"


def test_a_reset_forgets_the_turns_and_keeps_the_system(hold, offline):
    words = [*GREEDY, "--system", "be brief"]
    _, out, err = hold("hi\n/reset\nyes\n/quit\nnever\n", *words)
    prompts = [f"[system]be brief\n[user]{x}\n[assistant]" for x in ("hi", "yes")]
    assert out == "".join(offline(prompt).text + "\n" for prompt in prompts)
    assert "generate: a new conversation" in err


def test_what_does_not_fit_is_refused_and_the_chat_goes_on(hold, offline):
    message, answer = next(
        (letter, answer)
        for letter in "abcdefghijkl"
        if (answer := offline(f"[user]{letter}\n[assistant]", max_tokens=9)).finished
        == "length"
    )
    words = ["--temperature", "0", "--max-len", "28"]
    lines = ["a message that is too long", message, message, "/reset", message]
    code, out, err = hold("\n".join(lines), *words)
    assert code == 0
    assert out == f"{answer.text}\n" * 2
    said = [line for line in err if line.startswith("generate: ")]
    used_up = (
        "generate: the model takes 28 tokens, and the conversation has used all of "
        "them: /reset"
    )
    assert said[0] == (
        "generate: the conversation has 44 tokens with this message, and the model "
        "takes 28 including the answer: shorten the message, or /reset"
    )
    assert re.match(r"generate: the conversation has \d+ tokens with", said[2])
    assert [said[1], *said[3:]] == [used_up, "generate: a new conversation", used_up]


def test_an_empty_pipe_is_no_error(hold):
    assert hold("")[:2] == (0, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "a"], "--chat reads messages from standard input.*--prompt"),
        (["--json"], "leave out .*--json"),
        (["--stop", ""], "--stop must not be empty"),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--max-len", "0"], "--max-len must be at least 1"),
    ],
)
def test_what_no_chat_takes_is_refused(hold, words, said):
    code, out, err = hold("hi\n", *words)
    assert (code, out) == (2, "")
    assert re.search(f"^error: .*{said}", err[-1])


def test_a_message_of_the_system_needs_a_chat(run, capsys):
    assert main([run, "--prompt", "a", "--system", "b"]) == 2
    assert "error: --system 'b' begins a conv" in capsys.readouterr().err


USER_ONLY = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}"


@pytest.mark.parametrize(
    ("template", "words", "said"),
    [
        (None, [], "has no chat template, .*chat_template.jinja beside the tokenizer"),
        ("{% if %}", [], "the chat template is broken"),
        (
            USER_ONLY + "{% endif %}{% endfor %}",
            ["--system", "b"],
            "leaves out the content of message 1, of the role 'system'",
        ),
        (
            "{% set s = messages[0].content %}{{ messages[-1].content }}",
            ["--system", "b"],
            "ignores system messages",
        ),
        (
            REFUSES + "{% endif %}{{ messages[0].content }}",
            ["--system", "b"],
            "no system.*; leave it out",
        ),
        ("{{ raise_exception('never') }}", [], "refuses: .*never"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    hold, tmp_path, template, words, said
):
    model = make_run(tmp_path / "work", template)
    code, out, err = hold("hi\n", *words, model=model)
    assert (code, out) == (2, "")
    assert re.search(f"^error: .*{said}", err[-1])


def test_a_turn_that_the_template_refuses_is_told(hold, tmp_path):
    rule = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    model = make_run(tmp_path / "work", rule + TEMPLATE)
    code, out, err = hold("a\nb\n", *GREEDY, model=model)
    assert code == 0
    assert out.endswith("\n")
    assert re.search(r"refuses: .*too many; write another message, or /reset", err[-1])


def test_a_message_that_is_not_utf_8_is_refused(run, monkeypatch, capsys):
    broken = io.TextIOWrapper(io.BytesIO(b"hi \xff\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", broken)
    assert main([run, "--chat", *GREEDY]) == 2
    assert "error: a message must be UTF-8" in capsys.readouterr().err


# ------------------------------------------------------------------------ in a terminal


_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells ignore it in the background
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Own the terminal, so that Ctrl-C reaches the process; then become another program."""


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, run: str) -> None:
        """Start the chat."""
        self._here, there = pty.openpty()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", _TAKE_TERMINAL, sys.executable),
                *("-m", "mjax.generate", run, "--chat", *GREEDY),
            ],
            stdin=there,
            stdout=there,
            stderr=there,
            cwd=ROOT,
            start_new_session=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "TERM": "dumb"},
        )
        os.close(there)
        self.shown = ""

    def until(self, pattern: str) -> None:
        """Read until a text has appeared since the last call."""
        until_s, new = time.monotonic() + 60, ""
        while not re.search(pattern, new):
            assert time.monotonic() < until_s, self.shown
            if select.select([self._here], [], [], 1.0)[0]:
                new += os.read(self._here, 4096).decode(errors="replace")
        self.shown += new

    def write(self, text: str) -> None:
        """Type."""
        os.write(self._here, text.encode())

    def interrupted(self) -> int:
        """Press Ctrl-C until the process ends; return the exit code.

        CPython misses a signal that comes between the prompt of `input` and its wait
        for a key: it stays unseen until the next key, here in 11 of 300 tries.
        """
        for _ in range(6):
            self.write("\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                break
        return self.ended()

    def ended(self) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(60)
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(self._here, 4096):
                self.shown += part.decode(errors="replace")
        return code

    def close(self) -> None:
        """End the process, if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._here)


@pytest.fixture
def terminal(run: str) -> Iterator[Terminal]:
    made = Terminal(run)
    yield made
    made.close()


def test_ctrl_d_ends_a_chat_in_a_terminal(terminal):
    terminal.until(r"/quit or Ctrl-D ends\r\n> $")
    terminal.write("hi\n")
    terminal.until(r"truncated after --tokens 6\r\n> $|\r\n> $")
    terminal.write("\x04")
    assert terminal.ended() == 0
    assert "Traceback" not in terminal.shown


def test_ctrl_c_ends_a_chat_quietly(terminal):
    terminal.until(r"\r\n> $")
    assert terminal.interrupted() == 130
    assert "Traceback" not in terminal.shown

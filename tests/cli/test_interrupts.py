"""Ctrl-C ends every program with one line at most, and no library can lose it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.cli import interrupts

ROOT = Path(__file__).parents[2]
_HOOK = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT_IMPORT"]:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if "LOST" not in os.environ:
                    raise
            print("lost", file=sys.stderr, flush=True)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.fixture
def interrupted(tmp_path):
    """Return a function that runs a program and presses Ctrl-C during an import."""
    (tmp_path / "sitecustomize.py").write_text(_HOOK)

    def run(words: list[str], *, at: str, **more: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONPATH": str(tmp_path), "AT_IMPORT": at} | more,
        )
        return done.returncode, done.stderr

    return run


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (["mjax.plan", "--recipe", "debug", "--gpu", "h200", "--nodes", "1"], "jax"),
        (["mjax", "plan", "--recipe", "debug"], "mjax.plan"),
        (["mjax.generate", "runs/a", "--prompt", "x"], "jax"),
        (["mjax.evaluate", "runs/a", "--held-out"], "jax"),
        (["mjax.mesh"], "jax"),
        (["mjax.data", "info"], "numpy"),
        (["mjax.ckpt", "ls", "runs/a"], "mjax.ckpt"),
    ],
)
def test_a_library_that_catches_everything_does_not_lose_ctrl_c(interrupted, words, at):
    # A shell reports the end by SIGINT as 130.
    assert interrupted(words, at=at, LOST="1") == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (["mjax.health", "checks"], "mjax.health.checks_command"),
        (["mjax", "observe", "ledger", "runs/a"], "mjax.observe.ledger"),
    ],
)
def test_a_program_that_cleans_up_says_that_it_was_interrupted(interrupted, words, at):
    assert interrupted(words, at=at) == (130, "interrupted\n")


def test_code_that_only_imports_mjax_keeps_its_own_handler():
    before = signal.getsignal(signal.SIGINT)
    with interrupts.raised():
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before


_RAISED = """
import os, signal
from mjax.cli import interrupts
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    with interrupts.raised():
        os.kill(os.getpid(), signal.SIGINT)
        print("not reached")
except KeyboardInterrupt:
    print("raised", flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("not reached")
"""


def test_ctrl_c_raises_only_inside_code_that_cleans_up():
    # In a process of its own: a signal that comes late would end the tests.
    words = [sys.executable, "-c", _RAISED]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "raised\n")

"""Commands of observe end at a signal, wherever the main thread is."""

import subprocess
import sys
from pathlib import Path

from mjax.observe.stream.service import Stop

# A signal arrives before every line that `wait` runs, in whatever module it is.
WAITS = """
import signal, sys
from mjax.observe.stream.service import stopped_by_signals

def hit(frame, event, arg):
    signal.raise_signal(signal.SIGTERM)
    return hit

with stopped_by_signals() as stop:
    assert not stop.is_set() and not stop.wait(0.0)
    sys.settrace(hit)
    stop.wait(0.01)
    sys.settrace(None)
    assert stop.is_set() and stop.wait()
print("ended", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


def test_a_signal_in_the_middle_of_a_wait_does_not_hang():
    done = subprocess.run(
        [sys.executable, "-c", WAITS],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "ended True\n", done.stderr


def test_a_signal_is_noticed_once_and_for_all():
    stop = Stop()
    assert not stop.wait(0.001)
    stop.note(15, None)
    assert stop.is_set()
    assert stop.wait()
    assert stop.wait()

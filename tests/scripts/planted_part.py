"""A part of the report whose cases fail in every way that a case can."""

import os
import subprocess
import sys
import time
from typing import Any

import jax

ORDER = (
    *("fine", "raises", "dies", "fine after", "hangs", "absent", "half a line"),
    *("leaves a child", "last"),
)
_OWN_PROCESS = "last"


def cases(small: bool) -> dict[str, str]:
    names = (*ORDER, *(f"{kind} {i}" for kind in ("dies", "times") for i in range(4)))
    return {name: name for name in (*names, "runs for ever")}


def process_of(case: str) -> str:
    return case if case == _OWN_PROCESS else "shared"


def kind_of(case: str) -> str:
    return case.rstrip(" 0123456789")


def measure(case: str, setting: Any) -> dict[str, Any]:
    if case == "raises":
        raise ValueError("planted")
    if kind_of(case) == "dies":
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    if case == "hangs":
        time.sleep(3600)
    if case == "runs for ever":
        with setting.exclusive():
            time.sleep(3600)
    if case == "absent":
        raise ModuleNotFoundError("No module named 'planted'")
    if case == "half a line":
        os.write(1, b'\n@@{"row": {"case"\n\xff\xfe no text\n')
        os._exit(9)
    if case == "leaves a child":
        # It holds the pipe in a separate session, so no signal to a process group
        # reaches it.
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(command, start_new_session=True)
        print(child.pid, file=sys.stderr, flush=True)
        os._exit(5)
    if kind_of(case) == "times":
        time.sleep(0.3)
        with setting.exclusive():
            start = time.monotonic()
            time.sleep(0.5)
            return {"pid": os.getpid(), "span": (start, time.monotonic())}
    print("what a library prints")
    return {"pid": os.getpid(), "device": jax.devices()[0].platform}


def tables(rows: dict[str, Any], small: bool) -> list[Any]:
    return []

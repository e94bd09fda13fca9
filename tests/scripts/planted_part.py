"""A part of the report whose cases fail in every way that a case can."""

import os
import sys
import time
from typing import Any

import jax

ORDER = ("fine", "raises", "dies", "fine after", "hangs", "absent", "last")
_OWN_PROCESS = "last"


def cases(small: bool) -> dict[str, str]:
    return {name: name for name in ORDER}


def process_of(case: str) -> str:
    return case if case == _OWN_PROCESS else "shared"


def measure(case: str, setting: Any) -> dict[str, Any]:
    if case == "raises":
        raise ValueError("planted")
    if case == "dies":
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    if case == "hangs":
        time.sleep(3600)
    if case == "absent":
        raise ModuleNotFoundError("No module named 'planted'")
    print("what a library prints")
    return {"pid": os.getpid(), "device": jax.devices()[0].platform}


def tables(rows: dict[str, Any], small: bool) -> list[Any]:
    return []

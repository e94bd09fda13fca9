"""Run cases of the report in a process of their own, one row a line.

    python -m scripts.gpu.worker MODULE MODE DEADLINE < names of cases, one a line
    python -m scripts.gpu.worker probe MODE DEADLINE

A kernel that faults takes its process with it, one that waits for ever can only be
killed: `supervise` starts this program again after such a case. Lines that begin with
`MARK` are for it: a case begins, or has its row.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from importlib import metadata
from types import ModuleType
from typing import Any, get_args

import jax
import jax.numpy as jnp

from scripts.gpu.setting import (
    Mode,
    Program,
    Row,
    Setting,
    SkippedError,
    make_setting,
)

MARK = "@@"
POISONED = 3
"""Exit code after a case that left the device unusable."""
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "torch")
_ERROR_LENGTH = 600


def run_case(part: ModuleType, case: Any, setting: Setting) -> Row:
    """Measure or compile one case; whatever goes wrong is its row."""
    start = time.monotonic()
    try:
        if setting.mode == "compile":
            fields = compile_case(part, case, setting)
        else:
            fields = part.measure(case, setting)
        row: Row = {"status": "ok", **fields}
    except (SkippedError, ImportError) as error:  # or a contender is not installed
        row = {"status": "skipped", "why": str(error)}
    except Exception as error:  # of any library; it is what the row reports
        text = f"{type(error).__name__}: {error}".strip()
        row = {"status": "error", "why": text[:_ERROR_LENGTH]}
    return row | {"seconds": round(time.monotonic() - start, 2)}


def compile_case(part: ModuleType, case: Any, setting: Setting) -> Row:
    """Compile every program of a case; return the memory that each needs."""
    sizes = {}
    for label, program in part.programs(case, setting).items():
        if isinstance(program, Program):
            lowered = program.lower(setting)
        else:
            lowered = program.lower()
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        sizes[label] = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
    return {"bytes": sizes}


def probe() -> Row:
    """Say which device and which software there is."""
    device = jax.devices()[0]
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "driver": _driver(),
        "versions": versions,
    }


def _driver() -> str:
    """Ask nvidia-smi for the driver; only to be written down."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def device_works() -> bool:
    """Say whether the device still computes after a case that failed."""
    try:
        return float(jnp.ones(8).sum()) == 8.0
    except Exception:  # whatever it is, the process is of no more use
        return False


def _emit(message: Row) -> None:
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


def main(path: str, mode: Mode, deadline: float) -> int:
    """Run the cases that stdin names; return the exit code."""
    assert mode in get_args(Mode), mode
    if path == "probe":
        _emit({"probe": probe()})
        return 0
    names = sys.stdin.read().splitlines()
    part = importlib.import_module(path)
    setting = make_setting(mode)
    cases = part.cases(setting.small)
    for name in names:
        if time.time() >= deadline:
            return 0
        _emit({"begin": name})
        row = run_case(part, cases[name], setting)
        _emit({"row": {"case": name, **row}})
        if mode == "gpu" and row["status"] == "error" and not device_works():
            return POISONED
    return 0


if __name__ == "__main__":
    _exit_code = main(sys.argv[1], sys.argv[2], float(sys.argv[3]))  # pyright: ignore[reportArgumentType]
    sys.stdout.flush()
    # Without the shutdown of libraries, which may wait for a device that hangs.
    os._exit(_exit_code)

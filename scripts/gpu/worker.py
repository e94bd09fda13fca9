"""Run cases of the report in a separate process, one row per line.

    python -m scripts.gpu.worker MODULE MODE LOCK_PATH < FILE    # of names, one a line
    python -m scripts.gpu.worker probe MODE

A kernel that faults ends its process, and one that hangs can only be killed:
`supervise` restarts this program after such a case. This program ends when `supervise`
ends, to free the device. Lines that begin with `MARK` are messages to `supervise`: this
process is ready, a case runs on the device, the case has its row, the device works.
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any, get_args

import jax
import jax.numpy as jnp

from scripts.gpu import cuda_root
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
_ERROR_LENGTH = 1500
_TRACE_LENGTH = 3000
PARENT_VARIABLE = "MJAX_GPU_REPORT_PID"
_PR_SET_PDEATHSIG = 1


def run_case(part: ModuleType, case: Any, setting: Setting) -> Row:
    """Measure or compile one case; an error becomes its row."""
    start = time.monotonic()
    try:
        if setting.mode == "compile":
            fields = compile_case(part, case, setting)
        else:
            fields = part.measure(case, setting)
        row: Row = {"status": "ok", **fields}
    except (SkippedError, ImportError) as error:  # or a contender is not installed
        row = {"status": "skipped", "why": str(error)}
    except Exception as error:  # of any library; the row reports it
        text = f"{type(error).__name__}: {error}".strip()
        trace = traceback.format_exc()[-_TRACE_LENGTH:]
        row = {"status": "error", "why": text[:_ERROR_LENGTH], "trace": trace}
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
    """Return the device and the software versions."""
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
        "ptxas": cuda_root.describe_ptxas(os.environ),
        "versions": versions,
    }


def _driver() -> str:
    """Ask nvidia-smi for the driver version, only for the record."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    # Failures are printed on stdout too. One line for each GPU.
    lines = done.stdout.split("\n") if done.returncode == 0 else []
    return (lines or [""])[0].strip() or "unknown"


def device_works() -> bool:
    """Return whether the device still computes after a case that failed."""
    try:
        return float(jnp.ones(8).sum()) == 8.0
    except Exception:  # after any error the process cannot be reused
        return False


def _emit(message: Row) -> None:
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def exclusive(lock_path: str) -> Any:
    """Return `Setting.exclusive` for a process that may share its device."""

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        # The kernel releases the lock if this process is killed.
        with open(lock_path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _emit({"runs": True})
            yield

    return alone


def main(path: str, mode: Mode, lock_path: str) -> int:
    """Run the cases that stdin names; return the exit code."""
    assert mode in get_args(Mode), mode
    end_with(int(os.environ[PARENT_VARIABLE]))
    if path == "probe":
        _emit({"probe": probe()})
        return 0
    part = importlib.import_module(path)
    setting = make_setting(mode, exclusive=exclusive(lock_path))
    cases = part.cases(setting.small)
    _emit({"ready": True})
    for line in sys.stdin:
        name = line.removesuffix("\n")
        row = run_case(part, cases[name], setting)
        _emit({"row": {"case": name, **row}})
        if row["status"] == "error":
            works = mode != "gpu" or device_works()
            _emit({"works": works})
            if not works:
                return POISONED
    return 0


if __name__ == "__main__":
    _exit_code = main(sys.argv[1], sys.argv[2], sys.argv[3])  # pyright: ignore[reportArgumentType]
    sys.stdout.flush()
    # Skip the shutdown of libraries, which may wait for a hung device.
    os._exit(_exit_code)

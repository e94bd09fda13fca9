"""Facts about this host: hardware, software, and the traffic of its RDMA ports.

Input: /sys, the environment and, if nvidia-ml-py is installed, NVIDIA's management
library. Output: texts for the journal, and counters for heartbeats. If the GPUs cannot
be read, they are "unknown", with the reason; other facts that cannot be read are empty
or None.
"""

import contextlib
import importlib
import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

_INFINIBAND = Path("/sys/class/infiniband")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STATUS = Path("/proc/self/stat")
_WORD_BYTES = 4
"""Bytes per word: port_xmit_data and port_rcv_data count words (InfiniBand
specification, 16.1.3.5)."""


def host_facts() -> dict[str, str]:
    """Return name -> text of facts about this host, for the journal."""
    return {
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
        "pod": os.environ.get("POD_NAME", ""),
        "pod_uid": os.environ.get("POD_UID", ""),
        "rdma_ports": ", ".join(rdma_bytes()),
        **gpu_facts(),
    }


def process_facts() -> dict[str, Any]:
    """Return the facts needed to interpret the times of this process.

    Returns:
      `pid`; `age_s`, seconds since the process started; and `boot`, the boot id of
      the host, whose processes share one monotonic clock. The last two are None if
      /proc lacks them.
    """
    age_s = boot = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The start time, field 22 of proc_pid_stat(5), in clock ticks since boot. The
        # name, field 2, may contain spaces; the start time is the 20th field after it.
        ticks = int(_STATUS.read_text().rpartition(")")[2].split()[19])
        since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        age_s = since_boot_s - ticks / os.sysconf("SC_CLK_TCK")
        boot = _BOOT.read_text().strip()
    return {"pid": os.getpid(), "age_s": age_s, "boot": boot}


def gpu_facts() -> dict[str, str]:
    """Return facts that name the GPUs and their driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {"gpus": "unknown: nvidia-ml-py is not installed"}
    try:
        nvml.nvmlInit()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return {
            "gpus": ", ".join(str(nvml.nvmlDeviceGetName(one)) for one in handles),
            "driver": str(nvml.nvmlSystemGetDriverVersion()),
        }
    except nvml.NVMLError as error:
        return {"gpus": f"unknown: {error}"}


def rdma_bytes(folder: Path = _INFINIBAND) -> dict[str, list[int]]:
    """Return device/port -> [bytes sent, bytes received]; empty without RDMA."""
    found = {}
    for port in sorted(folder.glob("*/ports/*")):
        names = ("port_xmit_data", "port_rcv_data")
        with contextlib.suppress(OSError, ValueError):
            words = [int((port / "counters" / name).read_text()) for name in names]
            name = f"{port.parents[1].name}/{port.name}"
            found[name] = [_WORD_BYTES * number for number in words]
    return found

"""Reported log lines, and reading of new lines."""

import os
import re

import pytest

from mjax.launch.log_rules import CAUSES, RULES, KernelLog, LogReader, match
from mjax.launch.messages import Match
from mjax.launch.policy import Cause

# Based on the public documentation of NVIDIA, the Linux kernel, NCCL and JAX.
BUS = (
    "NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen "
    "off the bus."
)
LINES = {
    BUS: "Xid",
    "4,911,5140900,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=2, DBE": "Xid",
    "NVRM: Xid (PCI:0000:3b:00): 119, pid=77, Timeout waiting for RPC from GSP": "Xid",
    "NVRM: Xid (PCI:0000:3b:00): 145, RLW_RXDET_INTERRUPT": "Xid",
    "NVRM: Xid (PCI:0000:3b:00): 13, pid=3117, Graphics SM": "Xid of a program",
    "NVRM: Xid (PCI:0000:3b:00): 94, pid=9, Contained": "Xid of a program",
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM": "SXid",
    "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2477)": "GPU driver",
    "jax.errors.JaxRuntimeError: INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE": "GPU memory",
    "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected": "GPU is gone",
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0": "machine check",
    "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal)": "PCIe",
    "NCCL WARN ncclSystemError: System call (e.g. socket, malloc) failed": "network",
    "mlx5: got completion with error IBV_WC_RETRY_EXC_ERR(12)": "network",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate": "GPU out of memory",
    "OSError: [Errno 116] Stale file handle: '/fsx/run/100'": "file system",
}


@pytest.mark.parametrize(("line", "rule"), LINES.items())
def test_a_line_is_named_after_its_rule(line, rule):
    found = match(line, rank=3)
    assert found is not None
    assert (found.rule, found.rank) == (rule, 3)
    assert found.line in line


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 79/100  loss 2.79  grad norm 0.48",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0",
        "mce: [Hardware Error]: Machine check events logged",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20001, Non-fatal, Link 30",
        "Out of memory: Killed process 4711 (python) total-vm:1kB",
        "pcieport: PCIe Bus Error: severity=Corrected, type=Physical Layer",
        "checkpoint 48 saved: 1.8 MB in 0.24 s",
        "warning: checkpoint 3 was not saved (try 1): [Errno 28] No space left",
    ],
)
def test_what_is_harmless_matches_nothing(line):
    assert match(line) is None


def test_every_rule_has_a_line_here_and_a_name_of_its_own():
    assert CAUSES.keys() == set(LINES.values())
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        re.compile(rule.pattern)


@pytest.fixture
def opened():
    """Open logs, as an agent does before a rank writes."""
    descriptors = []

    def open_log(path, rank=0):
        descriptors.append(os.open(path, os.O_RDONLY | os.O_CREAT))
        return LogReader(descriptors[-1], rank)

    yield open_log
    for descriptor in descriptors:
        os.close(descriptor)


def test_each_line_of_a_log_is_read_once_and_whole(tmp_path, opened):
    path = tmp_path / "log"
    reader = opened(path, rank=1)
    assert reader.read() == []
    path.write_text(f"hello\n{BUS[:30]}")
    assert reader.read() == []
    with path.open("a") as file:
        file.write(f"{BUS[30:]}\n")
    assert reader.read() == [Match(rule="Xid", line=BUS, rank=1)]
    assert reader.read() == []


def test_the_last_line_of_a_rank_that_has_ended_needs_no_end(tmp_path, opened):
    path = tmp_path / "log"
    path.write_text(BUS)
    reader = opened(path)
    assert reader.read() == []
    assert len(reader.read(is_over=True)) == 1
    assert reader.read(is_over=True) == []


def test_a_log_that_was_put_aside_is_read_from_its_beginning(tmp_path, opened):
    path = tmp_path / "log"
    path.write_text("a line\n" * 20)
    reader = opened(path)
    reader.read()
    path.write_text(f"{BUS}\n")
    assert [one.rule for one in reader.read()] == ["Xid"]


def test_of_what_is_said_a_thousand_times_three_are_told(tmp_path, opened):
    path = tmp_path / "log"
    path.write_text(f"{BUS}\n" * 1000 + "Stale file handle\n")
    reader = opened(path)
    assert [one.rule for one in reader.read()] == ["Xid"] * 3 + ["file system"]
    path.write_text(path.read_text() + f"{BUS}\n")
    assert reader.read() == []


def test_of_a_flood_the_last_part_is_read(tmp_path, opened):
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 * 2**20) + f"\n{BUS}\n".encode() + b"\xff\n")
    assert [one.rule for one in opened(path).read()] == ["Xid"]


def test_the_log_of_the_kernel_is_read_from_now_on(tmp_path):
    path = tmp_path / "kmsg"
    path.write_text(f"4,1,100,-;{BUS}\n")
    log = KernelLog(path)
    assert (log.access, log.read()) == ("read", [])
    with path.open("a") as file:
        file.write("4,2,200,-;NVRM: Xid (PCI:0000:3b:00): 74, NVLink\n6,3,300,-;usb\n")
    (found,) = log.read()
    assert (found.rule, found.rank) == ("Xid", None)


def test_a_log_of_the_kernel_that_may_not_be_read_is_said_to_be_unknown(tmp_path):
    log = KernelLog(tmp_path / "none")
    assert (log.access, log.read()) == ("unknown: not readable", [])


def test_only_faults_of_hardware_name_a_host():
    assert {cause for cause in CAUSES.values() if cause} == {
        *(Cause.GPU_FAULT, Cause.HOST_FAULT, Cause.NETWORK),
        *(Cause.OUT_OF_MEMORY, Cause.STORE),
    }

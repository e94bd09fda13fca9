"""Replay 30 minutes of logs with planted faults through `health watch`, 100 times fast.

`python -m scripts.health.replay_logs [--seed N] [--speed X]`

Input: a seed. Output: docs/benchmarks/replay_logs.md. Two logs are made: the kernel's
log of a host, and the event log of UFM for 1,000 switch ports. Each has noise, planted
faults, and near misses, with one line less than a rule needs. The real command reads
them in a child process; the programs that its rules call are fakes on PATH that record
their calls. The same log at full speed must give the same events and calls.
"""

import argparse
import dataclasses
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mjax.health.events import rules
from scripts import evidence

DURATION_S = 1800
EVENTS_DIR = Path(rules.__file__).parent
_UFM_START = "2026-05-01 12:"
_HARD = ("leaf-03", "7/1")
"""Port whose test always fails."""
_FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in "test leaf-03 7/1") exit 1;; esac
exit 0
"""
Planted = set[tuple[str, str]]
"""(rule, device) of each event that must be found."""
Timed = tuple[float, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """A log, and its contents."""

    name: str
    text: str
    planted: Planted
    near_misses: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of the command for a log."""

    events: list[dict[str, Any]]
    calls: list[str]
    wall_s: float
    cpu_s: float
    peak_mib: float
    code: int


def kernel_log(seed: int) -> Log:
    """Make the kernel's log of one host."""
    rng = random.Random(seed)
    noise = (
        "perf: interrupt took too long (2510 > 2500), lowering limit",
        "docker0: port 1(veth12ab) entered blocking state",
        "nvidia-uvm: Loaded the UVM driver, major device number 509.",
        "systemd-journald[812]: Data hash table is full, suggesting rotation.",
        "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE",
        "NVRM: Xid (PCI:0000:5e:00): 13, pid=4242, name=python, Graphics Exception",
        "NVRM: Xid (PCI:0000:5e:00): 31, pid=4242, name=python, MMU Fault",
        "audit: type=1400 audit(1714564800.123:45): apparmor=ALLOWED",
    )
    lines: list[Timed] = [
        (rng.uniform(0, DURATION_S), rng.choice(noise)) for _ in range(9000)
    ]
    planted: Planted = set()

    def plant(rule: str, device: str, texts: Sequence[str], span_s: float) -> None:
        begin_s = rng.uniform(0, DURATION_S - span_s - 1)
        for i, text in enumerate(texts):
            lines.append((begin_s + i * span_s / max(1, len(texts) - 1), text))
        if rule:
            planted.add((rule, device))

    xid = "NVRM: Xid (PCI:{}): {}, pid='<unknown>', name=<unknown>, {}"
    lost = xid.format("0000:3b:00", 79, "GPU has fallen off the bus.")
    lines.append((300.0, lost))
    planted.add(("gpu-off-the-bus", "pci=0000:3b:00"))
    ecc = xid.format("0000:86:00", 95, "Uncontained: LTC TAG (0x2, 0x1).")
    plant("gpu-fault", "pci=0000:86:00 xid=95", [ecc, ecc], 5)
    down = "mlx5_core 0000:{}:00.0 mlx5_{}: Port: 1 Link DOWN"
    plant("nic-flapping", "device=mlx5_3 port=1", [down.format("5d", 3)] * 3, 1500)
    plant("", "", [down.format("ab", 5)] * 2, 900)
    aer = "nvme 0000:{}:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer"
    plant("pcie-corrected-often", "pci=0000:c1:00.0", [aer.format("c1")] * 20, 590)
    plant("", "", [aer.format("c2")] * 19, 590)
    plant("", "", [aer.format("c3")] * 20, 700)  # too slow
    oom = "Out of memory: Killed process 4711 (python) total-vm:1kB"
    plant("oom-killer", "program=python", [oom], 1)
    lines.sort()
    text = "".join(f"[{1000 + at_s:12.6f}] {text}\n" for at_s, text in lines)
    return Log(name="dmesg", text=text, planted=planted, near_misses=3)


def ufm_log(seed: int) -> Log:
    """Make the event log of UFM for 25 switches of 40 ports."""
    rng = random.Random(seed)
    ports = [(f"leaf-{s:02}", f"{p}/1") for s in range(25) for p in range(1, 41)]
    free = [port for port in ports if port[0] not in ("leaf-03", "leaf-24")]
    rng.shuffle(free)
    lines: list[Timed] = []
    planted: Planted = set()

    def add(port: tuple[str, str], make: Any, times_s: Sequence[float]) -> None:
        lines.extend((at_s, make(*port)) for at_s in times_s)

    def times(num: int, begin_s: float, span_s: float) -> list[float]:
        return [begin_s + i * span_s / max(1, num - 1) for i in range(num)]

    def plant(rule: str, port: tuple[str, str], make: Any, at_s: list[float]) -> None:
        add(port, make, at_s)
        planted.add((rule, f"port={port[1]} switch={port[0]}"))

    for _ in range(7000):
        lines.append((rng.uniform(0, DURATION_S), _ufm_noise(rng, rng.choice(ports))))
    plant("link-flapping", _HARD, _down, times(3, 10, 90))
    for i in range(4):
        begin_s = 100 + 350 * i + rng.uniform(0, 100)
        plant("link-flapping", free.pop(), _down, times(3 + i, begin_s, 200))
    for i in range(3):
        begin_s = 60 + 500 * i + rng.uniform(0, 100)
        plant("symbol-ber", free.pop(), _ber, times(2 + i, begin_s, 120))
    for at_s in times(8, 1400, 9):
        add(("leaf-24", f"{round(at_s) % 40 + 1}/1"), _down, [at_s])
    planted.add(("many-links-down", "switch=leaf-24"))
    for _ in range(40):
        add(free.pop(), _down, sorted(rng.uniform(0, DURATION_S) for _ in range(2)))
        add(free.pop(), _ber, [rng.uniform(0, DURATION_S)])
    text = _with_defects(rng, sorted(lines))
    return Log(name="UFM", text=text, planted=planted, near_misses=80)


def _with_defects(rng: random.Random, lines: Sequence[Timed]) -> str:
    """Write each line; some are repeated, some swapped with the next one."""
    written: list[str] = []
    for number, (at_s, text) in enumerate(lines):
        minute, second = divmod(at_s, 60)
        stamp = f"{_UFM_START}{int(minute):02}:{second:06.3f}"
        written.append(f"{stamp} [{number}] {text}\n")
        if rng.random() < 0.1:
            written.append(written[-1])
        if rng.random() < 0.1 and len(written) > 1:
            written[-2:] = written[:-3:-1]
    return "".join(written)


def _down(switch: str, port: str) -> str:
    return (
        f"[329] WARNING [Link] Link [{switch}]: Link went down: "
        f"(Switch:{switch}:1/{port})9c0591030090e000:33 - "
        "(Switch:spine-01:1/4/2)fc6a1c0300244e00:8, cable S/N: MT0000FT00000"
    )


def _ber(switch: str, port: str) -> str:
    return (
        f"[917] CRITICAL [Hardware] IBPort [default(34) / Switch: {switch} / 1/{port}] "
        "[dev_id: 248a0703006d40f0]: Symbol bit error rate is above the threshold."
    )


def _ufm_noise(rng: random.Random, port: tuple[str, str]) -> str:
    switch, label = port
    up = f"Link is up: (Switch:{switch}:1/{label})"
    return rng.choice(
        (
            f"[328] INFO [Link] Link [{switch}]: {up}",
            "[64] INFO [Fabric Notification] Grid [Grid]: GID address out of service",
            "[517] INFO [Maintenance] Site [default]: Fabric Health Report Succeeded",
            "[527] INFO [Maintenance] Grid [Grid]: UFM CPU usage is 12 percent",
            "[1500] INFO [Module Status] Switch [cable]: New cable detected",
        )
    )


def run(log: Log, folder: Path, speed: float | None) -> Outcome:
    """Run the command over a log, with fakes of the programs that its rules call."""
    folder.mkdir()
    path, calls = folder / "log", folder / "calls"
    path.write_text(log.text)
    calls.touch()
    bin_dir = folder / "bin"
    bin_dir.mkdir()
    for name in ("site-port", "site-gpu"):
        (bin_dir / name).write_text(_FAKE)
        (bin_dir / name).chmod(0o755)
    rules_path = EVENTS_DIR / f"{'ufm' if log.name == 'UFM' else 'kernel'}_rules.toml"
    argv = [sys.executable, "-m", "mjax.health.events.command", str(path), "--yes"]
    argv += ["--rules", str(rules_path), "--state", str(folder / "state.db")]
    argv += ["--events", str(folder / "events.jsonl"), "--json"]
    argv += [] if speed is None else ["--replay-speed", str(speed)]
    environment = os.environ | {
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "CALLS": str(calls),
    }
    start_s = time.monotonic()
    with (folder / "out").open("wb") as out:
        child = subprocess.Popen(argv, stdout=out, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.monotonic() - start_s
    written = (folder / "events.jsonl").read_text()
    if written != (folder / "out").read_text():
        raise RuntimeError("--events and stdout differ")
    return Outcome(
        events=[json.loads(line) for line in written.splitlines()],
        calls=calls.read_text().splitlines(),
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mib=usage.ru_maxrss / 1024,
        code=child.returncode,
    )


def found(events: Sequence[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Count the events by (rule, device); actions are left out."""
    keys = (
        (
            event["data"]["rule"],
            " ".join(f"{k}={v}" for k, v in sorted(event["data"]["device"].items())),
        )
        for event in events
        if event["kind"] != "action"
    )
    return Counter(keys)


def most_disabled(calls: Sequence[str]) -> int:
    """Return the maximum number of devices out of use at one time, from the calls."""
    out: set[str] = set()
    most = 0
    for call in calls:
        _, verb, *device = call.split()
        if verb in ("isolate", "drain"):
            out.add(" ".join(device))
        elif verb in ("enable", "return"):
            out.discard(" ".join(device))
        most = max(most, len(out))
    return most


def orders(calls: Sequence[str]) -> dict[str, list[str]]:
    """Return the verbs of the calls for each device, in order."""
    seen: dict[str, list[str]] = {}
    for call in calls:
        program, verb, *device = call.split()
        seen.setdefault(" ".join([program, *device]), []).append(verb)
    return seen


def in_order(calls: Sequence[str]) -> bool:
    """Return whether each device was disabled, tested, and only then enabled."""
    for device, verbs in orders(calls).items():
        if device.endswith(" ".join(_HARD)):
            good = verbs[0] == "isolate" and set(verbs[1:]) == {"test"}
        else:
            good = verbs in (["isolate", "test", "enable"], ["drain", "test", "return"])
        if not good:
            return False
    return bool(calls)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all replays and write the page; 1 if something was missed or differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--speed", type=float, default=100.0)
    args = parser.parse_args(argv)
    rows, action_rows, is_good = [], [], True
    with tempfile.TemporaryDirectory() as folder:
        for log in (kernel_log(args.seed), ufm_log(args.seed)):
            slow = run(log, Path(folder) / f"{log.name}-replay", args.speed)
            fast = run(log, Path(folder) / f"{log.name}-full", None)
            is_equal = (slow.events, slow.calls) == (fast.events, fast.calls)
            counts = found(slow.events)
            hits = log.planted & set(counts)
            false = sum(counts.values()) - len(hits)
            is_good &= is_equal and hits == log.planted and false == 0
            is_good &= in_order(slow.calls) and most_disabled(slow.calls) <= 2
            refused = sum(
                "refused" in event["data"].get("status", "") for event in slow.events
            )
            for speed, outcome in ((f"{args.speed:g}x", slow), ("full speed", fast)):
                rows.append(
                    [
                        *(log.name, speed, str(log.text.count("\n"))),
                        f"{len(hits)} of {len(log.planted)}",
                        *(str(log.near_misses), str(false), str(refused)),
                        str(most_disabled(outcome.calls)),
                        *(f"{outcome.wall_s:.1f}", f"{outcome.cpu_s:.2f}"),
                        f"{outcome.peak_mib:.0f}",
                        "yes" if is_equal else "NO",
                    ]
                )
            for device, verbs in orders(slow.calls).items():
                action_rows.append([log.name, device, ", ".join(verbs)])
    _write(args, rows, action_rows)
    return 0 if is_good else 1


def _write(
    args: argparse.Namespace, rows: list[list[str]], action_rows: list[list[str]]
) -> None:
    words = ["python", "-m", "scripts.health.replay_logs", "--seed", str(args.seed)]
    header = ["log", "speed", "lines", "planted found", "near misses", "false events"]
    header += ["refused by the limit", "out of use at a time", "wall s", "CPU s"]
    header += ["peak MiB", "same at both speeds"]
    evidence.write_page(
        "replay_logs",
        "Replays of logs through the rules",
        shlex.join(words),
        [
            evidence.Table(
                title="Events and cost",
                text="30 minutes of log, with the shipped rules and --yes. A near miss "
                "has one line less than its rule needs, or needs a little too long. "
                "False events: any that was not planted, and any second one of a "
                "planted fault. CPU seconds are those of the command and the programs "
                "that it called; memory is an upper bound of the largest "
                "resident size (ru_maxrss). The last column compares "
                "all fields of all events, and all calls in their order.",
                header=header,
                rows=rows,
            ),
            evidence.Table(
                title="Actions",
                text="As the fake programs were called, in order. The test of port 7/1 "
                "of leaf-03 always fails: it must stay isolated. The rules allow 1 GPU "
                "and 2 ports out of use at a time, so the other ports share one place; "
                "a fault that finds no place is an event and a ticket for a person.",
                header=["log", "program and device", "calls"],
                rows=action_rows,
            ),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())

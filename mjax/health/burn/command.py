"""`python -m mjax.health burn`: measure the performance of a host, and judge it.

Input: flags, baselines by hardware, results of other hosts. Output: a result whose
checks have one of four states (`result`), and the state of a long burn. Measurements
run in separate processes (`child`), so that a hung device is reported. The host must be
idle: other programs reduce the measured rates.

Exit codes: 0 passed; 1 not passed; 2 bad input; 42 stopped by a signal, and the same
command resumes from --state.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mjax.cli import exit_codes, flags
from mjax.health.burn import child as burn_child
from mjax.health.burn import limits as burn_limits
from mjax.health.burn import result as burn_result
from mjax.health.burn import state as burn_state
from mjax.health.burn.config import BurnConfig
from mjax.health.burn.judging import Round, judge
from mjax.health.burn.measurements import GROUPS, Group, Measured, Task, is_within
from mjax.health.burn.result import Check, Result
from mjax.health.findings import State

_MODULES: Mapping[Group, str] = {
    "devices": "mjax.health.burn.workloads",
    "host": "mjax.health.burn.host_workloads",
    "network": "mjax.health.burn.workloads",
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    try:
        config: BurnConfig = flags.read(
            BurnConfig,
            argv,
            prog="python -m mjax.health burn",
        )
        return _run(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.FAILED


def _run(config: BurnConfig) -> int:
    """Burn, judge and report; return the exit code."""
    baselines = burn_limits.read_baselines(config.baselines)
    others = [burn_result.read_result(path) for path in config.compare]
    burn_limits.check_results(others)
    for flag, path in (("--out", config.out), ("--state", config.state)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{flag} {path}: its folder does not exist; make it first")
    saved = burn_state.load(config.state, config.host, config.settings)
    with _signals() as received:
        while not _is_over(saved, config):
            try:
                saved = _round(config, saved, received)
            except burn_child.Stopped:
                print(_stopped_text(config, saved), file=sys.stderr)
                return exit_codes.PREEMPTED
            burn_state.save(config.state, saved)
            if config.minutes is not None:
                print(_progress(config, saved), file=sys.stderr)
    hardware = saved.rounds[0].hardware
    same = burn_limits.others(others, config.host, hardware, config.compare_fraction)
    checks = judge(
        saved.rounds,
        lambda one: burn_limits.limits(one, hardware, baselines, same),
        _expected_devices(config),
    )
    checks = (*checks, *_not_measured(config, checks))
    result = Result(
        ok=burn_result.is_passed(checks, config.require),
        host=config.host,
        hardware=hardware,
        checks=checks,
    )
    text = burn_result.to_json(result)
    print(text if config.json else burn_result.to_table(result), flush=True)
    _write(config.out, text)
    return exit_codes.DONE if result.ok else exit_codes.FAILED


def _write(path: Path | None, text: str) -> None:
    """Write the result; do nothing without a path.

    Raises:
      RuntimeError: it cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot write --out {path}: {error.strerror}") from error


def _is_over(saved: burn_state.Saved, config: BurnConfig) -> bool:
    """Return whether no round is left."""
    if not saved.rounds:
        return False
    return config.minutes is None or saved.burned_s >= 60 * config.minutes


def _round(
    config: BurnConfig, saved: burn_state.Saved, received: Sequence[int]
) -> burn_state.Saved:
    """Run one round and return the burn extended by it.

    Raises:
      Stopped: a signal arrived; the round is discarded.
    """
    started_s = time.monotonic()
    found: list[Measured] = []
    hardware, agreed_s = "", None
    for group, every in GROUPS.items():
        kinds = tuple(kind for kind in every if _is_asked(config, kind))
        why_not = _why_not(config, group, saved)
        if why_not is not None:
            found += [dataclasses.replace(why_not, name=kind) for kind in kinds]
        elif kinds:
            elapsed_s = saved.elapsed_s + time.monotonic() - started_s
            ended = burn_child.measure(
                _task(config, group, kinds, elapsed_s),
                (sys.executable, "-m", _MODULES[group]),
                _environment(config),
                _limits(config, group),
                lambda: bool(received),
            )
            found += ended.results
            hardware, agreed_s = hardware or ended.hardware, ended.agreed_s
    seconds = time.monotonic() - started_s
    new = Round(
        begin_s=saved.elapsed_s,
        seconds=seconds,
        hardware=hardware,
        results=tuple(found),
    )
    return dataclasses.replace(saved, rounds=(*saved.rounds, new), agreed_s=agreed_s)


def _is_asked(config: BurnConfig, kind: str) -> bool:
    return not config.only or any(is_within(kind, one) for one in config.only)


def _why_not(
    config: BurnConfig, group: Group, saved: burn_state.Saved
) -> Measured | None:
    """Return the outcome of kinds that cannot be measured; None if they can be.

    Its name is a placeholder.
    """
    if group != "host" and importlib.util.find_spec("jax") is None:
        return Measured(name="-", outcome="absent", note="jax is not installed")
    if group != "network":
        return None
    if config.coordinator is None:
        return Measured(name="-", outcome="absent", note="--coordinator is not given")
    for index, one in enumerate(saved.rounds):
        for measured in one.results:
            is_bad = measured.outcome in ("error", "incomplete")
            if is_bad and is_within(measured.name, "all_reduce_hosts"):
                note = f"not tried again after round {index + 1}: {measured.note}"
                return Measured(name="-", outcome="incomplete", note=note)
    return None


def _task(
    config: BurnConfig, group: Group, kinds: tuple[str, ...], elapsed_s: float
) -> Task:
    """Return the task of a measuring process."""
    task = Task(
        kinds=kinds,
        form=config.form,
        disk_dir=None if config.disk_dir is None else str(config.disk_dir),
        disk_mib=config.disk_mib,
        memory_mib=config.memory_mib,
        elapsed_s=elapsed_s,
    )
    if group != "network":
        return task
    return dataclasses.replace(
        task,
        coordinator=config.coordinator,
        num_processes=config.num_processes or 1,
        process_id=config.process_id or 0,
        join_s=config.join_s,
    )


def _limits(config: BurnConfig, group: Group) -> burn_child.Limits:
    """Return time limits; they are longer for a process that waits for other hosts."""
    join_s = float(config.join_s) if group == "network" else 0.0
    return burn_child.Limits(start_s=config.limit_s + join_s, kind_s=config.limit_s)


def _environment(config: BurnConfig) -> dict[str, str]:
    """Return the environment variables of a measuring process."""
    found = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ | {"LC_ALL": "C"}
    if config.simulate_devices is not None:
        count = f"--xla_force_host_platform_device_count={config.simulate_devices}"
        found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} {count}".strip()
        found["JAX_PLATFORMS"] = "cpu"
    elif config.platform is not None:
        found["JAX_PLATFORMS"] = config.platform
    elif _nvidia_devices():
        # jax would silently use the CPU if the GPUs cannot start.
        found.setdefault("JAX_PLATFORMS", "cuda")
    return found


def _expected_devices(config: BurnConfig) -> int | None:
    """Return the required number of devices, if known."""
    if config.expect_devices is not None:
        return config.expect_devices
    if config.simulate_devices is not None:
        return config.simulate_devices
    if config.platform == "cpu" or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    return _nvidia_devices() or None


def _nvidia_devices(folder: Path = Path("/dev")) -> int:
    """Count the GPUs for which the NVIDIA driver created a device file."""
    names = (path.name for path in folder.glob("nvidia*"))
    return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names)


def _not_measured(config: BurnConfig, checks: Sequence[Check]) -> list[Check]:
    """Return a check for each required measurement without a result."""
    return [
        Check(
            name=name,
            state=State.UNKNOWN,
            value=None,
            limit=None,
            reason="required, but not measured",
            unit="",
        )
        for name in config.require
        if not any(is_within(check.name, name) for check in checks)
    ]


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list that collects SIGTERM and SIGINT, which do not end the process."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in _SIGNALS
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress(config: BurnConfig, saved: burn_state.Saved) -> str:
    return (
        f"round {len(saved.rounds)}: {saved.burned_s / 60:.1f} of {config.minutes:g} "
        "minutes burned"
    )


def _stopped_text(config: BurnConfig, saved: burn_state.Saved) -> str:
    """Return a text that says which rounds are saved."""
    if config.state is None:
        return "stopped; nothing is saved without --state"
    return (
        f"stopped after {len(saved.rounds)} complete rounds; the same command resumes "
        f"from {config.state}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

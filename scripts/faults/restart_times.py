"""Measure the time from the kill of a rank to its next step, by phase.

    python -m scripts.faults.restart_times --kills 30

A launch of two hosts trains the `debug` recipe. One rank after the other is killed,
including rank 0. The events of the launch divide the time until the next generation has
completed a step into phases. There are three modes: the default, which restarts warm;
each rank started separately, with jax's compilation cache; and the same without the
cache. Writes docs/benchmarks/restart_times.md, and restart_times.jsonl with a line for
each kill. Modes that are not measured again keep their lines.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.cli.flags import with_flags
from scripts.evidence import BENCHMARKS_DIR, Table, commit, write_page
from scripts.faults.launch_faults import RUN, XLA_FLAGS
from scripts.faults.launched import Launched

LOG = BENCHMARKS_DIR / "restart_times.jsonl"
HOSTS = 2
COLD = ("--restart.no-warm", "--restart.no-coordinator")
MODES: Mapping[str, tuple[Sequence[str], Sequence[str], Mapping[str, str]]] = {
    "warm": ((), (), {}),
    "cold, jax's cache": (COLD, ("--no-keep-compiled",), {}),
    "cold, no cache": (
        COLD,
        ("--no-keep-compiled",),
        {"JAX_ENABLE_COMPILATION_CACHE": "false"},
    ),
}
"""Mode -> flags of the launch, flags of the trainer, environment variables."""
PHASES = ("notice", "stop and place", "import", "init", "build", "compile", "restore")


def restart(launched: Launched, rank: int) -> dict[str, float]:
    """Kill a rank; return the seconds until the next step, and those of each phase."""
    generation = launched.generation
    # Without a new saved step the launch would pause before the next restart.
    launched.wait_for(lambda: _has_saved(launched), "a save")
    killed_ns, killed_s = time.time_ns(), time.monotonic()
    os.kill(launched.rank_pid(rank), signal.SIGKILL)
    launched.wait_for(lambda: launched.generation > generation, "a restart")
    launched.wait_for(lambda: _has_stepped(launched), "a step")
    total_s = time.monotonic() - killed_s
    launched.wait_for(
        lambda: launched.events("under_way")[-1]["generation"] > generation, "an event"
    )
    failure = launched.events("failure")[-1]["time_ns"]
    start = launched.events("generation")[-1]["time_ns"]
    spent = launched.events("under_way")[-1]["data"]["spent_s"]
    return {
        "notice": (failure - killed_ns) / 1e9,
        "stop and place": (start - failure) / 1e9,
        **{phase: spent[phase] for phase in PHASES[2:]},
        "total": total_s,
    }


def _has_stepped(launched: Launched) -> bool:
    """Return whether all ranks completed the first step of the current generation."""
    words = [launched.word(rank) for rank in range(HOSTS)]
    return all(
        word is not None
        and word.generation == launched.generation
        and word.first_step_ns > 0
        for word in words
    )


def _has_saved(launched: Launched) -> bool:
    """Return whether the launcher has recorded a saved step of this generation."""
    generation = launched.generation
    saves = [e for e in launched.events("save") if e["generation"] == generation]
    return len(saves) > int(generation > 1)  # the first record is the restored step


def measure(mode: str, kills: int, folder: Path) -> list[dict[str, float]]:
    """Kill ranks in a launch of this mode."""
    own, train, environment = MODES[mode]
    for name, value in environment.items():
        os.environ[name] = value
    flags = with_flags([*RUN, *train], {"--steps": ["5000"]})
    launched = Launched(folder / mode.replace(" ", "-"), HOSTS, 0, flags, own)
    try:
        launched.wait_for_row(4)
        found = []
        for number in range(kills):
            seconds = restart(launched, number % HOSTS)
            found.append({name: round(s, 2) for name, s in seconds.items()})
            print(mode, found[-1], flush=True)
        return found
    finally:
        launched.end()
        for name in environment:
            del os.environ[name]


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[max(0, round(0.95 * len(values)) - 1)]


def _row(mode: str, kills: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [kill["seconds"] for kill in kills]
    totals = [one["total"] for one in found]
    rest = [one["total"] - sum(one[phase] for phase in PHASES) for one in found]
    medians = [statistics.median(one[p] for one in found) for p in PHASES]
    numbers = [statistics.median(totals), _p95(totals), *medians]
    numbers.append(statistics.median(rest))
    commits = ", ".join(dict.fromkeys(kill["commit"] for kill in kills))
    return [mode, commits, str(len(found)), *(f"{s:.2f}" for s in numbers)]


def main() -> int:
    """Measure the restarts, and write log and page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=[*MODES])
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    lines = LOG.read_text().splitlines() if LOG.exists() else []
    kills = [one for one in map(json.loads, lines) if one["mode"] not in args.modes]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        for mode in args.modes:
            for seconds in measure(mode, args.kills, Path(folder)):
                kills.append({"commit": commit(), "mode": mode, "seconds": seconds})
    LOG.write_text("".join(f"{json.dumps(kill)}\n" for kill in kills))
    by_mode = {mode: [k for k in kills if k["mode"] == mode] for mode in MODES}
    table = Table(
        title="Seconds from the kill of a rank to the end of the next step",
        text=(
            f"{HOSTS} hosts with a rank each, `{' '.join(RUN)}`, compiled without "
            "LLVM's passes. Ranks are killed in turn. All columns but median and p95 "
            "are medians of the slowest rank: `notice` until the launcher names a "
            "cause, `stop and place` until its order to start, then the phases of the "
            "trainer; `rest` is the first step and the time that the clocks of the "
            "processes do not cover."
        ),
        header=["launch", "commit", "kills", "median", "p95", *PHASES, "rest"],
        rows=[_row(mode, found) for mode, found in by_mode.items() if found],
    )
    command = f"python -m scripts.faults.restart_times --kills {args.kills}"
    print(write_page("restart_times", "Restarts", command, [table]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure the cost of the observation that is on by default in a run.

    python -m scripts.observe.watch_overhead

The spans of the host (one line per step), the watchdog of slow steps, and a beat per
second (`mjax.run.watch`) are on by default. There are three measurements, each in a
separate process, in which blocks of steps with all of them and with none alternate in
the order on, off, off, on:

- the demo, as `python -m mjax.train` trains it;
- the configuration of `scripts/speed/bench_overhead.py` on 8 simulated devices;
- the loop around a step that computes nothing, so that the noise of a step does not
  mask the cost.

For each pair of neighbouring blocks, the ratio of the CPU-seconds of a step is
computed. The first step of a block is left out, because the loop reads the metrics of
the step before. Writes docs/benchmarks/watch_overhead.md; ends with 1 if a median is
more than 1.01, or if the cost in the loop with the empty step is more than 1% of a
step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from mjax.run import loop
from mjax.run.watch import Watch
from scripts.evidence import Table, commit, write_page

MOST = 1.01
DEMO = (
    *("--steps", "2401", "--eval.every", "3000", "--ckpt.every", "3000"),
    *("--log.sample-tokens", "0"),
)
DEVICES = (
    *("--recipe", "debug", "--simulate-devices", "8", "--mesh.tp", "2"),
    *("--zero", "2", "--model.remat", "full", "--data.path", "synthetic"),
    *("--model.layers", "8", "--model.d-model", "256", "--model.heads", "8"),
    *("--model.d-ff", "680"),
    *("--data.seq-len", "256", "--batch.size", "32", "--precision.compute", "float32"),
    *("--optim.name", "adamw", "--steps", "89", "--eval.every", "2000"),
    *("--ckpt.every", "2000", "--log.sample-tokens", "0"),
)
BLOCK = {"demo": 2, "devices": 2, "nothing": 25}
"""Steps of a block. The first one of each is not counted. Each run ends in a block with
all of them on, because the end of a run uses them more than a step does.
"""


class Silent:
    """Replaces spans and the watchdog, and does nothing."""

    def enter(self, name: str, kind: str, step: int) -> int:
        """Return the time, which the loop uses."""
        return time.monotonic_ns()

    def add(self, *span: Any, step: int = -1) -> None:
        """Keep nothing."""

    def begin(self) -> None:
        """Watch nothing."""

    def end(self, step: int) -> None:
        """Find nothing."""

    def flush(self, before: int | None = None) -> None:
        """Write nothing."""


class Turns:
    """Batches that switch the watch on and off, and time each step."""

    def __init__(self, batches: loop.Batches, watch: Watch, block: int) -> None:
        """Begin with the current watch."""
        self._batches, self._watch, self._block = batches, watch, block
        self._on = watch.spans, watch.slow_steps
        silent: Any = Silent()
        self._off = silent, silent
        self._beats = watch.beats
        self._began: tuple[float, float] | None = None
        self._num = -1
        self.data_wait_s = 0.0
        self.steps: list[tuple[bool, float, float]] = []
        """For each counted step: whether it was watched, CPU-seconds, seconds."""

    def __next__(self) -> Any:
        """Return the next batch; a step ends and the next one begins."""
        now = time.process_time(), time.perf_counter()
        if self._began is not None:
            before, after = self._is_on(self._num), self._is_on(self._num + 1)
            if self._num % self._block and self._num > self._block:
                cpu_s, wall_s = (b - a for a, b in zip(self._began, now, strict=True))
                self.steps.append((before, cpu_s, wall_s))
            if before != after:
                watch = self._watch
                watch.spans, watch.slow_steps = self._on if after else self._off
                self._switch_beats(is_on=after)
        self._num += 1
        self._began = time.process_time(), time.perf_counter()
        batch = next(self._batches)
        self.data_wait_s = self._batches.data_wait_s
        return batch

    def _switch_beats(self, *, is_on: bool) -> None:
        """Switch the beats on or off; if off, their thread wakes but does nothing."""
        assert self._beats is not None
        if is_on:
            del vars(self._beats)["_beat"]
        else:
            vars(self._beats)["_beat"] = lambda end=None: None

    def _is_on(self, num: int) -> bool:
        return (num // self._block) % 4 in (0, 3)

    def result(self) -> dict[str, list[float]]:
        """Return the mean CPU-seconds and seconds of a step of each block, in turn."""
        size = self._block - 1
        blocks = [
            self.steps[at : at + size]
            for at in range(0, len(self.steps) - size + 1, size)
        ]
        found: dict[str, list[float]] = {"on": [], "off": [], "on_s": [], "off_s": []}
        for block in blocks:
            assert len({is_on for is_on, _, _ in block}) == 1
            name = "on" if block[0][0] else "off"
            found[name].append(statistics.median(cpu_s for _, cpu_s, _ in block))
            found[f"{name}_s"].append(statistics.median(s for _, _, s in block))
        return found


def measure_training(case: str) -> dict[str, list[float]]:
    """Train as a user does, with alternating blocks."""
    from mjax import train

    made: list[Turns] = []
    original = loop.Loop

    def make(**parts: Any) -> loop.Loop:
        made.append(Turns(parts["batches"], parts["watch"], BLOCK[case]))
        return original(**{**parts, "batches": made[0]})

    flags = {"demo": DEMO, "devices": DEVICES}[case]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(loop, "Loop", make),
    ):
        exit_code = train.main([*flags, "--work-dir", folder])
    if exit_code:
        raise RuntimeError(f"training ended with {exit_code}")
    return made[0].result()


def measure_nothing() -> dict[str, list[float]]:
    """Run the loop around a step that computes nothing."""
    import jax

    from mjax.observe.spans import Header
    from mjax.run.beats import Beats
    from mjax.run.slow_steps import SlowSteps
    from mjax.run.spans import Spans
    from scripts.speed import host_time
    from scripts.speed.bench_overhead import Workload, make_batch, mjax_program
    from scripts.speed.bench_overhead import simulate_devices as simulate

    simulate(Workload())
    work = Workload()
    program = mjax_program(work)
    batch = jax.device_put(make_batch(work), program.batch_sharding)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        header = Header(
            run="overhead",
            host="host",
            rank=0,
            generation=1,
            pid=1,
            wall_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
            devices=tuple(range(8)),
            mesh={"pp": 1, "dp_replica": 1, "dp_shard": 4, "tp": 2},
        )
        spans = Spans(folder / "spans", header)
        watch = Watch(spans=spans, slow_steps=SlowSteps(folder / "stacks.txt"))
        watch.beats = Beats(folder, header, watch.marks, spans, 1.0)
        same = host_time.SameBatch(batch)
        turns = Turns(same, watch, BLOCK["nothing"])
        host_time.run_empty(program, turns, folder, num_steps=2001, watch=watch)
        watch.close(0)
    return turns.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one case, or measure all and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=tuple(BLOCK))
    parser.add_argument("--results", type=Path, help="folder; what it has is not run")
    args = parser.parse_args(argv)
    case = args.case
    if case is not None:
        found = measure_nothing() if case == "nothing" else measure_training(case)
        print(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = args.results or Path(folder)
        results.mkdir(exist_ok=True)
        return _write_page({name: _run(name, results) for name in BLOCK})


def _run(case: str, results: Path) -> dict[str, list[float]]:
    """Run a case in a separate process, or read its result."""
    path = results / f"{case}.json"
    if path.exists():
        return json.loads(path.read_text())
    command = [sys.executable, "-m", "scripts.observe.watch_overhead", "--case", case]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    path.write_text(done.stdout.splitlines()[-1])
    return json.loads(path.read_text())


def _write_page(found: dict[str, dict[str, list[float]]]) -> int:
    rows, is_high = [], False
    for case in ("demo", "devices"):
        on, off = found[case]["on"], found[case]["off"]
        ratios = np.asarray(on[: len(off)]) / np.asarray(off[: len(on)])
        low, high = _interval(ratios)
        median = float(np.median(ratios))
        is_high |= median > MOST
        rows.append(
            [
                {"demo": "demo", "devices": "8 devices"}[case],
                f"{len(ratios)}",
                f"{statistics.median(off) * 1e3:.1f}",
                f"{statistics.median(on) * 1e3:.1f}",
                f"**{median:.4f}**",
                f"{low:.4f} to {high:.4f}",
            ]
        )
    nothing = found["nothing"]
    pairs = zip(nothing["on"], nothing["off"], strict=False)
    cost_s = statistics.median(on - off for on, off in pairs)
    wall = zip(nothing["on_s"], nothing["off_s"], strict=False)
    cost_wall_s = statistics.median(on - off for on, off in wall)
    parts = []
    for case in ("demo", "devices"):
        step_s = statistics.median(found[case]["off"])
        parts.append(f"{cost_s / step_s:.3%}")
        is_high |= cost_s / step_s > MOST - 1
    write_page(
        "watch_overhead",
        "What watching a run costs",
        "python -m scripts.observe.watch_overhead",
        [
            Table(
                title="Steps",
                text=f"Commit {commit()}. Spans, beats and the watchdog of slow steps, "
                "which are on by default, against a run without them, in turns within "
                "one process. CPU-milliseconds per step of this process, medians; the "
                "ratio is the median over pairs of neighbouring blocks, with a 95% "
                "bootstrap interval over blocks (10,000 draws). The bound is 1.01.",
                header=("run", "pairs", "off", "on", "on / off", "95%"),
                rows=rows,
            ),
            Table(
                title="Around a step that computes nothing",
                text="The same loop on 8 simulated devices with a compiled step that "
                "does nothing, so that only the host's time of an iteration remains.",
                header=(
                    "cost a step, CPU-ms",
                    "by the clock, ms",
                    "of a demo step",
                    "of a step on 8 devices",
                ),
                rows=[[f"{cost_s * 1e3:.3f}", f"{cost_wall_s * 1e3:.3f}", *parts]],
            ),
        ],
    )
    return int(is_high)


def _interval(ratios: np.ndarray) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    drawn = rng.choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m mjax.observe whatif`: how much of a run is due to stragglers.

    python -m mjax.observe whatif --work-dir DIR [--from-step A] [--json] [--out FILE]

Enters: the spans of a run. Leaves: the step without stragglers; what each rank and each
phase costs; causes, the most expensive first (`mjax.observe.detect.whatif`). Exit
codes: 0 done, 2 bad input.

The spans of a run have no operations of a pipeline, so the graph is made of what they
do have, and this is assumed:

- Each device does its own phases one after the other: it waits for its host between
  steps, then forward and backward passes, the optimizer.
- The gradients' reduction and norm (span `norm`) is one collective of all devices: the
  last one to come holds up the others, and then it takes the same time for all.
- Nothing else waits. A wait for a transfer of tp or pp inside of a pass counts as the
  pass: the peers of a slow device then look slow too.
- Clocks of hosts differ: they are shifted so that the norm ends for all at once.

A run without stamps has no such spans: its hosts all see the step of the slowest.
"""

import argparse
import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax.observe import output
from mjax.observe.detect.whatif import LEAST_SAVED, Trace, WhatIf, analyse
from mjax.observe.spans import Span, SpanFile, read_run

_PHASE_OF = {"tick": "forward"}
_NAME_OF = {"data": "between steps", "sync": "norm"}
"""What people and programs are told, for phases of the analysis."""
_MOST_SHOWN = 8
_SKIPPED_STEPS = 2
"""First steps of a start, which fill caches and connect devices. Chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """A device, which does one thing at a time."""

    rank: int
    host: str
    stream: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the command says."""

    workers: tuple[Worker, ...]
    steps: tuple[int, ...]
    found: WhatIf
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        found = self.found
        by_host: dict[str, float] = collections.defaultdict(float)
        for worker, saved in zip(self.workers, found.saved_by_worker, strict=True):
            by_host[worker.host] += float(saved)
        return {
            "steps": [self.steps[0], self.steps[-1]],
            "step_s": float(found.step_s.mean()),
            "even_step_s": float(found.step_s.mean()) * (1 - found.saved),
            "stragglers": found.saved,
            "replay_error": float(found.replayed_s.sum() / found.step_s.sum() - 1),
            "cause": found.first.name if found.first else None,
            "causes": [
                {
                    "name": cause.name,
                    "saved": cause.saved,
                    "step_s": float(cause.step_s.mean()),
                    "workers": [
                        dataclasses.asdict(self.workers[w]) for w in cause.workers
                    ],
                }
                for cause in found.causes
            ],
            "workers": [
                dataclasses.asdict(worker) | {"saved": float(saved)}
                for worker, saved in zip(
                    self.workers, found.saved_by_worker, strict=True
                )
            ],
            "hosts": dict(by_host),
            "phases": {
                _NAME_OF.get(phase, phase): saved
                for phase, saved in found.saved_by_phase.items()
            },
            "problems": [*self.problems],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mjax.observe whatif",
        description="How much of a run is due to stragglers.",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="of the run")
    add("--from-step", type=int, help="leave out steps before it")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="write the JSON object there too")
    args = parser.parse_args(argv)
    try:
        found = answer(args.work_dir, args.from_step)
        text = json.dumps(found.to_json())
        if args.out is not None:
            output.write(args.out, text + "\n")
    except ValueError as error:
        return output.refuse(error)
    print(text if args.json else _text(found))
    return 0


def answer(work_dir: Path, from_step: int | None = None) -> Answer:
    """Replay the newest start of a run.

    Args:
      work_dir: of the run.
      from_step: first step that counts; None leaves out the first two.
    Raises:
      ValueError: there are no spans, or too few steps that all ranks have taken.
    """
    files, problems = read_run(work_dir)
    newest = max(found.header.generation for found in files)
    files = [found for found in files if found.header.generation == newest]
    workers, rows = _rows(files)
    shared = set.intersection(*(set(row) for row in rows)) if rows else set()
    # Steps follow each other: what is between two that do not is no step.
    steps = _longest([*shared])
    first = steps[0] + _SKIPPED_STEPS if from_step is None and steps else from_step
    steps = [step for step in steps if step >= (first or 0)]
    if not steps:
        raise ValueError(
            f"{work_dir} has no steps in a row that all of {len(files)} ranks have "
            "taken; let the run go on, or name an earlier --from-step"
        )
    found = analyse(_trace(rows, steps))
    return Answer(
        workers=tuple(workers),
        steps=tuple(steps),
        found=found,
        problems=tuple(problems),
    )


def _longest(steps: Sequence[int]) -> list[int]:
    """Return the longest row of steps that follow each other."""
    ordered = np.array(sorted(steps), np.int64)
    if not len(ordered):
        return []
    parts = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return max(parts, key=len).tolist()


def _rows(
    files: Sequence[SpanFile],
) -> tuple[list[Worker], list[dict[int, list[Span]]]]:
    """Return the workers, and of each the spans of each step."""
    found: list[tuple[Worker, dict[int, list[Span]]]] = []
    for file in files:
        header = file.header
        streams: dict[str, dict[int, list[Span]]] = {}
        for line in file.lines:
            for span in line.spans if line.step > 0 else ():
                steps = streams.setdefault(span.stream, {})
                steps.setdefault(line.step, []).append(span)
        devices = sorted(
            (stream for stream in streams if stream.startswith("device:")),
            key=lambda stream: int(stream.partition(":")[2]),
        )
        if not devices:
            raise ValueError(
                f"{file.path} has no spans of devices, so nobody can tell which rank "
                "the others wait for; run with --observe.stamps True"
            )
        for stream in devices:
            worker = Worker(rank=header.rank, host=header.host, stream=stream)
            found.append((worker, streams[stream]))
    return [worker for worker, _ in found], [steps for _, steps in found]


def _operations(
    spans: Sequence[Span], before_ns: int | None
) -> Iterator[tuple[str, int, int, int]]:
    """Yield phase, microbatch, start and end of what a worker did in a step.

    Args:
      spans: of one stream and step.
      before_ns: when the step before it ended.
    """
    ordered = sorted(spans, key=lambda span: span.start_ns)
    begin_ns = ordered[0].start_ns if before_ns is None else before_ns
    yield "data", -1, min(begin_ns, ordered[0].start_ns), ordered[0].start_ns
    counts: dict[str, int] = collections.defaultdict(int)
    joined = False
    for span in ordered:
        phase = _PHASE_OF.get(span.name, span.name)
        if phase in ("forward", "backward"):
            yield phase, counts[phase], span.start_ns, span.end_ns
            counts[phase] += 1
        elif phase == "norm":
            joined = True
            yield "sync", -1, span.start_ns, span.end_ns
        elif phase == "optimizer":
            yield "optimizer", -1, span.start_ns, span.end_ns
    end_ns = ordered[-1].end_ns
    if not joined:
        yield "sync", -1, end_ns, end_ns
    if all(span.name != "optimizer" for span in ordered):
        yield "optimizer", -1, end_ns, end_ns


def _trace(rows: Sequence[Mapping[int, list[Span]]], steps: Sequence[int]) -> Trace:
    """Build the graph: phases of a worker in order, and a sync of all."""
    table: list[tuple[str, int, int, int, float, float]] = []
    edges: list[tuple[int, int]] = []
    joint: dict[int, list[int]] = collections.defaultdict(list)
    for worker, row in enumerate(rows):
        before_ns, last, zero_ns = None, -1, None
        for number, step in enumerate(steps):
            for phase, micro, start_ns, end_ns in _operations(row[step], before_ns):
                zero_ns = start_ns if zero_ns is None else zero_ns
                here = len(table)
                table.append(
                    (
                        phase,
                        worker,
                        number,
                        micro,
                        (start_ns - zero_ns) / 1e9,
                        (end_ns - zero_ns) / 1e9,
                    )
                )
                if last >= 0:
                    edges.append((last, here))
                if phase == "sync":
                    joint[number].append(here)
                last, before_ns = here, end_ns
    start_s = np.array([row[4] for row in table])
    end_s = np.array([row[5] for row in table])
    of = np.array([row[1] for row in table], np.int64)
    shift_s = _shift_s(joint, end_s, len(rows))
    start_s, end_s = start_s + shift_s[of], end_s + shift_s[of]
    origin_s = float(start_s.min())
    previous = {then: first for first, then in edges}
    for members in joint.values():
        arrivals = [previous[member] for member in members]
        edges += [(a, m) for m in members for a in arrivals if a != previous[m]]
    num = len(table)
    return Trace(
        phase=np.array([row[0] for row in table]),
        worker=of,
        step=np.array([row[2] for row in table], np.int64),
        micro=np.array([row[3] for row in table], np.int64),
        stage=np.zeros(num, np.int64),
        backward=np.zeros(num, bool),
        edges=np.array(edges, np.int64).reshape(-1, 2),
        start_s=start_s - origin_s,
        end_s=end_s - origin_s,
        place=np.zeros(len(rows), np.int64),
        replica=np.arange(len(rows)),
    )


def _shift_s(
    joint: Mapping[int, Sequence[int]], end_s: np.ndarray, num: int
) -> np.ndarray:
    """Return what to add to the times of each worker, so that syncs end together."""
    ends_s = np.array([end_s[list(members)] for members in joint.values()])
    return np.median(ends_s[:, :1] - ends_s, axis=0).reshape(num)


def _text(found: Answer) -> str:
    """Say it to people."""
    what = found.found
    step_s = float(what.step_s.mean())
    error = float(what.replayed_s.sum() / what.step_s.sum() - 1)
    lines = [
        *found.problems,
        f"steps {found.steps[0]} to {found.steps[-1]}, {len(found.workers)} workers: "
        f"{step_s:.4g} s a step; stragglers cost {what.saved:.1%} of it (the replay of "
        f"what was measured is off by {error:+.1%})",
    ]
    first = what.first
    if first is None:
        lines.append(f"no cause costs {LEAST_SAVED:.1%} or more")
    for cause in what.causes:
        named = ""
        if cause.workers:
            shown = [found.workers[w] for w in cause.workers[:_MOST_SHOWN]]
            named = " (" + ", ".join(f"rank {w.rank} on {w.host}" for w in shown) + ")"
        lines.append(f"  {cause.name}{named}: {cause.saved:.1%}")
    order = np.argsort(-what.saved_by_worker)[:_MOST_SHOWN].tolist()
    lines.append("by worker:")
    for worker in order:
        one = found.workers[worker]
        lines.append(
            f"  rank {one.rank} on {one.host}, {one.stream}: "
            f"{what.saved_by_worker[worker]:.1%}"
        )
    lines.append("by phase:")
    for phase, saved in sorted(what.saved_by_phase.items(), key=lambda each: -each[1]):
        lines.append(f"  {_NAME_OF.get(phase, phase)}: {saved:.1%}")
    return "\n".join(lines)

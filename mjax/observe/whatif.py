"""`python -m mjax.observe whatif`: how much time stragglers cost a run.

    python -m mjax.observe whatif --work-dir DIR [--from-step A] [--to-step B]
                                  [--json] [--out FILE]

Input: the spans of a run. Output: the step time without stragglers; the cost of each
rank and each phase; and the causes, the most expensive first. Exit codes: 0 done, 2 bad
input.

`mjax.observe.step_graph` builds the graph of the steps and states its assumptions.
`mjax.observe.detect.whatif_ranks` finds what makes an operation longer than usual.
Stamps are required: without them there are no spans of devices, and all hosts see the
step time of the slowest.
"""

import collections
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax.cli.flags.standard import ArgumentParser
from mjax.observe import output
from mjax.observe.detect.whatif import LEAST_SAVED, WhatIf
from mjax.observe.detect.whatif_ranks import analyse_ranks
from mjax.observe.spans import SpanFile, read_run
from mjax.observe.step_graph import Worker, build, read_steps, runs_of

_NAME_OF = {"data": "wait for data", "host": "between steps", "sync": "norm"}
"""Names of the phases, for people and programs."""
_MOST_SHOWN = 8
_SKIPPED_STEPS = 2
"""Number of steps to leave out at the beginning of the replayed series: the first steps
of a start fill caches and connect devices. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Result of the command."""

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
            "stages": {str(of): saved for of, saved in found.saved_by_stage.items()},
            "phases": {
                _NAME_OF.get(phase, phase): saved
                for phase, saved in found.saved_by_phase.items()
            },
            "problems": [*self.problems],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.observe whatif",
        description="Show how much time stragglers cost a run.",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="work dir of the run")
    add("--from-step", type=int, help="first step to use")
    add("--to-step", type=int, help="last step to use")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args(argv)
    try:
        found = answer(args.work_dir, args.from_step, args.to_step)
        text = json.dumps(found.to_json())
        if args.out is not None:
            output.write(args.out, text + "\n")
    except ValueError as error:
        return output.refuse(error)
    print(text if args.json else _text(found))
    return 0


def answer(
    work_dir: Path,
    from_step: int | None = None,
    to_step: int | None = None,
    files: Sequence[SpanFile] | None = None,
) -> Answer:
    """Replay the newest start of a run.

    Args:
      work_dir: work dir of the run.
      from_step: first step to use; None leaves out the first two of the longest series
        of consecutive steps.
      to_step: last step to use.
      files: its span files, if already read.
    Raises:
      ValueError: there are no spans, or too few steps that all ranks ran.
    """
    problems: list[str] = []
    if files is None:
        files, problems = read_run(work_dir)
    newest = max(found.header.generation for found in files)
    steps = read_steps([found for found in files if found.header.generation == newest])
    last = max((max(of, default=0) for of in steps.of), default=0)
    first = from_step or 0
    chosen = [s for s in steps.shared if first <= s <= (to_step or last)]
    # Time between steps that are not consecutive belongs to no step.
    longest = max(runs_of(chosen), key=len, default=[])
    longest = longest[_SKIPPED_STEPS:] if from_step is None else longest
    if not longest:
        raise ValueError(
            f"{work_dir} has no consecutive steps that all {len(steps.workers)} "
            "devices ran; let the run continue, or choose other steps with --from-step "
            "and --to-step"
        )
    return Answer(
        workers=steps.workers,
        steps=tuple(longest),
        found=analyse_ranks(build(steps, longest)),
        problems=tuple(problems),
    )


def _text(found: Answer) -> str:
    """Return the report as text for people."""
    what = found.found
    step_s = float(what.step_s.mean())
    error = float(what.replayed_s.sum() / what.step_s.sum() - 1)
    lines = [
        *found.problems,
        f"steps {found.steps[0]} to {found.steps[-1]}, {len(found.workers)} workers: "
        f"{step_s:.4g} s a step; stragglers cost {what.saved:.1%} of it (the replay "
        f"of the measured times is off by {error:+.1%})",
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
    if len(what.saved_by_stage) > 1:
        lines.append("by stage:")
        lines += [f"  {of}: {saved:.1%}" for of, saved in what.saved_by_stage.items()]
    lines.append("by phase:")
    for phase, saved in sorted(what.saved_by_phase.items(), key=lambda each: -each[1]):
        lines.append(f"  {_NAME_OF.get(phase, phase)}: {saved:.1%}")
    return "\n".join(lines)

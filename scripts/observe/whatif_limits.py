"""Measure the part of the error of `whatif` that no analysis can avoid.

    python -m scripts.observe.whatif_limits --report

Generated pipelines, as in `scripts.observe.whatif_cases`, on other seeds. A healthy run
also has a longer last stage, uneven lengths and pauses, which remain when the cause is
removed. Their size cannot be read from a run in which the cause masks them. So each run
is judged three times: by the normal analysis; by an analysis that gets the length of
the last stage and the unevenness of the lengths without the cause; and, generated
without all three effects, by an analysis that gets this information. The last two are
oracles. Exits with 1 if the analysis without an oracle has a median error above 10% of
the slowdown.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from mjax.observe.detect.whatif import Usual, analyse
from scripts.evidence import Table, commit, write_page
from tests.observe import synthetic_pipelines as pipelines
from tests.observe.detector_inputs import part_of_slowdown, trace_of
from tests.observe.synthetic_pipelines import Cause, PipelineRun, make
from tests.observe.synthetic_severity import TUNING_SEEDS, WHATIF_SECOND_REPORT_SEEDS

TARGET = 0.10
CHECKED_SEEDS = TUNING_SEEDS[5100:5110]
NOTHING = Usual(last=1.0, lengths=1e-9)
KINDS: tuple[Cause, ...] = ("slow_last_stage", "sequence_lengths", "garbage")
"""Effects that healthy runs also have."""


class _Listener:
    """Draws like numpy's generator, and records the run generator's draws."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.drawn: dict[tuple[float, float], float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)

    def uniform(self, low: float, high: float, *size: Any) -> Any:
        """Draw, and record the value by its bounds."""
        value = self._rng.uniform(low, high, *size)
        if not size:
            self.drawn[low, high] = value
        return value


def told(cause: Cause, seed: int) -> tuple[PipelineRun, Usual]:
    """Make a run, and return its properties without the cause."""
    heard: list[_Listener] = []

    make_rng = np.random.default_rng

    def listen(seed: Any) -> _Listener:
        heard.append(_Listener(make_rng(seed)))
        return heard[-1]

    with mock.patch.object(np.random, "default_rng", listen):
        run = make(cause, seed)
    drawn = heard[0].drawn
    usual = Usual(
        last=drawn[pipelines.MILD_LAST],
        lengths=max(drawn[pipelines.MILD_LENGTHS], NOTHING.lengths),
    )
    return run, usual


@contextlib.contextmanager
def nothing_else() -> Iterator[None]:
    """Make runs without the effects of healthy ones; all other draws stay the same."""
    with (
        mock.patch.object(pipelines, "MILD_LAST", (1.0, 1.0)),
        mock.patch.object(pipelines, "MILD_LENGTHS", (0.0, 0.0)),
        mock.patch.object(pipelines, "MILD_GARBAGE", 0.0),
    ):
        yield


def error(run: PipelineRun, usual: Usual | None) -> float:
    """Return the error of the step without the first cause, over the slowdown."""
    found = analyse(trace_of(run), usual)
    first = found.first
    return part_of_slowdown(found.step_s if first is None else first.step_s, run)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge all cases and print or write the table."""
    parser = argparse.ArgumentParser(description="What an oracle would do.")
    parser.add_argument("--report", action="store_true", help="use the reported seeds")
    parser.add_argument("--seeds", type=int, help="take the first ones only")
    args = parser.parse_args(argv)
    seeds = (WHATIF_SECOND_REPORT_SEEDS if args.report else CHECKED_SEEDS)[: args.seeds]
    errors: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for seed in seeds:
            run, usual = told(kind, seed)
            with nothing_else():
                bare = make(kind, seed)
            errors[kind].append(
                [error(run, None), error(run, usual), error(bare, NOTHING)]
            )
        print(*_row(kind, errors[kind]), sep=" | ", flush=True)
    everything = [each for kind in KINDS for each in errors[kind]]
    table = Table(
        title="Error of the time without the cause, with and without an oracle",
        text=f"Seeds {seeds[0]} to {seeds[-1]} of each cause, declared before they "
        f"were run; commit {commit()}. Errors are relative to the slowdown; the target "
        "is 10%. `told`: the analysis knows how long the last stage and how uneven "
        "the lengths of this run are without the cause. `nothing else`: the same runs "
        "without these and without healthy pauses. A healthy pause looks like one of "
        "the cause, so `told` does not help there.",
        header=(
            *("cause", "error, median", "largest", "within 10%"),
            *("told: median", "largest", "within 10%"),
            *("nothing else: median", "largest", "within 10%"),
        ),
        rows=[*(_row(kind, errors[kind]) for kind in KINDS), _row("all", everything)],
    )
    print(*_row("all", everything), sep=" | ")
    if args.report:
        write_page(
            "observe_whatif_limits",
            "What no analysis can know of a slow run",
            f"python -m scripts.observe.whatif_limits --report --seeds {len(seeds)}",
            [table],
        )
    worst = max(np.median(np.abs(each), axis=0)[0] for each in errors.values())
    return int(worst > TARGET)


def _row(cause: str, errors: Sequence[Sequence[float]]) -> list[str]:
    sizes = np.abs(errors)
    cells = [cause]
    for column in sizes.T:
        within = f"{(column <= TARGET).sum()}/{len(column)}"
        cells += [f"{np.median(column):.1%}", f"{column.max():.1%}", within]
    return cells


if __name__ == "__main__":
    sys.exit(main())

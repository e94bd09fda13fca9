"""`python -m mjax.observe mfu`: diagnose a run from the shape of its MFU series.

Input: the work dir of a run. Output: the known signature that its series matches best,
the evidence, and the next action. The command changes nothing.

The signatures and remedies are those of the field guide (Imbue, "From bare metal to a
70B model: infrastructure set-up and scripts",
imbue.com/research/70b-infrastructure/) and MegaScale, arXiv:2402.15627, section 6.3.

Exit codes: 0 done, 2 bad input.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax.cli.flags.standard import ArgumentParser
from mjax.observe.detect.mfu import BETWEEN_HOSTS, CLEAR, Finding, Kind, classify
from mjax.observe.detect.mfu_models import LEVELS, LOST, THERMAL_LEVEL
from mjax.observe.detect.mfu_series import EXPECTED_DEVIATION, Dips
from mjax.observe.mfu_run import RunSeries, read_series
from mjax.observe.output import printable

_GUIDE = "imbue.com/research/70b-infrastructure"
_MEANING: dict[Kind, tuple[str, str, str]] = {
    "healthy": (
        "the MFU keeps its level; saves, evaluations and restarts explain its dips",
        "Nothing to do.",
        _GUIDE,
    ),
    "dead_link": (
        "the MFU is below 10% of what is expected: a link is dead, or PCIe runs with "
        "too few lanes",
        "Check network and PCIe on every host (python -m mjax.health check), then "
        "test groups of hosts (python -m mjax.health bisect); remove the bad host.",
        _GUIDE,
    ),
    "no_gpudirect": (
        "the MFU is about 30% of what is expected: a host copies outgoing data "
        "through main memory",
        "Check on every host that GPUDirect RDMA works (nvidia_peermem is loaded or "
        "NCCL uses DMA-BUF; NCCL's log has GDRDMA): python -m mjax.health check.",
        _GUIDE,
    ),
    "bad_link": (
        "the MFU is at 60-80% of what is expected: a link or a network card is bad, or "
        "a CPU is throttled",
        "Read error counters and rates of all links, and CPU frequencies (python -m "
        "mjax.health check); if that finds nothing, test groups of hosts (python -m "
        "mjax.health bisect).",
        _GUIDE,
    ),
    "regular_dips": (
        "steps are about ten times as long at a fixed interval, and no save or "
        "evaluation explains them",
        "Find what runs at this interval: saves or evaluations without marks, cron "
        "jobs, a monitor. Compare the times with the logs of the hosts.",
        _GUIDE,
    ),
    "rare_dips": (
        "single steps are about ten times as long, rarely and at no fixed interval: "
        "another process takes the CPU, or the data loader is late",
        "Check data_wait_s of these steps, and which other programs ran on the CPUs "
        "of the hosts then.",
        _GUIDE,
    ),
    "slow_decay": (
        "the MFU falls slowly, and a restart resets it: garbage collection or another "
        "host-side leak lets ranks drift apart",
        "Collect garbage on all ranks at the same steps (--gc-every), and look for "
        "host memory that grows. Until then, restart more often.",
        f"{_GUIDE}; arXiv:2402.15627, section 6.3",
    ),
    "thermal": (
        "the MFU is at about 70% of what is expected, but the first 12-20 s of load "
        "after a pause are fast: GPUs throttle for heat or power",
        "Read temperatures, power limits and throttle reasons of all GPUs "
        "(nvidia-smi -q -d PERFORMANCE); check fans and power supplies.",
        _GUIDE,
    ),
    "ragged": (
        "the MFU wanders between 90% and 100% of its level: links of the upper tiers "
        "of the network are busy or bad",
        "Read error counters and load of the links between switches; compare with "
        "other jobs of the cluster.",
        _GUIDE,
    ),
}
_MEANING_ON_ONE_HOST: dict[Kind, tuple[str, str, str]] = {
    "dead_link": (
        "the MFU is below 10% of what is expected: PCIe runs with too few lanes, or a "
        "link between GPUs is dead",
        "Check PCIe and the links of this host (python -m mjax.health check).",
        _GUIDE,
    ),
    "bad_link": (
        "the MFU is at 60-80% of what is expected: a CPU is throttled, or a link "
        "between GPUs is bad",
        "Read CPU frequencies and the error counters of the links between GPUs (python "
        "-m mjax.health check).",
        _GUIDE,
    ),
}
"""Replaces _MEANING for a run on one host, which uses no network."""
LOWER = "lower_level"
"""Class of a report on a run that is slow at a level which no known fault explains."""
_OF_LINKS: tuple[Kind, ...] = ("dead_link", "no_gpudirect", "bad_link")
_LEVELS: Mapping[str, tuple[float, float]] = {**LEVELS, "thermal": THERMAL_LEVEL}
MODELLED_DEVIATION = 0.08
"""Standard deviation of the logarithm of a modelled MFU: modelled step times of 175B
are within 8% of those that MegaScale reports (docs/benchmarks/megascale.md)."""
_NEAR_S = 120.0
"""Events this close to the onset of a fault are shown with it. Not measured."""
_LONG_S = 1800.0
"""Shorter runs get a warning. It is twice the time between two rare dips."""
_MOST_STEPS = 8
"""Steps listed in a line. That many steps fit into the line."""
_DEEP = 0.05
"""Deviation of the slow wander of the log MFU above which the report warns. An even
spread between 90% and 100% has 0.03."""
_NOISY = 0.05
"""Deviation of the log MFU of a single step above which the report warns. It is five
times the noise of a healthy run on GPUs (0.2 to 1%)."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = _parser().parse_args(argv)
    try:
        report = make_report(
            read_series(options.work_dir, options.plan), options.expected_mfu
        )
        text = json.dumps(report) if options.json else "\n".join(describe(report))
        if options.out is not None:
            options.out.write_text(text + "\n", encoding="utf-8")
        else:
            print(text)
    except BrokenPipeError:
        raise  # the reader has closed stdout; the input is fine
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m mjax.observe mfu",
        description="Diagnose a run from the shape of its MFU series.",
    )
    parser.add_argument(
        "--work-dir", type=Path, required=True, help="work dir of the run"
    )
    parser.add_argument(
        "--expected-mfu",
        type=float,
        help="MFU of the same run when healthy, 0 to 1; default: that of the plan, or "
        "without a plan the best level of the run itself",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        help="output of python -m mjax.plan --json; default: plan.json in the work dir",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="file for the report")
    return parser


def make_report(series: RunSeries, expected_mfu: float | None = None) -> dict[str, Any]:
    """Classify a run and give the reasons.

    Args:
      series: MFU series of the run.
      expected_mfu: None takes that of the plan, or without a plan the best level of the
        run.
    Raises:
      ValueError: the expected MFU is not between 0 and 1, the run has no MFU to compare
        with it, or too few steps are usable.
    """
    source, deviation = "--expected-mfu", EXPECTED_DEVIATION
    if expected_mfu is not None:
        if not 0 < expected_mfu < 1:
            raise ValueError(
                f"--expected-mfu must be between 0 and 1, got {expected_mfu}"
            )
        if not series.has_mfu:
            raise ValueError(
                "--expected-mfu needs rows with an MFU, but the peak of this run's "
                "device is unknown; leave it out, or set the peak when training "
                "(--peak-tflops)"
            )
    elif series.has_mfu and series.expected_mfu is not None:
        expected_mfu, deviation = series.expected_mfu, MODELLED_DEVIATION
        source = "modelled by the plan"
    else:
        source = "best level of this run"
    found = classify(
        *(series.step_end_s, series.step_s, series.rate, series.marks),
        expected_mfu=expected_mfu,
        expected_deviation=deviation,
        left_out=BETWEEN_HOSTS if series.num_hosts == 1 else (),
    )
    prepared = found.prepared
    name, meaning, action, reference = "unclear", None, None, None
    if found.is_clear:
        name, meaning, action, reference = _diagnosis(series, found)
    return {
        "class": name,
        "best": found.kind,
        "runner_up": found.runner_up,
        "margin_nats": found.margin,
        "also": found.also,
        "meaning": meaning,
        "action": action,
        "source": reference,
        "decides": [] if found.is_clear else [*_decides(series, found, expected_mfu)],
        "also_meaning": (
            _meaning(found.also, series.num_hosts)
            if found.also and found.is_clear
            else None
        ),
        "evidence": list(_evidence(series, found)),
        "cautions": list(_cautions(series, found, expected_mfu)),
        "unit": "MFU" if series.has_mfu else "tokens/s",
        "expected": prepared.base,
        "expected_from": source,
        "steps": len(series.step),
        "steps_without_rate": prepared.num_left_out,
        "steps_explained_by_marks": prepared.num_masked,
        "marks": {
            kind: sum(mark.kind == kind for mark in series.marks)
            for kind in ("save", "eval", "restart")
        },
        "dips": [
            {
                "step": int(series.step[_known(series)[at]]),
                "time_s": time_s,
                "factor": factor,
            }
            for at, time_s, factor in zip(
                prepared.dips.step,
                prepared.dips.time_s.tolist(),
                prepared.dips.factor.tolist(),
                strict=True,
            )
        ],
        "scores_nats": found.scores,
        "problems": list(series.problems),
    }


def _diagnosis(series: RunSeries, found: Finding) -> tuple[str, str, str, str]:
    """Return the class of a clear finding, its meaning, the next action and a source.

    A fault of links, or of a hot GPU, needs such a part, and a level near its own.
    """
    kind, level = found.kind, found.level.level
    if kind not in _LEVELS or (_may_have(kind, series) and _is_near(kind, level)):
        meaning, action, source = _meaning(kind, series.num_hosts)
        return kind, meaning, action, source
    rate = "MFU" if series.has_mfu else "throughput"
    text = f"the {rate} is at {level:.0%} of its healthy level"
    if series.is_on_cpus:
        text += ": other programs use the cores of this machine, or it is throttled"
        action = "Look at the load of this machine (top) and at the CPU frequencies."
    else:
        text += ", at which none of the known faults puts a run"
        action = (
            "Check the hosts (python -m mjax.health check), and what else runs on them."
        )
    return LOWER, text, action, _GUIDE


def _may_have(kind: Kind, series: RunSeries) -> bool:
    """Return whether the devices of a run can have a fault."""
    has_links = series.num_devices != 1
    return not series.is_on_cpus and (has_links or kind not in _OF_LINKS)


def _is_near(kind: str, level: float) -> bool:
    low, high = _LEVELS[kind]
    return 0.9 * low <= level <= 1.1 * high


def _meaning(kind: Kind, num_hosts: int | None) -> tuple[str, str, str]:
    """Return the meaning of a class, the next action, and the source of both."""
    known = _MEANING | _MEANING_ON_ONE_HOST if num_hosts == 1 else _MEANING
    return known[kind]


def _decides(
    series: RunSeries, found: Finding, expected_mfu: float | None
) -> Iterator[str]:
    """Yield what would make an unclear class clear."""
    if series.step_end_s[-1] < _LONG_S:
        yield (
            f"a run of at least {_LONG_S / 60:.0f} min; this one took "
            f"{_duration(series.step_end_s[-1])}"
        )
    else:
        yield "more steps: let the run continue"
    if not series.has_mfu:
        yield (
            "a known MFU: give the peak of the device when training (--peak-tflops), "
            "then --expected-mfu"
        )
    elif expected_mfu is None:
        yield "the MFU of a healthy run of this configuration: give --expected-mfu"
    if found.prepared.blocks.deviation > _NOISY:
        yield "steps of equal length: a machine on which nothing else runs"


def _known(series: RunSeries) -> np.ndarray:
    """Return the positions of the steps that the classifier used."""
    rate, took_s = series.rate, series.step_s
    good = np.isfinite(rate) & (rate > 0) & np.isfinite(took_s) & (took_s > 0)
    return np.flatnonzero(good)


def _evidence(series: RunSeries, found: Finding) -> Iterator[str]:
    """Yield the evidence for a class: numbers with units."""
    blocks, level, dips = found.prepared.blocks, found.level, found.prepared.dips
    unit = "the expected MFU" if series.has_mfu else "the best level"
    low, high = np.exp(np.quantile(blocks.value, [0.1, 0.9]))
    yield (
        f"median {np.exp(np.median(blocks.value)):.1%} of {unit}, 10th to 90th "
        f"percentile {low:.1%} to {high:.1%}, over {_duration(dips.end_s)}"
    )
    yield f"a step differs from its neighbours by {blocks.deviation:.2%} (robust)"
    kinds = {found.kind, found.also}
    if kinds & {"dead_link", "no_gpudirect", "bad_link"}:
        since = "from the start"
        if level.onset_s is not None:
            ago_s = float(series.step_end_s[-1]) - level.onset_s
            since = (
                f"since {_duration(ago_s)} before the last step "
                f"({_step_at(series, level)})"
            )
        yield f"level {level.level:.1%} of the healthy level, {since}"
    if "thermal" in kinds:
        yield (
            f"level {level.level:.1%} after {level.delay_s:.0f} s of load; faster at "
            "first, after each start and long pause"
        )
    if "slow_decay" in kinds:
        num = sum(mark.kind == "restart" for mark in series.marks)
        reset = "no restart has reset it yet"
        if num:
            reset = f"reset by {num} restart{'s' if num > 1 else ''}"
        yield f"{level.lost:.0%} of the MFU is lost before a restart; {reset}"
    if "ragged" in kinds:
        yield (
            f"the MFU wanders by {found.wander.deviation:.1%} (deviation) within some "
            f"{found.wander.time_s:.0f} s; healthy runs by 1.2% or less"
        )
    if len(dips.step):
        yield from _dip_evidence(series, dips)
    rhythm = found.rhythm
    if "regular_dips" in kinds and rhythm is not None:
        seconds = ""
        if rhythm.unit == "steps":
            seconds = f", some {_duration(rhythm.period * dips.step_s)}"
        yield (
            f"{rhythm.num_hits} of {rhythm.num_expected} expected dips come every "
            f"{rhythm.period:.1f} {rhythm.unit}{seconds}"
        )
    onset_s = 0.0 if level.onset_s is None else level.onset_s
    for event in series.events:
        if level.onset_s is not None and abs(event.time_s - onset_s) <= _NEAR_S:
            yield (
                f"{event.time_s - onset_s:+.0f} s from the onset of the fault, "
                f"{event.kind}: {printable(event.text)}"
            )


def _dip_evidence(series: RunSeries, dips: Dips) -> Iterator[str]:
    """Yield the depth of dips, their steps, and whether they waited for data."""
    at = _known(series)[dips.step]
    steps = ", ".join(map(str, series.step[at][:_MOST_STEPS]))
    more = ", ..." if len(at) > _MOST_STEPS else ""
    yield (
        f"{len(at)} of the steps without a mark took {dips.factor.min():.1f} to "
        f"{dips.factor.max():.1f} times as long as their neighbours: {steps}{more}"
    )
    waited = series.data_wait_s[at] > 0.5 * series.step_s[at]
    yield f"{waited.sum()} of these waited for data for more than half of their time"


def _step_at(series: RunSeries, level: Any) -> str:
    at = int(np.searchsorted(series.step_end_s, level.onset_s))
    return f"step {series.step[min(at, len(series.step) - 1)]}"


def _cautions(
    series: RunSeries, found: Finding, expected_mfu: float | None
) -> Iterator[str]:
    """Yield reasons why the class may be wrong."""
    if not found.is_clear:
        yield (
            f"{found.runner_up} explains the series nearly as well: "
            f"{found.margin:.1f} nats less, {CLEAR:.0f} are needed"
        )
    if expected_mfu is None:
        yield (
            "the healthy level is unknown: a level that is low from the start looks "
            "healthy; give --expected-mfu"
        )
    elif series.expected_mfu == expected_mfu:
        yield (
            "the expected MFU is modelled and may be off by 8%; give --expected-mfu "
            "from a healthy run"
        )
    kinds, level = {found.kind, found.also}, found.level
    for kind, (low, high) in _LEVELS.items():
        if kind in kinds and not _is_near(kind, level.level):
            yield (
                f"the level of {level.level:.1%} matches none in the field guide; "
                f"{kind} ({low:.0%} to {high:.0%}) is the nearest"
            )
    if "slow_decay" in kinds and not LOST[0] * 0.9 <= level.lost <= LOST[1] * 1.2:
        yield f"a decay of {level.lost:.0%} is not within {LOST[0]:.0%}-{LOST[1]:.0%}"
    if "ragged" in kinds and found.wander.deviation > _DEEP:
        yield (
            f"a wander of {found.wander.deviation:.1%} is deeper than the field "
            "guide's 90% to 100%: something else also slows the run at times"
        )
    if found.prepared.blocks.deviation > _NOISY:
        yield (
            f"steps differ by {found.prepared.blocks.deviation:.0%} from one to the "
            "next, much more than on dedicated GPUs: small effects are not visible"
        )
    if series.step_end_s[-1] < _LONG_S:
        yield (
            f"the run took {_duration(series.step_end_s[-1])}; rare dips, a slow decay "
            f"and throttling need at least {_LONG_S / 60:.0f} min to show"
        )
    if not series.marks:
        yield "no save, evaluation or restart is marked; they may have caused the dips"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def describe(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report, for people."""
    name = report["class"]
    if name == "unclear":
        name = f"unclear: {report['best']} or {report['runner_up']}"
    yield f"{name}" + (f", and {report['also']}" if report["also"] else "")
    if report["meaning"]:
        yield f"  {report['meaning']}"
    marks = ", ".join(
        f"{count} {kind}{'s' if count != 1 else ''}"
        for kind, count in report["marks"].items()
    )
    expected = report["expected"]
    shown = f"{expected:.1%}" if report["unit"] == "MFU" else f"{expected:,.0f}"
    yield (
        f"{report['steps']} steps; {marks}; expected {report['unit']} {shown} "
        f"({report['expected_from']})"
    )
    if report["steps_without_rate"]:
        yield f"{report['steps_without_rate']} steps have no rate and are left out"
    yield "evidence"
    yield from (f"  - {line}" for line in report["evidence"])
    yield f"  - {report['margin_nats']:.1f} nats better than {report['runner_up']}"
    if report["decides"]:
        yield "what would decide it"
        yield from (f"  - {line}" for line in report["decides"])
    else:
        yield "next"
        yield f"  {report['action']} [{report['source']}]"
    if report["also_meaning"]:
        meaning, action, source = report["also_meaning"]
        yield f"  {report['also']}: {meaning}. {action} [{source}]"
    yield from (f"caution: {line}" for line in report["cautions"])
    yield from (f"warning: {line}" for line in report["problems"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The compile gate for candidates: which may be timed, and why others are pruned.

Input: kernels and head widths. Output: a verdict for each candidate. Needs the
environment of `make env-plan`, and no GPU.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from scripts.gpu.candidates import (
    FULL,
    LISTED_VARIABLE,
    Candidate,
    first_round,
    second_round,
)
from scripts.kernels.compiled_kernels import CaseReport, compile_cases

_CASES = "scripts.gpu.candidates:listed_cases"
_PER_CASE_S = 60.0
"""Time limit of one compilation; the longest seen is 25 s on two busy cores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of compiling a candidate."""

    name: str
    fault: str | None
    """Reason for pruning; None if it may be timed."""
    shared_memory_bytes: int | None
    """Per block, with segments; None if it was not compiled."""


def prune(
    kernels: Sequence[str],
    head_dims: Sequence[int],
    say: Callable[[str], None],
    compile_listed: Callable[[list[str]], list[CaseReport]] | None = None,
) -> list[Verdict]:
    """Compile and judge the candidates, kernel by kernel to show progress.

    First each tile and block with the fewest stages, then the survivors with every
    number of stages, with segments and a soft cap, because a shipped kernel supports
    both.

    Args:
      kernels: names in `candidates.KERNELS`.
      head_dims: head widths.
      say: called with lines of progress.
      compile_listed: compiles candidates by name; None is the compile gate.
    """
    compiler = compile_listed or _compile_listed
    verdicts = []
    for kernel in kernels:
        for head_dim in head_dims:
            plain = first_round([kernel], [head_dim])
            judged = _judge(compiler, plain, full=False)
            left = [c for c in plain if judged[c.name].fault is None]
            say(f"{kernel} D={head_dim}: {len(left)} of {len(plain)} compile as wanted")
            verdicts += [v for v in judged.values() if v.fault is not None]
            final = _judge(compiler, second_round(left), full=True)
            passed = sum(v.fault is None for v in final.values())
            say(f"{kernel} D={head_dim}: {passed} of {len(final)} with all stages")
            verdicts += final.values()
    return verdicts


def _judge(
    compiler: Callable[[list[str]], list[CaseReport]],
    candidates: Sequence[Candidate],
    *,
    full: bool,
) -> dict[str, Verdict]:
    """Return the verdicts by name."""
    names = [c.name + FULL * full for c in candidates]
    verdicts = {}
    for report in compiler(names) if names else []:
        sizes = [kernel.shared_memory_bytes for kernel in report.kernels]
        name = report.case.removesuffix(FULL)
        first_line = report.faults[0].splitlines()[0] if report.faults else None
        verdicts[name] = Verdict(
            name=name,
            fault=first_line,
            shared_memory_bytes=max(sizes) if sizes else None,
        )
    return verdicts


def _compile_listed(names: list[str]) -> list[CaseReport]:
    os.environ[LISTED_VARIABLE] = json.dumps(names)
    return compile_cases(_CASES, timeout_s=_PER_CASE_S * len(names))


def as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts for JSON."""
    return [dataclasses.asdict(verdict) for verdict in verdicts]

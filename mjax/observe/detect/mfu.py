"""Classify the shape of an MFU series by the signatures of Imbue's field guide.

Input: time, duration and MFU of each step, marks, and the expected MFU if it is known.
Output: the class, its margin over the runner-up, and the numbers behind it. Each class
is a small model of the series (`mfu_models`), and the classes are compared by their
evidence. `healthy` is one of them, with a higher prior than each of the others.

Source of the classes, the field guide: Imbue, "From bare metal to a 70B model:
infrastructure set-up and scripts", imbue.com/research/70b-infrastructure/.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Literal, get_args

from mjax.observe.detect.mfu_models import (
    Curve,
    Rhythm,
    Wander,
    fit_curves,
    score_dips,
    score_levels,
)
from mjax.observe.detect.mfu_series import (
    EXPECTED_DEVIATION,
    Array,
    Mark,
    Prepared,
    prepare,
)

type Kind = Literal[
    "healthy",
    "dead_link",
    "no_gpudirect",
    "bad_link",
    "regular_dips",
    "rare_dips",
    "slow_decay",
    "thermal",
    "ragged",
]
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
BETWEEN_HOSTS: tuple[Kind, ...] = ("no_gpudirect", "ragged")
"""Classes whose only causes are in the network between hosts."""
HEALTHY_ODDS = 8.0
"""Prior odds of `healthy` over each other class. Half of all runs are healthy, and
eight classes share the other half."""
CLEAR = 3.0
"""Margin in log evidence from which a class is clear. Kass and Raftery 1995 (Bayes
factors, JASA 90, section 3.2): twice the log of the ratio is strong evidence from 6
on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of the classification."""

    kind: Kind
    """The class that explains the series best."""
    runner_up: Kind
    margin: float
    """Log evidence of the best class minus that of the runner-up."""
    scores: dict[Kind, float]
    """Log evidence of each class relative to the best one. A class is absent if the run
    is too short for it."""
    also: Kind | None
    """Second fault; None unless both the level and the dips show a fault."""
    level: Curve
    """Mean curve of the class that explains the level best."""
    wander: Wander
    """Slow variation around that curve."""
    rhythm: Rhythm | None
    """Period of the dips, if there are at least four."""
    prepared: Prepared

    @property
    def is_clear(self) -> bool:
        """Whether the runner-up can be excluded."""
        return self.margin >= CLEAR


def classify(
    step_end_s: Array,
    step_s: Array,
    mfu: Array,
    marks: Sequence[Mark] = (),
    expected_mfu: float | None = None,
    expected_deviation: float = EXPECTED_DEVIATION,
    left_out: Collection[Kind] = (),
) -> Finding:
    """Classify a series.

    Args:
      step_end_s: [T], seconds on any clock, ascending.
      step_s: [T], seconds.
      mfu: [T], MFU of each single step; tokens/s if expected_mfu is None.
      marks: saves, evaluations and restarts, on the clock of step_end_s.
      expected_mfu: None takes the best level of the series, which hides a level that is
        low from the start.
      expected_deviation: standard deviation of the logarithm of the expected MFU.
      left_out: classes that cannot apply to the run; never `healthy`.
    Raises:
      ValueError: too few steps are usable, or the series is invalid.
    """
    prepared = prepare(step_end_s, step_s, mfu, marks, expected_mfu, expected_deviation)
    curves = fit_curves(prepared.blocks)
    levels = score_levels(prepared.blocks, curves)
    levels = {name: each for name, each in levels.items() if name not in left_out}
    dips = score_dips(prepared.dips)
    total: dict[Kind, float] = {}
    for each in KINDS:
        in_dips = each.endswith("_dips")
        level = levels.get("healthy" if in_dips else each)
        dip = dips.get(each if in_dips else "none")
        if level is not None and dip is not None:
            total[each] = level[0] + dip.score
    total["healthy"] += math.log(HEALTHY_ODDS)
    best_level = max(levels, key=lambda name: levels[name][0])
    best_dips = max(dips, key=lambda name: dips[name].score)
    ranked: list[Kind] = sorted(total, key=total.__getitem__, reverse=True)
    kind: Kind = ranked.pop(0)
    also: Kind | None = None
    more = levels[best_level][0] - levels["healthy"][0]
    if min(more, dips[best_dips].score - dips["none"].score) >= CLEAR:
        found = best_level if kind == best_dips else best_dips
        also = next(each for each in ranked if each == found)
        # The second of two simultaneous faults is not a rival explanation of the first.
        ranked.remove(also)
    runner_up = ranked[0]
    return Finding(
        kind=kind,
        runner_up=runner_up,
        margin=float(total[kind] - total[runner_up]),
        scores={each: float(total[each] - total[kind]) for each in total},
        also=also,
        level=curves["healthy" if best_level == "ragged" else best_level],
        wander=levels[best_level][1],
        rhythm=dips.get("regular_dips"),
        prepared=prepared,
    )

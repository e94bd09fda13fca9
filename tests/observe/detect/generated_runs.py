"""Give generated runs to the detector of slow hosts.

Input: a run of `tests.observe.synthetic_stragglers`. Output: what the detector finds,
and which cause is right for each kind of slow host.
"""

import numpy as np

from mjax.observe.detect.stragglers import Layout, Report, Role, find
from tests.observe.synthetic_stragglers import PHASES, Stragglers

ROLES: tuple[Role, ...] = ("data", "compute", "compute", "wait", "sync", "wait")
CAUSES = {
    "compute": ("compute",),
    "one_gpu": ("compute",),  # its host shows the time of the slowest GPU on all
    "throttled": ("throttled",),
    "nic": ("network",),
    "loader": ("data",),
    "hog": ("host",),
}


def detect(run: Stragglers) -> Report:
    """Run the detector on a generated run."""
    where = run.layout
    end = PHASES.index("optimizer")
    has_mark = np.zeros(len(run.phase_s), bool)
    for mark in run.marks:  # the step after a save waits for data
        has_mark[mark.step : mark.step + 2] = True
    return find(
        run.phase_s,
        ROLES,
        Layout(host=where.host, tp=where.tp, pp=where.pp, dp=where.dp),
        left_s=run.phase_s[:, :, :end].sum(axis=2, dtype=np.float64),
        left_out=has_mark,
    )

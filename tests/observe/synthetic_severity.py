"""Ranges and sources that the synthetic bars of the observer share.

Input: nothing. Output: constants, and `log_uniform`. Every generator of this folder
takes its ranges from here, so that the weakest fault and the strongest healthy
disturbance stand side by side.

Sources, by the short names that the comments use:

- MegaScale: arXiv 2402.15627, sections 5.1 and 6.3. About 0.5% of the machines needed
  about 10% more time for the same forward pass. Without them the MFU was 0.7% better.
  Irregular garbage collection made the MFU decay.
- What-if: arXiv 2505.05713. Causes of stragglers: slow workers, uneven stages, uneven
  sequence lengths, garbage collection.
- Traces: the three traces which the authors of What-if publish at
  github.com/ByteDance-Seed/StragglerAnalysis, data/trace-{ST,SE,AR}.parquet. ST has an
  uneven last stage, SE uneven sequence lengths, AR one artificially slow worker. The
  figures were measured on these files with numpy for this module.
- Field guide: Imbue, "From bare metal to a 70B model: infrastructure set-up and
  scripts", imbue.com/research/70b-infrastructure/, the part on MFU.
- Llama 3: arXiv 2407.21783, section 3.3.4: the throughput varied by 1-2% with the time
  of day, since the GPUs were warmer at noon.
- NTP: RFC 5905, section 7.2, PHI: a frequency tolerance of 15 parts per million.

"Chosen" marks what no source gives.
"""

import numpy as np

# Seeds. Thresholds of a detector are fixed on TUNING_SEEDS. REPORT_SEEDS are run once,
# after the thresholds are committed.

TUNING_SEEDS = range(0, 10_000)
REPORT_SEEDS = range(10_000, 10_050)
"""50 of each MFU class, as issue I asks. The other bars take the first of them."""
STRAGGLER_REPORT_SEEDS = REPORT_SEEDS[:20]
"""Chosen: 20 runs of 128 hosts have 260 slow hosts, so recall is known to 2-3%."""
WHATIF_REPORT_SEEDS = REPORT_SEEDS[:20]
"""Chosen: 20 of each cause. Spent: docs/benchmarks/observe_whatif.md."""
WHATIF_SECOND_REPORT_SEEDS = range(10_050, 10_100)
"""For an analysis that is changed after the first report; 50 of each cause."""
CLOCK_REPORT_SEEDS = REPORT_SEEDS[:20]
"""Chosen: 20 of each kind."""

# Healthy compute, for stragglers and what-if runs.

STEP_NOISE = (0.003, 0.008)
"""Log deviation of the compute of a step. Traces: 0.004 to 0.006 between replicas."""
OPERATION_NOISE = (0.014, 0.031)
"""Log deviation of one microbatch. Traces: 0.0145 to 0.0314 in each stage."""
RANK_SPREAD = 0.006
"""Log deviation between healthy ranks, for ever. Traces: medians of ranks of one stage
differ by -1.2% to +1.3% (4 to 32 ranks each)."""
MOST_RANK_SPREAD = 0.018
"""Chosen: three deviations; a healthy chip is never slower than this."""
BACKWARD = (1.6, 2.14)
"""Time of a backward pass over that of a forward pass. Traces: SE 1.60, AR 1.76, ST
2.14."""
LAST_FORWARD = (1.03, 1.8)
LAST_BACKWARD = (1.03, 1.42)
"""Time of the last stage (head and loss) over that of the others. Traces: forward 1.065
(AR), 1.79 (SE) and 2.07 (ST), backward 1.03, 1.48 and 1.42. 2.07 is kept for a cause of
a slow run."""
FIRST_STAGE = (1.0, 1.05)
"""Chosen: the embedding costs little."""
LENGTHS = (0.02, 0.126)
"""Log deviation of the compute of a replica in a step, where the lengths are uneven.
Traces: 0.073 forward and 0.126 backward in SE; 0.004 in ST where they are even."""
UNEVEN_PROBABILITY = 0.5
"""Chosen."""
GARBAGE_PROBABILITY = (0.0005, 0.004)
"""Chosen: collections per rank and step; with 1,024 ranks about one in each step."""
GARBAGE_S = (0.1, 0.6)
"""Seconds of a collection. Chosen: Python traverses some millions of objects."""

# Healthy differences that no single host is to blame for. All chosen, so that for each
# kind of slow host there is a group of healthy ones that looks like it.

GROUP_PROBABILITY = 0.5
"""Of each of the following, for each run."""
LONG_REPLICAS = (0.02, 0.06)
"""Some replicas always read longer documents: added fraction of the compute."""
UNEVEN_STAGE = (0.03, 0.12)
"""One stage in the middle has more layers."""
RACK_HOSTS = (6, 17)
WARM_RACK = (0.003, 0.009)
"""Llama 3: 1-2% by temperature; here for some neighbouring hosts."""
FAR_RACK_WAIT = (0.004, 0.012)
"""Mean wait for data of neighbouring hosts with a slow way to the storage."""
BUSY_RAIL = (1.1, 1.6)
"""Times the transfer, for the same card of all hosts: a busy switch."""

# Slow hosts. Factors are of the compute, parts are of a usual step.

SLOW_PART = 0.10
"""Of the hosts; issue I. MegaScale: 0.5%, but all kinds have to be seen in one run."""
SLOW_COMPUTE = (1.07, 1.15)
"""MegaScale: about 10%."""
THROTTLED = (1.15, 1.43)
"""The upper end is the field guide's drop to 70%, 1 / 0.7. The lower end is chosen."""
EPISODE_STEPS = (8, 40)
BETWEEN_STEPS = (5, 30)
"""Chosen: steps of an episode of throttling, and between two."""
ONE_GPU = (1.08, 1.25)
"""Chosen, around MegaScale's 10%: a single GPU is slow, its host waits for it."""
NIC_FACTOR = (2.0, 4.0)
"""Chosen: half the lanes, half the rate or both."""
NIC_SHARED = (0.3, 0.8)
"""Chosen: part of the delay of a slow network card that its group shares. 1 would be a
ring, where nobody can tell who is slow; trees and direct exchange have less."""
SLOW_LOADER = (0.10, 0.20)
"""Chosen: mean wait for data, part of the step; 1 is a step."""
SLOW_LOADER_PROBABILITY = (0.6, 1.0)
"""Chosen: part of the steps that wait."""
HOG_PROBABILITY = (0.4, 0.7)
HOG_PART = (0.08, 0.20)
"""Chosen: part of the steps that are dispatched late, and the mean part of the compute
that this costs (exponential)."""
WEAKEST_COST = 0.045
"""Weakest slow host, measured: mean part of a step that it loses after its onset."""
STRONGEST_HEALTHY_COST = 0.035
"""Strongest healthy host, measured in the same way, over the whole run."""
BLIP_COST = (0.05, 0.3)
BLIP_STEPS = (1, 5)
BLIP_PROBABILITY = 0.25
"""Chosen: a healthy host is slow once, for some steps: a log rotation, a package check.
Part of the compute."""

# What-if runs. Factors are of the compute of one microbatch.

SLOW_WORKER = (1.10, 2.25)
"""MegaScale: 10%. Traces: 2.25 to 2.49 for the artificial one (AR)."""
SLOW_LAST_FORWARD = (1.4, 2.07)
SLOW_LAST_BACKWARD = (1.25, 1.48)
"""Traces: up to 2.07 (ST) and 1.48 (SE)."""
LENGTHS_BY_MICROBATCH = (0.10, 0.30)
"""Log deviation. Traces: SE has 0.08 to 0.19 in the core; one in 1,000 is at 1.7 to 2.9
times the median, which a normal log of 0.18 to 0.34 has."""
GARBAGE_PER_STEP = (0.1, 0.6)
"""Chosen: collections per worker and step, where they are the cause."""
SLOW_LINK = (4.0, 20.0)
"""Chosen: times the transfer; a port that fell back to a slower rate."""
PIPELINE_SEND = (0.005, 0.021)
"""Of a forward pass. Traces: the fastest sends of ST and AR are 0.5%, of SE 2.1%."""
WEAKEST_SLOWDOWN = 0.05
"""Chosen: part by which the cause lengthens the steps, at least; a cause that is
weaker is made stronger until it does."""

# MFU

MFU = (0.30, 0.58)
"""Expected MFU of a run. MegaScale: 47.7% to 65.3% in its ablation. Chosen: lower."""
EXPECTED_ERROR = 0.015
"""Chosen: deviation of the expected MFU from the true one: it came from another run."""
MFU_STEP_NOISE = (0.002, 0.010)
"""Deviation of the log step time of a healthy run. Traces: 0.4-0.6% per replica."""
MFU_DRIFT = (0.0, 0.02)
"""Llama 3: 1-2% over a day."""
DEAD_LINK_LEVEL = (0.02, 0.10)
NO_GPUDIRECT_LEVEL = (0.25, 0.35)
BAD_LINK_LEVEL = (0.60, 0.80)
"""Parts of the expected MFU. Field guide: below 10%, about 30%, 60-80%."""
DIP_FACTOR = (7.0, 14.0)
"""Factor on the step time in a dip. Field guide: tenfold dips."""
REGULAR_S = (60.0, 400.0)
"""Chosen: between regular dips, like evaluations."""
RARE_S = 900.0
"""Field guide: a rare dip about every 15 minutes (CPU of a neighbour, loader)."""
DECAY = (0.10, 0.35)
"""Chosen: part of the MFU that is gone before the restart. Field guide: slow, reset by
a restart; MegaScale: garbage collection."""
THERMAL_LEVEL = (0.65, 0.75)
THERMAL_DELAY_S = (12.0, 20.0)
"""Field guide: drop to 70%, some 15 s after the load begins."""
RAGGED_LOSS = (0.08, 0.12)
"""Field guide: the MFU wanders between 90% and 100%; upper-tier links. The range is of
the deepest regular loss, chosen around the 10%."""
WEAKEST_RAGGED = 0.018
"""Standard deviation of the log MFU, over 20 s; healthy series stay below 0.013."""
STRONGEST_HEALTHY_RAGGED = 0.013

# Clocks

OFFSET_S = (1e3, 1e6)
"""Chosen: monotonic clocks count from the boot of a host, minutes to weeks ago."""
DRIFT_PPM = 15.0
"""NTP."""
SLEW_PPM = 500.0
"""Most that adjtimex of Linux steers a clock by (man 2 adjtimex: freq goes from
-32768000 to 32768000, in units of 2^-16 ppm)."""
ONE_WAY_S = (5e-6, 2e-4)
"""Chosen: from a fabric with remote memory access to TCP in a busy data centre."""


def log_uniform(
    rng: np.random.Generator, bounds: tuple[float, float], size: int
) -> np.ndarray:
    """Draw numbers whose logarithms are uniform between the bounds, [size]."""
    return np.exp(rng.uniform(np.log(bounds[0]), np.log(bounds[1]), size))

"""Times that the ranks of a synthetic healthy run need, before any waiting.

Input: a random generator. Output: the layout of 1,024 ranks, the seconds of data,
forward and backward of each step and rank, and those of the transfers. For
`synthetic_stragglers`, which says what is in it; ranges from `synthetic_severity`.
"""

import dataclasses

import numpy as np

from tests.observe import synthetic_severity as severity

type Array = np.ndarray
# Chosen where no source is named: see `synthetic_severity` for the names.
NUM_HOSTS, RANKS_PER_HOST = 128, 8
NUM_RANKS = NUM_HOSTS * RANKS_PER_HOST
STAGES = (4, 8, 16)  # chosen; data parallel 32, 16, 8
TRANSFER = (0.04, 0.10)  # of the compute: gradients that nothing overlaps; chosen
TRANSFER_NOISE = (0.03, 0.12)
PIPELINE_TRANSFER = (0.005, 0.03)  # of the compute, per step and neighbour; chosen
OPTIMIZER = (0.01, 0.03)  # of the compute; Traces: 0.5% to 4%
USUAL_WAIT = (0.001, 0.004)  # of the compute: data that is ready must still be taken
HICCUP_PROBABILITY = 0.02  # per step: the storage is slow for many hosts
WARMUP_STEPS, WARMUP = (2, 8), (1.3, 4.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Position of each rank. All arrays are [R] and count from 0."""

    host: Array
    tp: Array
    """Rank in the tensor-parallel group, which is the host."""
    pp: Array
    """Stage."""
    dp: Array
    """Replica: one pipeline. Ranks with the same pp and tp sync gradients."""


def draw_layout(rng: np.random.Generator) -> Layout:
    """Place the hosts on a mesh; the order of pp and dp differs between runs."""
    stages = int(rng.choice(STAGES))
    host, tp = np.divmod(np.arange(NUM_RANKS), RANKS_PER_HOST)
    if rng.random() < 0.5:
        pp, dp = host // (NUM_HOSTS // stages), host % (NUM_HOSTS // stages)
    else:
        dp, pp = host // stages, host % stages
    return Layout(host=host, tp=tp, pp=pp, dp=dp)


def draw_work(
    rng: np.random.Generator, layout: Layout, num_steps: int, work_s: float
) -> tuple[dict[str, Array], Array, bool, Array]:
    """Draw the seconds that each rank would need without waiting, [T, R].

    Returns:
      data, forward, backward; the factor of each step [T, replicas] that all stages of
      a replica share; whether it is uneven; the cost of each healthy host, [hosts].
    """
    shape, ratio = (num_steps, NUM_RANKS), rng.uniform(*severity.BACKWARD)
    spread = np.clip(
        rng.normal(0, severity.RANK_SPREAD, NUM_RANKS),
        -severity.MOST_RANK_SPREAD,
        severity.MOST_RANK_SPREAD,
    )
    noise = rng.uniform(*severity.STEP_NOISE)
    last = layout.pp == layout.pp.max()
    stage = 1 + (rng.uniform(*severity.FIRST_STAGE) - 1) * (layout.pp == 0)
    if _happens(rng):
        middle = int(rng.integers(1, layout.pp.max()))
        stage = stage + rng.uniform(*severity.UNEVEN_STAGE) * (layout.pp == middle)
    blips = _draw_blips(rng, num_steps)
    warm = rng.uniform(*severity.WARM_RACK) * _draw_rack(rng, layout) * _happens(rng)
    spread = spread + warm
    work = {}
    heavier = (severity.LAST_FORWARD, severity.LAST_BACKWARD)
    for name, part, bounds in (
        ("forward", 1 / (1 + ratio), heavier[0]),
        ("backward", ratio / (1 + ratio), heavier[1]),
    ):
        usual = part * work_s * np.where(last, rng.uniform(*bounds), stage)
        jitter = np.exp(noise * rng.standard_normal(shape) + spread)
        work[name] = usual * jitter * (1 + np.repeat(blips, RANKS_PER_HOST, axis=1))
    _add_garbage(rng, work, num_steps)
    _add_warmup(rng, work)
    work["data"] = _draw_data(rng, layout, num_steps, work_s)
    lengths, uneven = _draw_lengths(rng, layout, num_steps)
    lasting = spread.reshape(NUM_HOSTS, RANKS_PER_HOST).max(axis=1)
    return work, lengths, uneven, np.maximum(lasting, 0) + blips.mean(axis=0)


def _draw_lengths(
    rng: np.random.Generator, layout: Layout, num_steps: int
) -> tuple[Array, bool]:
    """Draw the effect of sequence lengths on each step of a replica, [T, replicas]."""
    uneven = bool(rng.random() < severity.UNEVEN_PROBABILITY)
    deviation = rng.uniform(*severity.LENGTHS) if uneven else 0.004
    replicas = int(layout.dp.max()) + 1
    lengths = np.exp(rng.normal(0, deviation, (num_steps, replicas)))
    if _happens(rng):
        longer = rng.random(replicas) < 0.15
        lengths *= 1 + rng.uniform(*severity.LONG_REPLICAS) * longer
    if rng.random() < 0.3:  # longer sequences or a larger batch from some step on
        lengths[int(rng.uniform(0.2, 0.8) * num_steps) :] *= rng.uniform(1.05, 1.4)
    return lengths, uneven


def _happens(rng: np.random.Generator) -> bool:
    """Return whether a run has one of the differences between groups of hosts."""
    return bool(rng.random() < severity.GROUP_PROBABILITY)


def _draw_rack(rng: np.random.Generator, layout: Layout) -> Array:
    """Draw some neighbouring hosts; 1 for their ranks, 0 for the others, [R]."""
    size = int(rng.integers(*severity.RACK_HOSTS))
    first = int(rng.integers(0, NUM_HOSTS - size))
    return ((layout.host >= first) & (layout.host < first + size)).astype(float)


def _draw_blips(rng: np.random.Generator, num_steps: int) -> Array:
    """Draw single slow periods of healthy hosts, [T, hosts], relative to compute."""
    blips = np.zeros((num_steps, NUM_HOSTS))
    for host in np.flatnonzero(rng.random(NUM_HOSTS) < severity.BLIP_PROBABILITY):
        length = int(rng.integers(*severity.BLIP_STEPS))
        start = int(rng.integers(0, num_steps - length))
        blips[start : start + length, host] = rng.uniform(*severity.BLIP_COST)
    return blips


def _add_garbage(
    rng: np.random.Generator, work: dict[str, Array], num_steps: int
) -> None:
    """Add collections: of each rank by itself, or of all ranks at the same steps."""
    pause_s = rng.uniform(*severity.GARBAGE_S, (num_steps, NUM_RANKS))
    if rng.random() < 0.5:
        every = int(rng.integers(10, 60))
        collects = np.zeros((num_steps, NUM_RANKS), bool)
        collects[every - 1 :: every] = True
    else:
        rate = rng.uniform(*severity.GARBAGE_PROBABILITY)
        collects = rng.random((num_steps, NUM_RANKS)) < rate
    in_forward = rng.random((num_steps, NUM_RANKS)) < 1 / 3
    work["forward"] += pause_s * (collects & in_forward)
    work["backward"] += pause_s * (collects & ~in_forward)


def _add_warmup(rng: np.random.Generator, work: dict[str, Array]) -> None:
    """Make the first steps slow, on each host by its own factor."""
    length = int(rng.integers(*WARMUP_STEPS))
    factors = np.ones((length, NUM_HOSTS)) + (
        (rng.uniform(*WARMUP) - 1)
        * np.linspace(1, 0.1, length)[:, None]
        * rng.uniform(0.5, 1.0, NUM_HOSTS)
    )
    for each in work.values():
        each[:length] *= np.repeat(factors, RANKS_PER_HOST, axis=1)


def _draw_data(
    rng: np.random.Generator, layout: Layout, num_steps: int, work_s: float
) -> Array:
    """Draw the wait for data: one loader per host, and a storage for all of them."""
    far = rng.uniform(*severity.FAR_RACK_WAIT) * _happens(rng)
    usual = rng.uniform(*USUAL_WAIT) + far * _draw_rack(rng, layout)[::RANKS_PER_HOST]
    waits = rng.exponential(usual, (num_steps, NUM_HOSTS))
    hiccups = np.flatnonzero(rng.random(num_steps) < HICCUP_PROBABILITY)
    for step in hiccups:
        hosts = rng.random(NUM_HOSTS) < rng.uniform(0.1, 1.0)
        waits[step, hosts] += rng.exponential(rng.uniform(0.05, 0.4), hosts.sum())
    skew = rng.uniform(0, 2e-4, (num_steps, NUM_RANKS))
    return work_s * (np.repeat(waits, RANKS_PER_HOST, axis=1) + skew)


def draw_transfer(
    rng: np.random.Generator, layout: Layout, num_steps: int, work_s: float
) -> dict[str, Array]:
    """Draw the transfers of each step and rank; the fabric is congested at times."""
    congested = np.ones(num_steps)
    for _ in range(int(rng.integers(0, 4))):
        start, length = int(rng.integers(0, num_steps)), int(rng.integers(3, 30))
        congested[start : start + length] *= rng.uniform(1.2, 2.5)
    noise = rng.uniform(*TRANSFER_NOISE)
    busy = (layout.tp == rng.integers(RANKS_PER_HOST)) * _happens(rng)
    rail = 1 + (rng.uniform(*severity.BUSY_RAIL) - 1) * busy

    def one(bounds: tuple[float, float]) -> Array:
        jitter = np.exp(rng.normal(0, noise, (num_steps, NUM_RANKS)))
        return work_s * rng.uniform(*bounds) * congested[:, None] * rail * jitter

    return {
        "sync": one(TRANSFER),
        "pipeline": one(PIPELINE_TRANSFER),
        "optimizer": work_s
        * rng.uniform(*OPTIMIZER)
        * np.exp(rng.normal(0, 0.02, (num_steps, NUM_RANKS))),
    }

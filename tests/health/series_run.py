"""The traffic of a training run at one network port: bursts, quiet phases, pauses.

Input: a random generator, and the share of its rate that a burst gets at each moment.
Output: a `Timeline`, the start and the bytes of every burst, from which counters can
be read at any moment.

The run is a table of steps (rows) and buckets (columns). A bucket has work_s seconds
of compute and bytes to send. Forward and backward buckets (all-gather, reduce-scatter
of a few layers) overlap, gradient buckets do not:

    burst_s = bytes / rate / share
    bucket_s = max(work_s, burst_s)     overlapped
    bucket_s = work_s + burst_s         gradients, after the last layer

A bucket begins with its burst and is quiet for the rest. The share at the start of a
burst holds for all of it. The start depends on the shares before; the loop in `lay`
iterates until few starts still move (`ITERATIONS`).

Ranges are chosen unless a line names a source. Most are wide, because a cluster is not
known; each is drawn once for a series unless the comment says otherwise.
Sources: rates of lanes, Linux commits 71eeba161d76 ("IB: Add new InfiniBand link
speeds") and f946e45f59ef (NDR); traffic that repeats with every step, MegaScale,
arXiv:2402.15627, on the data that its monitoring collects.
"""

import dataclasses
from typing import Literal

import numpy as np

type Array = np.ndarray
type LinkLayer = Literal["InfiniBand", "Ethernet"]

SPECIFIED_BIT_ERROR_RATE = 1e-12
"""Errors per bit that the InfiniBand specification allows.

Source: NVIDIA, "Cabling Data Centers", section Mixing Widths and Rates
(docs.nvidia.com/dgx-superpod/design-guide-cabling-data-centers/latest/widths-rates.html).
The same page says that cables are tested in the factory to 1e-15.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Port:
    """Properties of a port that a sampler knows before it reads a counter."""

    link_layer: LinkLayer
    rate_gbit_per_s: float
    """The file `rate` at the first sample; it is not read again."""
    data_bytes_per_s: float
    """Payload rate of the wire, one direction."""
    data_counter_bits: Literal[32, 64]
    """The byte counters go back to 0 after 2^32 or 2^64 units of 4 bytes."""

    @property
    def specified_errors_per_s(self) -> float:
        """Symbol errors per second at the bit error rate of the specification."""
        return self.rate_gbit_per_s * 1e9 * SPECIFIED_BIT_ERROR_RATE


PORTS = (
    # 4 lanes of 10 Gbit/s with 8b/10b coding. 32 bits: some devices have this width and
    # wrap (Linux commit 11d2b114cdeb, hfi1; DPDK commit 827f72e8ce2c, hns3). At 1 GB/s
    # of 4-byte units a counter wraps every 4.3 s, so 1 Hz still counts right.
    Port(
        link_layer="InfiniBand",
        rate_gbit_per_s=40.0,
        data_bytes_per_s=4.0e9,
        data_counter_bits=32,
    ),
    *(
        Port(
            link_layer=layer,
            rate_gbit_per_s=rate,
            data_bytes_per_s=rate / 8 * 1e9,
            data_counter_bits=64,
        )
        for layer in ("InfiniBand", "Ethernet")
        for rate in (100.0, 200.0, 400.0)
    ),
)
PORT_PROBABILITY = (0.1, 0.15, 0.15, 0.15, 0.15, 0.15, 0.15)

DURATION_S = (600.0, 1800.0)
STEP_S = (0.5, 20.0)  # log-uniform
GRADIENT_PART = (0.08, 0.35)  # part of a step: communication without overlap
TAIL_PART = (0.03, 0.15)  # part of a step: optimizer, data, logging; nothing is sent
BUSY_PART = (0.35, 0.95)  # part of an overlapped bucket in which the port sends
BUCKET_S = (0.06, 0.30)  # a burst has to span a few samples of 5 to 10 ms
MOST_BUCKETS = 40  # per forward pass; bounds the time to make a series
EFFICIENCY = (0.60, 0.88)  # burst over wire rate: protocol, imbalance, own incast
PHASE_EFFICIENCY = (0.85, 1.0)  # factor for each of forward, backward, gradients
BURST_NOISE = (0.01, 0.04)  # relative deviation of the rate, one draw per burst
STEP_NOISE = (0.003, 0.03)  # relative deviation of the compute, one draw per step
STALL_PROBABILITY = (0.0, 0.02)  # per step: garbage collection, late data
STALL_PART = (0.1, 1.0)  # part by which a stall lengthens its step; one draw each

EVALUATION_EVERY_S = (60.0, 400.0)
EVALUATION_S = (3.0, 60.0)  # one per evaluation
SAVE_EVERY_S = (120.0, 900.0)
SAVE_S = (2.0, 40.0)  # one per checkpoint
SAVE_RATE = (0.05, 0.5)  # part of the wire's rate
UPLOAD_RATE = (0.01, 0.08)  # part of the wire's rate, after an asynchronous save
UPLOAD_S = (10.0, 60.0)
TRICKLE_RATE = (1e-5, 3e-3)  # part of the wire's rate, log-uniform: data, monitoring
RESTART_S = (20.0, 180.0)
REBOOT_S = (90.0, 260.0)
FIRST_STEP = (1.5, 4.0)  # factor on the step after a restart: compilation, caches
BATCH = (0.8, 1.3)  # factor on the batch size at an update
BATCH_BYTES = (0.0, 0.5)  # part of the bytes that grows with the batch: activations
SLOW_HOST = (1.05, 1.30)  # factor on the compute while another host delays the step
REVERSE = (0.8, 1.25)  # bytes received per byte sent
MOST_EFFICIENCY = 0.88  # maximum part of the wire's rate, in either direction
ITERATIONS = 3
GRID_S = 0.05  # time step of the grid of shares; bursts last at least 0.02 s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pause:
    """A stop between two steps, in which the run does not train."""

    name: Literal["save", "restart", "reboot"]
    after_step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run before it is laid out in time. N steps, C buckets; the last is a pause."""

    port: Port
    duration_s: float
    step_s: float
    """Nominal time of a step."""
    work_s: Array
    """[N, C], float64: compute."""
    burst_s: Array
    """[N, C], float64: seconds that a burst takes with the whole share."""
    bytes: Array
    """[N, C], float64: sent in a burst."""
    exposed: Array
    """[C], bool: nothing overlaps the burst."""
    trained: Array
    """[N], bool: False for a step of an evaluation."""
    lead_s: float
    """Seconds from the start of the first step to the first sample."""
    pauses: tuple[Pause, ...]
    pause_in_step: bool
    """The trainer counts a save as a part of the step before it."""
    uploads: tuple[tuple[float, float, float], ...]
    """Start, seconds and bytes per second of what an asynchronous save sends."""
    trickle_bytes_per_s: float
    reverse: float
    efficiency: float
    """Mean rate of a burst, as a fraction of the wire's rate."""
    changes: tuple[tuple[str, float, float], ...]
    """Name, start and end of other changes of a healthy host's step time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A run laid out in time. Times are in seconds of work, without outages."""

    start_s: Array
    """[N, C]: start of each bucket, which is the start of its burst."""
    burst_s: Array
    """[N, C]."""
    end_s: Array
    """[N, C]: end of each bucket, where the next one begins."""


def log_uniform(rng: np.random.Generator, bounds: tuple[float, float]) -> float:
    """Draw a number whose logarithm is uniform between the bounds."""
    return float(np.exp(rng.uniform(np.log(bounds[0]), np.log(bounds[1]))))


def draw_run(rng: np.random.Generator, restart_probability: float) -> Run:
    """Draw a run that fills 10 to 30 minutes with steps of 0.5 to 20 s.

    Args:
      rng: generator of all draws of the run.
      restart_probability: probability of one restart or reboot within the series.
    """
    port = PORTS[rng.choice(len(PORTS), p=PORT_PROBABILITY)]
    duration_s = float(rng.uniform(*DURATION_S))
    step_s = log_uniform(rng, STEP_S)
    work, busy, exposed, layers = _draw_step(rng, step_s)
    work, size, trained, changes = _draw_rows(
        rng, duration_s, step_s, (work, busy, exposed, layers)
    )
    efficiency = float(rng.uniform(*EFFICIENCY))
    phases = _by_bucket(rng.uniform(*PHASE_EFFICIENCY, 3), layers, exposed)
    noise = rng.standard_normal(work.shape, np.float32) * rng.uniform(*BURST_NOISE)
    sent = size * (port.data_bytes_per_s * efficiency * phases)
    burst = size / np.clip(1 + noise, 0.8, 1.2)
    pauses, uploads = _add_pauses(
        rng, port, step_s, restart_probability, (work, burst, sent)
    )
    run = Run(
        port=port,
        duration_s=duration_s,
        step_s=step_s,
        work_s=work,
        burst_s=burst,
        bytes=sent,
        exposed=exposed,
        trained=trained,
        lead_s=float(rng.uniform(0, step_s)),
        pauses=pauses,
        pause_in_step=bool(rng.random() < 0.3),
        uploads=uploads,
        trickle_bytes_per_s=log_uniform(rng, TRICKLE_RATE) * port.data_bytes_per_s,
        reverse=min(float(rng.uniform(*REVERSE)), MOST_EFFICIENCY / efficiency),
        efficiency=efficiency,
        changes=changes,
    )
    return _trimmed(run)


def lay(run: Run, share: Array | None = None) -> Timeline:
    """Lay a run out in time.

    Args:
      share: [G], part of its rate that a burst gets, one number for each GRID_S from
        0; None gives every burst its whole rate.
    """
    burst = run.burst_s
    start = end = np.empty_like(burst)
    for turn in range(1 if share is None else 1 + ITERATIONS):
        if turn and share is not None:
            burst = run.burst_s / at(share, start)
            burst[:, -1] = run.burst_s[:, -1]  # a save is not limited by the fabric
        bucket = np.where(
            run.exposed, run.work_s + burst, np.maximum(run.work_s, burst)
        )
        end = np.cumsum(bucket.ravel()).reshape(bucket.shape) - run.lead_s
        start = end - bucket
    return Timeline(start_s=start, burst_s=burst, end_s=end)


def at(grid: Array, time_s: Array) -> Array:
    """Return the grid's value at each time; outside the grid, its first or last
    value."""
    index = (time_s * (1 / GRID_S)).astype(np.int32)
    return grid[np.clip(index, 0, len(grid) - 1)]


def grid_times(duration_s: float) -> Array:
    """Return the middle of each cell of a grid that covers a series."""
    return (np.arange(int(duration_s / GRID_S) + 1) + 0.5) * GRID_S


def _draw_step(
    rng: np.random.Generator, step_s: float
) -> tuple[Array, Array, Array, int]:
    """Draw one step: work and burst of each bucket, and how many are forward."""
    gradients, tail = rng.uniform(*GRADIENT_PART), rng.uniform(*TAIL_PART)
    overlapped_s = step_s * (1 - gradients - tail)
    layers = int(np.clip(overlapped_s / 3 / rng.uniform(*BUCKET_S), 2, MOST_BUCKETS))
    num_gradients = int(rng.integers(1, 4))
    # A backward pass computes twice what a forward pass does, and sends twice as much
    # when parameters are gathered again and gradients scattered.
    forward_s = overlapped_s / 3 / layers
    work = np.array(
        [forward_s] * layers
        + [2 * forward_s] * layers
        + [0.05 * gradients * step_s / num_gradients] * num_gradients
        + [tail * step_s, 0.0]
    )
    busy = work * rng.uniform(*BUSY_PART)
    busy[2 * layers : -2] = 0.95 * gradients * step_s / num_gradients
    busy[-2:] = 0.0
    exposed = np.zeros(len(work), bool)
    exposed[2 * layers : -2] = True
    return work, busy, exposed, layers


def _draw_rows(
    rng: np.random.Generator,
    duration_s: float,
    step_s: float,
    step: tuple[Array, Array, Array, int],
) -> tuple[Array, Array, Array, tuple[tuple[str, float, float], ...]]:
    """Repeat a step with jitter, load and evaluations until the time is filled.

    Returns:
      work and seconds of sending, [N, C]; which rows train, [N]; changes of the load.
    """
    work, busy, exposed, layers = step
    num_steps = int(2.5 * duration_s / step_s) + 4  # more than there is time for
    batch, slow, changes = _draw_load(rng, num_steps, duration_s, step_s)
    scale = batch * slow * _draw_jitter(rng, num_steps)
    trained = _draw_evaluations(rng, num_steps, step_s)
    least_s = scale * np.where(trained, work.sum(), work[:layers].sum())
    num_steps = int(np.searchsorted(np.cumsum(least_s), duration_s + step_s)) + 2
    batch, trained = batch[:num_steps], trained[:num_steps]
    rows = scale[:num_steps, None] * work
    growth = 1 + rng.uniform(*BATCH_BYTES) * (batch - 1)
    size = np.where(exposed, 1.0, growth[:, None]) * busy
    idle = ~trained[:, None] & (np.arange(len(work)) >= layers)
    rows[idle] = size[idle] = 0.0
    return rows, size, trained, changes


def _by_bucket(phases: Array, layers: int, exposed: Array) -> Array:
    """Spread one number for each phase over the buckets; 1 where nothing is sent."""
    out = np.ones(len(exposed))
    out[:layers], out[layers : 2 * layers], out[exposed] = phases
    return out


def _draw_jitter(rng: np.random.Generator, num_steps: int) -> Array:
    """Draw the compute time of each step, relative to the nominal one."""
    jitter = np.exp(rng.standard_normal(num_steps) * rng.uniform(*STEP_NOISE))
    stalled = rng.random(num_steps) < rng.uniform(*STALL_PROBABILITY)
    return jitter * np.where(stalled, 1 + rng.uniform(*STALL_PART, num_steps), 1.0)


def _draw_load(
    rng: np.random.Generator, num_steps: int, duration_s: float, step_s: float
) -> tuple[Array, Array, tuple[tuple[str, float, float], ...]]:
    """Draw the batch size and the slowness of other hosts, for each step."""
    batch, slow, changes = np.ones(num_steps), np.ones(num_steps), []
    if rng.random() < 0.3:
        start_s = rng.uniform(0.1, 0.9) * duration_s
        batch[int(start_s / step_s) :] = rng.uniform(*BATCH)
        changes.append(("batch size", float(start_s), duration_s))
    if rng.random() < 0.15:
        start_s = rng.uniform(0.1, 0.8) * duration_s
        end_s = start_s + rng.uniform(0.1, 0.6) * duration_s
        slow[int(start_s / step_s) : int(end_s / step_s)] = rng.uniform(*SLOW_HOST)
        changes.append(("slow host", float(start_s), float(end_s)))
    return batch, slow, tuple(changes)


def _draw_evaluations(rng: np.random.Generator, num_steps: int, step_s: float) -> Array:
    """Mark the rows that train; the others have only a forward pass."""
    trained = np.ones(num_steps, bool)
    if rng.random() < 0.4:
        return trained
    every = max(3, int(rng.uniform(*EVALUATION_EVERY_S) / step_s))
    for first in range(int(rng.integers(2, every + 2)), num_steps, every):
        length = int(rng.uniform(*EVALUATION_S) / (step_s / 3)) or 1
        trained[first : first + min(length, every // 2)] = False
    return trained


def _add_pauses(
    rng: np.random.Generator,
    port: Port,
    step_s: float,
    restart_probability: float,
    table: tuple[Array, Array, Array],
) -> tuple[tuple[Pause, ...], tuple[tuple[float, float, float], ...]]:
    """Write saves and a restart into the last bucket of the table of a run."""
    work, burst, sent = table
    pauses, uploads = [], []
    ends_s = np.cumsum(np.maximum(work, burst).sum(axis=1))
    if rng.random() < 0.7:
        every = max(2, int(rng.uniform(*SAVE_EVERY_S) / step_s))
        background, on_port = rng.random() < 0.4, rng.random() < 0.5
        rate = port.data_bytes_per_s
        for step in range(int(rng.integers(1, every + 1)), len(work), every):
            save_s = rng.uniform(*SAVE_S) * (0.1 if background else 1.0)
            work[step, -1] = save_s
            pauses.append(Pause(name="save", after_step=step))
            if background and on_port:
                upload = (rng.uniform(*UPLOAD_S), rng.uniform(*UPLOAD_RATE) * rate)
                uploads.append((float(ends_s[step]), *map(float, upload)))
            elif on_port:
                burst[step, -1] = 0.9 * save_s
                sent[step, -1] = 0.9 * save_s * rng.uniform(*SAVE_RATE) * rate
    if rng.random() < restart_probability:
        reboot = rng.random() < 0.35
        step = int(rng.uniform(0.1, 0.6) * len(work))
        work[step, -1] = rng.uniform(*(REBOOT_S if reboot else RESTART_S))
        burst[step, -1] = sent[step, -1] = 0.0
        work[step + 1, :-1] *= rng.uniform(*FIRST_STEP)
        name = "reboot" if reboot else "restart"
        pauses.append(Pause(name=name, after_step=step))
    return tuple(pauses), tuple(uploads)


def _trimmed(run: Run) -> Run:
    """Drop the steps after the end; steps can only start later than laid out here."""
    start_s = lay(run).start_s[:, 0]
    assert start_s[-1] > run.duration_s, "too few steps were drawn"
    kept = int(np.searchsorted(start_s, run.duration_s)) + 1
    return dataclasses.replace(
        run,
        work_s=run.work_s[:kept],
        burst_s=run.burst_s[:kept],
        bytes=run.bytes[:kept],
        trained=run.trained[:kept],
        pauses=tuple(pause for pause in run.pauses if pause.after_step < kept),
    )

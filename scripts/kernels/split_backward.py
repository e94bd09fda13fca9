"""Count the gain and cost of splitting the backward slot of interleaved 1F1B.

    python -m scripts.kernels.split_backward --pp 8 --chunks 2 --microbatches 32 \\
      --layers 4

A split backward slot B computes the gradients of activations only; those of weights
come later, in a slot W that no other stage waits for (Qi et al. 2024,
arXiv:2401.10241). In lockstep, a tick takes the time of each kind of slot that at
least one stage uses in it. The table of W is searched for the best lag behind the first
B. Differs: the paper's stages do not move in lockstep.

Times are in forward passes of a chunk, of its GEMMs alone. Memory is in activations
[microbatch, T, D], for a block with MHA and F = 4 D: the inputs of its GEMMs are 7 of
them (1 of q, k and v together, 1 of the output projection, 1 and 4 of the MLP), the
gradients of their outputs 9 (3, 1, 4 and 1).
"""

import argparse
import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from mjax.pipeline.schedule import IDLE, Schedule, build

INPUTS_PER_LAYER = 7
OUTPUTS_PER_LAYER = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute a chunk's gradients in two slots."""

    name: str
    joined_time: int
    """Time of the unsplit backward slot, with its recomputation."""
    backward_time: int
    weight_time: int
    keeps_inputs: bool
    """B passes the GEMMs' inputs to W. If not, they are in the stash, or recomputed."""
    keeps_outputs: bool
    """B passes the gradients of the GEMMs' outputs to W. If not, W recomputes them."""


WAYS = (
    Way(
        name="all stashed, all gradients kept",
        joined_time=2,
        backward_time=1,
        weight_time=1,
        keeps_inputs=False,
        keeps_outputs=True,
    ),
    Way(
        name="all stashed, W repeats B",
        joined_time=2,
        backward_time=1,
        weight_time=2,
        keeps_inputs=False,
        keeps_outputs=False,
    ),
    Way(
        name="recompute in B, all kept",
        joined_time=3,
        backward_time=2,
        weight_time=1,
        keeps_inputs=True,
        keeps_outputs=True,
    ),
    Way(
        name="recompute in both, gradients kept",
        joined_time=3,
        backward_time=2,
        weight_time=2,
        keeps_inputs=False,
        keeps_outputs=True,
    ),
    Way(
        name="recompute in both, W repeats B",
        joined_time=3,
        backward_time=2,
        weight_time=3,
        keeps_inputs=False,
        keeps_outputs=False,
    ),
)


def weight_slots(schedule: Schedule, lag: int) -> Bool[np.ndarray, "ticks P"]:
    """Return the ticks in which each stage has a slot W, in the order of its slots B.

    The first tick with W is `lag` ticks after the first B of any stage. From then on, a
    stage has a W in each tick in which one of its own B, of the same tick or earlier,
    has no W yet.
    """
    done = schedule.backward_chunk != IDLE
    first = int(np.flatnonzero(done.any(axis=1))[0]) + lag
    rest = np.zeros((done.sum() + lag, schedule.num_stages), bool)
    waiting = np.zeros(schedule.num_stages, int)
    slots = []
    for tick, row in enumerate(np.vstack([done, rest])):
        waiting += row
        slots.append((waiting > 0) & (tick >= first))
        waiting -= slots[-1]
    return np.stack(slots)


def used_ticks(slots: Bool[np.ndarray, "ticks P"]) -> int:
    """Count the ticks in which at least one stage has a slot."""
    return int(slots.any(axis=1).sum())


def most_waiting(
    begin: Bool[np.ndarray, "begin P"], end: Bool[np.ndarray, "end P"]
) -> Int[np.ndarray, " P"]:
    """Count, for each stage, the most items alive between two slots, inclusive."""
    begun = np.cumsum(np.vstack([begin, np.zeros_like(end)])[: len(end)], axis=0)
    ended = np.cumsum(end, axis=0) - end
    return (begun - ended).max(axis=0)


def best_lag(schedule: Schedule) -> int:
    """Return the smallest lag with the fewest ticks in which W is used."""
    lags = range(2 * schedule.num_stages * schedule.num_chunks)
    return min(lags, key=lambda lag: (used_ticks(weight_slots(schedule, lag)), lag))


def split_bubble(schedule: Schedule, lag: int, way: Way) -> float:
    """Return the time of a step over the ideal time of unsplit slots, minus 1.

    Recomputation in W counts as bubble: it produces no new result.
    """
    forward = used_ticks(schedule.forward_chunk != IDLE)
    backward = used_ticks(schedule.backward_chunk != IDLE)
    weight = used_ticks(weight_slots(schedule, lag))
    time = forward + backward * way.backward_time + weight * way.weight_time
    work = schedule.num_chunks * schedule.num_microbatches
    return time / (work * (1 + way.joined_time)) - 1


def report(schedule: Schedule, layers: int) -> list[str]:
    """Print the table of the ways, and what more virtual stages would give instead."""
    lag = best_lag(schedule)
    forward, backward = schedule.forward_chunk != IDLE, schedule.backward_chunk != IDLE
    weight = weight_slots(schedule, lag)
    until_backward = most_waiting(forward, backward)
    until_weight = most_waiting(forward, weight)
    from_backward = most_waiting(backward, weight)
    slots = int(from_backward.max())
    lines = [
        f"{schedule.num_stages} stages, {schedule.num_chunks} chunks of {layers} "
        f"layers, {schedule.num_microbatches} microbatches; W begins {lag} ticks after "
        "the first B",
        f"ticks with F, B, W        {used_ticks(forward)} {used_ticks(backward)} "
        f"{used_ticks(weight)}",
        f"in flight from F to B     {until_backward.tolist()}",
        f"in flight from F to W     {until_weight.tolist()}",
        f"waiting from B to W       {from_backward.tolist()}",
        "",
        f"{'':36}{'F':>3}{'B':>3}{'W':>3}{'joined':>9}{'split':>9}{'change':>8}"
        f"{'activations':>13}",
    ]
    for way in WAYS:
        split = split_bubble(schedule, lag, way)
        # Without all gradients, W needs the gradient of the chunk's output.
        kept = OUTPUTS_PER_LAYER * layers if way.keeps_outputs else 1
        kept += INPUTS_PER_LAYER * layers if way.keeps_inputs else 0
        lines.append(
            f"{way.name:36}{1:3}{way.backward_time:3}{way.weight_time:3}"
            f"{schedule.bubble:9.4f}{split:9.4f}{split / schedule.bubble - 1:+8.0%}"
            f"{slots * kept:13}"
        )
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4, help="of a chunk")
    args = parser.parse_args(argv)
    schedule, finer = (
        build(
            "interleaved-1f1b",
            num_stages=args.pp,
            num_chunks=chunks,
            num_microbatches=args.microbatches,
        )
        for chunks in (args.chunks, 2 * args.chunks)
    )
    print("\n".join(report(schedule, args.layers)))
    print(
        f"\ninstead, {2 * args.chunks} chunks: bubble {finer.bubble:.4f}, in flight "
        f"{max(finer.in_flight)} chunk inputs, before {max(schedule.in_flight)}"
    )


if __name__ == "__main__":
    main()

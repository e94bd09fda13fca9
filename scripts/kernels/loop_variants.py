"""Change the loops of the attention kernels to model planned kernels.

Input: phases read from compiled loops. Output: phases of a loop that does not exist
yet, or of FlashAttention-3, with the instructions per score of compiled loops.
"""

import dataclasses
from collections.abc import Sequence

from scripts.kernels.sm_model import (
    SHARED_BYTES_PER_CLOCK,
    Phase,
    Product,
    Program,
    Wait,
    Work,
)

ROWS = 64
"""Rows of a warpgroup's matmul."""
_BYTES = 2
_SUM_BYTES = 4


def scaled(program: Program, factor: float) -> Program:
    """Return the loop for blocks that are longer by a factor."""

    def one(phase: Phase) -> Phase:
        if isinstance(phase, Work):
            return Work(clocks={p: c * factor for p, c in phase.clocks.items()})
        if isinstance(phase, Product):
            return Product(
                flops=phase.flops * factor, shared_bytes=phase.shared_bytes * factor
            )
        return phase

    return [one(phase) for phase in program]


def serial(program: Program) -> Program:
    """Return the loop with all its work after its matmuls, without overlap."""
    kept = [p for p in program if not (isinstance(p, Wait) and p.most_unfinished == 0)]
    last = max(i for i, phase in enumerate(kept) if isinstance(phase, Product))
    waits = [i for i, p in enumerate(kept) if isinstance(p, Wait) and i > last]
    at = waits[0] if waits else last + 1
    return [*kept[:at], Wait(most_unfinished=0), *kept[at:]]


def from_registers(program: Program, width: int) -> Program:
    """Return the loop with the first operand of its score matmuls in registers.

    Args:
      program: phases of dq or dkv; the matmuls before the first work compute scores.
      width: H.
    """
    saved = float(ROWS * width * _BYTES)

    def one(phase: Phase, is_score: bool) -> Phase:
        if not isinstance(phase, Product) or not is_score:
            return phase
        return dataclasses.replace(phase, shared_bytes=phase.shared_bytes - saved)

    products = [i for i, phase in enumerate(program) if isinstance(phase, Product)]
    scores = products[: len(products) - 1]
    return [one(phase, i in scores) for i, phase in enumerate(program)]


def wider(program: Program, width: int) -> Program:
    """Return the loop of dq with blocks of twice as many keys.

    The first operands of the score matmuls are then read once instead of twice.
    """
    saved = float(ROWS * width * _BYTES)
    doubled = list(scaled(program, 2.0))
    products = [i for i, phase in enumerate(doubled) if isinstance(phase, Product)]
    for i in products[:-1]:
        phase = doubled[i]
        assert isinstance(phase, Product)
        doubled[i] = dataclasses.replace(phase, shared_bytes=phase.shared_bytes - saved)
    return doubled


def backward(
    dkv: Program,
    *,
    scores: int,
    queries: int,
    keys: int,
    width: int,
    warpgroups: int,
    fused: bool,
) -> Program:
    """Return a loop of dk and dv that issues both score matmuls at once.

    As in FlashAttention-3 (hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp): S and dP, then
    the exponentials, which overlap dP, then dV, dQ and dK. A warpgroup has 64 of the
    keys.

    Args:
      dkv: phases of a compiled loop of dkv, for its work per score.
      scores: number of scores of a warpgroup in an iteration of `dkv`.
      queries: number of queries in a block.
      keys: number of keys in a tile.
      width: H.
      warpgroups: number of warpgroups that share a tile.
      fused: also compute dQ, which the copy engine adds from shared to global memory,
        in float32.
    """
    first, second = _work_of(dkv)
    more = ROWS * queries / scores
    probs, gradients = (_scaled_all(part, more) for part in (first, second))
    flops = 2.0 * ROWS * queries * width
    block = float(queries * width * _BYTES)
    tile = float(ROWS * width * _BYTES)
    score = Product(flops=flops, shared_bytes=tile + block)
    add = Product(flops=flops, shared_bytes=block)
    begin = [score, score, Wait(most_unfinished=1), *probs, Wait(most_unfinished=0)]
    if not fused:
        return [*begin, *gradients, add, add]
    # Gradients of scores are stored for dQ; all warpgroups contribute to its rows.
    d_scores = ROWS * queries * _BYTES
    sums = queries * width * _SUM_BYTES / warpgroups
    d_query = Product(
        flops=2.0 * queries * width * keys / warpgroups,
        shared_bytes=(ROWS * keys + queries * keys) * float(_BYTES),
    )
    return [
        *begin,
        *gradients,
        _stored(d_scores),
        add,
        d_query,
        Wait(most_unfinished=1),
        add,
        Wait(most_unfinished=1),
        _stored(sums),
        Wait(most_unfinished=0),
    ]


def _work_of(program: Program) -> tuple[list[Work], list[Work]]:
    """Return the work up to the last exponential, and the rest."""
    work = [phase for phase in program if isinstance(phase, Work)]
    last = max(i for i, phase in enumerate(work) if phase.clocks.get("mufu"))
    return work[: last + 1], work[last + 1 :]


def _scaled_all(work: Sequence[Work], factor: float) -> list[Work]:
    return [
        Work(clocks={p: c * factor for p, c in phase.clocks.items()}) for phase in work
    ]


def _stored(num_bytes: float) -> Work:
    """Return the work of a warpgroup to store bytes to shared memory, 16 a thread."""
    return Work(
        clocks={
            "issue": num_bytes / (16 * 128),
            "lsu": num_bytes / SHARED_BYTES_PER_CLOCK,
        }
    )

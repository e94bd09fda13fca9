"""The loss on held-out batches.

Input: a program, parameters and batches, as arguments. Output: fields of a row.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from mjax.run.loop_protocols import Program
from mjax.run.metrics import Row, bits_per_byte


def evaluate(
    program: Program,
    params: PyTree,
    batches: Iterable[Any],
    num_bytes: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Row:
    """Measure the loss on held-out batches.

    Args:
      program: program of the run, which provides `eval_step`.
      params: parameters of the state, with its shardings.
      batches: held-out batches, the same at every evaluation.
      num_bytes: number of text bytes of all targets of the batches.
      is_stopped: called before each batch; True ends the evaluation.
    Returns:
      `eval_loss` (mean nats per target token) and `eval_bits_per_byte`; empty if
      stopped.
    Raises:
      ValueError: no position of the batches has a target.
    """
    results: list[Mapping[str, Any]] = []
    for batch in batches:
        if is_stopped():
            return {}
        results.append(program.eval_step(params, batch))
        # Two batches in flight overlap reading with compute. More would only hold
        # memory, and queued programs starve simulated devices (see `generate`).
        jax.block_until_ready(dict(results[max(0, len(results) - 2)]))
    # Summed on the host in float64: the order and rounding are the same everywhere.
    nll = sum(float(result["nll"]) for result in results)
    tokens = sum(int(result["tokens"]) for result in results)
    if tokens == 0:
        raise ValueError(
            "the held-out samples have no targets: every document is shorter than two "
            "tokens; give longer text or --data.no-isolate-documents"
        )
    return {
        "eval_loss": nll / tokens,
        "eval_bits_per_byte": bits_per_byte(nll, num_bytes),
    }

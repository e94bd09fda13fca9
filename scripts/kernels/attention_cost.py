"""Show that blocked attention costs O(s * w): FLOPs and temporary memory against s.

    python -m scripts.kernels.attention_cost

Programs are compiled for this machine and read, never run. FLOPs are the matmuls in the
optimised program times the trip counts of its loops; memory is XLA's temporary buffers.
"Visible" FLOPs are those of the scores inside the window; the ratio beside them is the
cost of computing whole tiles. Writes docs/benchmarks/attention_cost.md. Exits with 1 if
a bound of `find_faults` does not hold.
"""

import dataclasses
import itertools
import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from mjax.kernels.attention import api
from mjax.plan.hlo.counts import count_dot_flops
from scripts.evidence import Table, write_page

WINDOW = 512
LENGTHS = tuple(1024 * 2**n for n in range(6))

# Matmuls of a tile: scores and output; backward the scores again, then the gradients of
# probabilities, q, k and v.
DOTS_FORWARD, DOTS_BOTH = 2, 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one compiled program."""

    flops: int
    visible_flops: int
    temp_bytes: int


def attention_cost(
    seq_len: int,
    window: int | None,
    *,
    backward: bool,
    heads: int = 1,
    head_dim: int = 64,
    backend: str = "blocked",
) -> Cost:
    """Compile attention for batch 1 in float32 and read its cost."""
    x = jax.ShapeDtypeStruct((1, seq_len, heads, head_dim), jnp.float32)

    def forward(q, k, v):
        return api.attention(q, k, v, window=window, backend=backend)

    def gradients(q, k, v, d_out):
        return jax.vjp(forward, q, k, v)[1](d_out)

    function, args = (gradients, (x,) * 4) if backward else (forward, (x,) * 3)
    compiled = jax.jit(function).lower(*args).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    dots = DOTS_BOTH if backward else DOTS_FORWARD
    return Cost(
        flops=count_dot_flops(text),
        visible_flops=2 * dots * heads * head_dim * num_visible(seq_len, window),
        temp_bytes=memory.temp_size_in_bytes,
    )


def num_visible(seq_len: int, window: int | None) -> int:
    """Count the pairs (query, key) that are visible to each other."""
    w = seq_len if window is None else min(window, seq_len)
    return w * seq_len - w * (w - 1) // 2


def find_faults(costs: Mapping[tuple[int, bool], Cost]) -> list[str]:
    """Return how costs grow faster than in proportion to the length.

    The first window is cheaper than the others, so FLOPs are an affine function of the
    length: if it doubles, so does their increment. Tiles that are computed once do not
    grow, so memory at most doubles.

    Args:
      costs: of each length and pass (True: with the backward pass); lengths double.
    """
    faults = []
    for backward in (False, True):
        of_pass = {
            s: cost for (s, is_both), cost in costs.items() if is_both == backward
        }
        lengths = sorted(of_pass)
        flops = [of_pass[s].flops for s in lengths]
        added = [more - less for less, more in itertools.pairwise(flops)]
        for index, s in enumerate(lengths[1:]):
            name = f"{_pass(backward)}, {s} positions"
            if index and added[index] != 2 * added[index - 1]:
                ratio = added[index] / added[index - 1]
                faults.append(f"{name}: the increment of FLOPs is {ratio:.3f} times")
            ratio = of_pass[s].temp_bytes / of_pass[lengths[index]].temp_bytes
            if ratio > 2:
                faults.append(f"{name}: memory is {ratio:.3f} times")
    return faults


def rows(costs: Mapping[tuple[int, bool], Cost]) -> list[list[str]]:
    """Return a row for each length and pass."""
    return [
        [
            str(s),
            _pass(backward),
            f"{cost.flops / 1e9:.3f}",
            f"{cost.visible_flops / 1e9:.3f}",
            f"{cost.flops / cost.visible_flops:.3f}",
            f"{cost.temp_bytes / 2**20:.2f}",
            f"{cost.temp_bytes / 2**10 / s:.3f}",
        ]
        for (s, backward), cost in costs.items()
    ]


def _pass(backward: bool) -> str:
    return "fwd+bwd" if backward else "fwd"


def main() -> int:
    """Write the page; return 1 if a cost grows faster than the length."""
    jax.config.update("jax_platforms", "cpu")
    costs = {
        (s, backward): attention_cost(s, WINDOW, backward=backward)
        for backward in (False, True)
        for s in LENGTHS
    }
    faults = find_faults(costs)
    table = Table(
        title=f"Window {WINDOW}, one head of 64, float32",
        text="Compiled for this CPU and not run. FLOPs are the matmuls of the "
        "optimised program times the trip counts of the loops around them; memory is "
        "XLA's temporary buffers. *Visible* counts only the pairs that the window lets "
        "through; the ratio is the cost of computing whole tiles at its edges. Bounds: "
        "where the length s doubles, so does the increment of FLOPs, and memory at "
        f"most doubles. Not met: {'; '.join(faults) or 'none'}.",
        header=(
            "s",
            "pass",
            "GFLOPs",
            "visible GFLOPs",
            "ratio",
            "temp MiB",
            "temp KiB per s",
        ),
        rows=rows(costs),
    )
    command = "python -m scripts.kernels.attention_cost"
    print(write_page("attention_cost", "Cost of blocked attention", command, [table]))
    print(*faults, sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

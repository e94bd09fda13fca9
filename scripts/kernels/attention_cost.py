"""Show that blocked attention costs O(s * w): FLOPs and temporary memory against s.

    python -m scripts.kernels.attention_cost --window 512

Programs are compiled for this machine and read, never run. FLOPs are the dots in the
optimised program times the trip counts of its loops; memory is XLA's temporary buffers.
"Visible" FLOPs are those of the scores inside the window; the ratio beside them is the
cost of computing whole tiles.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

from mjax.kernels.attention import api
from mjax.plan.hlo.counts import count_dot_flops

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="s")
    args = parser.parse_args()
    lengths = args.lengths or [1024 * 2**n for n in range(6)]
    jax.config.update("jax_platforms", "cpu")
    print(f"blocked attention, window {args.window}, one head of 64, float32, CPU\n")
    print("| s | pass | GFLOPs | visible GFLOPs | ratio | temp MiB | temp KiB per s |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    for backward in (False, True):
        for s in lengths:
            cost = attention_cost(s, args.window, backward=backward)
            print(
                f"| {s} | {'fwd+bwd' if backward else 'fwd'} | {cost.flops / 1e9:.3f} "
                f"| {cost.visible_flops / 1e9:.3f} "
                f"| {cost.flops / cost.visible_flops:.3f} "
                f"| {cost.temp_bytes / 2**20:.2f} | {cost.temp_bytes / 2**10 / s:.3f} |"
            )


if __name__ == "__main__":
    main()

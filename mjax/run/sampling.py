"""Let the trained model continue a text, as a check after the last step.

Input: a program, parameters and a prompt. Output: the drawn tokens. The whole prefix is
recomputed for each token.
"""

from collections.abc import Callable, Set

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from mjax.run.loop_protocols import Program

_TEMPERATURE = 0.8


def generate(
    program: Program,
    params: PyTree,
    prompt: Int[np.ndarray, "n"],
    *,
    num_rows: int,
    seq_len: int,
    num_tokens: int,
    vocab_size: int,
    seed: int,
    end_ids: Set[int] = frozenset(),
    is_stopped: Callable[[], bool] = lambda: False,
) -> Int[np.ndarray, "m"] | None:
    """Continue a prompt by sampling at a fixed temperature.

    The whole prefix is recomputed for each token: this checks a model, and is too slow
    to serve it.

    Args:
      program: program of the run, which provides `next_token_logits`.
      params: parameters of the state, with its shardings.
      prompt: token ids, at least one.
      num_rows: rows of the token array, a multiple of the data-parallel size. All hold
        the same prompt; the first is returned.
      seq_len: columns of the token array; a longer text is continued from its last
        seq_len tokens.
      num_tokens: maximum number of tokens to draw.
      vocab_size: number of ids that the tokenizer can decode.
      seed: seed of the sampling.
      end_ids: tokens that end the continuation, which includes them.
      is_stopped: called before each token; True ends the sampling.
    Returns:
      The continuation, without the prompt; None if stopped.
    """
    sharding = program.batch_sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())

    # The key is made inside jit: jax cannot put a key on devices of other processes.
    def draw(logits, count):
        known = jnp.arange(logits.shape[-1]) < vocab_size
        logits = jnp.where(known, logits.astype(jnp.float32) / _TEMPERATURE, -jnp.inf)
        return jax.random.categorical(
            jax.random.fold_in(jax.random.key(seed), count), logits[0]
        )

    draw = jax.jit(draw, out_shardings=whole)
    shape = (num_rows, seq_len)
    seen = prompt.tolist()
    for count in range(num_tokens):
        if is_stopped():
            return None
        context = np.asarray(seen[-seq_len:], np.int32)
        rows = np.broadcast_to(np.pad(context, (0, seq_len - len(context))), shape)
        tokens = jax.make_array_from_callback(shape, sharding, rows.__getitem__)
        logits = program.next_token_logits(params, tokens, len(context))
        # Read each token before drawing the next, because simulated devices share few
        # threads. With all tokens queued, collectives that waited for each other
        # occupied every thread, and XLA aborted after 40 s (seen with 8 devices on 2
        # cores, jax 0.11.2).
        seen.append(int(draw(logits, count)))
        if seen[-1] in end_ids:
            break
    return np.asarray(seen[len(prompt) :])

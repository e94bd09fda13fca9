"""Output projection and cross-entropy in one op, without storing all logits.

Input: the last hidden states, the table of the output projection, and the targets.
Output: the targets' summed negative log-likelihood; its gradients are computed in the
same pass. Positions are processed in chunks, so memory holds the logits of one chunk.
"""

from jaxtyping import Array, Float, Int

from mjax.kernels.cross_entropy import chunked, tuning
from mjax.kernels.cross_entropy.chunked import Vocabulary as Vocabulary


def linear_cross_entropy(
    x: Float[Array, "B T D"],
    w: Float[Array, "v D"],
    bias: Float[Array, " v"] | None,
    targets: Int[Array, "B T"],
    first_token: Int[Array, ""] | int = 0,
    *,
    scale: float,
    vocabulary: Vocabulary,
    soft_cap: float | None = None,
) -> Float[Array, ""]:
    """Return the sum over positions of -log softmax((x w^T + bias) scale)[target].

    Logits, softmax and sums are float32. The gradients of the logits enter the two
    matmuls of the backward pass in the dtype of x; the gradient of w is summed over the
    chunks in float32. The function can be differentiated once, in x, w and bias.

    Inside shard_map the shapes are per device and x, w and bias vary over the same
    axes. If the vocabulary is split over devices, each device returns the gradient of x
    from its own columns; their sum over the devices is the full gradient.

    Args:
      x: hidden states at full width D, any float dtype.
      w: this device's rows of the table, dtype of x.
      bias: this device's entries of the bias, or None.
      targets: global token ids; a negative id means no target and adds 0.
      first_token: token id of row 0 of w.
      scale: factor on the logits.
      vocabulary: size of the vocabulary, and reductions over the devices that share it.
      soft_cap: scaled logits z become soft_cap * tanh(z / soft_cap); None means no cap.
    Returns:
      The sum in nats, float32; equal on all devices that share the vocabulary.
    Raises:
      ValueError: shapes or dtypes do not fit together.
    """
    _check(x, w, bias, targets)
    num_chunks = tuning.CHUNKED.num_chunks(targets.size, w.shape[0])
    options = chunked.Options(
        num_chunks=num_chunks, scale=scale, vocabulary=vocabulary, soft_cap=soft_cap
    )
    flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    return chunked.summed_nll(options, *flat, w, bias, first_token)


def _check(x, w, bias, targets) -> None:
    """Raise ValueError unless the arguments fit together."""
    if x.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have one id for each position of x, got x {x.shape}, "
            f"targets {targets.shape}"
        )
    if x.shape[-1] != w.shape[-1] or (bias is not None and bias.shape != w.shape[:1]):
        shape = None if bias is None else bias.shape
        raise ValueError(
            "w must be [tokens, width of x] and bias [tokens], got "
            f"x {x.shape}, w {w.shape}, bias {shape}"
        )
    if x.dtype != w.dtype:
        raise ValueError(
            f"x and w must have one dtype, got {x.dtype} and {w.dtype}; cast them to "
            "the compute dtype first"
        )

"""LayerNorm and RMSNorm: one entry point.

Enters: activations, scale and bias. Leaves: the normalised activations, in their
dtype. For the backward pass only x and scale are kept.
"""

from jaxtyping import Array, Float

from mjax.kernels.layer_norm import xla


def norm(
    x: Float[Array, "*dims D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    centred: bool,
    eps: float,
) -> Float[Array, "*dims D"]:
    """Normalise every position by its own statistics over D, in float32, then scale.

    centred (LayerNorm): y = (x - mean) * scale / sqrt(var + eps) + bias;
    otherwise (RMSNorm): y = x * scale / sqrt(mean(x^2) + eps) + bias.

    Differentiable once. Inside shard_map all arguments vary over the same axes.

    Args:
      x: activations, any float dtype.
      scale: factors, any float dtype.
      bias: summands, or None.
      centred: subtract the mean.
      eps: added to the variance or mean square; unit of x squared.
    Returns:
      y, dtype of x.
    Source: Ba et al. 2016, arXiv:1607.06450, eq. 4; Zhang and Sennrich 2019,
    arXiv:1910.07467, eq. 4. Differs: eps, absent in the latter.
    """
    return xla.norm(xla.Options(centred=centred, eps=eps), x, scale, bias)

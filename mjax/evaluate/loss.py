"""The mean loss of a model over the scored tokens of a text.

Input: a model on a mesh, and windows of the text. Output: a `Result`. The host adds the
scores in float64, window by window, so the order does not depend on the mesh.
"""

import dataclasses
import math
from collections.abc import Iterable

from jax.sharding import Mesh

from mjax.data.samples import NO_TARGET
from mjax.evaluate.scoring import Scorer
from mjax.evaluate.windows import Window
from mjax.mesh.axes import DP, TP
from mjax.model.config import ModelConfig
from mjax.model.transformer import Params

_TOKENS_PER_DEVICE = 8192
"""Tokens per device and batch if no batch size is given. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Result of scoring a text."""

    nll: float
    """Sum over all scored tokens, in nats."""
    tokens: int
    """Number of scored tokens."""
    windows: int
    """Number of windows."""
    computed_tokens: int
    """Number of tokens in all windows, including those repeated as context."""

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if it overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def make_scorer(
    model: ModelConfig,
    params: Params,
    mesh: Mesh,
    *,
    length: int,
    batch_size: int | None,
) -> Scorer:
    """Make a scorer for windows of up to `length` tokens.

    Args:
      model: the architecture.
      params: parameters, as for `Scorer`.
      mesh: mesh, as for `Scorer`.
      length: tokens of the longest window.
      batch_size: sequences per batch; None gives each device about
        `_TOKENS_PER_DEVICE` tokens.
    Raises:
      ValueError: `Scorer` refuses an argument.
    """
    tp = mesh.shape[TP]
    row_len = -(-length // tp) * tp
    if batch_size is None:
        num_dp = math.prod(mesh.shape[axis] for axis in DP)
        batch_size = num_dp * max(1, _TOKENS_PER_DEVICE // row_len)
    return Scorer(model, params, mesh, row_len=row_len, num_rows=batch_size)


def total(scorer: Scorer, windows: Iterable[Window]) -> Result:
    """Score windows and sum their scores.

    Raises:
      ValueError: no token is scored.
      RuntimeError: the sum is not finite.
    """
    num_tokens, num_computed = [], []

    def counted() -> Iterable[Window]:
        for window in windows:
            num_tokens.append(int((window.targets != NO_TARGET).sum()))
            num_computed.append(len(window.tokens))
            yield window

    parts = [scores.total for scores in scorer(counted())]
    result = Result(
        nll=math.fsum(parts),
        tokens=sum(num_tokens),
        windows=len(parts),
        computed_tokens=sum(num_computed),
    )
    if result.tokens == 0:
        raise ValueError(
            "the text has no token to score: every document is empty, or is one token "
            "without context; give more text, or --start-token eos"
        )
    if not math.isfinite(result.nll):
        raise RuntimeError(
            f"the loss is {result.nll}: the model's outputs are not finite; use "
            "--precision float32, or another checkpoint (--step)"
        )
    return result

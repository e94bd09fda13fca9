"""Published speeds of attention on H100, TFLOP/s.

Source: Shah et al. 2024, FlashAttention-3, arXiv:2407.08608: the numbers above the bars
of figure 5 (forward) and figure 6 (backward, without a causal mask), and table 2, all
from transcriptions of the paper. H100 80GB SXM5, FP16, 16k tokens a batch, hidden size
2048. FLOPs are counted as in the paper: 4 T^2 H per head forward, half of that with a
causal mask, and 2.5 times as many backward.
"""

import dataclasses

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, HIDDEN = 16384, 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One group of bars."""

    head_dim: int
    causal: bool
    backward: bool
    flash3: tuple[int, ...]
    """TFLOP/s of FlashAttention-3, for each of `LENGTHS`."""
    cudnn: tuple[int, ...]

    @property
    def name(self) -> str:
        """Bars by direction, head width and mask, such as forward, 64, causal."""
        direction = "backward" if self.backward else "forward"
        mask = "causal" if self.causal else "full"
        return f"{direction}, {self.head_dim}, {mask}"


def _series(H: int, causal: bool, backward: bool, flash3, cudnn) -> Series:
    return Series(
        head_dim=H, causal=causal, backward=backward, flash3=flash3, cudnn=cudnn
    )


SERIES = (
    _series(
        64, False, False, (333, 392, 460, 476, 496, 497), (335, 373, 395, 408, 412, 413)
    ),
    _series(
        64, True, False, (197, 265, 371, 420, 460, 473), (225, 288, 334, 363, 379, 388)
    ),
    _series(
        128,
        False,
        False,
        (467, 565, 625, 638, 646, 648),
        (497, 574, 617, 609, 600, 595),
    ),
    _series(
        128, True, False, (292, 423, 521, 579, 602, 616), (315, 410, 484, 518, 529, 539)
    ),
    _series(
        64, False, True, (272, 363, 422, 453, 472, 474), (266, 348, 395, 417, 432, 433)
    ),
    _series(
        128, False, True, (316, 424, 501, 542, 559, 561), (305, 408, 465, 499, 518, 516)
    ),
)

ABLATION_BATCH, ABLATION_LENGTH, ABLATION_HEADS, ABLATION_WIDTH = 4, 8448, 16, 128
ABLATION_FULL, ABLATION_SERIAL = 661, 582
"""Table 2, without a mask: as it is, and with the softmax of a warpgroup after its
matmuls instead of overlapping them (the warpgroups still take turns). The table's third
figure, 570, is for a kernel without loading warps."""


def model_flops(
    *,
    batch: int,
    seq_len: int,
    heads: int,
    head_dim: int,
    causal: bool,
    backward: bool,
) -> float:
    """Count FLOPs as the source does."""
    forward = 4.0 * batch * heads * seq_len**2 * head_dim
    return forward * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)

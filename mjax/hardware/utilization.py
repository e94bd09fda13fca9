"""Model FLOPs utilization (MFU): the FLOPs that it counts, and the peak."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Utilization:
    """Model FLOPs utilization (MFU): the FLOPs that it counts, and the peak."""

    flops_per_token: float
    """Model FLOPs per token, forward and backward, with attention over the pairs of
    query and key that are visible in a sequence of one document."""
    peak_flops_per_s: float | None
    """Dense bf16 peak of one device, in FLOP/s; None if unknown."""
    num_devices: int
    """Number of devices in the mesh."""
    flops_per_pair: float = 0.0
    """The part of flops_per_token of one pair in one layer."""
    pairs_per_token: float = 0.0
    """Pairs that flops_per_token counts, summed over the layers."""

    def mfu(self, tokens_per_s: float) -> float | None:
        """Return the MFU as a fraction of the peak; None if the peak is unknown."""
        if self.peak_flops_per_s is None:
            return None
        peak = self.peak_flops_per_s * self.num_devices
        return self.flops_per_token * tokens_per_s / peak

    def mfu_visible(self, tokens_per_s: float, pairs_per_token: float) -> float | None:
        """Return the MFU of a batch whose documents leave this many pairs visible."""
        mfu, hidden = self.mfu(tokens_per_s), self.pairs_per_token - pairs_per_token
        part = self.flops_per_pair * hidden / self.flops_per_token
        return None if mfu is None else mfu * (1 - part)

    def describe(self) -> str:
        """Return a text with the formula and its numbers."""
        if self.peak_flops_per_s is None:
            return (
                f"MFU unknown: no peak for this device (set --peak-tflops); "
                f"{self.flops_per_token:.4g} model FLOPs per token"
            )
        return (
            f"MFU = {self.flops_per_token:.4g} model FLOPs per token (forward and "
            f"backward, attention as in sequences of one document) x tokens/s / "
            f"({self.num_devices} x {self.peak_flops_per_s / 1e12:.4g} TFLOP/s)"
        )

"""Input of the step-time model: model, layout, device and efficiency.

Input: plain numbers. Output: `Case` (a transformer, its layout and its batch),
`Device` (a GPU and its links) and `Constants` (the fractions of peak rates that are
reached). Letters are those of docs/vocabulary.md.
"""

import dataclasses
from typing import Literal

from mjax.hardware.gpus import Gpu
from mjax.mesh.axes import AxisSizes

_MAY_BE_0 = ("zero", "learned_positions", "host_state_bytes")

Remat = Literal["none", "attention", "core", "dots", "full"]
"""What the backward pass recomputes, as in `--model.remat`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A transformer, its layout on a mesh, and its batch."""

    layers: int
    d_model: int
    d_ff: int
    heads: int
    head_width: int
    kv_heads: int
    gated: bool
    """Whether the feed-forward layer has a gate: three matrices instead of two."""
    parallel: bool
    """Whether blocks are parallel, with fused projections, or serial."""
    post_norms: bool = False
    """Whether the output of each branch is normalised too."""
    learned_positions: int = 0
    """Rows of the position table, which is replicated on every GPU."""
    vocab_size: int
    seq_len: int
    visible_keys: float | None = None
    """Number of keys that a query sees, averaged over queries and layers; None: all
    earlier keys."""
    sizes: AxisSizes
    chunks: int = 1
    """v, virtual stages per stage."""
    microbatches: int
    rows: int = 1
    """Sequences of one microbatch on one data-parallel rank."""
    tp_chunks: int = 1
    """Chunks in which the sequence is sent over tp. With 1, the gathered input is kept
    for the backward pass; with more, it is gathered again (`mjax.layers.linear`)."""
    remat: Remat = "none"
    loading_horizon: int | None = None
    """Number of layers ahead of their use at which residuals are prefetched from host
    memory; None: they stay on the GPU."""
    zero: int = 2
    """ZeRO level, as in `--zero`."""
    param_bytes: int = 2
    """Bytes per entry of gathered weights and of activations."""
    grad_bytes: int = 4
    """Bytes per entry of gradients, while they accumulate and are reduced."""
    state_bytes: int = 12
    """Bytes per parameter of its master and its two moments together."""
    host_state_bytes: int = 0
    """The part of `state_bytes` that is in host memory."""
    projection_rate: float = 1.0
    """Speed of the layers' matmuls relative to 16-bit matmuls; 2 for 8 bits."""

    def __post_init__(self) -> None:
        """Refuse values that no run can have."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and field.name not in _MAY_BE_0 and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.zero not in range(4):
            raise ValueError(f"zero must be from 0 to 3, got {self.zero}")
        if self.zero == 3 and self.sizes.pp > 1:
            raise ValueError(
                f"pp must be 1 with zero 3, which gathers all parameters in every "
                f"microbatch, got {self.sizes.pp}; use zero 2, or pp 1"
            )
        if self.sizes.pp == 1 and self.chunks > 1:
            raise ValueError(
                "chunks must be 1 with pp 1, where one stage runs all layers at once, "
                f"got {self.chunks}"
            )
        if self.visible_keys is not None and not 1 <= self.visible_keys <= self.seq_len:
            raise ValueError(
                f"visible_keys must be from 1 to seq_len {self.seq_len}, got "
                f"{self.visible_keys}"
            )

    @property
    def repeats_layers(self) -> bool:
        """Whether the backward pass recomputes the work between projections."""
        return self.remat in ("core", "dots", "full")

    @property
    def repeats_attention(self) -> bool:
        """Whether the backward pass recomputes the forward pass of attention.

        With `--model.remat attention` it recomputes nothing, because every fused
        backend keeps its output and log-sum-exp.
        """
        return self.remat in ("dots", "full")

    @property
    def keys(self) -> float:
        """Mean number of visible keys of a query."""
        causal = (self.seq_len + 1) / 2
        return causal if self.visible_keys is None else self.visible_keys

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one data-parallel rank."""
        return self.rows * self.seq_len

    @property
    def batch(self) -> int:
        """Sequences of one step over all devices."""
        return self.rows * self.microbatches * self.sizes.dp

    @property
    def layers_per_gpu(self) -> int:
        """Layers of the fullest stage. Virtual stages differ by at most one layer."""
        return self.chunks * -(-self.layers // (self.sizes.pp * self.chunks))

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of one layer, summed over tp."""
        attention = self.d_model * self.head_width * 2 * (self.heads + self.kv_heads)
        return attention + self.d_model * self.d_ff * (3 if self.gated else 2)

    @property
    def repeated_weights(self) -> int:
        """Number of weights whose matmuls are recomputed with a layer.

        The last matmul of a layer is not recomputed, because only an addition reads its
        output.
        """
        if self.post_norms:
            return self.layer_weights
        attention = self.d_model * self.head_width * self.heads if self.parallel else 0
        return self.layer_weights - attention - self.d_model * self.d_ff

    @property
    def gpu_weights(self) -> float:
        """Number of layer parameters of one stage on one rank of tp, before ZeRO."""
        return self.layers_per_gpu * self.layer_weights / self.sizes.tp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU and its links; rates are peaks."""

    peak_flops_per_s: float | int
    """Dense FLOPs per second in the compute dtype."""
    memory_bytes_per_s: float | int
    node_link_bytes_per_s: float | int
    """Rate to the other GPUs of the node: one direction, all links of a GPU."""
    network_bytes_per_s: float | int
    """Rate from one GPU to other nodes, one direction."""
    gpus_per_node: int = 8
    num_sms: int = 132
    """Number of streaming multiprocessors; the default is an H100's."""

    def __post_init__(self) -> None:
        """Refuse rates and counts that are not positive."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(
                    f"{field.name} must be positive, got {getattr(self, field.name)}"
                )

    @classmethod
    def of(cls, gpu: Gpu, *, gpus_per_node: int = 8) -> "Device":
        """Return the device of a GPU description.

        Args:
          gpu: the GPU.
          gpus_per_node: number of GPUs that the node links connect.
        """
        return cls(
            peak_flops_per_s=float(gpu.peak_bf16_flops_per_s),
            memory_bytes_per_s=float(gpu.memory_bytes_per_s),
            node_link_bytes_per_s=float(gpu.node_link_bytes_per_s),
            network_bytes_per_s=float(gpu.network_bytes_per_s),
            gpus_per_node=gpus_per_node,
            num_sms=gpu.num_sms,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Fractions of a device's rates that a run reaches; assumed, not measured.

    They describe complete layers, including the work around kernels. The constants of
    `mjax.plan.cost.CostModel`, which are also assumed, describe single kernels of a
    schedule, so the values differ. A hop is a step of a ring here, but a level of a
    tree there.
    """

    product_efficiency: float = 0.75
    """Fraction of the peak in matmuls."""
    by_shape: bool = False
    """Whether small matmuls of the layers are modelled as slower than large ones
    (`mjax.estimate.formulas.matmul`)."""
    attention_efficiency: float = 0.55
    """Fraction of the peak in the fused attention kernel, on visible pairs."""
    memory_efficiency: float = 0.85
    """Fraction of the memory rate in memory-bound kernels."""
    node_link_efficiency: float = 0.77
    """Fraction of the node links' rate in collectives."""
    network_efficiency: float = 0.9
    """Fraction of the network rate."""
    tp_overlap: float = 0.0
    """Share of the tp collectives' time that is overlapped with matmuls."""
    dp_overlap: float = 0.0
    """Share of the time of gathers and reductions over dp that is overlapped."""
    pp_overlap: float = 0.0
    """Share of the time of transfers between stages that is overlapped."""
    elementwise_passes: float = 1.0
    """Ratio of the elementwise memory traffic to the traffic of fully fused kernels."""
    stash_passes: float = 0.0
    """Number of times that copies into and out of stacks read or write residuals."""
    chunk_passes: float = 0.0
    """Number of times that copies and sums read or write data sent over tp in
    chunks."""
    visit_bytes: float = 0.0
    """Bytes per layer parameter and microbatch that slices of weights and sums of
    gradients move. Ignored with one microbatch and no pipeline."""
    kernel_s: float = 3e-6
    """Seconds lost between consecutive kernels."""
    hop_s: float = 3e-6
    """Latency of one hop of a ring or of one transfer, in seconds."""
    fixed_s: float = 0.0
    """Fixed seconds per step: data, host, synchronisation."""

    def __post_init__(self) -> None:
        """Refuse values outside of their range."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_efficiency") and not 0 < value <= 1:
                raise ValueError(
                    f"{field.name} must be above 0 and at most 1, got {value}"
                )
            if field.name.endswith("_overlap") and not 0 <= value <= 1:
                raise ValueError(f"{field.name} must be from 0 to 1, got {value}")
            if value < 0:
                raise ValueError(f"{field.name} must be at least 0, got {value}")

"""The figures of the MegaScale paper, and its runs as cases of the step-time model.

Source of every figure with a table or section: Jiang et al. 2024, arXiv:2402.15627.
Values that the paper does not give are assumed and marked in `SOURCES`.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from mjax.estimate.formulas.case import Case, Constants, Device
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from mjax.model.counts import visible_pairs

SystemName = Literal["MegaScale", "Megatron-LM"]
SEQ_LEN, VOCAB_SIZE, TP = 2048, 64_000, 8
WINDOW = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the paper's table 2."""

    system: SystemName
    gpus: int
    batch: int
    step_s: float
    mfu: float
    flops_per_s: float
    """FLOPs per second of all GPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """How a system runs a model, without the fitted constants."""

    parallel: bool
    window: int | None
    dp_overlap: bool
    """All but the last of 2 v transfers over dp are overlapped."""
    constants: Constants

    def constants_for(self, model: "Model", fit: "Fit") -> Constants:
        """Combine assumed, read and fitted constants."""
        return dataclasses.replace(
            self.constants,
            dp_overlap=1 - 1 / (2 * model.chunks) if self.dp_overlap else 0.0,
            **dataclasses.asdict(fit),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """The constants that are fitted."""

    product_efficiency: float
    fixed_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A row of the paper's table 1, with the chunks of section 6.1."""

    layers: int
    d_model: int
    heads: int
    pp: int
    chunks: int


GPT_175B = Model(layers=96, d_model=12288, heads=128, pp=8, chunks=6)
GPT_530B = Model(layers=105, d_model=20480, heads=160, pp=35, chunks=3)

_TABLE_2: tuple[tuple[SystemName, int, int, float, float, float], ...] = (
    ("MegaScale", 768, 256, 32.0, 65.3, 52.2),
    ("MegaScale", 768, 512, 16.5, 63.5, 101.4),
    ("MegaScale", 768, 768, 11.5, 61.3, 146.9),
    ("MegaScale", 768, 1024, 8.9, 59.0, 188.5),
    ("MegaScale", 6144, 3072, 23.66, 59.1, 566.5),
    ("MegaScale", 6144, 6144, 12.21, 57.3, 1098.4),
    ("MegaScale", 6144, 8192, 9.56, 54.9, 1400.6),
    ("MegaScale", 6144, 12288, 6.34, 55.2, 2166.3),
    ("Megatron-LM", 768, 256, 40.0, 53.0, 43.3),
    ("Megatron-LM", 768, 512, 21.2, 49.9, 77.6),
    ("Megatron-LM", 768, 768, 15.2, 46.7, 111.9),
    ("Megatron-LM", 768, 1024, 11.9, 44.7, 131.9),
    ("Megatron-LM", 6144, 3072, 29.02, 48.7, 466.8),
    ("Megatron-LM", 6144, 6144, 14.78, 47.8, 916.3),
    ("Megatron-LM", 6144, 8192, 12.24, 43.3, 1106.7),
    ("Megatron-LM", 6144, 12288, 8.57, 41.2, 1579.5),
)
"""System, batch, GPUs, seconds, MFU in percent, PFLOP/s."""
STRONG_SCALING = tuple(
    Row(
        system=system,
        gpus=gpus,
        batch=batch,
        step_s=step_s,
        mfu=percent / 100,
        flops_per_s=petaflops_per_s * 1e15,
    )
    for system, batch, gpus, step_s, percent, petaflops_per_s in _TABLE_2
)
"""Table 2, the 175B model."""
WEAK_SCALING: tuple[tuple[SystemName, int, float], ...] = (
    ("MegaScale", 2240, 0.543),
    ("MegaScale", 4480, 0.541),
    ("MegaScale", 11200, 0.543),
    ("Megatron-LM", 2240, 0.492),
    ("Megatron-LM", 4480, 0.488),
    ("Megatron-LM", 11200, 0.482),
)
"""Figure 9, the 530B model: system, GPUs and as many sequences, MFU."""
ABLATION: tuple[tuple[str, float, int, Mapping[str, Any]], ...] = (
    ("baseline", 0.477, 256, {}),
    ("(1) with PTB", 0.523, 256, {"parallel": True}),
    ("(2) with SWA", 0.533, 256, {"window": WINDOW}),
    ("(3) with TP overlap", 0.555, 256, {"tp_overlap": 0.9}),
    ("(4) with PP overlap", 0.580, 256, {"pp_overlap": 0.95}),
    ("(5) with DP overlap", 0.595, 256, {"dp_overlap": True}),
    (
        "(6) with efficient operators",
        *(0.612, 256),
        {"attention_efficiency": 0.6, "elementwise_passes": 1.0},
    ),
    ("(7) with misc optimizations", 0.623, 256, {}),
    ("(8) with LAMB (BS x 3)", 0.653, 768, {}),
)
"""Table 3, 175B on 256 GPUs: step, MFU, batch, changes by the step in the model."""

A100 = Device.of(GPUS["a100-80g"])
"""The paper's servers have the network of a DGX A100: eight cards of 200 Gb/s."""
UNOPTIMISED = System(
    parallel=False,
    window=None,
    dp_overlap=False,
    constants=Constants(attention_efficiency=0.33, elementwise_passes=2.0),
)

SOURCES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "peak_flops_per_s": (
            "read",
            "NVIDIA A100 data sheet, bfloat16, dense. The paper says Ampere, and its "
            "PFLOP/s and MFU agree with this peak, but for four rows",
        ),
        "memory_bytes_per_s": ("read", "80 GB SXM module; `mjax.hardware.gpus`"),
        "node_link_bytes_per_s": ("read", "data sheet: NVLink 600 GB/s both ways"),
        "network_bytes_per_s": ("read", "section 3.6: eight 200 Gb/s cards a server"),
        "gpus_per_node": ("read", "section 3.6: eight cards a server; tp 8"),
        "num_sms": ("read", "NVIDIA A100 data sheet; without by_shape it is not used"),
        "product_efficiency": ("fitted", "on two rows of table 2"),
        "by_shape": (
            "read",
            "off: the fitted efficiency is that of the paper's shapes",
        ),
        "fixed_s": ("fitted", "on the same two rows"),
        "attention_efficiency": (
            "assumed",
            "Dao 2023, arXiv:2307.08691, abstract: FlashAttention 25 to 40% of an "
            "A100's peak, FlashAttention-2 50 to 73%",
        ),
        "memory_efficiency": ("assumed", "usual for a large streaming kernel"),
        "node_link_efficiency": ("assumed", "usual bus rate of NCCL in an A100 node"),
        "network_efficiency": ("assumed", "headers, and NCCL's protocol"),
        "tp_overlap": ("assumed", "section 3.2 tells how, not how much"),
        "dp_overlap": (
            "read",
            "our reading of section 3.2: 1 / (2 v) stays exposed, v chunks",
        ),
        "pp_overlap": ("assumed", "section 3.2 tells how, not how much"),
        "elementwise_passes": (
            "assumed",
            "section 3.3: LayerNorm and GELU were many kernels, then fused",
        ),
        **dict.fromkeys(
            ("stash_passes", "chunk_passes", "visit_bytes"),
            ("read", "0: copies in the program of mjax, which neither system runs"),
        ),
        "kernel_s": ("assumed", "launch gap on one stream"),
        "hop_s": ("assumed", "a few microseconds a hop"),
        "window": ("assumed", "the paper gives none"),
        "tp_chunks": (
            "assumed",
            "section 3.2: MegaScale cuts the sequence into chunks, it does not say how "
            "many. Megatron-LM has none but gathers its inputs again in the backward "
            "pass (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), which is "
            "all that this says to the model",
        ),
        "loading_horizon": ("read", "none: nothing is copied to the host"),
        "remat": ("assumed", "none: the memory estimate leaves room for it"),
        "zero": ("read", "section 2, figure 1: ZeRO-2"),
        "param_bytes": ("assumed", "bfloat16"),
        "grad_bytes": ("assumed", "float32, which Megatron-LM sets for bfloat16"),
        "state_bytes": ("read", "ZeRO's 12 bytes: float32 master and two moments"),
        "host_state_bytes": ("assumed", "0: all of it is on the GPU"),
        "projection_rate": ("assumed", "1: matmuls in bfloat16"),
        "rows": ("assumed", "1 sequence a microbatch"),
        "d_ff": ("assumed", "4 d_model: makes table 1 a 175B and a 530B model"),
    }
)
"""For every constant: whether it is read, assumed or fitted, and its source."""


def change(system: System, changes: Mapping[str, Any]) -> System:
    """Return a system with some of its fields or constants replaced."""
    own = {name: value for name, value in changes.items() if hasattr(system, name)}
    rest = {name: value for name, value in changes.items() if name not in own}
    constants = dataclasses.replace(system.constants, **rest)
    return dataclasses.replace(system, constants=constants, **own)


ABLATION_SYSTEMS = tuple(
    itertools.accumulate((step[3] for step in ABLATION), change, initial=UNOPTIMISED)
)[1:]
"""The system after each step."""
SYSTEMS: Mapping[SystemName, System] = MappingProxyType(
    {"Megatron-LM": ABLATION_SYSTEMS[0], "MegaScale": ABLATION_SYSTEMS[-1]}
)


def make_case(model: Model, system: System, gpus: int, batch: int) -> Case:
    """Lay a model over GPUs as the paper does: tp 8, one row a microbatch, ZeRO-2.

    Both systems gather the inputs of a layer again in the backward pass: MegaScale in
    chunks, Megatron-LM at once. `Case` supports this only with chunks, so both have
    them.

    Raises:
      ValueError: the GPUs are no whole number of replicas, or the batch does not divide
        over them.
    """
    dp, rest = divmod(gpus, TP * model.pp)
    if rest or batch % dp:
        raise ValueError(
            f"{gpus} GPUs and batch {batch} do not fill replicas of {TP * model.pp}; "
            f"use a multiple of {TP * model.pp}, and a batch that divides by replicas"
        )
    return Case(
        layers=model.layers,
        d_model=model.d_model,
        d_ff=4 * model.d_model,
        heads=model.heads,
        head_width=model.d_model // model.heads,
        kv_heads=model.heads,
        gated=False,
        parallel=system.parallel,
        vocab_size=VOCAB_SIZE,
        seq_len=SEQ_LEN,
        visible_keys=visible_pairs(SEQ_LEN, system.window) / SEQ_LEN,
        sizes=AxisSizes(pp=model.pp, dp_replicate=1, dp_shard=dp, tp=TP),
        chunks=model.chunks,
        microbatches=batch // dp,
        tp_chunks=TP,
    )


def flops_per_token(model: Model, system: System) -> float:
    """Return 72 L D^2 (1 + w / 6 D + V / 12 L D): forward and backward.

    w is the window, or the sequence. With the sequence it is the formula of Narayanan
    et al. 2021, arXiv:2104.04473, section 5.1, without recomputation. With half of it,
    which is our window, w / 6 D is s / 12 D: causal attention counted once.
    """
    width, layers = model.d_model, model.layers
    keys = system.window or SEQ_LEN
    attention = keys / (6 * width)
    head = VOCAB_SIZE / (12 * layers * width)
    return 72 * layers * width**2 * (1 + attention + head)

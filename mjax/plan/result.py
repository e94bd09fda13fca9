"""The result of planning a run, from which the page and the JSON output are made.

Figures that are read from the compiled step are separate from modelled figures. If the
step was not compiled, the memory is estimated from the trace, and the modelled figures
come from closed formulas.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mjax.config.train import TrainConfig
from mjax.estimate import memory
from mjax.mesh.axes import AxisSizes
from mjax.model.counts import num_params
from mjax.plan.options import Topology

ROLES = ("tp", "dp", "pp")
"""Roles of axes, from the fastest links to the slowest."""

JAX_SHARE = 0.75
"""Fraction of a GPU's memory that jax uses, unless XLA_CLIENT_MEM_FRACTION is set (jax
documentation, GPU memory allocation)."""

USABLE_SHARE = 0.92
"""Largest fraction of a GPU's memory that jax can use. The rest is assumed to hold the
context of CUDA, the buffers of NCCL, and the workspaces of libraries."""

SECONDS_PER_DAY = 86_400

WHOLE_STEP = "the whole step"
"""`Picture.where` of the picture of a whole step. Every other picture shows a part of
the step."""
IDLE = "idle slots of the pipeline"
HOST = "host"
"""Role of copies between GPU and host."""
HOST_COPIES = "waiting for copies to or from the host"
"""Part of a step in which compute waits for the link between GPU and host."""
COMPUTE_PARTS = {
    "product": "matrix products",
    "kernel": "attention and other kernels",
    "memory": "kernels bound by memory",
}
"""Parts of a step, by kind of compute."""
_LABELS = {
    "matrix products": "matmuls",
    "kernels bound by memory": "memory-bound kernels",
    "compute copy": "gathered weights",
    IDLE: "pipeline bubble",
    "exchange of chunks": "changes of virtual stage",
}
"""Labels that the page shows in place of names that the JSON output keeps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one device during a step, in bytes."""

    parts: Mapping[str, int]
    """Bytes by purpose; they add up to the total."""
    within: Mapping[str, int]
    """Bytes of the temporaries by purpose, from the trace of the step."""
    total: int
    is_compiled: bool
    """Whether the bytes are read from the executable, not estimated from the trace."""
    gpu: int
    """Bytes of memory of the GPU."""
    usable: int
    """Bytes of memory of the GPU that the run may use."""
    host: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes in pinned host memory for this GPU, by purpose."""

    @property
    def fits(self) -> bool:
        """Whether the step fits in the memory that the run may use."""
        return self.total <= self.usable

    @property
    def share(self) -> float:
        """Fraction of the GPU's memory that the step uses."""
        return self.total / self.gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Totals of the collectives of one kind over the same axes, per device and step."""

    kind: str
    """Name of the collective, as in HLO: all-gather, reduce-scatter, ..."""
    axes: tuple[str, ...]
    """Mesh axes over which the devices of a group differ."""
    role: str
    """Parallelism that the collectives serve: tp, dp or pp; mixed if several."""
    tier: str
    """Slowest link that the collectives cross: node or network."""
    dtype: str
    """Dtype of the elements, as in HLO: bf16, f32, ..."""
    group_size: int
    """Number of devices in a group."""
    count: int
    """Number of collectives."""
    num_async: int
    """Number of asynchronous collectives, which compute can overlap."""
    num_bytes: int
    """Bytes sent on the wire."""
    overlapped_bytes: int
    """Bytes sent while a matmul or a kernel runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """Communication of one device in a step, read from the executable."""

    traffic: tuple[Traffic, ...]
    communicators: int

    def overlapped_fraction(self, role: str) -> float | None:
        """Return the overlapped fraction of a role's bytes; None if nothing is sent."""
        rows = [row for row in self.traffic if row.role == role]
        total = sum(row.num_bytes for row in rows)
        return sum(row.overlapped_bytes for row in rows) / total if total else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modelled:
    """Figures of a cost model, not measured."""

    source: str
    """Name of the cost model."""
    parts_s: Mapping[str, float]
    """Seconds of the parts of a step, by name; they add up to the step."""
    exposed_s: Mapping[str, float]
    """Seconds that compute waits, by the role of the communication that occupies the
    link meanwhile. The collective for which compute waits may have another role, if it
    is still waiting for the link itself."""
    bubble: float
    """Idle time of the pipeline over its ideal time."""
    memory_bound_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the longest memory-bound kernels, by place in the traced step."""
    mfu: float
    tokens_per_s: float

    @property
    def step_s(self) -> float:
        """Seconds of one step: the sum of the parts."""
        return sum(self.parts_s.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Kernels with the same purpose in a step, or waits of the same kind, as one group.

    `seconds` and `floor_s` are modelled.
    """

    name: str
    seconds: float
    num_bytes: int | None
    """Bytes read and written in the memory of one GPU; None for waits."""
    floor_s: float | None
    """Minimum seconds that the algorithm needs; None without a formula."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """An interval in the picture of a schedule."""

    stream: str
    """compute, wait, node (the links inside a node), network, or host (the link to the
    host)."""
    name: str
    kind: str
    """Kind of work: product (a matmul), kernel, memory, loop, branch, or a role such as
    tp."""
    start_s: float
    stop_s: float
    passes: tuple[str, ...] = ()
    """Passes of the step in which the span runs, as in `Picture.passes`. A loop has the
    passes of its body; a transfer has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """A branch that is not taken in every run of the computation in the picture.

    The picture shows the branch in full.
    """

    part: str
    """Name of the computed part, such as: head and loss."""
    runs: float
    """Number of runs of the branch in a step; for changes of virtual stage, the mean
    over stages."""
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """One run of a computation of the schedule."""

    name: str
    """Name of the computation in the compiled program."""
    where: str
    """Place of the computation in the step: `WHOLE_STEP`, or words such as: one tick of
    the loop over ticks."""
    passes: tuple[str, ...]
    """Passes of the step, such as forward; empty if no scope names them."""
    runs: int
    """Number of runs of the computation in a step."""
    mean_s: float
    """Mean seconds of a run of the computation, over all runs in the step. Each branch
    is weighted by how often it runs."""
    spans: tuple[Span, ...]
    branches: tuple[Branch, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A suggested change."""

    flags: str
    why: str
    gain: float | None
    """Modelled fraction of the step's time that the change saves; None if unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run: memory, communication and time of a step, and advice."""

    recipe: str
    config: TrainConfig
    sizes: AxisSizes
    topology: Topology
    memory: Memory
    communication: Communication | None
    """Communication of a step; None without a compilation."""
    modelled: Modelled
    sources: tuple[Source, ...] = ()
    """Parts of the step by purpose of their kernels; empty without a compilation."""
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes for the reader."""
    trace_s: float
    compile_s: float | None = None
    bottleneck: str = ""
    advice: tuple[Advice, ...] = ()


def label(name: str) -> str:
    """Return the label that the page shows for a part of the step or of the memory."""
    return _LABELS.get(name, name)


def waiting(role: str) -> str:
    """Return the name of the part of a step that waits for a role's communication."""
    if role == HOST:
        return HOST_COPIES
    return f"waiting for {role}"


def usable_bytes(topology: Topology, device_memory_gib: float | None) -> int:
    """Return the bytes of a GPU that a run may use: the user's limit, or nearly all."""
    if device_memory_gib is not None:
        return int(device_memory_gib * 2**30)
    return round(topology.description.memory_bytes * USABLE_SHARE)


def memory_of(
    traced: memory.Estimate,
    topology: Topology,
    *,
    params_bytes: int,
    device_memory_gib: float | None,
    compiled_bytes: int | None = None,
    compiled_host_bytes: int | None = None,
) -> Memory:
    """Combine the figures of the memory of a step.

    Args:
      traced: bytes by purpose, from the trace.
      topology: the cluster.
      params_bytes: bytes of the stored parameters, a part of the state.
      device_memory_gib: the user's limit for the memory of a device, if any.
      compiled_bytes: bytes of the whole step, from the compiler; None uses the trace.
      compiled_host_bytes: bytes in pinned host memory, from the compiler; None uses the
        trace.
    """
    gpu = topology.description.memory_bytes
    usable = usable_bytes(topology, device_memory_gib)
    host = {
        "optimizer state": traced.host_state,
        "activations": traced.host_activations,
    }
    if compiled_host_bytes is not None and traced.host_activations:
        host["activations"] = compiled_host_bytes - traced.host_state
    passing = {
        "compute copy": traced.compute_copy,
        "gradients": traced.gradients,
        "pipeline stash": traced.stash,
    }
    at_rest = {
        "parameters": params_bytes,
        "optimizer state": traced.state - params_bytes,
    }
    if compiled_bytes is None:
        parts = at_rest | passing | {"working set": traced.working_set}
        return Memory(
            parts=_present(parts),
            within={},
            total=traced.total,
            is_compiled=False,
            gpu=gpu,
            usable=usable,
            host=_present(host),
        )
    rest = compiled_bytes - traced.state
    return Memory(
        parts=at_rest | {"batch and temporaries": rest},
        within=_present(passing),
        total=compiled_bytes,
        is_compiled=True,
        gpu=gpu,
        usable=usable,
        host=_present(host),
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the object that `--json` prints; modelled figures are in `modelled`."""
    sent, modelled, config = plan.communication, plan.modelled, plan.config
    return {
        "recipe": plan.recipe,
        "gpu": plan.topology.gpu,
        "nodes": plan.topology.nodes,
        "gpus_per_node": plan.topology.gpus_per_node,
        "mesh": dataclasses.asdict(plan.sizes),
        "batch_size": config.batch.size,
        "microbatches": config.batch.microbatches,
        "seq_len": config.data.seq_len,
        "params": num_params(config.model),
        "compiled": sent is not None,
        "trace_s": plan.trace_s,
        "compile_s": plan.compile_s,
        "fits": plan.memory.fits,
        "memory_bytes": plan.memory.total,
        "memory_source": _memory_source(plan.memory),
        "memory_parts_bytes": dict(plan.memory.parts),
        "memory_within_bytes": dict(plan.memory.within),
        "host_memory_parts_bytes": dict(plan.memory.host),
        "gpu_memory_bytes": plan.memory.gpu,
        "usable_memory_bytes": plan.memory.usable,
        "collectives": sent and [dataclasses.asdict(row) for row in sent.traffic],
        "overlapped_bytes_fraction": {
            role: sent and sent.overlapped_fraction(role) for role in ROLES
        },
        "communicators": sent and sent.communicators,
        "modelled": {
            "source": modelled.source,
            "step_s": modelled.step_s,
            "parts_s": dict(modelled.parts_s),
            "exposed_s": dict(modelled.exposed_s),
            "bubble": modelled.bubble,
            "memory_bound_s": dict(modelled.memory_bound_s),
            "by_source": [dataclasses.asdict(source) for source in plan.sources],
            "mfu": modelled.mfu,
            "tokens_per_s": modelled.tokens_per_s,
            "tokens_per_day": modelled.tokens_per_s * SECONDS_PER_DAY,
            "bottleneck": plan.bottleneck,
            "advice": [dataclasses.asdict(advice) for advice in plan.advice],
        },
        "notes": list(plan.notes),
    }


def _memory_source(found: Memory) -> str:
    return "executable" if found.is_compiled else "estimate from the trace"


def _present(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}

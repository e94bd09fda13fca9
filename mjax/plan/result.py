"""What is known of a planned run: the object that page, JSON and advice read.

Facts, read off the compiled step, and modelled figures are kept apart. Without a
compilation the facts are absent and the modelled figures come from a closed form.
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
"""What axes are for, from the fastest links to the slowest."""

JAX_SHARE = 0.75
"""Share of a GPU's memory that jax takes unless XLA_CLIENT_MEM_FRACTION says otherwise
(jax documentation, GPU memory allocation)."""

USABLE_SHARE = 0.92
"""Largest share of a GPU's memory that jax can take. Assumed: the rest is for the
context of CUDA, the buffers of NCCL, and workspaces of libraries."""

SECONDS_PER_DAY = 86_400

IDLE = "idle slots of the pipeline"
HOST = "host"
"""Role of copies between GPU and host."""
HOST_COPIES = "waiting for copies to or from the host"
"""Part of a step in which only the link between GPU and host works."""
COMPUTE_PARTS = {
    "product": "matrix products",
    "kernel": "attention and other kernels",
    "memory": "kernels bound by memory",
}
"""Parts of a step, by what computes."""
_LABELS = {
    "matrix products": "matmuls",
    "kernels bound by memory": "memory-bound kernels",
    "compute copy": "gathered weights",
    IDLE: "pipeline bubble",
    "exchange of chunks": "changes of virtual stage",
}
"""Labels on the page for names that readers of the JSON output rely on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device while it takes a step."""

    parts: Mapping[str, int]
    """By what they are for; they add up to all that is needed."""
    within: Mapping[str, int]
    """Of the temporaries among these, what the trace says they are for."""
    total: int
    is_compiled: bool
    """Read off the executable; else estimated from the trace."""
    gpu: int
    """Bytes of the GPU."""
    usable: int
    """Bytes that the run may take of it."""
    host: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes in pinned host memory for this GPU, by what they are for."""

    @property
    def fits(self) -> bool:
        """Whether the step fits."""
        return self.total <= self.usable

    @property
    def share(self) -> float:
        """Needed over the memory of the GPU."""
        return self.total / self.gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind over the same axes; of one device and step."""

    kind: str
    axes: tuple[str, ...]
    role: str
    tier: str
    dtype: str
    group_size: int
    count: int
    num_async: int
    num_bytes: int
    """Sent on the wire."""
    overlapped_bytes: int
    """Of these, in flight while a matmul or a kernel runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """What one device sends in a step, read off the executable."""

    traffic: tuple[Traffic, ...]
    communicators: int

    def overlapped_fraction(self, role: str) -> float | None:
        """Return the overlapped part of a role's bytes; None if nothing is sent."""
        rows = [row for row in self.traffic if row.role == role]
        total = sum(row.num_bytes for row in rows)
        return sum(row.overlapped_bytes for row in rows) / total if total else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modelled:
    """Figures of a cost model, not of a measurement."""

    source: str
    """By what they were modelled."""
    parts_s: Mapping[str, float]
    """Seconds that add up to the step."""
    exposed_s: Mapping[str, float]
    """By role: seconds in which compute waits while communication of that role occupies
    the link, even if another collective is awaited."""
    bubble: float
    """Idle over ideal time of the pipeline."""
    memory_bound_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The longest memory-bound kernels, by where they come from."""
    mfu: float
    tokens_per_s: float

    @property
    def step_s(self) -> float:
        """One step."""
        return sum(self.parts_s.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What a part of a step is for. All but the bytes is modelled."""

    name: str
    seconds: float
    num_bytes: int | None
    """Read and written in the memory of one GPU; None where compute waits."""
    floor_s: float | None
    """Seconds that the algorithm needs for it; None where no formula says it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of time in the picture of a schedule."""

    stream: str
    """compute, wait, node (the links inside a node), network, or host (its link)."""
    name: str
    kind: str
    """What it is: product (a matmul), kernel, memory, loop, or a role such as tp."""
    start_s: float
    stop_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A computation of the schedule, once from its beginning to its end."""

    name: str
    """In the compiled program."""
    passes: tuple[str, ...]
    """What it computes, such as forward and backward; empty if no scope says it."""
    runs: int
    """In a step."""
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A change that is likely to help."""

    flags: str
    why: str
    gain: float | None
    """Part of the step's time that it saves, as modelled; None where time is not the
    point."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, planned."""

    recipe: str
    config: TrainConfig
    sizes: AxisSizes
    topology: Topology
    memory: Memory
    communication: Communication | None
    """None without a compilation."""
    modelled: Modelled
    sources: tuple[Source, ...] = ()
    """The step by what its parts are for; empty without a compilation."""
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader must know beside the numbers."""
    trace_s: float
    compile_s: float | None = None
    bottleneck: str = ""
    advice: tuple[Advice, ...] = ()


def label(name: str) -> str:
    """Return the label on the page of a part of the step or of the memory."""
    return _LABELS.get(name, name)


def waiting(role: str) -> str:
    """Name the part of a step in which only the communication of a role runs."""
    if role == HOST:
        return HOST_COPIES
    return f"waiting for {role}"


def usable_bytes(topology: Topology, device_memory_gib: float | None) -> int:
    """Return what a run may take of a GPU: what its user says, or nearly all of it."""
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
    """Put the bytes of a step together.

    Args:
      traced: by what they are for, as the trace says.
      topology: the cluster.
      params_bytes: stored parameters, a part of the state.
      device_memory_gib: what the run may take of a device, if the user says it.
      compiled_bytes: all bytes, as the compiler says; None: as the trace does.
      compiled_host_bytes: bytes in pinned host memory, as the compiler says; None: as
        the trace does.
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
    """Return the object that `--json` prints; what is modelled is under `modelled`."""
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

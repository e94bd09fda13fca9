"""Read a compiled step: what one GPU sends in it, and how long it takes in a model.

Enters: a module, its analysis and its replay. Leaves: the parts of a `Plan` that need a
compilation.

The analysis takes the heaviest branch of every choice. What is in a branch that the
schedule takes less often counts less often (`choices`).
"""

import collections
from collections.abc import Mapping

from mjax import scopes
from mjax.config.train import TrainConfig
from mjax.hardware.utilization import Utilization
from mjax.mesh.axes import AxisSizes
from mjax.model.counts import flops_per_token, visible_pairs
from mjax.pipeline.schedule import Schedule, build
from mjax.plan.choices import taken_share
from mjax.plan.hlo.analysis import Analysis, Collective
from mjax.plan.hlo.parse import Module, short_name
from mjax.plan.hlo.work import KERNELS
from mjax.plan.options import Topology
from mjax.plan.replay import Replay
from mjax.plan.result import (
    COMPUTE_PARTS,
    IDLE,
    ROLES,
    Communication,
    Modelled,
    Picture,
    Span,
    Traffic,
    waiting,
)

_PICTURES = 6
"""Number of computations that are drawn: those that take most of the step."""

_LEAST_SHARE = 0.05
"""Share of the time of a computation below which a pass is not in its name."""

_PASSES = {"loss": "head and loss", "grad_norm": "gradient norm"}
"""Passes that people know by another name than their scope."""

_MEMORY_BOUND = 3
"""Number of memory-bound kernels that are named."""

Runs = Mapping[str, float]
"""How often each computation runs in a step, by its name."""


def schedule_of(config: TrainConfig, sizes: AxisSizes) -> Schedule | None:
    """Return the pipeline's schedule; None with one stage."""
    if sizes.pp == 1:
        return None
    return build(
        config.pipeline.schedule_name,
        num_stages=sizes.pp,
        num_chunks=config.pipeline.chunks,
        num_microbatches=config.batch.microbatches,
    )


def count_runs(
    module: Module, analysis: Analysis, schedule: Schedule | None = None
) -> Runs:
    """Count how often each computation runs in a step.

    Args:
      module: the step.
      analysis: of this module.
      schedule: of the pipeline; its choices are taken as often as it says. None: each
        takes its heavy branch every time.
    """
    runs: collections.Counter[str] = collections.Counter()
    found: list[tuple[str, float]] = [(module.entry, 1.0)]
    while found:
        name, times = found.pop()
        runs[name] += times  # pyright: ignore[reportArgumentType]
        for x in module.computations[name].instructions:
            part = taken_share(x.op_name, schedule) if x.branches else 1.0
            for called, turns in analysis.calls.get((name, x.name), ()):
                found.append((called, times * turns * part))
    return runs


def communication(analysis: Analysis, every: Runs, taken: Runs) -> Communication:
    """Add up what one GPU sends in a step.

    Args:
      analysis: of the step.
      every: runs of each computation, all choices taken.
      taken: the same, choices taken as often as the schedule takes them.
    """
    rows: dict[tuple, list[Collective]] = collections.defaultdict(list)
    for c in analysis.collectives:
        key = (c.role, c.kind, c.axes, c.tier, c.dtype, c.group_size)
        rows[key].append(c)

    def runs(c: Collective) -> int:
        return round(c.runs * taken[c.computation] / every[c.computation])

    traffic = tuple(
        Traffic(
            kind=kind,
            axes=axes,
            role=role,
            tier=tier,
            dtype=dtype,
            group_size=size,
            count=sum(runs(c) for c in found),
            num_async=sum(runs(c) for c in found if c.is_async),
            num_bytes=sum(runs(c) * c.wire_bytes for c in found),
            overlapped_bytes=sum(
                runs(c) * c.wire_bytes for c in found if c.is_overlapped
            ),
        )
        for (role, kind, axes, tier, dtype, size), found in sorted(rows.items())
    )
    return Communication(traffic=traffic, communicators=analysis.communicators)


def modelled(
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    found: Replay,
    every: Runs,
    taken: Runs,
) -> Modelled:
    """Model a step from its replay.

    Args:
      config: the run.
      sizes: of the mesh axes.
      topology: the cluster.
      found: the replay, with all choices taken.
      every: runs of each computation, as the replay takes them.
      taken: as the schedule takes them.
    """
    schedule = schedule_of(config, sizes)
    idle = 0.0 if schedule is None else schedule.bubble
    compute: dict[str, float] = collections.defaultdict(float)
    exposed = dict.fromkeys((*ROLES, *found.exposed_s), 0.0)
    for (name, role), seconds in found.waits_s.items():
        exposed[role] += seconds * taken[name] / every[name]
    for name, events in found.timeline.items():
        for event in events:
            if event.stream == "compute" and event.kind in COMPUTE_PARTS:
                seconds = taken[name] * (event.stop_s - event.start_s)
                compute[COMPUTE_PARTS[event.kind]] += seconds
    # In lockstep all stages compute in every tick; the idle slots are among these.
    parts = {part: seconds / (1 + idle) for part, seconds in compute.items()}
    parts[IDLE] = sum(compute.values(), 0.0) * idle / (1 + idle)
    parts |= {waiting(role): seconds for role, seconds in exposed.items()}
    tokens_per_s = config.batch.size * config.data.seq_len / sum(parts.values())
    utilization = Utilization(
        flops_per_token=flops_per_token(
            config.model, config.data.seq_len, config.adapters
        ),
        peak_flops_per_s=topology.description.peak_bf16_flops_per_s,
        num_devices=sizes.num_devices,
    )
    mfu = utilization.mfu(tokens_per_s)
    assert mfu is not None  # the peak is known
    return Modelled(
        source="replay of the compiled schedule",
        parts_s={name: seconds for name, seconds in parts.items() if seconds},
        exposed_s=exposed,
        bubble=idle,
        mfu=mfu,
        tokens_per_s=tokens_per_s,
    )


def memory_bound(module: Module, found: Replay, taken: Runs) -> dict[str, float]:
    """List the memory-bound kernels that take most of a step.

    Args:
      module: the step.
      found: the replay.
      taken: runs of each computation.
    Returns:
      Seconds of a step, largest first, by where in the traced step they come from.
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    for name, events in found.timeline.items():
        for event in events:
            if event.stream == "compute" and event.kind == "memory":
                origin = module.computations[name].by_name[event.name].op_name
                took = taken[name] * (event.stop_s - event.start_s)
                seconds[short_name(origin) or event.name] += took
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return dict(ranked[:_MEMORY_BOUND])


def pictures(module: Module, found: Replay, runs: Runs) -> tuple[Picture, ...]:
    """Choose the computations in which most of the step passes, and draw their time.

    Args:
      module: the step.
      found: the replay.
      runs: of each computation in a step.
    """

    def own_s(name: str) -> float:
        events = found.timeline[name]
        return sum((e.stop_s - e.start_s for e in events if e.kind != "loop"), 0.0)

    names = sorted(found.timeline, key=lambda n: -own_s(n) * runs[n])
    return tuple(
        Picture(
            name=name,
            passes=_passes(module, found, name),
            runs=round(runs[name]),
            spans=tuple(
                Span(
                    stream=e.stream,
                    name=e.name,
                    kind=e.role or e.kind,
                    start_s=e.start_s,
                    stop_s=e.stop_s,
                )
                for e in found.timeline[name]
            ),
        )
        for name in names[:_PICTURES]
        if own_s(name) > 0
    )


def _passes(module: Module, found: Replay, name: str) -> tuple[str, ...]:
    """Name the passes that a computation belongs to, by the time of its kernels."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for event in found.timeline[name]:
        if event.stream == "compute":
            origin = module.computations[name].by_name[event.name].op_name
            phase = scopes.read(origin).phase
            if phase is not None:
                seconds[phase] += event.stop_s - event.start_s
    least_s = _LEAST_SHARE * sum(seconds.values())
    return tuple(
        _PASSES.get(phase, phase) for phase in scopes.PHASES if seconds[phase] > least_s
    )


def kernel_flops(
    config: TrainConfig, sizes: AxisSizes, module: Module
) -> dict[str, float]:
    """Count FLOPs of a call of each attention kernel that the module holds.

    A product of queries with the keys they see is 2 H FLOPs a pair and head. Forward
    has two of them; backward, in two kernels that each compute the scores again, three
    for the gradient of the queries and four for those of keys and values, or five in
    one fused kernel (Dao 2023, arXiv:2307.08691, algorithm 2). Layers of different
    windows run equally often in a scan: the mean over them is exact in sum.
    """
    model, seq_len = config.model, config.data.seq_len
    rows = config.batch.size // (sizes.dp * config.batch.microbatches)
    pairs = sum(visible_pairs(seq_len, kind.window) for kind in model.kinds)
    heads = model.heads / sizes.tp
    product = 2 * model.head_width * rows * heads * pairs / model.layers
    counts = {
        **{"attention_forward": 2, "attention_dq": 3, "attention_dkv": 4},
        "attention_fused": 5,
    }
    present = {
        part
        for computation in module.computations.values()
        for x in computation.instructions
        if x.target.startswith(KERNELS)
        for part in x.op_name.split("/")
    }
    return {name: n * product for name, n in counts.items() if name in present}

"""Read the communication of a GPU and the modelled time from a compiled step.

Input: a module, its analysis and its replay. Output: the parts of a `Plan` that need a
compilation.

The analysis assumes the heaviest branch of every conditional. Branches that the
schedule takes less often count less often (`choices`).
"""

import collections
from collections.abc import Mapping

from mjax.config.train import TrainConfig
from mjax.hardware.utilization import Utilization
from mjax.mesh.axes import AxisSizes
from mjax.model.counts import flops_per_token, row_pairs
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
    Traffic,
    waiting,
)
from mjax.trace import scopes

_MEMORY_BOUND = 3
"""Number of memory-bound kernels to name."""

Runs = Mapping[str, float]
"""Number of executions of each computation in a step, by name."""
Slots = frozenset[tuple[str, str]]
"""Instructions that run in every half-tick: names of (computation, instruction)."""


def schedule_of(config: TrainConfig, sizes: AxisSizes) -> Schedule | None:
    """Return the pipeline's schedule; None if there is only one stage."""
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
      module: module of the step.
      analysis: analysis of this module.
      schedule: pipeline schedule, which determines how often heavy branches run. None
        means that they always run.
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


def half_ticks(module: Module, analysis: Analysis) -> Slots:
    """Find the instructions that run in every half-tick of a pipeline.

    These are the layers of a virtual stage. Idle half-ticks do not run the head, the
    embedding, changes of virtual stage or the optimizer. They do run the copies to and
    from the stash and the sums of gradients around the layers, but these instructions
    are not found, so their idle part counts as busy.

    Args:
      module: the step.
      analysis: analysis of this module.
    Returns:
      Pairs of (name of the computation, name of the instruction).
    """
    slots = set[tuple[str, str]]()
    found, seen = [(module.entry, False)], set[tuple[str, bool]]()
    while found:
        name, is_slot = place = found.pop()
        if place in seen:
            continue
        seen.add(place)
        for x in module.computations[name].instructions:
            # XLA names no scope for some of the instructions that it adds.
            is_work = is_slot or scopes.read(x.op_name).is_slot
            if is_work:
                slots.add((name, x.name))
            calls = analysis.calls.get((name, x.name), ())
            found += [(called, is_work) for called, _ in calls]
    return frozenset(slots)


def communication(analysis: Analysis, every: Runs, taken: Runs) -> Communication:
    """Sum the communication of one GPU in a step.

    Args:
      analysis: analysis of the step.
      every: number of runs of each computation if heavy branches always run.
      taken: number of runs if heavy branches run as often as the schedule says.
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
    slots: Slots,
) -> Modelled:
    """Model a step from its replay.

    In lockstep all stages, idle ones too, compute in every half-tick that one of them
    uses. With b = idle time / ideal time (`Schedule.bubble`), the layers take (1 + b)
    times their ideal time, and b / (1 + b) of the time that they take is idle. Head,
    embedding and optimizer do not run in idle half-ticks.

    Args:
      config: config of the run.
      sizes: sizes of the mesh axes.
      topology: the cluster.
      found: replay of the step, in which heavy branches always run.
      every: number of runs of each computation in the replay.
      taken: number of runs if heavy branches run as often as the schedule says.
      slots: instructions that run in every half-tick, from `half_ticks`.
    """
    schedule = schedule_of(config, sizes)
    idle = 0.0 if schedule is None else schedule.bubble
    compute: dict[str, float] = collections.defaultdict(float)
    idle_s = 0.0
    exposed = dict.fromkeys((*ROLES, *found.exposed_s), 0.0)
    for (name, role), seconds in found.waits_s.items():
        exposed[role] += seconds * taken[name] / every[name]
    for name, events in found.timeline.items():
        for event in events:
            if event.stream == "compute" and event.kind in COMPUTE_PARTS:
                seconds = taken[name] * (event.stop_s - event.start_s)
                if (name, event.name) in slots:
                    idle_s += seconds * idle / (1 + idle)
                    seconds /= 1 + idle
                compute[COMPUTE_PARTS[event.kind]] += seconds
    parts = compute | {IDLE: idle_s}
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
    assert mfu is not None  # described GPUs have a known peak
    return Modelled(
        source="replay of the compiled schedule",
        parts_s={name: seconds for name, seconds in parts.items() if seconds},
        exposed_s=exposed,
        bubble=idle,
        mfu=mfu,
        tokens_per_s=tokens_per_s,
    )


def memory_bound(module: Module, found: Replay, taken: Runs) -> dict[str, float]:
    """List the memory-bound kernels with the largest part of a step.

    Args:
      module: module of the step.
      found: replay of the step.
      taken: number of runs of each computation in a step.
    Returns:
      Seconds per step by place in the traced step, the largest first.
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


def kernel_flops(
    config: TrainConfig, sizes: AxisSizes, module: Module
) -> dict[str, float]:
    """Return the FLOPs of one call of each attention kernel of the module, by its name.

    A matmul of queries with visible keys takes 2 H FLOPs per pair and head. The forward
    pass has two. The backward pass has two kernels that both recompute the scores:
    three matmuls for the gradient of the queries and four for the gradients of keys and
    values; or one fused kernel with five (Dao 2023, arXiv:2307.08691, algorithm 2).
    Layers of different windows run equally often in a scan, so their mean gives the
    exact sum.
    """
    model, seq_len = config.model, config.data.seq_len
    rows = config.batch.size // (sizes.dp * config.batch.microbatches)
    pairs = row_pairs(model, seq_len)
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

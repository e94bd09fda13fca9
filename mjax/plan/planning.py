"""Plan a run: compile it and read the program, or without a compiler go by formulas.

Enters: a config that fits its cluster. Leaves: a `Plan`, but for the advice.
"""

import collections
import time
from collections.abc import Callable, Mapping

from mjax.config import TrainConfig
from mjax.counts import flops_per_token, visible_pairs
from mjax.mesh.axes import AxisSizes
from mjax.mesh.described import abstract_mesh
from mjax.metrics import Utilization
from mjax.pipeline.schedule import build
from mjax.plan import closed_form
from mjax.plan.analysis import Analysis, analyse
from mjax.plan.compile import compilable, compile_step, stored_bytes
from mjax.plan.cost import CostModel
from mjax.plan.hlo import Module, parse
from mjax.plan.replay import Replay, replay
from mjax.plan.result import (
    ROLES,
    Communication,
    Modelled,
    Picture,
    Plan,
    Span,
    Traffic,
    memory_of,
)
from mjax.plan.topology import Topology
from mjax.sim.case import Constants
from mjax.traced import trace_step

_PICTURES = 6
"""Computations that are drawn: those in which most of the step passes."""

IDLE = "idle slots of the pipeline"
COMPUTE_PARTS = {
    "product": "matrix products",
    "kernel": "attention and other kernels",
    "memory": "kernels bound by memory",
}


def plan_compiled(
    recipe: str,
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    say: Callable[[str], None],
) -> Plan:
    """Compile the step and read it.

    Args:
      recipe: where the config comes from, for the page.
      config: the run, settled.
      sizes: of the mesh axes.
      topology: the cluster.
      say: takes lines on the progress.
    Raises:
      ValueError: the program cannot be built, or its text is not understood.
      NoPluginError: jax has no CUDA plugin.
    """
    program, note = compilable(config, topology)
    executable = compile_step(program, sizes, topology, say)
    module = parse(executable.text)
    analysis = analyse(module, sizes, topology.gpus_per_node)
    modelled = replay(
        module,
        analysis,
        CostModel.of(topology.description),
        kernel_flops=_kernel_flops(program, sizes, module),
    )
    say(f"read {len(analysis.collectives)} collectives, {analysis.num_products} GEMMs")
    runs = runs_of(module, analysis)
    return Plan(
        recipe=recipe,
        config=config,
        sizes=sizes,
        topology=topology,
        memory=memory_of(
            executable.traced,
            topology,
            params_bytes=executable.params_bytes,
            device_memory_gib=config.device_memory_gib,
            compiled_bytes=executable.memory_bytes,
        ),
        communication=_communication(analysis),
        modelled=_modelled(config, sizes, topology, modelled, runs),
        pictures=pictures(modelled, runs),
        notes=(note,) if note else (),
        trace_s=executable.trace_s,
        compile_s=executable.compile_s,
    )


def plan_by_formulas(
    recipe: str,
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    why: str,
) -> Plan:
    """Plan without compiling: memory from the trace of the step, time from formulas.

    Args:
      recipe: where the config comes from, for the page.
      config: the run, settled.
      sizes: of the mesh axes.
      topology: the cluster.
      why: nothing is compiled, for people.
    Raises:
      ValueError: the program cannot be built.
    """
    started_s = time.perf_counter()
    mesh = abstract_mesh(sizes, gpu=topology.gpu)
    program, _, needed = trace_step(config, mesh)
    return Plan(
        recipe=recipe,
        config=config,
        sizes=sizes,
        topology=topology,
        memory=memory_of(
            needed,
            topology,
            params_bytes=stored_bytes(program.abstract_state.params),
            device_memory_gib=config.device_memory_gib,
        ),
        communication=None,
        modelled=modelled_by_formulas(config, sizes, topology),
        notes=(why,),
        trace_s=time.perf_counter() - started_s,
    )


def modelled_by_formulas(
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    constants: Constants = closed_form.ASSUMED,
) -> Modelled:
    """Model a step in closed form.

    Args:
      config: the run, settled.
      sizes: of the mesh axes.
      topology: the cluster.
      constants: how much of it is reached, and what is hidden.
    """
    found = closed_form.estimate(config, sizes, topology, constants)
    time = found.time
    parts = {
        COMPUTE_PARTS["product"]: time.products_s + time.head_s,
        COMPUTE_PARTS["kernel"]: time.attention_s,
        COMPUTE_PARTS["memory"]: time.elementwise_s + time.optimizer_s,
        IDLE: time.bubble_s,
        waiting("tp"): time.tp_s,
        waiting("dp"): time.dp_s,
        waiting("pp"): time.pp_s,
        "host": time.fixed_s,
    }
    return Modelled(
        source="closed form (mjax.sim)",
        parts_s={name: seconds for name, seconds in parts.items() if seconds},
        exposed_s={"tp": time.tp_s, "dp": time.dp_s, "pp": time.pp_s},
        bubble=time.bubble,
        mfu=found.mfu,
        tokens_per_s=config.batch.size * config.data.seq_len / time.total_s,
    )


def waiting(role: str) -> str:
    """Name the part of a step in which only the communication of a role goes on."""
    return f"waiting for {role}"


def bubble(config: TrainConfig, sizes: AxisSizes) -> float:
    """Count idle over ideal time of the pipeline's schedule; 0 with one stage."""
    if sizes.pp == 1:
        return 0.0
    schedule = build(
        config.pipeline.schedule_name,
        num_stages=sizes.pp,
        num_chunks=config.pipeline.chunks,
        num_microbatches=config.batch.microbatches,
    )
    return schedule.bubble


def runs_of(module: Module, analysis: Analysis) -> Mapping[str, int]:
    """Count how often each computation runs in a step, by its name."""
    runs: collections.Counter[str] = collections.Counter()
    waiting = [(module.entry, 1)]
    while waiting:
        name, times = waiting.pop()
        runs[name] += times
        for x in module.computations[name].instructions:
            for called, turns in analysis.calls.get((name, x.name), ()):
                waiting.append((called, times * turns))
    return runs


def pictures(found: Replay, runs: Mapping[str, int]) -> tuple[Picture, ...]:
    """Choose the computations in which most of the step passes, and draw their time.

    Args:
      found: the replay.
      runs: of each computation in a step.
    """

    def own_s(name: str) -> float:
        events = found.timeline[name]
        return sum(e.stop_s - e.start_s for e in events if e.kind != "loop")

    names = sorted(found.timeline, key=lambda n: -own_s(n) * runs[n])
    return tuple(
        Picture(
            name=name,
            runs=runs[name],
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


def _modelled(
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    found: Replay,
    runs: Mapping[str, int],
) -> Modelled:
    idle = bubble(config, sizes)
    compute: dict[str, float] = collections.defaultdict(float)
    for name, events in found.timeline.items():
        for event in events:
            if event.stream == "compute" and event.kind in COMPUTE_PARTS:
                part = COMPUTE_PARTS[event.kind]
                compute[part] += runs[name] * (event.stop_s - event.start_s)
    # In lockstep all stages compute in every tick; the idle slots are among these.
    parts = {part: seconds / (1 + idle) for part, seconds in compute.items()}
    parts[IDLE] = found.compute_s * idle / (1 + idle)
    parts |= {waiting(role): seconds for role, seconds in found.exposed_s.items()}
    tokens_per_s = config.batch.size * config.data.seq_len / found.step_s
    peak = topology.description.peak_bf16_flops_per_s
    utilization = Utilization(
        flops_per_token=flops_per_token(config.model, config.data.seq_len),
        peak_flops_per_s=peak,
        num_devices=sizes.num_devices,
    )
    mfu = utilization.mfu(tokens_per_s)
    assert mfu is not None  # the peak is known
    return Modelled(
        source="replay of the compiled schedule",
        parts_s={name: seconds for name, seconds in parts.items() if seconds},
        exposed_s=dict.fromkeys(ROLES, 0.0) | dict(found.exposed_s),
        bubble=idle,
        mfu=mfu,
        tokens_per_s=tokens_per_s,
    )


def _communication(analysis: Analysis) -> Communication:
    rows: dict[tuple, list] = collections.defaultdict(list)
    for c in analysis.collectives:
        key = (c.role, c.kind, c.axes, c.tier, c.dtype, c.group_size)
        rows[key].append(c)
    return Communication(
        traffic=tuple(
            Traffic(
                kind=kind,
                axes=axes,
                role=role,
                tier=tier,
                dtype=dtype,
                group_size=size,
                count=sum(c.runs for c in found),
                num_async=sum(c.runs for c in found if c.is_async),
                num_bytes=sum(c.runs * c.wire_bytes for c in found),
                overlapped_bytes=sum(
                    c.runs * c.wire_bytes for c in found if c.is_overlapped
                ),
            )
            for (role, kind, axes, tier, dtype, size), found in sorted(rows.items())
        ),
        overlapped_fraction={
            role: analysis.overlapped_bytes_fraction(role) for role in ROLES
        },
        communicators=analysis.communicators,
    )


def _kernel_flops(
    config: TrainConfig, sizes: AxisSizes, module: Module
) -> dict[str, float]:
    """Count FLOPs of a call of each attention kernel that the module holds.

    A product of queries with the keys they see is 2 H FLOPs a pair and head. Forward
    has two of them; backward, in two kernels that each compute the scores again, three
    for the gradient of the queries and four for those of keys and values (Dao 2023,
    arXiv:2307.08691, algorithm 2). Layers of different windows run equally often in a
    scan: the mean over them is exact in sum.
    """
    model, seq_len = config.model, config.data.seq_len
    rows = config.batch.size // (sizes.dp * config.batch.microbatches)
    pairs = sum(visible_pairs(seq_len, kind.window) for kind in model.kinds)
    heads = model.heads / sizes.tp
    product = 2 * model.head_width * rows * heads * pairs / model.layers
    counts = {"attention_forward": 2, "attention_dq": 3, "attention_dkv": 4}
    present = {
        part
        for computation in module.computations.values()
        for x in computation.instructions
        if x.target
        for part in x.op_name.split("/")
    }
    return {name: n * product for name, n in counts.items() if name in present}

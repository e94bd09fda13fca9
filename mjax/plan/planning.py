"""Plan a run: compile it and read the program, or trace it and use formulas.

Input: a config that fits its cluster. Output: a `Plan` without the advice.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

from mjax.config.train import TrainConfig
from mjax.estimate.formulas.case import Constants
from mjax.hardware.described import abstract_mesh
from mjax.mesh.axes import AxisSizes, resolve
from mjax.plan import closed_form, reading
from mjax.plan.compile import Executable, compilable, compile_step, stored_bytes
from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import analyse
from mjax.plan.hlo.frames import read_frames
from mjax.plan.hlo.parse import parse
from mjax.plan.options import Topology
from mjax.plan.pictures import pictures
from mjax.plan.replay import replay
from mjax.plan.result import (
    COMPUTE_PARTS,
    HOST_COPIES,
    IDLE,
    Communication,
    Modelled,
    Picture,
    Plan,
    Source,
    memory_of,
    waiting,
)
from mjax.plan.sources import by_source
from mjax.step.traced import trace_step


def plan_compiled(
    recipe: str,
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    say: Callable[[str], None],
) -> Plan:
    """Compile the step; return the plan read from it.

    Args:
      recipe: origin of the config, for the page.
      config: config of the run, from `topology.settle`.
      sizes: sizes of the mesh axes.
      topology: the cluster.
      say: function called with each line about the progress.
    Raises:
      ValueError: the program cannot be built.
      NoPluginError: jax has no CUDA plugin.
      RuntimeError: the compiled step cannot be read.
    """
    program, notes = compilable(config, topology)
    executable = compile_step(program, sizes, topology, say)
    try:
        plan = read(recipe, program, sizes, topology, executable)
    except ValueError as error:  # not an error in the input
        raise RuntimeError(f"the compiled step is not understood: {error}") from error
    return dataclasses.replace(plan, config=config, notes=(*notes, *plan.notes))


def read(
    recipe: str,
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    executable: Executable,
) -> Plan:
    """Return the plan read from a compiled step.

    Args:
      recipe: origin of the config, for the page.
      config: config of the run as compiled.
      sizes: sizes of the mesh axes.
      topology: the cluster.
      executable: the compiled step.
    Raises:
      ValueError: the text of the program is not understood.
    """
    found = read_schedule(
        config,
        sizes,
        topology,
        text=executable.text,
        params_bytes=executable.params_bytes,
    )
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
            compiled_bytes=executable.needed.total_bytes,
            compiled_host_bytes=executable.needed.host_bytes,
        ),
        communication=found.communication,
        modelled=found.modelled,
        sources=found.sources,
        pictures=found.pictures,
        notes=(*executable.notes, *_limits(found.timed_by_bytes)),
        trace_s=executable.trace_s,
        compile_s=executable.compile_s,
    )


class Schedule(NamedTuple):
    """Figures read from the text of a compiled step, and its modelled time."""

    communication: Communication
    modelled: Modelled
    sources: tuple[Source, ...]
    pictures: tuple[Picture, ...]
    timed_by_bytes: tuple[str, ...]
    """See `Replay.timed_by_bytes`."""


def read_schedule(
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    *,
    text: str,
    params_bytes: int,
) -> Schedule:
    """Read the text of a compiled step.

    Args:
      config: config of the run as compiled.
      sizes: sizes of the mesh axes.
      topology: the cluster.
      text: text of the scheduled module.
      params_bytes: bytes of the stored parameters of one device.
    Raises:
      ValueError: the text is not understood.
    """
    module = parse(text)
    analysis = analyse(module, sizes, topology.gpus_per_node)
    cost = CostModel.of(topology.description)
    replayed = replay(
        module,
        analysis,
        cost,
        kernel_flops=reading.kernel_flops(config, sizes, module),
    )
    every = reading.count_runs(module, analysis)
    schedule = reading.schedule_of(config, sizes)
    taken = reading.count_runs(module, analysis, schedule)
    slots = reading.half_ticks(module, analysis)
    modelled = dataclasses.replace(
        reading.modelled(config, sizes, topology, replayed, every, taken, slots),
        memory_bound_s=reading.memory_bound(module, replayed, taken),
    )
    sources = by_source(
        config,
        sizes,
        cost,
        module=module,
        frames=read_frames(text),
        found=replayed,
        taken=taken,
        slots=slots,
        modelled=modelled,
        params_bytes=params_bytes,
    )
    return Schedule(
        communication=reading.communication(analysis, every, taken),
        modelled=modelled,
        sources=sources,
        pictures=pictures(
            module, analysis, replayed, every=every, taken=taken, schedule=schedule
        ),
        timed_by_bytes=replayed.timed_by_bytes,
    )


def _limits(timed_by_bytes: tuple[str, ...]) -> list[str]:
    """Return a note on kernels whose time is modelled from their bytes, if any."""
    if not timed_by_bytes:
        return []
    return [
        "modelled time: the FLOPs of these kernels are unknown, so their time is "
        f"modelled from the bytes that they move: {', '.join(timed_by_bytes)}"
    ]


def plan_by_formulas(
    recipe: str,
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    why: str,
) -> Plan:
    """Plan without compiling: memory from the trace of the step, time from formulas.

    Args:
      recipe: origin of the config, for the page.
      config: config of the run, from `topology.settle`.
      sizes: sizes of the mesh axes.
      topology: the cluster.
      why: the reason why nothing is compiled, for the user.
    Raises:
      ValueError: the program cannot be built.
    """
    started_s = time.perf_counter()
    stand_in, notes = compilable(config, topology)
    mesh = abstract_mesh(sizes, gpu=topology.gpu)
    program, _, needed = trace_step(stand_in, mesh)
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
        notes=(why, *notes),
        trace_s=time.perf_counter() - started_s,
    )


def traced_bytes(config: TrainConfig, topology: Topology) -> int:
    """Estimate the memory of one device in bytes, from the trace of the step.

    Args:
      config: the run, from `topology.settle`.
      topology: the cluster; the mesh uses all of it.
    """
    sizes = resolve(config.mesh, topology.num_gpus)
    stand_in, _ = compilable(config, topology)
    return trace_step(stand_in, abstract_mesh(sizes, gpu=topology.gpu))[2].total


def modelled_by_formulas(
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    constants: Constants = closed_form.ASSUMED,
) -> Modelled:
    """Model a step in closed form.

    Args:
      config: the run, from `topology.settle`.
      sizes: sizes of the mesh axes.
      topology: the cluster.
      constants: as for `closed_form.estimate`.
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
        HOST_COPIES: found.host_copies_s,
        "host": time.fixed_s,
    }
    return Modelled(
        source="closed form (mjax.estimate.formulas)",
        parts_s={name: seconds for name, seconds in parts.items() if seconds},
        exposed_s={"tp": time.tp_s, "dp": time.dp_s, "pp": time.pp_s},
        bubble=time.bubble,
        mfu=found.mfu,
        tokens_per_s=config.batch.size * config.data.seq_len / found.total_s,
    )

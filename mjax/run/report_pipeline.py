"""Describe the pipeline of a run before it starts.

Input: the config of the run and the sizes of its mesh. Output: lines of text. All
numbers are counted from the schedule's tables, except memory, which comes from the
trace of the step.
"""

from collections.abc import Iterator

import numpy as np

from mjax.config.train import TrainConfig
from mjax.estimate import memory
from mjax.kernels.target import target
from mjax.mesh.axes import AxisSizes, tp_chunks
from mjax.pipeline.config import PipelineConfig, Stash
from mjax.pipeline.make import make_pipeline
from mjax.pipeline.partition import Partition
from mjax.pipeline.schedule import Phase, Schedule


def describe(
    config: TrainConfig, sizes: AxisSizes, needed: memory.Estimate
) -> Iterator[str]:
    """Yield lines about the pipeline, or about ignored options if there is none.

    Args:
      config: config of the run.
      sizes: sizes of the mesh axes.
      needed: estimated memory of the step.
    """
    if sizes.pp * config.pipeline.chunks == 1:
        yield from _ignored(config.pipeline)
        return
    pipeline = make_pipeline(
        config.pipeline,
        num_layers=config.model.layers,
        period=config.model.pattern_length,
        num_stages=sizes.pp,
        num_microbatches=config.batch.microbatches,
        platform=target().platform,
        permutes=tp_chunks(config.mesh, sizes.tp) > 1,
    )
    schedule = pipeline.schedule
    yield from _schedule_lines(schedule)
    yield _layers_line(pipeline.partition)
    yield f"idle half-ticks: {pipeline.options.idle} ({_why_idle(config, sizes)})"
    yield _stash_line(schedule, pipeline.options.stash, needed.stash)
    yield from _sent_lines(schedule, _sent_bytes(config, sizes))
    yield _zero_line(config, sizes)


def _zero_line(config: TrainConfig, sizes: AxisSizes) -> str:
    if sizes.dp == 1:
        return "over dp: no communication, its size is 1"
    gathers = config.zero > 0 and sizes.shards > 1
    if config.pipeline.chunks == 1:
        what = "gradients are reduced layer by layer in the last tick"
        if gathers:
            what = f"weights are gathered layer by layer in the first tick and {what}"
    else:
        what = "weights are gathered and gradients" if gathers else "gradients are"
        what += " reduced in pieces while the stages compute; the first virtual stage "
        what += "gathers in the first tick and " if gathers else ""
        what += "reduces in the last tick"
    return f"over dp {sizes.dp}, ZeRO {config.zero}: {what}"


def _stash_line(schedule: Schedule, stash: Stash, num_bytes: int) -> str:
    slots, in_flight = schedule.num_stash_slots, schedule.in_flight
    return (
        f"stash: {stash}, {slots} buffer entries x "
        f"{memory.in_units(num_bytes / slots)} = {memory.in_units(num_bytes)} on every "
        f"stage; in flight on stages 0 to {schedule.num_stages - 1}: "
        f"{', '.join(map(str, in_flight))}"
    )


def _ignored(config: PipelineConfig) -> Iterator[str]:
    """Yield a line with the pipeline options given to a run without a pipeline."""
    default = PipelineConfig()
    changed = [
        f"--pipeline.{name.replace('_', '-')}"
        for name, value in vars(config).items()
        if value != getattr(default, name)
    ]
    if changed:
        yield (
            "no pipeline, since --mesh.pp and --pipeline.chunks are 1; ignored: "
            f"{', '.join(changed)}"
        )


def _schedule_lines(schedule: Schedule) -> Iterator[str]:
    stages, chunks, count = (
        schedule.num_stages,
        schedule.num_chunks,
        schedule.num_microbatches,
    )
    phases = ", ".join(
        f"{phase.stop - phase.start} {_slots(phase)}" for phase in schedule.phases
    )
    yield (
        f"pipeline: {schedule.name}, {stages} stages x {chunks} virtual, {count} "
        f"microbatches; {schedule.num_ticks} ticks: {phases}"
    )
    formula = (stages - 1) / (chunks * count)
    yield (
        f"bubble: {schedule.bubble:.1%} of the ideal time, counted from the schedule; "
        f"(P - 1) / (v M) = {formula:.1%}"
    )
    if count < stages:
        yield (
            f"warning: --batch.microbatches {count} is less than --mesh.pp {stages}: "
            f"the stages are never all busy, and idle time is {schedule.bubble:.0%} of "
            "the ideal time; give more microbatches or fewer stages"
        )


def _slots(phase: Phase) -> str:
    if phase.has_forward and phase.has_backward:
        return "of both"
    return "forward only" if phase.has_forward else "backward only"


def _layers_line(partition: Partition) -> str:
    counts = partition.layers_per_chunk
    line = f"layers: {max(counts)} per virtual stage"
    shorter = [str(at) for at, count in enumerate(counts) if count < max(counts)]
    if not shorter:
        return line
    return f"{line}, but {min(counts)} in virtual stage {', '.join(shorter)}"


def _why_idle(config: TrainConfig, sizes: AxisSizes) -> str:
    if config.pipeline.idle != "auto":
        return "as requested"
    if tp_chunks(config.mesh, sizes.tp) > 1:
        return "auto: every device must take part in the permutes over tp"
    if target().platform == "cpu":
        return "auto: devices of a CPU share its cores"
    return "auto: a conditional would make the device wait for the host"


def _sent_bytes(config: TrainConfig, sizes: AxisSizes) -> int:
    """Count the bytes of one device's activation between stages, [b, T/tp, D]."""
    rows = config.batch.size // (sizes.dp * config.batch.microbatches)
    entries = rows * config.data.seq_len // sizes.tp * config.model.d_model
    return entries * np.dtype(config.precision.compute).itemsize


def _sent_lines(schedule: Schedule, num_bytes: int) -> Iterator[str]:
    """Yield lines on the bytes that stages must send, and on the bytes they do send."""
    last = schedule.num_stages - 1
    if last == 0:
        yield "sent between stages: nothing, there is one stage"
        return
    one = memory.in_units(num_bytes)
    for what, sends, ticks in (
        (
            "forward, activations",
            schedule.forward_sends,
            [p.stop - p.start for p in schedule.phases if p.has_forward],
        ),
        (
            "backward, gradients",
            schedule.backward_sends,
            [p.stop - p.start for p in schedule.phases if p.has_backward],
        ),
    ):
        yield (
            f"sent {what} of {one}: {', '.join(map(str, sends))} per step from each "
            f"device of stages 0 to {last}, at most "
            f"{memory.in_units(max(sends) * num_bytes)}; in fact "
            f"{memory.in_units(sum(ticks) * num_bytes)} from each, because the whole "
            f"ring sends in all {sum(ticks)} ticks"
        )

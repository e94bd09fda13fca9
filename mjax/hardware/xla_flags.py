"""The table of XLA options for programs with collectives.

Thresholds for combined collectives follow from the model (`mjax.hardware.combining`).

Options are passed per program, as compiler options. Compiler options override
XLA_FLAGS, change no process-wide state, and also apply to a program that is planned
without a GPU. An option that the installed XLA does not have is left out; the run
reports it at its start. docs/overlap.md lists the options that other frameworks set,
and their effects.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh

from mjax.hardware.combining import Thresholds
from mjax.mesh.axes import AXES, AxisSizes

Value = bool | int | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """Properties of a step that determine its options."""

    sizes: AxisSizes
    tp_chunks: int
    """Number of chunks into which tensor-parallel communication splits activations; 1
    means no chunking."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An XLA option, and the condition under which a step is compiled with it."""

    name: str
    value: Value
    why: str
    since: str
    """Oldest version of jax with which the option was tried."""
    applies: Callable[[Use], bool]
    platform: Literal["cpu", "gpu"] = "gpu"
    """Platform to which the option applies."""


def _has_pipeline(use: Use) -> bool:
    return use.sizes.pp > 1


def _has_dp(use: Use) -> bool:
    return use.sizes.dp > 1


def _has_dp_alone(use: Use) -> bool:
    return use.sizes.dp > 1 and use.sizes.pp == 1


def _has_chunks(use: Use) -> bool:
    return use.tp_chunks > 1


_IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"

TABLE = (
    Option(
        name="xla_gpu_dot_merger_threshold_mb",
        value=0,
        why="otherwise matmuls of chunks with the same weights are merged into one, "
        "which waits for all chunks",
        since="0.11.2",
        applies=_has_chunks,
    ),
    Option(
        name=_IN_FLIGHT,
        value=64,
        why="transfers of chunks overlap each other, and collectives over dp overlap a "
        "loop of layers, whose 14 permutes count against the limit",
        since="0.11.2",
        applies=_has_chunks,
    ),
    Option(
        name=_IN_FLIGHT,
        value=4,
        why="otherwise a transfer between stages waits for every collective over tp",
        since="0.11.2",
        applies=lambda use: _has_pipeline(use) and not _has_chunks(use),
    ),
    Option(
        name=_IN_FLIGHT,
        value=4,
        why="otherwise the gathers of the next layer's weights wait for each other, "
        "and most are not overlapped",
        since="0.11.2",
        applies=lambda use: _has_dp_alone(use) and not _has_chunks(use),
    ),
    Option(
        name="xla_gpu_experimental_collective_start_as_early_as_possible",
        value=True,
        why="otherwise transfers of gradients between stages and of partial sums over "
        "tp start after most of the compute that could overlap them",
        since="0.11.2",
        applies=lambda use: _has_pipeline(use) or _has_chunks(use),
    ),
    Option(
        name="xla_gpu_execution_terminate_timeout",
        value="1200s",
        why="the process exits if a step hangs for 20 minutes",
        since="0.11.2",
        applies=lambda use: use.sizes.num_devices > 1,
    ),
    Option(
        name="xla_cpu_scheduler_type",
        value="CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        why="otherwise independent collectives start in a different order on each "
        "simulated device and match the wrong partner",
        since="0.11.2",
        applies=lambda use: use.sizes.num_devices > 1,
        platform="cpu",
    ),
)
"""Sources. GPU: XLA's schedules for H200s (docs/overlap.md), except for the time limit
of an execution (docs/resilience.md). CPU: docs/parallelism.md, "Simulated devices"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """The options chosen for one program."""

    used: tuple[Option, ...] = ()
    unknown: tuple[Option, ...] = ()
    """Options that apply to the program, but that the installed XLA does not have."""

    def as_compiler_options(self) -> dict[str, Value]:
        """Return the values of the options in use, by name, as `jax.jit` takes them."""
        return {option.name: option.value for option in self.used}

    def describe(self) -> list[str]:
        """Return one line of text for each option."""
        lines = [f"XLA: {o.name}={o.value}: {o.why}" for o in self.used]
        return lines + [
            f"XLA: {o.name}={o.value} left out: this XLA does not know it (tried with "
            f"jax {o.since}); {o.why}"
            for o in self.unknown
        ]


def _combine_options(thresholds: Thresholds, use: Use) -> tuple[Option, ...]:
    """Return the options that limit combined data-parallel collectives."""
    unit = "the smallest matrix" if _has_pipeline(use) else "the weights"
    gathers = (
        f"a gather carries up to {unit} of one layer; separate gathers start late, and "
        "combined layers wait for each other"
    )
    reductions = f"a reduction carries up to {unit} of one layer, for the same reasons"
    rows = (
        ("all_gather", thresholds.all_gather, gathers),
        ("reduce_scatter", thresholds.reduce_scatter, reductions),
        ("all_reduce", thresholds.all_reduce, reductions),
    )
    return tuple(
        Option(
            name=f"xla_gpu_{kind}_combine_threshold_bytes",
            value=num_bytes,
            why=why,
            since="0.11.2",
            applies=_has_dp,
        )
        for kind, num_bytes, why in rows
    )


def choose(
    mesh: Mesh | AbstractMesh,
    *,
    tp_chunks: int,
    thresholds: Thresholds | None = None,
) -> Chosen:
    """Choose the options for the programs of a training run.

    Args:
      mesh: mesh of the step. Nothing can be compiled for an abstract mesh, so no option
        is tested; all are kept.
      tp_chunks: number of chunks, as in `Use`.
      thresholds: bytes of combined collectives; None keeps XLA's defaults.
    """
    sizes = AxisSizes(**{axis: mesh.shape[axis] for axis in AXES})
    use = Use(sizes=sizes, tp_chunks=tp_chunks)
    platform = _platform(mesh)
    combined = () if thresholds is None else _combine_options(thresholds, use)
    table = (*TABLE, *combined)
    wanted = [o for o in table if o.platform == platform and o.applies(use)]
    return _known(mesh, wanted)


def for_collectives(mesh: Mesh | AbstractMesh) -> dict[str, Value]:
    """Choose the options of a program with collectives that is not a training step.

    Returns the values of the options by name. On GPUs the result is empty, because the
    GPU options in the table are for training steps.

    Args:
      mesh: mesh of the program, with any axes.
    """
    if mesh.size == 1 or _platform(mesh) != "cpu":
        return {}
    wanted = [option for option in TABLE if option.platform == "cpu"]
    return _known(mesh, wanted).as_compiler_options()


def _platform(mesh: Mesh | AbstractMesh) -> str:
    return mesh.abstract_mesh.abstract_device.platform


def _known(mesh: Mesh | AbstractMesh, wanted: Sequence[Option]) -> Chosen:
    """Separate the options that the installed XLA has from those that it lacks."""
    if isinstance(mesh, AbstractMesh):
        return Chosen(used=tuple(wanted))
    device = mesh.devices.flat[0]
    is_known = {o: _is_known(device, o.name, o.value) for o in wanted}
    return Chosen(
        used=tuple(option for option in wanted if is_known[option]),
        unknown=tuple(option for option in wanted if not is_known[option]),
    )


@functools.cache
def _is_known(device: Any, name: str, value: Value) -> bool:
    """Return whether a trivial program for the device compiles with the option."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    nothing = jax.jit(lambda: 0, out_shardings=sharding).lower()
    try:
        nothing.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True

"""Where a measurement runs, and what it returns.

Every part of the report is a module with

    cases(small) -> {name: case}           in the order of importance, without devices
    process_of(case) -> str                equal for cases that may share a process
    kind_of(case) -> str                   equal for cases that fail for the same reason
    programs(case, setting) -> {label: Program}     what runs, also for compile-only
    measure(case, setting) -> row          runs it; an exception is the row's error
    tables(rows) -> [Table]                for people

Rows are dicts that JSON can represent.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh

Mode = Literal["gpu", "rehearse", "compile"]
"""Measure on a GPU; run small shapes on a CPU; compile for a described GPU."""

Row = dict[str, Any]

ONE_DEVICE = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)


class SkippedError(Exception):
    """Raised if a case has nothing to run here, with the reason; not a failure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One question of the report."""

    name: str
    """Value of --part; the files are gpu_<name>.md and .json."""
    title: str
    path: str
    """Path of its module, imported on use, so a failed import affects no other part."""
    timeout_s: float
    """Time limit in seconds of one case, or until it has the device exclusively:
    compilation, and waiting for other processes.
    """
    run_s: float = 60.0
    """Time limit in seconds of exclusive use of the device; it ends a hung kernel."""
    processes: int = 1
    """Processes that run cases at once on a GPU. With more than one, cases must take
    the device with `Setting.exclusive` to time anything.
    """

    @property
    def module(self) -> ModuleType:
        """Import the module."""
        return importlib.import_module(self.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a measurement runs."""

    mode: Mode
    mesh: Mesh
    """One device; all axes."""
    exclusive: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Context in which no other process of the report uses the device."""

    @property
    def small(self) -> bool:
        """Whether shapes are tiny, for a CPU."""
        return self.mode == "rehearse"

    @property
    def ours(self) -> str:
        """The attention backend that is measured; another one on a CPU."""
        return "blocked" if self.mode == "rehearse" else "mosaic_gpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function of arrays, and the shapes of its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """A jax.ShapeDtypeStruct for each argument."""

    def lower(self, setting: Setting) -> jax.stages.Lowered:
        """Trace for the device of the setting."""
        sharding = NamedSharding(setting.mesh, PartitionSpec())
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self.args,
        )
        with jax.sharding.use_abstract_mesh(setting.mesh.abstract_mesh):
            return jax.jit(self.function).lower(*args)

    def inputs(self, seed: int) -> tuple[Any, ...]:
        """Draw arrays: floats from a normal distribution, integers in [0, 256)."""
        keys = jax.random.split(jax.random.key(seed), len(self.args))
        return tuple(
            _draw(key, x.shape, x.dtype) for key, x in zip(keys, self.args, strict=True)
        )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if np.issubdtype(dtype, np.integer):
        return jax.random.randint(key, shape, 0, 256, dtype)
    return jax.random.normal(key, shape, dtype)


def make_setting(
    mode: Mode,
    *,
    exclusive: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Setting:
    """Make the setting of a process; initialises its device, if it has one.

    Args:
      mode: where it runs.
      exclusive: as in `Setting`.
    Raises:
      RuntimeError: there is no GPU, or for "compile" no CUDA plugin.
    """
    if mode == "compile":
        return Setting(mode=mode, mesh=described_mesh(ONE_DEVICE), exclusive=exclusive)
    device = jax.devices()[0]
    if mode == "gpu" and device.platform != "gpu":
        raise RuntimeError(f"this needs an NVIDIA GPU; jax sees {device.device_kind}")
    mesh = build_mesh(ONE_DEVICE, [device])
    return Setting(mode=mode, mesh=mesh, exclusive=exclusive)

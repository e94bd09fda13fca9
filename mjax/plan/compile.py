"""Compile the training step of a run for a cluster that need not exist.

Input: a config that fits the cluster. Output: the text of the scheduled program, its
memory on a device, and the compile time.

Two things differ from the program of the run, which both need a GPU. All matmuls are
calls to cuBLAS: a run times cuBLAS and XLA's own kernels, and chooses. Sorts are XLA's
own kernels: a run uses CUB.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from mjax.config.train import TrainConfig
from mjax.estimate import memory
from mjax.hardware.described import described_mesh, put_in_host_memory
from mjax.hardware.xla_flags import Chosen
from mjax.kernels.attention.api import choose
from mjax.kernels.target import Target
from mjax.mesh.axes import AxisSizes
from mjax.plan.options import Topology
from mjax.step.traced import trace_step

OPTIONS: dict[str, bool | int] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_cub_radix_sort": False,
}
"""Compiler options in addition to those of a run (`hardware.xla_flags`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledMemory:
    """Memory of a program on one device, according to the compiler."""

    argument_bytes: int
    """Bytes of the arguments; for a training step, state and batch."""
    output_bytes: int
    aliased_bytes: int
    """Bytes of the output that are written in place of an argument."""
    temporary_bytes: int
    code_bytes: int
    host_bytes: int = 0
    """Bytes in pinned host memory: arguments, results that are not written over
    arguments, and temporaries."""

    @property
    def total_bytes(self) -> int:
        """Total bytes on the device while the program runs."""
        kept = self.argument_bytes + self.output_bytes - self.aliased_bytes
        return kept + self.temporary_bytes + self.code_bytes


def read_memory(compiled: jax.stages.Compiled) -> CompiledMemory:
    """Read the compiler's memory analysis.

    Raises:
      RuntimeError: the compiler gave no analysis.
    """
    found = compiled.memory_analysis()
    if found is None:
        raise RuntimeError("the compiler gave no memory analysis")
    return CompiledMemory(
        argument_bytes=found.argument_size_in_bytes,
        output_bytes=found.output_size_in_bytes,
        aliased_bytes=found.alias_size_in_bytes,
        temporary_bytes=found.temp_size_in_bytes,
        code_bytes=found.generated_code_size_in_bytes,
        host_bytes=found.host_argument_size_in_bytes
        + found.host_output_size_in_bytes
        - found.host_alias_size_in_bytes
        + found.host_temp_size_in_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executable:
    """A compiled step: its text, its memory, and the time to make it."""

    text: str
    """The scheduled HLO module."""
    needed: CompiledMemory
    params_bytes: int
    """Bytes of the stored parameters, a part of the arguments."""
    traced: memory.Estimate
    """Bytes by purpose, from the trace of the step."""
    trace_s: float
    compile_s: float
    notes: tuple[str, ...] = ()
    """Compiler options of the run that this version of XLA does not have."""


def compile_step(
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    say: Callable[[str], None],
) -> Executable:
    """Trace and compile the step.

    Args:
      config: the run, from `topology.settle`.
      sizes: sizes of the mesh axes.
      topology: the cluster.
      say: function called with each line about the progress.
    Raises:
      ValueError: the program cannot be built.
      NoPluginError: jax has no CUDA plugin.
      RuntimeError: the compiler gave no text or no memory analysis.
    """
    mesh = described_mesh(
        sizes,
        gpu=topology.gpu,
        gpus_per_node=topology.gpus_per_node,
        tp_across_hosts=config.mesh.tp_across_hosts,
    )
    started_s = time.perf_counter()
    program, step, needed = trace_step(config, mesh)
    traced_s = time.perf_counter()
    notes = tuple(Chosen(unknown=program.xla_options.unknown).describe())
    for line in program.xla_options.describe():
        say(line)
    say(f"traced in {traced_s - started_s:.1f} s; compiling for {sizes.num_devices}")
    lowered = step.lower()
    if any(jax.tree.leaves(program.on_host)):
        put_in_host_memory(lowered, _results_on_host(program.on_host, lowered))
    compiled = lowered.compile(compiler_options=dict(OPTIONS))
    compiled_s = time.perf_counter()
    say(f"compiled in {compiled_s - traced_s:.1f} s")
    text = compiled.as_text()
    if text is None:
        raise RuntimeError("the compiler did not give the text of the step")
    return Executable(
        text=text,
        needed=read_memory(compiled),
        params_bytes=stored_bytes(program.abstract_state.params),
        traced=needed,
        trace_s=traced_s - started_s,
        compile_s=compiled_s - traced_s,
        notes=notes,
    )


def _results_on_host(state: Any, lowered: jax.stages.Lowered) -> list[bool]:
    """Return a flag per result of the step: whether it is in host memory.

    The results of the state come first, and no other result is in host memory.
    """
    of_state = jax.tree.leaves(state)
    others = len(jax.tree.leaves(lowered.out_info)) - len(of_state)
    return [*of_state, *[False] * others]


def stored_bytes(tree: Any) -> int:
    """Add up the bytes of one device's part of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def compilable(
    config: TrainConfig, topology: Topology
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Return the run as it can be planned without a GPU, and notes on the differences.

    cuDNN makes its plans on the device and cannot even be traced without a GPU, so
    another backend replaces it. A step is planned with all its gathers, even with
    `--mesh.gather-first`. Without differences there are no notes.
    """
    notes: list[str] = []
    if config.mesh.gather_first:
        mesh = dataclasses.replace(config.mesh, gather_first=False)
        config = dataclasses.replace(config, mesh=mesh)
        notes.append(
            "--mesh.gather-first: planned as one call, which takes as long if the "
            "batch arrives in time; memory of the kept first weights is not counted"
        )
    stand_ins = ("mosaic_gpu", "blocked")
    target = Target(platform="gpu", device_kind=topology.description.device_kind)

    def able(backend: str) -> bool:
        return all(backend == _backend(config, target, w, backend) for w in windows)

    windows = tuple(dict.fromkeys(config.model.window))
    asked = config.model.attention
    if "cudnn" not in {_backend(config, target, w, asked) for w in windows}:
        return config, tuple(notes)
    name = next(backend for backend in stand_ins if able(backend))
    model = dataclasses.replace(config.model, attention=name)
    notes.append(
        "attention: the run uses cuDNN, which can be compiled on a GPU only; the plan "
        f"uses {name} instead"
    )
    return dataclasses.replace(config, model=model), tuple(notes)


def _backend(
    config: TrainConfig, target: Target, window: int | None, asked: str
) -> str | None:
    """Return the backend of a layer; None if the substitute does not support the layer.

    Raises:
      ValueError: the backend that the run asks for does not support the layer.
    """
    try:
        return choose(
            target=target,
            dtype=config.precision.compute,
            head_dim=config.model.head_width,
            seq_len=config.data.seq_len,
            window=window,
            segments=config.data.isolate_documents,
            soft_cap=config.model.attn_soft_cap,
            backend=asked,
            backward=config.model.attention_backward,
        ).name
    except ValueError:
        if asked == config.model.attention:
            raise
        return None

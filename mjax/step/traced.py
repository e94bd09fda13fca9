"""Trace the training step of a config and a mesh; training and planning share it.

Input: a checked config and a mesh of real or described devices. Output: the program,
its step ready to be lowered, and the memory that the step needs.
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from mjax.config.train import TrainConfig
from mjax.estimate import memory
from mjax.mesh.axes import PP, TP, tp_chunks
from mjax.pipeline.model import STASH
from mjax.step.program import Program, build_program
from mjax.step.stamps import writes_stamps


def ingredients_of(config: TrainConfig, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Return everything that determines the program of a run, except its mesh.

    Two starts with equal ingredients, mesh, code and versions have the same step.
    `run.executables` uses all four as the key of a stored step.

    Args:
      config: config of the run, with its final vocabulary size.
      mesh: mesh with all axes.
    Returns:
      The arguments of `build_program`; keys are their names.
    """
    return {
        "model": config.model,
        "optimizer": config.optim,
        "batch": config.batch,
        "precision": config.precision,
        "combine": config.combine,
        "seq_len": config.data.seq_len,
        "num_steps": config.steps,
        "seed": config.seed,
        "zero_level": config.zero,
        "isolate_documents": config.data.isolate_documents,
        "pipeline": config.pipeline,
        "tp_chunks": tp_chunks(config.mesh, mesh.shape[TP]),
        "stamps": writes_stamps(config.observe.stamps, mesh),
        "adapters": config.adapters,
        "frozen_dtype": config.lora.base_dtype,
        "gather_first": config.mesh.gather_first,
    }


def program_of(config: TrainConfig, mesh: Mesh | AbstractMesh) -> Program:
    """Build the program of a run; trace and compile none of its functions.

    Args:
      config: config of the run, with its final vocabulary size.
      mesh: mesh with all axes. A step traced for an abstract mesh cannot be compiled.
    """
    return build_program(mesh=mesh, **ingredients_of(config, mesh))


def trace_step(
    config: TrainConfig, mesh: Mesh | AbstractMesh
) -> tuple[Program, jax.stages.Traced, memory.Estimate]:
    """Build the program of a run and trace its step; compile nothing.

    Args:
      config: as for `program_of`.
      mesh: as for `program_of`.
    Returns:
      The program, its traced step, and the memory that the step needs on a device.
    """
    program = program_of(config, mesh)
    state = program.abstract_state
    step = program.trace()
    needed = memory.estimate(
        step,
        state,
        program.abstract_saved,
        trained=program.trained.of(state.params),
        on_host=program.on_host,
        first=program.abstract_first,
        moments_at_once=None
        if program.host_update is None
        else program.host_update.bytes_on_device(state.opt_state["adam"].mu),
        compute=config.precision.compute,
        reduce=config.precision.reduce,
        stash_name=STASH,
        zero_level=config.zero,
        accumulates=config.batch.microbatches > 1
        or mesh.shape[PP] * config.pipeline.chunks > 1,
    )
    return program, step, needed

"""Small steps, compiled for described GPUs as the planner compiles: the text of XLA."""

from typing import Any, Literal

from mjax.config.optim import OptimConfig
from mjax.config.step import PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.plan.compile import OPTIONS
from mjax.step.program import Program, build_program


def described_program(sizes: AxisSizes, **changes: Any) -> Program:
    """Build a program for described GPUs.

    Args:
      sizes: sizes of the mesh axes.
      changes: arguments of `build_program`; model, batch and seq_len must be there.
    """
    defaults: dict[str, Any] = {
        "optimizer": OptimConfig(),
        "precision": PrecisionConfig(),
        "num_steps": 10,
        "seed": 0,
        "zero_level": 2,
        "isolate_documents": True,
    }
    return build_program(mesh=described_mesh(sizes), **defaults | changes)


def compiled_text(
    program: Program, what: Literal["gradients", "step"], **options: bool | int
) -> str:
    """Compile the gradients, or the whole step; return its scheduled HLO.

    Args:
      program: for described GPUs.
      what: the gradients or the whole step.
      options: options of XLA, in addition to those of the planner.
    """
    if what == "step":
        lowered = program.trace().lower()
    else:
        state = program.abstract_state
        lowered = program.gradients.lower(
            state.params, state.rng, state.step, program.abstract_batch
        )
    text = lowered.compile(compiler_options=OPTIONS | options).as_text()
    assert text is not None
    return text

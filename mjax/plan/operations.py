"""Map the operations of compiled programs to places in the traced code.

Input: compiled programs. Output: maps from the names of programs and operations, which
XLA reports when a GPU hangs (xla_gpu_execution_progress_tracking), to places.
"""

import os
from collections.abc import Mapping

from mjax.plan.hlo.parse import parse, short_name

_TRACKING = "--xla_gpu_execution_progress_tracking="


def are_tracked(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether XLA can report the operations for which a hanging GPU waits."""
    return _TRACKING in environment.get("XLA_FLAGS", "")


def places_of(text: str) -> dict[str, dict[str, str]]:
    """Return the place in the traced code of each operation that has a place.

    Args:
      text: text of the scheduled module.
    Returns:
      name of the program -> name of the operation -> place.
    Raises:
      ValueError: the text cannot be parsed; see `plan.hlo.parse`.
    """
    module = parse(text)
    places = {
        instruction.name: short_name(instruction.op_name)
        for computation in module.computations.values()
        for instruction in computation.instructions
    }
    return {module.name: {name: place for name, place in places.items() if place}}

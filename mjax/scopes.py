"""Names of the parts of a step: written when it is traced, read from compiled programs.

Enters: a part of the step, such as the backward pass, or a loop over its layers.
Leaves: the name of a `jax.named_scope`; and the inverse, from the name that XLA gives
an instruction (`op_name`), which lists the scopes around it. Names are metadata: they
change no instruction.

- `phase.forward`: a phase of the step, one of `PHASES`.
- `layer.5`: the work of one layer. Weights that are gathered ahead and gradients that
  are reduced behind in this scope belong to a neighbour of the layer.
- `layers.0.2.3`: a loop; its iterations begin with layers 0, 2 and 4 (start, step,
  count). Inside, `place.1` is the second layer of the repeating pattern.
- `ticks.4.1.9`, `microbatches.1.1.2`: loops over ticks of a pipeline, or microbatches.
  The scope of a single-iteration loop, which XLA unrolls, names its iteration.
- `slot`: the compute of a pipeline stage in a slot that is not idle.
- `skip`: the conditional that skips an idle slot of a pipeline.
- `exchange`: the exchange of weights and sums when the chunk of a stage changes.
"""

import collections
import dataclasses
import re
from typing import Literal

type Phase = Literal["forward", "backward", "loss", "grad_norm", "optimizer", "eval"]
PHASES: tuple[Phase, ...] = (
    "forward",
    "loss",
    "backward",
    "grad_norm",
    "optimizer",
    "eval",
)
"""Phases in their order in a step. `loss` includes the head and its backward pass."""
type Unit = Literal["layers", "ticks", "microbatches"]

_ONE: dict[Unit, str] = {"layers": "layer", "ticks": "tick"}
_ONE["microbatches"] = "microbatch"
_UNITS: dict[str, Unit] = {one: unit for unit, one in _ONE.items()}
_WORD = re.compile(r"[^/():;]+")
_LOOP = re.compile(r"(layers|ticks|microbatches)\.(-?\d+)\.(-?\d+)\.(\d+)")
_SINGLE = re.compile(r"(layer|tick|microbatch)\.(\d+)")
_PLACE = re.compile(r"place\.(\d+)")
SLOT = "slot"
"""Scope of the work of a slot of a pipeline."""
SKIP = "skip"
"""Scope of the choice to skip a slot."""
EXCHANGE = "exchange"
"""Scope of the exchange of weights and sums when a chunk changes."""
_BACKWARD = "transpose("
"""jax's prefix for transposed code; the name of the primitive has no bracket."""
_RECOMPUTED = "rematted_computation"
_WHILE = "while"


def phase(name: Phase) -> str:
    """Return the name of the scope of a phase."""
    return f"phase.{name}"


def loop(unit: Unit, start: int, count: int, *, step: int = 1) -> str:
    """Return the name of the scope around a loop.

    Args:
      unit: of an iteration, or the unit that it begins with.
      start: number of the first iteration.
      count: iterations.
      step: from the number of one iteration to the next.
    """
    return f"{unit}.{start}.{step}.{count}"


def single(unit: Unit, index: int) -> str:
    """Return the name of the scope of one unit outside a loop."""
    return f"{_ONE[unit]}.{index}"


def place(index: int) -> str:
    """Return the name of the scope of one layer of the pattern that a loop repeats."""
    return f"place.{index}"


_PHASE_NAMES: dict[str, Phase] = {phase(name): name for name in PHASES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop, as its scope describes it."""

    unit: Unit
    start: int
    step: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scopes:
    """The scopes in the op_name of an instruction."""

    phase: Phase | None
    is_recomputed: bool
    """Computed again in the backward pass."""
    singles: dict[Unit, int]
    """Units outside of loops."""
    place: int
    """In the pattern of layers; 0 without one."""
    is_slot: bool
    """The work of a slot of a pipeline."""
    own_loop: Loop | None
    """The loop of a while instruction; None: not a loop with a scope."""


def is_phase(word: str) -> bool:
    """Say whether a part of an op_name is the scope of a phase."""
    return word in _PHASE_NAMES


def is_position(word: str) -> bool:
    """Say whether a part of an op_name is the scope of a loop, or of a unit of one."""
    return any(p.fullmatch(word) for p in (_LOOP, _SINGLE, _PLACE))


def read(op_name: str) -> Scopes:
    """Read the op_name of an instruction.

    The phase is `eval` if any scope is, otherwise the innermost phase. Transposed code
    in the scope of the forward pass is the backward pass. XLA joins the names of
    instructions that it combines by colons: the phase of most of them counts.
    """
    words = _WORD.findall(op_name)
    votes: collections.Counter[Phase] = collections.Counter()
    votes.update(found for p in op_name.split(":") if (found := _phase_of(p)))
    singles = [m for m in map(_SINGLE.fullmatch, words) if m]
    places = [m for m in map(_PLACE.fullmatch, words) if m]
    loops = [(at, m) for at, m in enumerate(map(_LOOP.fullmatch, words)) if m]
    turns = [one for _, m in loops if (one := _loop(m)).count == 1]
    units: dict[Unit, int] = {x.unit: x.start for x in turns if x.unit != "layers"}
    units.update((_UNITS[m[1]], int(m[2])) for m in singles)
    # A while instruction is the innermost loop, unless it is nested inside it.
    is_own = bool(loops) and words[loops[-1][0] :].count(_WHILE) == 1
    return Scopes(
        phase=votes.most_common(1)[0][0] if votes else None,
        is_recomputed=_RECOMPUTED in words,
        singles=units,
        place=int(places[-1][1]) if places else 0,
        is_slot=SLOT in words,
        own_loop=_loop(loops[-1][1]) if is_own else None,
    )


def _phase_of(op_name: str) -> Phase | None:
    words = _WORD.findall(op_name)
    found: list[Phase] = [_PHASE_NAMES[word] for word in words if is_phase(word)]
    if not found:
        return None
    if "eval" in found:
        return "eval"
    if found[-1] == "forward" and _BACKWARD in op_name:
        return "backward"
    return found[-1]


def _loop(found: re.Match[str]) -> Loop:
    unit, start, step, count = found.groups()
    return Loop(
        unit=next(u for u in _ONE if u == unit),
        start=int(start),
        step=int(step),
        count=int(count),
    )

"""Names of the parts of a step, written into the trace and read from compiled programs.

Input: a part of the step, such as the backward pass, or a loop over its layers.
Output: the name of a `jax.named_scope`. Also the inverse: the part of the step from the
name of an XLA instruction (`op_name`), which lists the scopes around it. Names are
metadata: they change no instruction.

- `phase.forward`: a phase of the step, one of `PHASES`.
- `layer.5`: the work of one layer. Weights gathered and gradients reduced in this scope
  belong to a neighbouring layer.
- `layers.0.2.3`: a loop; its iterations begin with layers 0, 2 and 4 (start, step,
  count). Inside, `place.1` is the second layer of the repeating pattern.
- `ticks.4.1.9`, `microbatches.1.1.2`: loops over ticks of a pipeline, or microbatches.
  The scope of a single-iteration loop, which XLA unrolls, names its iteration.
- `slot`: the work of a pipeline stage in a half-tick.
- `skip`: the conditional that skips an idle half-tick.
- `exchange`: the exchange of weights and sums when a stage changes its virtual stage.
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
"""Phases, in the order of a step. `loss` includes the head and its backward pass."""
type Unit = Literal["layers", "ticks", "microbatches"]

_ONE: dict[Unit, str] = {"layers": "layer", "ticks": "tick"}
_ONE["microbatches"] = "microbatch"
_UNITS: dict[str, Unit] = {one: unit for unit, one in _ONE.items()}
_WORD = re.compile(r"[^/():;]+")
_LOOP = re.compile(r"(layers|ticks|microbatches)\.(-?\d+)\.(-?\d+)\.(\d+)")
_SINGLE = re.compile(r"(layer|tick|microbatch)\.(\d+)")
_PLACE = re.compile(r"place\.(\d+)")
SLOT = "slot"
"""Scope of the work of a half-tick."""
SKIP = "skip"
"""Scope of the conditional that skips a half-tick."""
EXCHANGE = "exchange"
"""Scope of the exchange of weights and sums when the virtual stage changes."""
_BACKWARD = "transpose("
"""jax's prefix of transposed code; the name of the transpose primitive has no
bracket."""
_RECOMPUTED = "rematted_computation"
_WHILE = "while"


def phase(name: Phase) -> str:
    """Return the name of the scope of a phase."""
    return f"phase.{name}"


def loop(unit: Unit, start: int, count: int, *, step: int = 1) -> str:
    """Return the name of the scope around a loop.

    Args:
      unit: what the loop runs over.
      start: first unit of the first iteration, such as a layer.
      count: number of iterations.
      step: units from the start of one iteration to that of the next.
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
    """A loop, as described by its scope."""

    unit: Unit
    start: int
    step: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scopes:
    """The scopes in the op_name of an instruction."""

    phase: Phase | None
    is_recomputed: bool
    """Whether the instruction is recomputed in the backward pass (remat)."""
    singles: dict[Unit, int]
    """Index of the unit outside a loop, by kind of unit."""
    place: int
    """Index of the layer in the repeating pattern; 0 without a pattern."""
    is_slot: bool
    """Whether the instruction belongs to the work of a pipeline's half-tick."""
    own_loop: Loop | None
    """The loop that a while instruction runs; None if no scope describes it."""


def is_phase(word: str) -> bool:
    """Return whether a part of an op_name is the scope of a phase."""
    return word in _PHASE_NAMES


def is_position(word: str) -> bool:
    """Return whether a part of an op_name is the scope of a loop, unit or place."""
    return any(p.fullmatch(word) for p in (_LOOP, _SINGLE, _PLACE))


def read(op_name: str) -> Scopes:
    """Read the op_name of an instruction.

    The phase is `eval` if any scope is that phase, otherwise the innermost phase.
    Transposed code in the scope of the forward pass is the backward pass. XLA joins the
    names of combined instructions by colons; the most frequent phase counts.
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
    # A while instruction runs the innermost scoped loop, unless it is nested in it.
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

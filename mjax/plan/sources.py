"""Split the modelled time of a step by the purpose of its kernels.

Input: a compiled step and its replay. Output: `Source` rows that add up to the step:
seconds, bytes read and written, and the seconds that the algorithm needs.

A kernel is assigned by the functions of mjax that traced it (`hlo.frames`), innermost
first, and the optimizer's kernels by the scope of its phase. XLA gives a fusion the
location of one of its instructions, so a row may include work that belongs to another.
Kernels that match no rule are in the row `OTHER`.
"""

import collections
import math
import re
from collections.abc import Mapping

from mjax.config.train import TrainConfig
from mjax.mesh.axes import AxisSizes, tp_chunks
from mjax.plan.cost import CostModel
from mjax.plan.floors import floors
from mjax.plan.hlo.frames import Frame, Frames, frames_of
from mjax.plan.hlo.parse import Instruction, Module, arrays
from mjax.plan.hlo.work import moved_bytes
from mjax.plan.reading import Runs, Slots
from mjax.plan.replay import Event, Replay
from mjax.plan.result import IDLE, Modelled, Source, waiting
from mjax.trace import scopes

OTHER = "other"
_COPIES = "zeros and copies"
_JOINS = "joins of weights"
_ACTIVATIONS = "joins and sums of activations"
_ATTENTION = "attention, other kernels"
_PROJECTION = "projections"
"""Marks kernels that count as weights or activations by the shape of their result."""
_OPTIMIZER = "optimizer and norm of the gradients"
_SUMS = "sums of gradients"
_SLICES = "slices of weights"
_STASH = "stash"
_EXCHANGE = "exchange of chunks"
_QUANTISATION = "quantisation to 8 bits"
_ENDS = "loss and embedding"

_PLACES = (
    (r"kernels/stamp/", "stamps of the time"),
    (r"step/optim\.py", _OPTIMIZER),
    (r"kernels/attention/", _ATTENTION),
    (r"(kernels/cross_entropy/|layers/(loss|embed)\.py)", _ENDS),
    (r"(kernels/layer_norm/|layers/norm\.py)", "norms"),
    (r"(kernels/gelu/|layers/mlp\.py)", "activation functions"),
    (r"layers/rope\.py", "rope"),
    (r"layers/fp8\.py", _QUANTISATION),
    (r"layers/dropout\.py", "dropout"),
    (r"layers/linear\.py:join_(columns|rows)", _JOINS),
    (r"layers/linear\.py:_gradient_of", _SUMS),
    (r"layers/block\.py:Block\.(join|separate)", _JOINS),
    (r"layers/stack\.py:LayerPattern\.(run|scan|apply)", _SLICES),
    (r"layers/linear\.py", _PROJECTION),
    (r"(layers/(block|attention|adapters)|mesh/collectives)\.py", _ACTIVATIONS),
    (r"pipeline/held\.py:stack_layers", _JOINS),
    (r"pipeline/tick\.py:Execution\.(_exchange_\w+|start_backward)", _EXCHANGE),
    (r"pipeline/tick\.py:(_add|_add_to_chunk)", _SUMS),
    (r"pipeline/tick\.py:Execution\.pick", _SLICES),
    (r"pipeline/tick\.py:Execution\.(_forward_slot|_backward_slot|_keep)", _STASH),
    (r"pipeline/tick\.py:Execution\.start", _COPIES),
    (r"pipeline/tick\.py:Execution\.(_enter|tick)", _ACTIVATIONS),
    (r"pipeline/pieces\.py:Pieces\.\w*(reduce|finish)", _SUMS),
    (r"pipeline/pieces\.py:Pieces", _SLICES),
    (r"mesh/zero\.py:gather", _SLICES),
    (r"mesh/zero\.py:", _SUMS),
    (r"step/prefetch\.py:OverlappedLayers\._at", _SLICES),
    (r"step/prefetch\.py:OverlappedLayers\.(_added|_summand|_hops|_reduced)", _SUMS),
    (r"step/prefetch\.py:(_move|OverlappedLayers\.backward\.layer)", _SUMS),
    (r"step/stacks\.py:stack_of", _COPIES),
    (r"trace/vjp\.py:zeros_of", _COPIES),
    (r"step/prefetch\.py:OverlappedLayers\.(forward|backward)", _STASH),
    (r"step/plain\.py:Plain\._microbatch", _SUMS),
)
"""Sources by the file and function of a frame; the first matching prefix counts."""
RULES = [(re.compile(place), source) for place, source in _PLACES]

_MOVES = re.compile(
    r"(copy|wrapped_(transpose|copy|slice|concatenate)|\w*broadcast|"
    r"(input|loop)_transpose|loop_(slice|dynamic_update_slice))(_fusion)?(\.\d+)*$"
)
"""Names of kernels that only copy or fill, used if nothing else gives the purpose."""


def by_source(
    config: TrainConfig,
    sizes: AxisSizes,
    cost: CostModel,
    *,
    module: Module,
    frames: Frames,
    found: Replay,
    taken: Runs,
    slots: Slots,
    modelled: Modelled,
    params_bytes: int,
) -> tuple[Source, ...]:
    """Split a step by source.

    Args:
      config: config of the run.
      sizes: sizes of the mesh axes.
      cost: speeds of the GPU.
      module: the step.
      frames: the stacks of its instructions.
      found: the replay.
      taken: number of runs of each computation in a step.
      slots: instructions that run in every half-tick. Their idle part has its own row,
        as in the parts of the step.
      modelled: the step; the rows add up to it.
      params_bytes: stored parameters of one device.
    Returns:
      Rows, the longest first, `OTHER` last.
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    num_bytes: dict[str, float] = collections.defaultdict(float)
    tokens = _tokens(config, sizes)
    for name, events in found.timeline.items():
        computation = module.computations[name]
        for event in events:
            if event.stream != "compute" or event.kind == "loop":
                continue
            x = computation.by_name[event.name]
            source = _source(event, x, frames_of(x, module, frames), tokens)
            runs = taken[name]
            if (name, event.name) in slots:
                runs /= 1 + modelled.bubble
            seconds[source] += runs * (event.stop_s - event.start_s)
            moved = sum(moved_bytes(x, computation, module))
            num_bytes[source] += runs * moved
    needed = floors(config, sizes, cost, params_bytes=params_bytes)
    rows = [
        Source(
            name=name,
            seconds=seconds.get(name, 0.0),
            num_bytes=round(num_bytes.get(name, 0.0)),
            floor_s=needed.get(name),
        )
        for name in sorted({*seconds, *needed} - {OTHER})
    ]
    rows += [
        Source(name=name, seconds=s, num_bytes=None, floor_s=0.0)
        for name, s in _waits(modelled).items()
    ]
    if idle := modelled.parts_s.get(IDLE):
        rows.append(Source(name=IDLE, seconds=idle, num_bytes=None, floor_s=idle))
    rows.sort(key=lambda row: -row.seconds)
    other = Source(
        name=OTHER,
        seconds=seconds.get(OTHER, 0.0),
        num_bytes=round(num_bytes.get(OTHER, 0.0)),
        floor_s=None,
    )
    return (*rows, other)


def _waits(modelled: Modelled) -> Mapping[str, float]:
    return {waiting(role): s for role, s in modelled.exposed_s.items() if s}


def _source(
    event: Event, x: Instruction, stack: tuple[Frame, ...], tokens: tuple[int, int]
) -> str:
    """Return the source of one kernel."""
    if scopes.read(x.op_name).phase in ("optimizer", "grad_norm"):
        return _OPTIMIZER
    place = _placed(stack)
    if event.kind == "product":
        return "matmuls of the head" if place == _ENDS else "matmuls of the layers"
    if event.kind == "kernel" and place == _ATTENTION:
        return "attention kernels"
    if place is None:
        return _COPIES if _MOVES.match(x.name) else OTHER
    if place == _PROJECTION:
        return _in_projection(x, tokens)
    return place


def _in_projection(x: Instruction, tokens: tuple[int, int]) -> str:
    """Return the source of a projection's kernel from the kernel's result.

    The stack is not enough: XLA records only the caller's stack for code traced in a
    `custom_vjp`.
    """
    results = arrays(x.result)
    is_scale = all(len(array.dims) < 2 for array in results)
    if is_scale or any(array.dtype.startswith("f8") for array in results):
        return _QUANTISATION
    return _ACTIVATIONS if _has_tokens(x, tokens) else _JOINS


def _placed(stack: tuple[Frame, ...]) -> str | None:
    for frame in stack:
        words = f"{frame.path}:{frame.function}"
        for rule, source in RULES:
            if rule.match(words):
                return source
    return None


def _tokens(config: TrainConfig, sizes: AxisSizes) -> tuple[int, int]:
    """Return the tokens of a tp chunk and of a microbatch on a device."""
    rows = config.batch.size // (sizes.dp * config.batch.microbatches)
    tokens = rows * config.data.seq_len
    return tokens // max(sizes.tp, tp_chunks(config.mesh, sizes.tp)), tokens


def _has_tokens(x: Instruction, tokens: tuple[int, int]) -> bool:
    """Return whether a result has one or more dims of tokens; weights have none."""
    chunk, whole = tokens
    for array in arrays(x.result):
        leading = [math.prod(array.dims[:n]) for n in range(1, len(array.dims) + 1)]
        if any(size % chunk == 0 and size <= whole for size in leading):
            return True
    return False

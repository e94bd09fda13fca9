"""Count the peak bytes of one device while it executes a traced function.

Input: a jaxpr of one device, from the shard_map of a `jax.stages.Traced`. Output: the
maximum number of bytes alive at the same time, without buffers that the caller keeps
alive.

Operations run in the order of the trace. Three rules model XLA. *Fusion*: a cheap
elementwise result is never in memory if only elementwise operations and reductions read
it; its operands stay alive instead. *Views*: a reshape, transpose or sharding cast
shares the buffer of its operand. *In place*: an elementwise result, an updated slice
and the carry of a loop reuse a buffer of the same size that they are the last to read.
Other orders, copies by XLA, alignment and library workspaces are not modelled. So this
is an estimate; the tests bound its error.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

_FUSED = frozenset(
    {
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp"),
        *("concatenate", "convert_element_type", "cos", "div", "dynamic_slice"),
        *("eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge"),
        *("gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p"),
        *("logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad"),
        *("pow", "random_wrap", "random_unwrap", "real", "rem", "reverse"),
        *("rng_bit_generator", "round", "rsqrt", "select_and_scatter", "select_n"),
        *("shift_left", "shift_right_arithmetic", "shift_right_logical", "sign"),
        *("sin", "slice", "split", "sqrt", "square", "sub", "tan", "tanh"),
        *("tie",),
        *("unstack", "xor"),
    }
)
"""Elementwise operations and selections of elements, fused into their readers."""

_VIEWS = frozenset(
    {
        *("copy", "expand_dims", "layout_constraint", "name"),
        *("optimization_barrier", "pcast", "pvary"),
        *("reshape", "reshard", "squeeze", "transpose", "stop_gradient"),
    }
)
"""Operations whose result shares the operand's buffer. A transpose is one of them,
because matmuls read dims in any order."""

_REDUCTIONS = frozenset(
    {
        *("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min"),
        *("reduce_or", "reduce_prod", "reduce_sum"),
    }
)
"""Operations that read elementwise operands without storing them in memory."""

_UPDATES = frozenset(
    {
        *("dynamic_update_slice", "scatter", "scatter-add", "scatter_add"),
    }
)
"""Operations that overwrite their first operand if it is not read later."""

_CALLS = frozenset(
    {
        *("checkpoint", "closed_call", "core_call", "custom_jvp_call"),
        *("custom_vjp_call", "eval_jaxpr", "jit", "pjit", "remat2"),
    }
)
"""Calls that are inlined."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """A result or an argument, compared by identity."""

    num_bytes: int


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An equation whose operands are values, None for a literal."""

    name: str
    operands: list[_Value | None]
    results: list[_Value]
    eqn: Any = None


def peak_bytes(jaxpr: Any, *, on_host: bool = False) -> int:
    """Return the peak bytes of a jaxpr, without its arguments.

    Args:
      jaxpr: jaxpr of one device; its results are counted.
      on_host: count arrays in host memory instead of those on the device.
    """
    size = _host_array_bytes if on_host else num_bytes
    return _peak(jaxpr, [False] * len(jaxpr.invars), size)


def named(jaxpr: Any, name: str) -> Iterator[Any]:
    """Yield the types of arrays with this `checkpoint_name`, also in nested jaxprs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and eqn.params["name"] == name:
            yield eqn.outvars[0].aval
        for inner in core.jaxprs_in_params(eqn.params):
            yield from named(inner, name)


def _host_array_bytes(aval: Any) -> int:
    is_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
    return math.prod(aval.shape) * aval.dtype.itemsize if is_host else 0


def main_shard_map(jaxpr: Any) -> Any:
    """Return the body of the shard_map with the largest results, a jaxpr of one device.

    A step computes everything in one shard_map; a second one may record times.

    Raises:
      ValueError: there is no shard_map.
    """
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    if not found:
        raise ValueError("the step has no shard_map")
    largest = max(found, key=lambda eqn: sum(num_bytes(v.aval) for v in eqn.outvars))
    return largest.params["jaxpr"]


def num_bytes(aval: Any) -> int:
    """Return the size of an array type; 0 for other types and arrays on the host."""
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return 0
    dtype = getattr(aval, "dtype", None)
    return math.prod(aval.shape) * getattr(dtype, "itemsize", 0) if dtype else 0


def _peak(
    jaxpr: Any,
    is_owned: Sequence[bool],
    size: Callable[[Any], int],
    *,
    num_slices: int = 0,
) -> int:
    """Return the peak bytes of a body.

    Owned arguments are counted until their last reader; the caller counts the rest.
    `size` gives the bytes of an array type. The last `num_slices` arguments are slices
    of the caller's arrays, counted from their first reader on.
    """
    arguments = [_Value(size(v.aval)) for v in jaxpr.invars]
    first_slice = len(arguments) - num_slices
    slices = [_Operation("slice", [], [part]) for part in arguments[first_slice:]]
    operations, outputs = _flatten(jaxpr, arguments, size)
    owned = [a for a, mine in zip(arguments, is_owned, strict=True) if mine]
    return _Simulation([*slices, *operations], outputs, owned, size).run()


def _flatten(
    jaxpr: Any, given: Sequence[_Value | None], size: Callable[[Any], int]
) -> tuple[list[_Operation], list[_Value | None]]:
    """Return the operations of a body, with calls inlined, and its results."""
    values: dict[Any, _Value | None] = dict.fromkeys(jaxpr.constvars)
    values |= dict(zip(jaxpr.invars, given, strict=True))
    operations: list[_Operation] = []

    def read(atom: Any) -> _Value | None:
        return None if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _CALLS:
            body = next(iter(core.jaxprs_in_params(eqn.params)))
            inner, results = _flatten(body, operands, size)
            operations += inner
        else:
            results = [_Value(size(v.aval)) for v in eqn.outvars]
            operations.append(_Operation(eqn.primitive.name, operands, results, eqn))
        values |= dict(zip(eqn.outvars, results, strict=True))
    return operations, [read(atom) for atom in jaxpr.outvars]


class _Simulation:
    """Analysis of a body, operation by operation."""

    def __init__(
        self,
        operations: list[_Operation],
        outputs: list[_Value | None],
        owned: list[_Value],
        size: Callable[[Any], int],
    ) -> None:
        self.operations, self.owned, self.size = operations, owned, size
        self.buffers: dict[_Value, frozenset[_Value]] = {}
        """For a value without a buffer of its own: the values that must be in memory so
        that it can be read."""
        in_memory = self._in_memory(outputs)
        for operation in operations:
            read = self._buffers_of(operation.operands)
            if operation.name in _VIEWS:
                pairs = zip(operation.results, operation.operands, strict=True)
                self.buffers |= {r: self._buffers_of([o]) for r, o in pairs}
            elif operation.name in _FUSED and in_memory.isdisjoint(operation.results):
                self.buffers |= dict.fromkeys(operation.results, read)
        self.outputs = self._buffers_of(outputs)

    def _in_memory(self, outputs: Iterable[_Value | None]) -> set[_Value | None]:
        """Return the values that non-fused operations read, also through views."""
        found: set[_Value | None] = set(outputs)
        for operation in reversed(self.operations):
            pairs = list(itertools.zip_longest(operation.operands, operation.results))
            if operation.name in _VIEWS:
                found |= {operand for operand, result in pairs if result in found}
            elif operation.name in _UPDATES:
                found.add(operation.operands[0])
            elif operation.name not in _FUSED | _REDUCTIONS:
                found.update(operation.operands)
        return found

    def _buffers_of(self, values: Iterable[_Value | None]) -> frozenset[_Value]:
        found: set[_Value] = set()
        for value in values:
            if value is not None:
                found |= self.buffers.get(value, {value})
        return frozenset(found)

    def run(self) -> int:
        """Return the peak bytes of the body."""
        real = [op for op in self.operations if not self._is_virtual(op)]
        last = {value: len(real) for value in self.outputs}
        for index, operation in reversed(list(enumerate(real))):
            for value in self._buffers_of(operation.operands):
                last.setdefault(value, index)
        alive = {value for value in self.owned if value in last}
        peak = now = _sum(self.owned)
        now = _sum(alive)
        late = {op.results[0]: op for op in real if not op.operands}
        for index, operation in enumerate(real):
            if not operation.operands:
                continue
            read = self._buffers_of(operation.operands)
            needed = [value for value in read if late.pop(value, None)]
            alive.update(needed)
            now += _sum(needed)
            ending = {value for value in read & alive if last[value] == index}
            peak = max(peak, now + self._during(operation, ending))
            made = {value for value in operation.results if value in last}
            alive = alive - ending | made
            now += _sum(made) - _sum(ending)
        return peak

    def _is_virtual(self, operation: _Operation) -> bool:
        return all(result in self.buffers for result in operation.results)

    def _during(self, operation: _Operation, ending: set[_Value]) -> int:
        """Return the bytes that an operation needs beyond those alive before it."""
        results = _sum(operation.results)
        if operation.name in ("scan", "while"):
            return self._loop(operation, ending)
        if operation.name == "cond":
            passed = operation.operands[1:]
            mine = [self._buffers_of([value]) <= ending for value in passed]
            inner = max(_peak(branch, mine, self.size) for branch in _bodies(operation))
            return max(results, inner) - self._given(passed, ending)
        in_place = operation.name in _FUSED | _UPDATES and any(
            value.num_bytes == results for value in ending
        )
        inner = [
            _peak(body, [False] * len(body.invars), self.size)
            for body in _bodies(operation)
        ]
        return max([0 if in_place else results, *inner])

    def _loop(self, operation: _Operation, ending: set[_Value]) -> int:
        """Return the bytes that a loop needs beyond those alive before it.

        These are the bytes of one iteration with its carry, and of the stacked results.
        """
        bodies = list(_bodies(operation))
        # The arguments are constants, carry and slices; the results are carry and
        # stacked arrays. A sliced or stacked array has one more dim outside of the
        # body.
        body = max(bodies, key=lambda body: len(body.outvars))
        results = zip(operation.eqn.outvars, body.outvars, strict=True)
        num_carry = sum(whole.aval.ndim == part.aval.ndim for whole, part in results)
        given = zip(operation.eqn.invars, body.invars, strict=True)
        num_slices = sum(whole.aval.ndim != part.aval.ndim for whole, part in given)
        stop = len(body.invars) - num_slices
        owned = [stop - num_carry <= index < stop for index in range(len(body.invars))]
        turn = _peak(body, owned, self.size, num_slices=num_slices)
        if self.size is _host_array_bytes:  # these results are counted in `stacked`
            turn -= sum(self.size(v.aval) for v in body.outvars[num_carry:])
        stacked = _sum(operation.results[num_carry:])
        given = self._given(operation.operands[stop - num_carry : stop], ending)
        return turn + stacked - given

    def _given(self, values: Iterable[_Value | None], ending: set[_Value]) -> int:
        """Return the bytes of the values that the caller does not read again."""
        return _sum(self._buffers_of(values) & ending)


def _bodies(operation: _Operation) -> Iterator[Any]:
    # A kernel's body works in on-chip memory.
    if operation.eqn is not None and operation.name != "pallas_call":
        yield from core.jaxprs_in_params(operation.eqn.params)


def _sum(values: Iterable[_Value]) -> int:
    return sum(value.num_bytes for value in values)

"""Order the collectives of a program for simulated devices.

Input: a function of one device, to be mapped by `jax.shard_map`. Output: a function
that returns the same bits, in which each collective depends on the one before it.

XLA's CPU client (jaxlib 0.11.2 and 0.12.0.1) uses one channel for all collectives of
jax. If two devices of a group are in different collectives, it treats both as the same
collective: the program aborts, hangs, or computes wrong numbers. XLA's schedule orders
the collectives of each device, but this does not prevent the error. If two collectives
share no data, the second may begin as soon as the first has *started*, not ended. A
loop with collectives counts as started while its iterations still wait in another
thread. So one device can reach the collective after a loop while others are still in
the loop.

XLA always respects a data dependence. So if no data dependence connects two collectives
(or loops with collectives), the later one in the trace gets an operand that depends on
the earlier one.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

_COLLECTIVES = frozenset(
    {
        *("all_gather", "all_gather_invariant", "all_to_all", "pmax", "pmin"),
        *("ppermute", "psum", "psum_invariant", "ragged_all_to_all"),
        *("reduce_scatter",),
    }
)
_REDUCTIONS = frozenset({"pmax", "pmin", "psum", "psum_invariant"})
_INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}
"""Primitive that XLA inlines -> name of the parameter that holds its jaxpr."""

_tie = core.Primitive("tie")
"""Return the first operand, unchanged, once the other operands are ready."""
_tie.def_abstract_eval(lambda x, *after: x)

_reduced_alone = core.Primitive("reduced_alone")
"""Return the operand with the type that a reduction over axes of size 1 gives it."""
_reduced_alone.def_abstract_eval(lambda x, *, aval: aval)


def in_order[R](per_device: Callable[..., R]) -> Callable[..., R]:
    """Add data dependences that put the collectives of a function in order.

    Args:
      per_device: function of one device, already differentiated; runs inside shard_map.
    Returns:
      A function with bit-identical results.
    """

    @functools.wraps(per_device)
    def ordered(*args: Any) -> R:
        jaxpr, shapes = jax.make_jaxpr(per_device, return_shape=True)(*args)
        outputs = _run(jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return ordered


def _run(jaxpr: core.Jaxpr, args: Sequence[Any]) -> list[Any]:
    outputs, _ = _Order().run(jaxpr, args, [0] * len(args))
    return outputs


class _Order:
    """Evaluate one level of a jaxpr; the body of a loop is a separate level.

    An event is a collective, or a loop or conditional that contains one. A set of
    events is an int with one bit per event.
    """

    def __init__(self) -> None:
        self._above: list[int] = []
        """For each event, the event itself and all events on which it depends."""
        self._results: list[Any] = []
        """For each event, an array that it computes."""

    def run(
        self,
        jaxpr: core.Jaxpr,
        args: Sequence[Any],
        args_above: Sequence[int],
    ) -> tuple[list[Any], list[int]]:
        """Return the results, and the events on which each depends."""
        values: dict[core.Var, tuple[Any, int]] = {}

        def read(atom: Any) -> tuple[Any, int]:
            return (atom.val, 0) if isinstance(atom, core.Literal) else values[atom]

        constants = zip(jaxpr.constvars, jaxpr.consts, strict=True)
        values |= {var: (value, 0) for var, value in constants}
        given = zip(args, args_above, strict=True)
        values |= dict(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            pairs = [read(atom) for atom in eqn.invars]
            ins, masks = [p[0] for p in pairs], [p[1] for p in pairs]
            above = functools.reduce(int.__or__, masks, 0)
            with _scopes_of(eqn):
                outs, outs_above = self._evaluate(eqn, ins, masks, above)
            values |= dict(
                zip(eqn.outvars, zip(outs, outs_above, strict=True), strict=True)
            )
        results = [read(atom) for atom in jaxpr.outvars]
        return [r[0] for r in results], [r[1] for r in results]

    def _evaluate(
        self, eqn: core.JaxprEqn, ins: list[Any], masks: list[int], above: int
    ) -> tuple[list[Any], list[int]]:
        if eqn.primitive.name in _INLINED:
            return self._inline(eqn, ins, masks)
        if eqn.primitive.name == "scan" and eqn.params["length"] == 1:
            # XLA also inlines a single-iteration loop.
            return self._once(eqn, ins, masks)
        if eqn.primitive is lax.optimization_barrier_p:
            # XLA's CPU compiler drops the operation: each result is its operand.
            return _bind(eqn, eqn.params, ins), masks
        if _is_alone(eqn):
            # XLA's CPU compiler would turn the reduction into a copy and an all-reduce.
            alone = zip(ins, eqn.outvars, strict=True)
            return [_reduced_alone.bind(x, aval=v.aval) for x, v in alone], masks
        # XLA removes operations without results.
        if eqn.outvars and _communicates(eqn):
            outs, above = self._event(eqn, ins, above)
        else:
            outs = _bind(eqn, eqn.params, ins)
        outs_above = [above] * len(outs)
        for result, operand in _passed_on(eqn).items():
            outs_above[result] = masks[operand]
        return outs, outs_above

    def _inline(
        self, eqn: core.JaxprEqn, ins: Sequence[Any], masks: Sequence[int]
    ) -> tuple[list[Any], list[int]]:
        inner = eqn.params[_INLINED[eqn.primitive.name]]
        if eqn.params.get("prevent_cse"):  # set by jax.checkpoint
            ins = lax.optimization_barrier(list(ins))
        return self.run(inner, ins, masks)

    def _once(
        self, eqn: core.JaxprEqn, ins: Sequence[Any], masks: Sequence[int]
    ) -> tuple[list[Any], list[int]]:
        carry, slices = _carry_of(eqn)
        ins = [x[0] if place in slices else x for place, x in enumerate(ins)]
        outs, outs_above = self.run(eqn.params["jaxpr"], ins, masks)
        stacked = outs[len(carry) :]
        return [*outs[: len(carry)], *(y[None] for y in stacked)], outs_above

    def _event(
        self, eqn: core.JaxprEqn, ins: list[Any], above: int
    ) -> tuple[list[Any], int]:
        event = len(self._above)
        after = []
        for earlier in reversed(range(event)):
            if not above >> earlier & 1:
                after.append(self._results[earlier])
                above |= self._above[earlier]
        if after:
            place = _operand_of(eqn)
            ins[place] = _tie.bind(ins[place], *after)
        is_nested = eqn.primitive.name not in _COLLECTIVES
        params = _with_ordered_bodies(eqn) if is_nested else eqn.params
        outs = _bind(eqn, params, ins)
        above |= 1 << event
        self._above.append(above)
        self._results.append(outs[_result_of(eqn)])
        return outs, above


def _scopes_of(eqn: core.JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Restore the named scopes of a traced equation."""
    scopes = str(eqn.source_info.name_stack)
    return jax.named_scope(scopes) if scopes else contextlib.nullcontext()


def _bind(eqn: core.JaxprEqn, params: dict[str, Any], ins: Sequence[Any]) -> list[Any]:
    outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _is_alone(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a reduction over axes of size 1."""
    return eqn.primitive.name in _REDUCTIONS and all(
        lax.axis_size(axis) == 1 for axis in eqn.params["axes"]
    )


def _communicates(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name in _COLLECTIVES:
        return not _is_alone(eqn)
    inner = core.jaxprs_in_params(eqn.params)
    return any(_communicates(e) for jaxpr in inner for e in jaxpr.eqns)


def _with_ordered_bodies(eqn: core.JaxprEqn) -> dict[str, Any]:
    """Fix the order of the collectives inside the bodies of a loop or conditional.

    Returns:
      Name -> value, the parameters of the equation with the changed bodies.
    """

    def ordered(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(ordered, value))
        if not isinstance(value, core.Jaxpr):
            return value
        return jax.make_jaxpr(lambda *args: _run(value, args))(*value.in_avals)

    return {name: ordered(value) for name, value in eqn.params.items()}


def _operand_of(eqn: core.JaxprEqn) -> int:
    """Return the index of an operand that the event needs before it can begin."""
    places = range(len(eqn.invars))
    if eqn.primitive.name == "cond":
        return 0  # the index of the branch
    if _body(eqn):
        carry, slices = _carry_of(eqn)
        passed = _passed_on(eqn).values()
        places = [place for place in carry if place not in passed] or slices or places
    return _smallest(places, eqn.invars)


def _result_of(eqn: core.JaxprEqn) -> int:
    """Return the index of a result that the event computes."""
    passed = _passed_on(eqn)
    everything = range(len(eqn.outvars))
    # A loop that returns its carry unchanged computes nothing: XLA removes it.
    places = [place for place in everything if place not in passed] or everything
    return _smallest(places, eqn.outvars)


def _passed_on(eqn: core.JaxprEqn) -> dict[int, int]:
    """Return result index -> operand index, for carry that a loop does not change."""
    body = _body(eqn)
    if body is None:
        return {}
    first = len(eqn.invars) - len(body.invars)
    carry, _ = _carry_of(eqn)
    return {
        result: place
        for result, place in enumerate(carry)
        if body.outvars[result] is body.invars[place - first]
    }


def _carry_of(eqn: core.JaxprEqn) -> tuple[range, range]:
    """Return the indices of a loop's carry, and of its slices, among its operands.

    The operands are constants, carry, slices; the results are carry, stacked arrays. A
    sliced or stacked array has one dim fewer in the body.
    """
    body = _body(eqn)
    assert body is not None

    def count(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        pairs = zip(reversed(outer), reversed(inner), strict=False)
        return sum(a.aval.ndim != b.aval.ndim for a, b in pairs)

    stop = len(eqn.invars) - count(eqn.invars, body.invars)
    num_carry = len(eqn.outvars) - count(eqn.outvars, body.outvars)
    return range(stop - num_carry, stop), range(stop, len(eqn.invars))


def _body(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    return {
        "scan": eqn.params.get("jaxpr"),
        "while": eqn.params.get("body_jaxpr"),
    }.get(eqn.primitive.name)


def _smallest(places: Sequence[int], atoms: Sequence[Any]) -> int:
    """Return the index among `places` of the array that is best for a dependence.

    This is the smallest float array, or the smallest of other dtypes if there is no
    float array. XLA may evaluate operations on other dtypes at compile time, which
    would remove the dependence, but never operations on floats. PRNG keys and empty
    arrays come last.
    """

    def weight(place: int) -> tuple[bool, bool, int]:
        dtype, shape = atoms[place].aval.dtype, atoms[place].aval.shape
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return is_key or 0 in shape, not is_float, math.prod(shape)

    return min(places, key=weight)


def _lower_tie(x: jax.Array, *after: jax.Array) -> jax.Array:
    """Return x, through a comparison that makes it depend on other arrays.

    XLA cannot simplify the comparison, so it keeps the dependence: the result is x
    unless the last bit of an entry is more than 1, which is never true.
    """
    never = jnp.zeros((), jnp.bool_)
    for y in after:
        entry = lax.slice(y, (0,) * y.ndim, (1,) * y.ndim).reshape(())
        if jnp.issubdtype(y.dtype, jnp.floating):
            entry = lax.bitcast_convert_type(entry, f"uint{8 * y.dtype.itemsize}")
        never |= (entry.astype(jnp.uint32) & 1) > 1
    return jnp.where(never, jnp.zeros_like(x), x)


mlir.register_lowering(_reduced_alone, lambda _, x, *, aval: [x])
mlir.register_lowering(_tie, mlir.lower_fun(_lower_tie, multiple_results=False))

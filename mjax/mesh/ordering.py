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
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr

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
_ARGUMENTS = 1
"""Set of events that has only the arguments of a level; see `_Order`."""

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
        # A dead operand of a loop is removed by XLA, together with its tie.
        jaxpr, _ = dce_jaxpr(jaxpr, True, instantiate=True)
        outputs = _run(jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return ordered


def _run(jaxpr: core.Jaxpr, args: Sequence[Any]) -> list[Any]:
    outputs, _ = _Order().run(jaxpr, args, [_ARGUMENTS] * len(args))
    return outputs


class _Order:
    """Evaluate one level of a jaxpr; the body of a loop is a separate level.

    An event is a collective, or a loop or conditional that contains one. Event 0 is the
    arguments of the level. A set of events is an int with one bit per event; a value
    that depends on no event is a constant.
    """

    def __init__(self) -> None:
        self._above: list[int] = [_ARGUMENTS]
        """For each event, the event itself and all events on which it depends."""
        self._results: list[Any] = [None]
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
            with _scopes_of(eqn):
                outs, outs_above = self._evaluate(eqn, ins, masks)
            values |= dict(
                zip(eqn.outvars, zip(outs, outs_above, strict=True), strict=True)
            )
        results = [read(atom) for atom in jaxpr.outvars]
        return [r[0] for r in results], [r[1] for r in results]

    def _evaluate(
        self, eqn: core.JaxprEqn, ins: list[Any], masks: list[int]
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
        if not _communicates(eqn):
            above = functools.reduce(int.__or__, masks, 0)
            return _bind(eqn, eqn.params, ins), [above] * len(eqn.outvars)
        everything = range(len(eqn.outvars))
        is_computed = _depend(eqn, [False] * len(ins))
        computed = [*itertools.compress(everything, is_computed)] or everything
        outs, above = self._event(eqn, ins, masks, computed)
        # XLA may compute the other results outside of the event.
        return outs, [above if k in computed else _ARGUMENTS for k in everything]

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
        self,
        eqn: core.JaxprEqn,
        ins: list[Any],
        masks: Sequence[int],
        computed: Sequence[int],
    ) -> tuple[list[Any], int]:
        event = len(self._above)
        above = functools.reduce(int.__or__, masks, _ARGUMENTS)
        after = []
        for earlier in reversed(range(event)):
            if not above >> earlier & 1:
                after.append(self._results[earlier])
                above |= self._above[earlier]
        if after:
            place = _best(_operands_of(eqn), eqn.invars, masks)
            ins[place] = _tie.bind(ins[place], *after)
        is_nested = eqn.primitive.name not in _COLLECTIVES
        params = _with_ordered_bodies(eqn) if is_nested else eqn.params
        outs = _bind(eqn, params, ins)
        above |= 1 << event
        if outs:  # a loop that only prints has none
            self._above.append(above)
            self._results.append(outs[_best(computed, eqn.outvars)])
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


def _depend(eqn: core.JaxprEqn, operands: Sequence[bool]) -> list[bool]:
    """Return which results depend on a collective inside, or on the given operands."""

    def of(jaxpr: core.Jaxpr, arguments: Sequence[bool]) -> list[bool]:
        known = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atoms: Sequence[Any]) -> list[bool]:
            return [isinstance(a, core.Var) and known.get(a, False) for a in atoms]

        for inner in jaxpr.eqns:
            known |= zip(inner.outvars, _depend(inner, read(inner.invars)), strict=True)
        return read(jaxpr.outvars)

    if not _communicates(eqn):
        return [any(operands)] * len(eqn.outvars)
    if eqn.primitive.name in _INLINED:
        return of(eqn.params[_INLINED[eqn.primitive.name]], operands)
    if eqn.primitive.name == "cond":
        branches = [of(branch, operands[1:]) for branch in eqn.params["branches"]]
        return [any(result) for result in zip(*branches, strict=True)]
    body = _body(eqn)
    if body is None:
        return [True] * len(eqn.outvars)
    carry, _ = _carry_of(eqn)
    given = [*operands]
    while True:
        results = of(body, given[len(given) - len(body.invars) :])
        before = [*given]
        for place, result in zip(carry, results, strict=False):
            given[place] |= result
        if given == before:
            return results


def _operands_of(eqn: core.JaxprEqn) -> Sequence[int]:
    """Return the indices of operands that the event needs before it can begin."""
    places = range(len(eqn.invars))
    if eqn.primitive.name == "cond":
        return [0]  # the index of the branch
    body = _body(eqn)
    if body is None:
        return places
    first = len(eqn.invars) - len(body.invars)
    carry, slices = _carry_of(eqn)
    # XLA takes carry that the body does not change out of the loop.
    changed = [
        place
        for place, result in zip(carry, body.outvars, strict=False)
        if result is not body.invars[place - first]
    ]

    def has_entries(atom: Any) -> bool:
        return 0 not in atom.aval.shape

    groups = (changed, slices, places)
    nonempty = ([p for p in group if has_entries(eqn.invars[p])] for group in groups)
    return next(filter(None, nonempty), places)


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


def _best(
    places: Sequence[int], atoms: Sequence[Any], masks: Sequence[int] | None = None
) -> int:
    """Return the index among `places` of the array that is best for a dependence.

    This is the smallest float array, or the smallest of other dtypes if there is no
    float array. XLA may evaluate operations on other dtypes at compile time, which
    would remove the dependence, but never operations on floats. Constants (mask 0),
    PRNG keys and empty arrays come last.
    """

    def weight(place: int) -> tuple[bool, bool, bool, int]:
        dtype, shape = atoms[place].aval.dtype, atoms[place].aval.shape
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        is_float = jnp.issubdtype(dtype, jnp.floating)
        is_constant = masks is not None and not masks[place]
        return is_key or 0 in shape, is_constant, not is_float, math.prod(shape)

    return min(places, key=weight)


def _lower_tie(x: jax.Array, *after: jax.Array) -> jax.Array:
    """Return x, with each of its bits inverted if a comparison that never holds does.

    XLA cannot simplify the comparison: whether the last bit of an entry exceeds 1. It
    also cannot drop the choice, even if it knows x, because inverted bits differ.
    """
    never = jnp.zeros((), jnp.bool_)
    for y in after:
        entry = lax.slice(y, (0,) * y.ndim, (1,) * y.ndim).reshape(())
        never |= (_bits(entry).astype(jnp.uint32) & 1) > 1
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        return jax.random.wrap_key_data(
            jnp.where(never, ~data, data), impl=jax.random.key_impl(x)
        )
    bits = _bits(x)
    return lax.bitcast_convert_type(jnp.where(never, ~bits, bits), x.dtype)


def _bits(x: jax.Array) -> jax.Array:
    """Return an array as integers of the same width."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")


mlir.register_lowering(_reduced_alone, lambda _, x, *, aval: [x])
mlir.register_lowering(_tie, mlir.lower_fun(_lower_tie, multiple_results=False))

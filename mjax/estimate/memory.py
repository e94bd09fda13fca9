"""Estimate the memory of one device from a traced step, before anything is compiled.

Input: the trace of a training step and its abstract state. Output: bytes by purpose.
The sizes of state, gathered weights, gradients and stash are exact;
`mjax.estimate.liveness` estimates the working set beyond them.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from mjax.estimate import liveness
from mjax.mesh import rules
from mjax.mesh.axes import SHARDS

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Peak bytes of one device in a step, and bytes of its host."""

    state: int
    """Parameters and optimizer state stored on the device."""
    compute_copy: int
    """Gathered weights, in the compute dtype; 0 if the stored parameters are used."""
    gradients: int
    """Gradients of all parameters that the device computes with, until the reduction.
    If each layer's gradients are reduced at once, only the gradients of the parameters
    that the device stores."""
    stash: int
    """Ring buffers between the forward and backward half-ticks of a pipeline."""
    working_set: int
    """The rest: the backward pass of the layers, the loss, the optimizer's update."""
    host_state: int = 0
    """Bytes of optimizer state in pinned host memory."""
    host_activations: int = 0
    """Bytes of the layers' residuals in pinned host memory."""

    @property
    def total(self) -> int:
        """All bytes on the device."""
        host = self.host_state + self.host_activations
        return sum(dataclasses.astuple(self)) - host


def estimate(
    step: jax.stages.Traced,
    state: Any,
    saved: Any,
    *,
    trained: Any = None,
    on_host: Any = None,
    moments_at_once: int | None = None,
    first: Any = None,
    compute: DTypeLike,
    reduce: DTypeLike,
    stash_name: str,
    zero_level: int,
    accumulates: bool,
) -> Estimate:
    """Estimate the memory of a device during a step.

    Args:
      step: the traced training step.
      state: shapes, dtypes and shardings of the state.
      saved: the same for the state in canonical form; leaves that differ from `state`
        are copied during a save.
      trained: the parameters that have gradients; None for all.
      on_host: whether each leaf of the state is in host memory; None for no leaf.
      moments_at_once: maximum bytes of moments on the device during an update in
        pieces; None if the update is not in pieces.
      first: weights gathered before the step and passed to it; None if the step gathers
        all weights.
      compute: dtype of the gathered weights.
      reduce: dtype of the gradients.
      stash_name: name of the pipeline's ring buffers in the trace.
      zero_level: 0 to 3.
      accumulates: whether gradients are accumulated over microbatches before their
        reduction, as in every pipeline.
    """
    body = liveness.main_shard_map(step.jaxpr)
    params = jax.tree.leaves(state.params)
    gathered = [_stored(p) if zero_level == 3 else _gathered(p) for p in params]
    is_copied = zero_level < 3 and (
        any(_stored(p) != _gathered(p) for p in params)
        or any(p.dtype != np.dtype(compute) for p in params)
    )
    compute_copy = is_copied * sum(gathered) * np.dtype(compute).itemsize
    is_whole = accumulates or zero_level == 0
    with_gradient = params if trained is None else jax.tree.leaves(trained)
    is_parts = zero_level == 3 or not is_whole
    gradients = sum(map(_stored if is_parts else _gathered, with_gradient))
    gradients *= np.dtype(reduce).itemsize
    stash = sum(map(liveness.num_bytes, liveness.named(body, stash_name)))
    # Every update waits for the norms, so the activations are no longer alive.
    updates = moments_at_once
    if updates is None:
        updates = sum(_stored(p) * p.dtype.itemsize for p in with_gradient)
    in_update = sum(map(_stored, with_gradient)) * np.dtype(reduce).itemsize + updates
    is_host = [False] * len(jax.tree.leaves(state))
    if on_host is not None:
        is_host = jax.tree.leaves(on_host)
    leaves = jax.tree.leaves(state), jax.tree.leaves(saved), is_host
    in_save, one_of_host = 0, 0
    for before, after, is_ in zip(*leaves, strict=True):
        size = _stored(after) * after.dtype.itemsize
        if before is not after and is_:  # one at a time, from the host and back
            one_of_host = max(one_of_host, 2 * size)
        elif before is not after:
            in_save += size
    early = sum(_stored(x) * x.dtype.itemsize for x in jax.tree.leaves(first))
    in_step = early + max(liveness.peak_bytes(body), in_update)
    peak = max(in_step, in_save + one_of_host)
    stored = [_stored(x) * x.dtype.itemsize for x in jax.tree.leaves(state)]
    in_host = sum(n for n, is_ in zip(stored, is_host, strict=True) if is_)
    return Estimate(
        state=sum(stored) - in_host,
        host_state=in_host,
        host_activations=liveness.peak_bytes(body, on_host=True),
        compute_copy=compute_copy,
        gradients=gradients,
        stash=stash,
        working_set=max(0, peak - compute_copy - gradients - stash),
    )


def table(found: Estimate, *, available: int | None) -> str:
    """Format an estimate as lines of text.

    Args:
      found: the estimate.
      available: bytes of the device, None if unknown.
    """
    rows = {
        "state at rest": found.state,
        "gathered weights": found.compute_copy,
        "gradients": found.gradients,
        "stash": found.stash,
        "working set": found.working_set,
    }
    lines = ["memory of one device, estimated from the trace of a step:"]
    lines += [
        f"  {what:<18}{in_units(size):>11}" for what, size in rows.items() if size
    ]
    host = {
        "optimizer state": found.host_state,
        "activations": found.host_activations,
    }
    lines += [
        f"  in pinned host memory: {what}, {in_units(size)}"
        for what, size in host.items()
        if size
    ]
    of = "" if available is None else f" of {in_units(available)}"
    return "\n".join([*lines, f"  {'total':<18}{in_units(found.total):>11}{of}"])


def check_fits(
    needed: Estimate, available: int, smaller: Iterable[tuple[str, Estimate]]
) -> None:
    """Refuse a step that does not fit in device memory.

    Args:
      needed: estimated memory of the step.
      available: bytes of the device.
      smaller: pairs of a flag that changes the run and its estimate. They are read in
        order, and only if the step does not fit.
    Raises:
      ValueError: the step does not fit; the message names the first change that makes
        it fit, or the one with the smallest estimate.
    """
    if needed.total <= available:
        return
    best, smallest = "", needed
    for words, found in smaller:
        if found.total < smallest.total:
            best, smallest = words, found
        if found.total <= available:
            break
    problem = (
        f"a step needs an estimated {in_units(needed.total)} of device memory, and a "
        f"device has {in_units(available)}"
    )
    if smallest.total <= available:
        raise ValueError(f"{problem}; {best} fits, with {in_units(smallest.total)}")
    least = f"{best} needs {in_units(smallest.total)}" if best else "no flag reduces it"
    raise ValueError(
        f"{problem}; no --pipeline.stash, --model.remat, --batch.microbatches or "
        f"--pipeline.schedule is enough ({least}): split the model over more devices, "
        "by --mesh.pp, --mesh.tp or --mesh.dp-shard"
    )


def in_units(num_bytes: int | float) -> str:
    """Format a number of bytes in the largest unit in which it is above 1."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _stored(leaf: Any) -> int:
    """Count the entries of a leaf on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _gathered(leaf: Any) -> int:
    """Count the entries of a leaf after all its shards are gathered."""
    spec, shape = leaf.sharding.spec, leaf.sharding.mesh.shape
    split = [axis for axis in SHARDS if rules.dim_of(spec, axis) is not None]
    return _stored(leaf) * math.prod(shape[axis] for axis in split)

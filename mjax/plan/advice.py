"""Name the bottleneck of a planned run, and the changes most likely to help.

Input: a `Plan`. Output: text with numbers of the plan, and flags. The numbers of the
plan decide which changes are considered. The gain of a change is the fraction of the
step time that it saves, modelled in closed form (`mjax.estimate.formulas`) with the
overlap of the plan.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from mjax.config.sizes import as_flags, check_sizes, smaller, with_fields
from mjax.config.train import TrainConfig
from mjax.estimate.formulas.case import Constants
from mjax.estimate.memory import in_units
from mjax.mesh.axes import AxisSizes, resolve
from mjax.plan import closed_form
from mjax.plan.host_copies import state_copies_s
from mjax.plan.reading import schedule_of
from mjax.plan.result import (
    COMPUTE_PARTS,
    HOST_COPIES,
    IDLE,
    ROLES,
    Advice,
    Plan,
    label,
    waiting,
)

MAX_ADVICE = 3
_MAX_TRACED = 8
"""Maximum number of smaller runs to trace, besides the smallest one, if a run does not
fit."""
_MIN_SHARE = 0.02
"""Minimum fraction of the step that a part must take to justify a change."""
_MIN_GAIN = 0.005
_BOUND = 0.08
"""A lost time above this fraction of the step is called the bottleneck."""

Traced = Callable[[TrainConfig], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Change:
    fields: dict[str, Any]
    why: str


def advise(plan: Plan, traced_bytes: Traced) -> Plan:
    """Return the plan with its bottleneck and advice.

    Args:
      plan: the plan.
      traced_bytes: function that estimates the memory of a run on the same mesh from
        its trace. It is called only if the plan does not fit.
    """
    advice = _to_fit(plan, traced_bytes) if not plan.memory.fits else _faster(plan)
    return dataclasses.replace(plan, bottleneck=bottleneck(plan), advice=advice)


def bottleneck(plan: Plan) -> str:
    """Return a description of the main limit of the run."""
    memory, modelled = plan.memory, plan.modelled
    if not memory.fits:
        return (
            f"memory: a step needs {in_units(memory.total)}, the limit is "
            f"{in_units(memory.usable)}"
        )
    shares = {name: s / modelled.step_s for name, s in modelled.parts_s.items()}
    losses = {
        name: share
        for name, share in shares.items()
        if name not in (COMPUTE_PARTS["product"], COMPUTE_PARTS["kernel"])
    }
    name = max(losses, key=lambda name: losses[name], default="")
    if not name or losses[name] < _BOUND:
        busy = sum(shares.get(COMPUTE_PARTS[kind], 0.0) for kind in COMPUTE_PARTS)
        return (
            f"arithmetic: kernels run for {busy:.0%} of the step, matmuls alone for "
            f"{shares.get(COMPUTE_PARTS['product'], 0.0):.0%}"
        )
    return f"{label(name)}, {losses[name]:.0%} of the step; {_explained(plan, name)}"


def _explained(plan: Plan, name: str) -> str:
    if name == IDLE:
        return (
            f"stages wait before and after {plan.config.batch.microbatches} "
            f"microbatches (pp {plan.sizes.pp}, virtual stages per stage "
            f"{plan.config.pipeline.chunks})"
        )
    if name == COMPUTE_PARTS["memory"]:
        largest = plan.modelled.memory_bound_s.items()
        named = ", ".join(
            f"{name} {s / plan.modelled.step_s:.1%}" for name, s in largest
        )
        return f"few FLOPs per byte{named and ', the largest: '}{named}"
    if name == HOST_COPIES:
        held = ", ".join(
            f"{in_units(n)} of {what}" for what, n in plan.memory.host.items()
        )
        return f"{held} in host memory"
    for role in ROLES:
        if name == waiting(role):
            return _overlap_words(plan, role)
    return "see the parts of the step"


def _overlap_words(plan: Plan, role: str) -> str:
    sent = plan.communication
    share = None if sent is None else sent.overlapped_fraction(role)
    if sent is None or share is None:
        return f"no overlap assumed for the bytes over {role}"
    total = sum(row.num_bytes for row in sent.traffic if row.role == role)
    return f"{in_units(total)} over {role} per step, {share:.0%} of them overlapped"


def _to_fit(plan: Plan, traced_bytes: Traced) -> tuple[Advice, ...]:
    """Return flags with which the step fits, found by tracing runs on the same mesh.

    Moving the optimizer state to the host is included if it costs less time than the
    first smaller run that fits, or if no smaller run fits.
    """
    memory = plan.memory
    # Assume that the compiler's memory beyond the trace grows in proportion to it.
    factor = memory.total / traced_bytes(plan.config)
    on_host = _state_to_host(plan, traced_bytes, factor)
    found = []
    others = [*smaller(plan.config, plan.sizes)]
    for words, config in [*others[:_MAX_TRACED], *others[_MAX_TRACED:][-1:]]:
        needed = round(traced_bytes(config) * factor)
        why = f"needs {in_units(needed)} of {in_units(memory.usable)}, from the trace"
        if config.model.remat == "offload":
            more_s = _longer_s(plan, config)
            why += f"; layer inputs are on the host, {more_s:+.2g} s per step, modelled"
        found.append((needed, Advice(flags=words, why=why, gain=None)))
        if needed <= memory.usable:
            if on_host is not None and on_host[0] < _longer_s(plan, config):
                return (on_host[1], found[-1][1])
            return (found[-1][1],)
    if on_host is not None:
        return (on_host[1],)
    split = Advice(
        flags="larger --mesh.tp, --mesh.pp or --mesh.dp-shard, or more --nodes",
        why="no change that keeps this mesh and the results is enough",
        gain=None,
    )
    smallest = [advice for _, advice in sorted(found, key=lambda pair: pair[0])[:1]]
    return (split, *smallest)


def _state_to_host(
    plan: Plan, traced_bytes: Traced, factor: float
) -> tuple[float, Advice] | None:
    """Return the cost in seconds of moments on the host, and the advice to move them.

    The result is None if they are already there, or if the step still does not fit.
    """
    state = plan.memory.parts.get("optimizer state", 0)
    if not state or plan.config.optim.state_memory == "host":
        return None
    fields = {"optim.state_memory": "host"}
    needed = round(traced_bytes(with_fields(plan.config, fields)) * factor)
    if needed > plan.memory.usable:
        return None
    cost_s = state_copies_s(state, plan.topology.description)
    why = (
        f"needs {in_units(needed)} of {in_units(plan.memory.usable)}, from the trace: "
        f"{in_units(state)} of moments are on the host, and their copies take "
        f"{cost_s:.2g} s per step, modelled ({cost_s / plan.modelled.step_s:.1%} of it)"
    )
    return cost_s, Advice(flags=as_flags(fields), why=why, gain=None)


def _longer_s(plan: Plan, config: TrainConfig) -> float:
    """Return the seconds that a change on the same mesh adds to a step, modelled."""
    constants, top = measured_overlap(plan), plan.topology
    now, then = (
        closed_form.estimate(run, plan.sizes, top, constants).total_s
        for run in (plan.config, config)
    )
    return plan.modelled.step_s * (then / now - 1)


def _faster(plan: Plan) -> tuple[Advice, ...]:
    """Return the changes that fit, ranked by their gain in closed form."""
    constants = measured_overlap(plan)
    top = plan.topology
    now = closed_form.estimate(plan.config, plan.sizes, top, constants)
    found: dict[str, Advice] = {}
    for change in _changes(plan):
        fitted = _fitted(plan, change)
        if fitted is None:
            continue
        then = closed_form.estimate(*fitted, top, constants)
        more = then.memory.total_bytes - now.memory.total_bytes
        gain = 1 - then.total_s / now.total_s
        if gain < _MIN_GAIN or plan.memory.total + more > plan.memory.usable:
            continue
        kind = next(iter(change.fields))
        if kind not in found or gain > (found[kind].gain or 0.0):
            why = f"{change.why}; memory {_signed(more)}"
            flags = as_flags(change.fields)
            found[kind] = Advice(flags=flags, why=why, gain=gain)
    ranked = sorted(found.values(), key=lambda advice: -(advice.gain or 0.0))
    return tuple(ranked[:MAX_ADVICE])


def measured_overlap(plan: Plan) -> Constants:
    """Return the assumptions of the closed form, with the overlap of the plan."""
    if plan.communication is None:
        return closed_form.ASSUMED
    overlap = plan.communication.overlapped_fraction
    return dataclasses.replace(
        closed_form.ASSUMED,
        tp_overlap=overlap("tp") or 0.0,
        dp_overlap=overlap("dp") or 0.0,
        pp_overlap=overlap("pp") or 0.0,
    )


def _fitted(plan: Plan, change: _Change) -> tuple[TrainConfig, AxisSizes] | None:
    """Return the changed run and its axis sizes; None if a size does not divide."""
    try:
        config = with_fields(plan.config, change.fields)
        sizes = resolve(config.mesh, plan.topology.num_gpus)
        check_sizes(config, sizes)
    except ValueError:
        return None
    return config, sizes


def _changes(plan: Plan) -> Iterator[_Change]:
    """Yield the changes that the numbers of the plan suggest."""
    yield from _less_remat(plan)
    yield from _inputs_to_host(plan)
    yield from _less_bubble(plan)
    yield from _less_tp(plan)
    yield from _less_dp(plan)


def _less_remat(plan: Plan) -> Iterator[_Change]:
    policies = ("none", "core", "dots", "full")
    remat = plan.config.model.remat
    if remat not in policies[1:]:
        return
    free = plan.memory.usable - plan.memory.total
    for policy in policies[: policies.index(remat)]:
        yield _Change(
            fields={"model.remat": policy},
            why=f"remat {remat} recomputes activations that would fit: "
            f"{in_units(free)} free",
        )


def _inputs_to_host(plan: Plan) -> Iterator[_Change]:
    """Suggest fewer microbatches if offloading layer inputs frees enough memory."""
    config = plan.config
    count = config.batch.microbatches
    is_pipeline = plan.sizes.pp * config.pipeline.chunks > 1
    if config.model.remat != "full" or is_pipeline or count % 2:
        return
    free = plan.memory.usable - plan.memory.total
    yield _Change(
        fields={"model.remat": "offload", "batch.microbatches": count // 2},
        why=f"{in_units(free)} free, and remat full keeps the input of every layer; "
        "with these on the host half as many microbatches suffice",
    )


def _less_bubble(plan: Plan) -> Iterator[_Change]:
    config, sizes = plan.config, plan.sizes
    idle = plan.modelled.bubble
    if idle < _MIN_SHARE:
        return

    def words(other: TrainConfig) -> str:
        schedule = schedule_of(other, sizes)
        then = 0.0 if schedule is None else schedule.bubble
        return f"bubble {idle:.1%} of the ideal time, then {then:.1%}"

    chunks = config.pipeline.chunks
    most = config.model.layers // sizes.pp
    local = config.batch.size // sizes.dp
    count = config.batch.microbatches
    for fields in (
        *({"pipeline.chunks": c} for c in range(chunks + 1, min(most, 2 * chunks) + 1)),
        *({"batch.microbatches": m} for m in (2 * count, 4 * count) if m <= local),
    ):
        change = _Change(fields=fields, why="")
        fitted = _fitted(plan, change)
        if fitted is not None:
            yield dataclasses.replace(change, why=words(fitted[0]))


def _less_tp(plan: Plan) -> Iterator[_Change]:
    share = plan.modelled.exposed_s["tp"] / plan.modelled.step_s
    if share < _MIN_SHARE:
        return
    why = f"{share:.1%} of the step waits for tp, {_overlap_words(plan, 'tp')}"
    tp, pp = plan.sizes.tp, plan.sizes.pp
    free_dp = {"mesh.dp": -1}
    if plan.config.mesh.tp_overlap == "off":
        yield _Change(
            fields={"mesh.tp_overlap": "chunks"},
            why=f"{why}; in chunks it overlaps with the matmuls",
        )
    yield _Change(fields={"mesh.tp": tp // 2, **free_dp}, why=f"{why}; halve tp")
    yield _Change(
        fields={"mesh.tp": tp // 2, "mesh.pp": 2 * pp, **free_dp},
        why=f"{why}; replace half of tp by pipeline stages",
    )
    if plan.config.model.block == "serial":
        yield _Change(
            fields={"model.block": "parallel"},
            why=f"{why}; half as many collectives (this changes the model)",
        )


def _less_dp(plan: Plan) -> Iterator[_Change]:
    share = plan.modelled.exposed_s["dp"] / plan.modelled.step_s
    if share < _MIN_SHARE:
        return
    why = f"{share:.1%} of the step waits for dp, {_overlap_words(plan, 'dp')}"
    sizes = plan.sizes
    inside = plan.topology.gpus_per_node // sizes.tp
    for shard in {max(1, inside), *(d for d in (2, 4, 8, 16) if d < sizes.shards)}:
        if shard < sizes.shards and sizes.dp % shard == 0:
            yield _Change(
                fields=_of_shard(plan, shard),
                why=f"{why}; all-gather and reduce-scatter over {shard} instead of "
                f"{sizes.shards}, all-reduce 1/{shard} of the bytes over the rest",
            )
    if plan.config.precision.reduce == "float32":
        yield _Change(
            fields={"precision.reduce": "bfloat16"},
            why=f"{why}; half the gradient bytes, at lower precision",
        )


def _of_shard(plan: Plan, shard: int) -> dict[str, Any]:
    """Return the mesh fields for `shard` shards.

    They keep the two-step collectives of the run if `shard` is a larger multiple of the
    shards per node; otherwise they select one-step collectives.
    """
    per_node = plan.config.mesh.dp_shard_per_node
    fields: dict[str, Any] = {"mesh.dp_shard": shard}
    if per_node is not None and (shard <= per_node or shard % per_node):
        fields["mesh.dp_shard_per_node"] = None
    return fields


def _signed(num_bytes: float) -> str:
    sign = "+" if num_bytes >= 0 else "-"
    return f"{sign}{in_units(abs(num_bytes))} a GPU, estimated before compilation"

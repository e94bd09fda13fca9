"""Search for a layout: mesh, virtual stages, microbatches, remat and window.

Input: a config and a cluster. Output: the candidates that fit in memory, the fastest
first. Memory and time are modelled in closed form (`mjax.estimate.formulas`).

Two common rules reduce the search space. Tensor parallelism stays inside a node
(Narayanan et al. 2021, arXiv:2104.04473, section 3.2, takeaway 1). dp_shard is the
smallest size that fits, because more shards must be gathered from further away (Zhang
et al. 2022, arXiv:2205.00119, section 3.1).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mjax.config.sizes import as_flags, check_sizes, with_fields
from mjax.config.train import TrainConfig
from mjax.estimate.formulas.case import Constants
from mjax.estimate.memory import in_units
from mjax.hardware.described import NoPluginError
from mjax.mesh.axes import AxisSizes
from mjax.plan import closed_form
from mjax.plan.options import Topology
from mjax.plan.result import Plan, usable_bytes

HIDDEN = dataclasses.replace(
    closed_form.ASSUMED, dp_overlap=0.5, pp_overlap=0.9, by_shape=True
)
"""Overlap that the search assumes with a pipeline: less than in compiled schedules of
mjax (docs/benchmarks/pipeline_overlap.md). The search also assumes that small matmuls
are slower. Both affect only the order of candidates: the best are compiled and analysed
with one efficiency for all matmuls (`mjax.plan.cost`)."""

HIDDEN_WITHOUT_PIPELINE = dataclasses.replace(HIDDEN, dp_overlap=0.85)
"""Overlap that the search assumes without a pipeline. Read from compiled schedules
(2026-11, jax 0.11.2): gpt-1b3, llama3-8b and gpt-13b overlap 88%, 90% and 97% of the
bytes over dp."""

_REMATS = ("none", "core", "dots", "full")
"""Remat policies to try: not `attention`, which equals `none` with a fused backend."""
_PLAIN_REMATS = (*_REMATS, "offload")
"""Policies to try without a pipeline, where offload covers the inputs of all layers."""

_MAX_CHUNKS = 12
MAX_ROWS = 12
"""Number of rows of the table."""
SEARCHED = (
    *("mesh.pp", "mesh.dp", "mesh.tp", "mesh.dp_shard", "mesh.dp_shard_per_node"),
    *("pipeline.chunks", "batch.microbatches", "model.remat"),
)
"""Fields that every layout sets, instead of the run's own values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that fits, modelled in closed form."""

    fields: dict[str, Any]
    """Values of the fields that the layout sets, by flag name."""
    config: TrainConfig
    sizes: AxisSizes
    step_s: float
    mfu: float
    memory_bytes: float
    usable_bytes: int
    """Memory of a GPU that a run may use, in bytes."""

    @property
    def flags(self) -> str:
        """The flags of the layout, for train and for plan."""
        return as_flags(self.fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate in the ranked table, with its plan if it was compiled."""

    candidate: Candidate
    plan: Plan | None = None
    """Plan of the compiled candidate; None if it was not compiled."""
    refused: str = ""
    """Why the candidate could not be compiled; empty without an error."""


def search(
    config: TrainConfig,
    topology: Topology,
    *,
    windows: Sequence[int] = (),
    constants: Constants | None = None,
    keep: Callable[[Mapping[str, Any]], bool] = lambda fields: True,
) -> list[Candidate]:
    """List the layouts that fit, the fastest first.

    Args:
      config: the run, with its vocabulary size; batch size, model and precision are
        fixed.
      topology: the cluster; every layout uses all of it.
      windows: attention windows to try besides the model's own.
      constants: assumptions of the closed form; None uses `assumed`.
      keep: function that decides whether to try a layout, from its fields (`SEARCHED`
        without the shards).
    Returns:
      One candidate for each mesh and window: its fastest number of virtual stages,
      microbatches and remat. Empty if nothing fits.
    """
    usable = usable_bytes(topology, config.device_memory_gib)
    best: dict[tuple, Candidate] = {}
    sets_per_node = config.mesh.dp_shard_per_node is not None
    for fields, changed, sizes in _layouts(config, topology, windows, keep):
        if sets_per_node:
            fields |= {"mesh.dp_shard_per_node": None}
        key = (sizes.pp, sizes.dp, sizes.tp, changed.model.window)
        found = _smallest_shard(
            *(fields, changed, sizes, topology, usable, constants or assumed(sizes))
        )
        if found is not None and (key not in best or found.step_s < best[key].step_s):
            best[key] = found
    return sorted(best.values(), key=lambda candidate: candidate.step_s)


def assumed(sizes: AxisSizes) -> Constants:
    """Return the assumptions of the closed form with which a mesh is ranked."""
    return HIDDEN if sizes.pp > 1 else HIDDEN_WITHOUT_PIPELINE


def compile_best(
    candidates: Sequence[Candidate],
    count: int,
    *,
    plan_of: Callable[[Candidate], Plan],
    traced_bytes: Callable[[Candidate], int],
    is_ours: Callable[[Exception], bool],
) -> tuple[list[Row], str]:
    """Compile the first candidates whose trace also fits; return all, ranked.

    Args:
      candidates: the fastest first.
      count: number of candidates to compile.
      plan_of: function that compiles a candidate and returns its plan.
      traced_bytes: function that estimates a candidate's memory from its trace.
      is_ours: function that returns whether an error refuses a layout; other errors are
        bugs and are raised.
    Returns:
      The rows, and the reason why nothing could be compiled (empty with a compiler).
    """
    rows: list[Row] = []
    no_compiler = ""
    for candidate in candidates:
        if no_compiler or sum(row.plan is not None for row in rows) == count:
            rows.append(Row(candidate=candidate))
            continue
        try:
            needed = traced_bytes(candidate)
            if needed > candidate.usable_bytes:
                refused = f"from the trace it needs {in_units(needed)}"
                rows.append(Row(candidate=candidate, refused=refused))
            else:
                rows.append(Row(candidate=candidate, plan=plan_of(candidate)))
        except NoPluginError as error:
            no_compiler = str(error)
            rows.append(Row(candidate=candidate))
        except (ValueError, NotImplementedError) as error:
            if not is_ours(error):
                raise
            rows.append(Row(candidate=candidate, refused=str(error)))
    return ranked(rows), no_compiler


def table(rows: Sequence[Row]) -> str:
    """Return the ranked table as text; compiled rows come first."""
    lines = [
        "search, MODELLED in closed form (mjax.estimate.formulas); compiled columns: "
        "time by replay of the compiled step, memory from XLA",
        f"{'':>3} {'step':>9} {'MFU':>7} {'GiB':>7}   {'compiled':>9} {'MFU':>7} "
        f"{'GiB':>7}   flags",
    ]
    for number, row in enumerate(rows, 1):
        c, plan = row.candidate, row.plan
        compiled = f"{'-':>9} {'-':>7} {'-':>7}"
        if plan is not None:
            m = plan.modelled
            gib = plan.memory.total / 2**30
            compiled = f"{m.step_s:>7.4g} s {m.mfu:>7.1%} {gib:>7.1f}"
        verdict = row.refused and f"   ({row.refused})"
        if plan is not None and not plan.memory.fits:
            verdict = "   (does not fit)"
        lines.append(
            f"{number:>3} {c.step_s:>7.4g} s {c.mfu:>7.1%} "
            f"{c.memory_bytes / 2**30:>7.1f}   {compiled}   {c.flags}{verdict}"
        )
    return "\n".join(lines) + "\n"


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in order: compiled and fitting, not compiled, refused.

    A compiled row that does not fit counts as refused. Within each group the fastest is
    first.
    """

    def key(row: Row) -> tuple[int, float]:
        if row.plan is None:
            return (2 if row.refused else 1), row.candidate.step_s
        return (0 if row.plan.memory.fits else 2), row.plan.modelled.step_s

    return sorted(rows, key=key)


def as_json(row: Row) -> dict[str, Any]:
    """Return a row for `--json`; only flags and compiler memory are not modelled."""
    c, plan = row.candidate, row.plan
    return {
        "flags": c.flags,
        "memory_bytes": plan and plan.memory.total,
        "fits": plan and plan.memory.fits,
        "refused": row.refused or None,
        "modelled": {
            "closed_form": {
                "step_s": c.step_s,
                "mfu": c.mfu,
                "memory_bytes": c.memory_bytes,
            },
            "replay": plan
            and {"step_s": plan.modelled.step_s, "mfu": plan.modelled.mfu},
        },
    }


def _layouts(
    config: TrainConfig,
    topology: Topology,
    windows: Sequence[int],
    keep: Callable[[Mapping[str, Any]], bool],
) -> Iterator[tuple[dict[str, Any], TrainConfig, AxisSizes]]:
    """Yield the layouts to try: their fields, the config with them, and the axis sizes.

    Here dp_shard is all of dp; `_smallest_shard` chooses the number of shards later.
    """
    for window in (None, *windows):
        fields = {} if window is None else {"model.window": (window,)}
        model = with_fields(config, fields)
        for mesh_fields, sizes in _meshes(model, topology):
            for rest in _splits(model, sizes):
                if not keep(mesh_fields | rest):
                    continue
                changed = _changed(model, mesh_fields | rest, sizes)
                if changed is not None:
                    yield fields | mesh_fields | rest, changed, sizes


def _meshes(
    config: TrainConfig, topology: Topology
) -> Iterator[tuple[dict[str, Any], AxisSizes]]:
    for tp in _divisors(topology.gpus_per_node):
        for pp in _divisors(topology.num_gpus // tp):
            dp = topology.num_gpus // tp // pp
            if pp > config.model.layers or config.batch.size % dp:
                continue
            fields: dict[str, Any] = {"mesh.pp": pp, "mesh.dp": dp, "mesh.tp": tp}
            if 1 < tp < (config.mesh.tp_chunks or 0):
                fields["mesh.tp_chunks"] = None  # above tp: use as many as tp
            yield fields, AxisSizes(pp=pp, dp_replicate=1, dp_shard=dp, tp=tp)


def _splits(config: TrainConfig, sizes: AxisSizes) -> Iterator[dict[str, Any]]:
    """Yield virtual stages, microbatches and remat; rows of a microbatch are 2^n."""
    local = config.batch.size // sizes.dp
    most = config.model.layers // sizes.pp if sizes.pp > 1 else 1
    unset: dict[str, Any] = {}
    if config.model.offload_horizon is not None:
        unset["model.offload_horizon"] = None
    for chunks in (c for c in _divisors(most) if c <= _MAX_CHUNKS):
        for rows in (2**n for n in range(local.bit_length()) if local % 2**n == 0):
            for remat in _REMATS if sizes.pp * chunks > 1 else _PLAIN_REMATS:
                yield unset | {
                    "pipeline.chunks": chunks,
                    "batch.microbatches": local // rows,
                    "model.remat": remat,
                }


def _changed(
    config: TrainConfig, fields: dict[str, Any], sizes: AxisSizes
) -> TrainConfig | None:
    """Return the run with these fields; None if a size does not divide evenly."""
    try:
        unsharded = {"mesh.dp_shard": None, "mesh.dp_shard_per_node": None}
        changed = with_fields(config, fields | unsharded)
        check_sizes(changed, sizes)
    except ValueError:
        return None
    return changed


def _smallest_shard(
    fields: dict[str, Any],
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    usable: int,
    constants: Constants,
) -> Candidate | None:
    """Choose the fewest shards that fit; None if even dp shards are too few.

    If the shards span nodes, gather in one step or two, whichever is faster. With the
    optimizer state on the host, choose the fastest number that fits, because each GPU
    copies its own part.
    """
    candidates: list[Candidate] = []
    for shard in _divisors(sizes.dp):
        if shard == 1 and config.mesh.gather_first:
            continue  # nothing to gather, so train refuses it
        one_step = dataclasses.replace(
            sizes, dp_shard=shard, dp_replicate=sizes.dp // shard
        )
        found = closed_form.estimate(config, one_step, topology, constants)
        if found.memory.total_bytes > usable:
            continue
        add = functools.partial(_candidate, fields, config, usable)
        candidates.append(add(one_step, found, per_node=None))
        per_node = topology.gpus_per_node // sizes.tp
        if config.zero and 1 < per_node < shard and shard % per_node == 0:
            two_steps = dataclasses.replace(
                one_step, dp_node=shard // per_node, dp_shard=per_node
            )
            found = closed_form.estimate(config, two_steps, topology, constants)
            candidates.append(add(two_steps, found, per_node=per_node))
        if config.optim.state_memory == "device":
            break
    return min(candidates, key=lambda candidate: candidate.step_s, default=None)


def _candidate(
    fields: dict[str, Any],
    config: TrainConfig,
    usable: int,
    sizes: AxisSizes,
    found: closed_form.Estimate,
    *,
    per_node: int | None,
) -> Candidate:
    more: dict[str, Any] = {"mesh.dp_shard": sizes.shards}
    if per_node is not None:
        more["mesh.dp_shard_per_node"] = per_node
    return Candidate(
        fields=fields | more,
        config=with_fields(config, more),
        sizes=sizes,
        step_s=found.total_s,
        mfu=found.mfu,
        memory_bytes=found.memory.total_bytes,
        usable_bytes=usable,
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]

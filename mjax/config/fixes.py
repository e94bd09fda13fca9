"""Fit a run to a number of devices, or suggest flags that make it fit.

Input: a config and the available devices. Output: the sizes of the mesh axes, or an
error with the violated rule and flags that fix it. A fix is suggested only if all
checks accept the run with it. Touches no device.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mjax.config.sizes import as_flags, check_sizes, with_fields
from mjax.config.train import TrainConfig
from mjax.mesh.axes import AxisSizes, MeshConfig, resolve

MAX_FIXES = 4
"""Maximum number of fixes in a message."""
_MAX_FLAGS = 4
"""Maximum number of flags in a fix."""
_MAX_VALUES = 6
"""Maximum number of values tried for a field, nearest first."""
_MAX_KEPT = 2
"""Maximum number of values to keep for a field with which no value makes the run fit.
Each kept value solves the current problem but causes another one. The next round of the
search adds a flag to each."""
_MAX_NODES = 16
"""Maximum number of unfinished fixes to which a round of the search adds a flag. This
bounds the search time."""

Change = dict[str, Any]
"""A fix, finished or unfinished: name of each field that it sets -> value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that a mesh must use, and the flag that sets their number."""

    count: int
    flag: str | None = None
    """Field that sets the number, such as simulate_devices; None if it is fixed."""
    per_flag: int = 1
    """Devices per unit of that field."""
    per_host: int | None = None
    """Devices per host; a tensor-parallel group stays within a host. None: one host."""
    is_mesh_alone: bool = False
    """Whether only the mesh must fit, because there is no model and no batch."""


def sizes_of(config: TrainConfig, devices: Devices) -> AxisSizes:
    """Compute the sizes of the mesh axes and check that the run fits them.

    Args:
      config: the run.
      devices: the mesh uses all of them.
    Raises:
      ValueError: the run does not fit. The message suggests the nearest fixes that all
        checks accept.
    """
    try:
        return _checked(config, devices)
    except ValueError as error:
        fixes = ", or ".join(map(as_flags, _fixes(config, devices, str(error))))
        advice = f"nearest that fit: {fixes}"
        if not fixes:
            advice = f"no fix of up to {_MAX_FLAGS} flags was found"
        raise ValueError(f"{error}; {advice}") from error


def _checked(config: TrainConfig, devices: Devices) -> AxisSizes:
    """Apply all checks, without advice; return the sizes of the mesh axes."""
    sizes = resolve(config.mesh, devices.count)
    per_host = devices.per_host or devices.count
    if per_host % sizes.tp and not config.mesh.tp_across_hosts:
        raise ValueError(
            f"without --mesh.tp-across-hosts, --mesh.tp must divide the {per_host} "
            f"devices of a host, got {sizes.tp}"
        )
    of_node = sizes.dp_shard * sizes.tp
    if sizes.dp_node > 1 and devices.per_host not in (None, of_node):
        raise ValueError(
            "--mesh.dp-shard-per-node times --mesh.tp must be the "
            f"{per_host} devices of a host, got {sizes.dp_shard} x {sizes.tp}"
        )
    if not devices.is_mesh_alone:
        check_sizes(config, sizes)
    return sizes


# ------------------------------------------------------------------------------- fixes


def _fixes(config: TrainConfig, devices: Devices, problem: str) -> list[Change]:
    """Return fixes, fewest flags first: one for each field that the problem names.

    If a value solves the problem but another check then refuses the run, the fix also
    sets a field that this other check names. Fixes of three or more flags are tried
    only if no fix with fewer flags was found.
    """
    found: dict[str, Change] = {}
    nodes: list[tuple[Change, str]] = [({}, problem)]
    for num_flags in range(1, _MAX_FLAGS + 1):
        following: dict[frozenset[tuple[str, Any]], tuple[Change, str]] = {}
        for change, refused in nodes[:_MAX_NODES]:
            if found and (num_flags > 2 or next(iter(change), "") in found):
                continue
            for longer, again in _next_flags(config, devices, change, refused):
                if not again:
                    found.setdefault(next(iter(longer)), longer)
                else:
                    following.setdefault(frozenset(longer.items()), (longer, again))
        nodes = list(following.values())
    fixes: list[Change] = []
    for fix in sorted(found.values(), key=len):
        # Leave out a fix if some of its flags are enough.
        if not any(fewer.keys() <= fix.keys() for fewer in fixes):
            fixes.append(fix)
    return fixes[:MAX_FIXES]


def _next_flags(
    config: TrainConfig, devices: Devices, change: Change, problem: str
) -> Iterator[tuple[Change, str]]:
    """Yield the change with one more flag, and the remaining problem, if any.

    For each field that the problem names, yield the nearest value with which the run
    fits. If there is none, yield the few nearest values that solve the problem but
    cause another one.
    """
    values = _values(config, devices, change)
    named = [name.replace("-", "_") for name in re.findall(r"\w+\.[\w-]+", problem)]
    for field in dict.fromkeys([*named, devices.flag or ""]):
        if field in change:
            continue
        kept: list[tuple[Change, str]] = []
        for value in values.get(field, ()):
            longer = change | {field: value}
            again = _problem(config, devices, longer)
            if not again:
                kept = [(longer, again)]
                break
            # Setting pp or tp to 1 is progress, even if the product of the axes is
            # still wrong.
            is_smallest = field in ("mesh.pp", "mesh.tp") and value == 1
            ends_problem = _rule(again) != _rule(problem)
            if len(kept) < _MAX_KEPT and (ends_problem or is_smallest):
                kept.append((longer, again))
        yield from kept


def _rule(problem: str) -> str:
    """Return a problem without its numbers."""
    return re.sub(r"\d+", "", problem)


def _problem(config: TrainConfig, devices: Devices, change: Change) -> str:
    """Return the error message for the changed run; empty if all checks accept it."""
    fields = {name: value for name, value in change.items() if name != devices.flag}
    try:
        changed = with_fields(config, fields)
        _checked(changed, _changed_devices(devices, change))
    except ValueError as error:
        return str(error)
    return ""


def _changed_devices(devices: Devices, change: Change) -> Devices:
    """Return the devices after a change, which may set their number."""
    if devices.flag not in change:
        return devices
    return dataclasses.replace(devices, count=change[devices.flag] * devices.per_flag)


def _values(
    config: TrainConfig, devices: Devices, change: Change
) -> dict[str, list[Any]]:
    """List for each field the values to try next, nearest to its current value first.

    The current value of a field is its value after `change`.
    """

    def current(field: str) -> Any:
        return change.get(field, operator.attrgetter(field)(config))

    count = _changed_devices(devices, change).count
    asked = {name: current(f"mesh.{name}") for name in ("pp", "dp", "tp")}
    values: dict[str, list[Any]] = {}
    try:
        sizes = resolve(MeshConfig(**asked), count)
        pp, dp, tp = sizes.pp, sizes.dp, sizes.tp
    except ValueError:  # the product is wrong: start from the requested sizes
        pp, dp, tp = (max(size, 1) for size in asked.values())
        if devices.flag is not None and not change:
            values[devices.flag] = _device_counts(tuple(asked.values()), devices)
    divisors = _divisors(count)
    model, batch_size = config.model, current("batch.size")
    num_microbatches = current("batch.microbatches")
    of_pp = _multiples(pp, num_microbatches)
    num_parts = (
        1 if current("pipeline.uneven_layers") else pp * current("pipeline.chunks")
    )
    return values | {
        "mesh.tp": _by_distance(divisors, tp),
        "mesh.dp": _by_distance(divisors, dp) if -1 in asked.values() else [-1],
        "mesh.pp": _by_distance(divisors, pp),
        "mesh.dp_shard": _by_distance(_divisors(dp), config.mesh.dp_shard or dp),
        "mesh.dp_shard_per_node": [(devices.per_host or 0) // tp, None],
        "mesh.tp_chunks": [tp, None],
        "mesh.tp_across_hosts": [True],
        "mesh.gather_first": [False],
        "mesh.tp_overlap": ["off"],
        "batch.size": _multiples(dp * num_microbatches, batch_size),
        "batch.microbatches": _by_distance(
            {*_divisors(batch_size), *of_pp}, num_microbatches
        ),
        "model.heads": _multiples(tp, model.heads),
        "model.kv_heads": _by_distance(
            _divisors(current("model.heads")), model.num_kv_heads
        ),
        "model.d_ff": _multiples(tp, model.ffn_width),
        "data.seq_len": _multiples(tp, config.data.seq_len),
        "model.layers": _multiples(model.pattern_length * num_parts, model.layers),
        "model.vocab_multiple": _multiples(tp, model.vocab_multiple),
        "model.remat": ["full"],
        "model.offload_horizon": [None],
        "pipeline.chunks": _by_distance(
            range(1, current("model.layers") + 1), config.pipeline.chunks
        ),
        "pipeline.uneven_layers": [True],
        "pipeline.schedule": ["interleaved-1f1b"],
        "pipeline.idle": ["compute"],
        "pipeline.stash": ["input"],
    }


def _device_counts(asked: tuple[int, ...], devices: Devices) -> list[int]:
    """List the values of `devices.flag` at which the axes use exactly all devices."""
    fixed = math.prod(size for size in asked if size != -1)
    step = math.lcm(fixed, devices.per_flag) // devices.per_flag
    if -1 in asked:
        return _multiples(step, devices.count // devices.per_flag)
    return [] if fixed % devices.per_flag else [fixed // devices.per_flag]


def _multiples(step: int, value: int) -> list[int]:
    """List multiples of step, nearest to value first; ties: larger first."""
    first = max(1, value // step - _MAX_VALUES // 2)
    return _by_distance((step * (first + n) for n in range(_MAX_VALUES)), value)


def _by_distance(numbers: Iterable[int], value: int) -> list[int]:
    """List the numbers nearest to value, and the smallest; ties: larger first."""
    ordered = sorted(numbers, key=lambda n: (abs(n - value), -n))
    nearest = ordered[:_MAX_VALUES]
    return nearest if min(ordered) in nearest else [*nearest, min(ordered)]


def _divisors(number: int) -> list[int]:
    """List the divisors of a number."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})

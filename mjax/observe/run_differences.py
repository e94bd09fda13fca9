"""Find differences between two runs other than times: flags, code, hosts, losses.

Input: the records of two runs. Output: for each group the names whose values differ,
with both values; the missing records; and the first step whose loss differs.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mjax.observe.records import Record, flat

GROUPS = (
    *("flags", "code", "versions", "environment", "hosts", "order of ranks"),
    *("seed", "data", "mesh"),
)
_NOT_COMPARED = ("work_dir", "ckpt.dir", "ckpt.local_dir", "distributed.")
"""Fields of the config that say where a run is and how its processes connect."""
_OF_A_START = (
    *("MJAX_GENERATION", "MJAX_LAUNCH", "MJAX_PROGRESS_FILE", "MJAX_STACKS_FILE"),
    *("MJAX_LOCK_PIPE", "MJAX_HOST", "SLURM_JOB_ID", "SLURM_JOBID"),
)
"""Environment variables that differ between any two starts."""
_ABSENT = "(absent)"

type Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Differences of one kind between two runs."""

    name: str
    differing: Mapping[str, tuple[Any, Any]]
    """Values in both runs, by name."""
    missing: tuple[str, ...] = ()
    """Missing files without which the group is unknown."""

    @property
    def is_same(self) -> bool | None:
        """Whether there are no differences; None if a file is missing."""
        return None if self.missing else not self.differing


def groups(a: Record, b: Record) -> list[Group]:
    """Compare the newest starts of two runs, in the order of GROUPS."""
    sides = [_facts(record) for record in (a, b)]
    files = dict.fromkeys(GROUPS, "starts/NNNN.json")
    files |= {"flags": "config.json", "seed": "config.json"}
    files |= {"data": "checkpoint.json, or summary.json,"}
    found = []
    for name in GROUPS:
        first, second = (side.get(name) for side in sides)
        missing = tuple(
            f"{files[name]} of {record.path}"
            for record, own in zip((a, b), (first, second), strict=True)
            if own is None
        )
        differing = {} if missing else _differing(first or {}, second or {})
        found.append(Group(name=name, differing=differing, missing=missing))
    return found


def changes_within(record: Record) -> list[str]:
    """Describe what each later start of a run changed."""
    said = []
    for number, (before, after) in enumerate(
        zip(record.starts, record.starts[1:], strict=False), start=2
    ):
        first, second = _of_start(before), _of_start(after)
        names = [name for name in first if _differing(first[name], second[name])]
        if names:
            said.append(f"start {number} changed {', '.join(names)}")
    return said


def _facts(record: Record) -> dict[str, Facts]:
    """Return the values of a run to compare, by group."""
    found: dict[str, Facts] = _of_start(record.starts[-1]) if record.starts else {}
    config = record.config
    if config is not None:
        found["seed"] = {"seed": config.get("seed")}
        found["flags"] = {
            f"--{name.replace('_', '-')}": value
            for name, value in config.items()
            if name != "seed" and not name.startswith(_NOT_COMPARED)
        }
    if record.data is not None:
        kind, _, value = record.data.partition(" ")
        found["data"] = {kind: value}
    return found


def _of_start(start: Facts) -> dict[str, Facts]:
    """Return the values in the record of a start, by group."""
    facts = _object(start.get("facts"))
    versions = {
        name: value
        for name, value in facts.items()
        if name.islower() and not name.startswith("jax_")
    }
    settings = {name: facts[name] for name in facts if name not in versions}
    variables = _object(start.get("environment"))
    settings |= {n: variables[n] for n in variables if n not in _OF_A_START}
    processes = start.get("processes")
    hosts = [
        str(_object(process).get("host"))
        for process in (processes if isinstance(processes, list) else [])
    ]
    counts = {host: f"{hosts.count(host)} ranks" for host in sorted(set(hosts))}
    return {
        "code": {name: start.get(name) for name in ("mjax", "commit", "code")},
        "versions": versions,
        "environment": settings,
        "hosts": {**counts, "device": start.get("device")},
        "order of ranks": {f"rank {n}": host for n, host in enumerate(hosts)},
        "mesh": dict(flat(_object(start.get("mesh")))),
    }


def _object(value: Any) -> Facts:
    return value if isinstance(value, Mapping) else {}


def _differing(first: Facts, second: Facts) -> dict[str, tuple[Any, Any]]:
    return {
        name: (first.get(name, _ABSENT), second.get(name, _ABSENT))
        for name in {**first, **second}
        if first.get(name, _ABSENT) != second.get(name, _ABSENT)
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of two runs, step by step."""

    num_shared: int
    """Number of steps for which both have a loss."""
    first_step: int | None
    """First step whose loss differs; None if all are equal."""
    values: tuple[Any, Any] | None
    """Both losses at that step; a loss that is not finite is a name such as `nan`. None
    if all losses are equal."""


def losses(a: Record, b: Record) -> Losses:
    """Compare the losses of two runs, bit by bit."""
    shared = [step for step in sorted(a.rows) if step in b.rows]
    for step in shared:
        values = tuple(_loss(record.rows[step]) for record in (a, b))
        if values[0] != values[1]:
            return Losses(
                num_shared=len(shared), first_step=step, values=(values[0], values[1])
            )
    return Losses(num_shared=len(shared), first_step=None, values=None)


def _loss(row: Facts) -> Any:
    """Return a loss; one that is not finite is returned by name, such as `nan`."""
    loss = row.get("loss")
    return _object(row.get("nonfinite")).get("loss") if loss is None else loss


def shown(value: Any, *, most: int = 40) -> str:
    """Format a value in few characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown_names(names: Sequence[str], *, most: int = 4) -> str:
    """Format the first few names."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")

"""Build the graph of the steps of a run: what each device did and waited for.

Input: the span files of one start of a run, with stamps. Output: a
`mjax.observe.detect.whatif.Trace`, which can be replayed with other times.

Operations of a device in a step, in sequence:

- data, host: from the end of the previous step to the first pass. `data` is the part in
  which the device's host waited for a batch. A host has two steps in flight, so its
  work that overlaps the device's compute costs nothing and is in neither operation.
- forward and backward passes, or the ticks of a pipeline.
- sync: the rest of the gradient reduction, and the gradient norm, a collective of all
  devices.
- optimizer: at most its usual time. A late host notices the end of a step late, so the
  excess counts as `host`.

Edges across devices:

- tp: a pass has a collective in every layer, so it ends when the last member of its
  group has arrived and the work is done.
- pp: a tick receives what the neighbours send in it; the last stage and the first are
  neighbours too.
- dp: where devices do not overlap communication with compute, as on CPUs, weights are
  gathered and gradients reduced within passes. Whether a pass waits for its dp group
  follows from the times: the edges are used if they make the durations of operations
  differ less between devices.
- sync: all devices wait for each other.

Host clocks differ, so they are shifted until the sync ends at the same time for all.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mjax.observe.detect.whatif import Trace
from mjax.observe.spans import Line, Span, SpanFile

PASSES = ("forward", "backward", "tick")
_INTERRUPTS = frozenset({"eval", "ckpt"})
"""Kinds of spans that make their step and the next one unusual."""
_CLOCK_ERROR_NS = 1_000_000
"""Smaller clock shifts are set to 0. The ends of one sync differ by less between
devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """A device, which runs one operation at a time."""

    rank: int
    host: str
    stream: str
    """Stream as in the spans: `device:N`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Position of a worker in the mesh."""

    pp: int
    dp: int
    tp: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """One step of a device."""

    passes: tuple[Span, ...]
    sync: Span
    ready_ns: int
    """Time at which the host had the metrics of the step."""
    data_ns: int
    """Nanoseconds that the host waited for its batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of all devices of one start."""

    workers: tuple[Worker, ...]
    places: tuple[Place, ...]
    of: tuple[Mapping[int, _Step], ...]
    """Steps by worker, then by step number."""

    @property
    def shared(self) -> list[int]:
        """The steps that all workers ran, without those that `_interrupted` returns."""
        return sorted(set.intersection(*(set(steps) for steps in self.of)))


def read_steps(files: Sequence[SpanFile]) -> Steps:
    """Find the operations of each device in each step.

    Raises:
      ValueError: a process has no spans of devices, or the run has one device.
    """
    workers: list[Worker] = []
    places: list[Place] = []
    of: list[dict[int, _Step]] = []
    for file in files:
        lines: dict[int, list[Span]] = collections.defaultdict(list)
        for line in file.lines:
            if line.step > 0:
                lines[line.step] += line.spans
        streams = {span.stream for spans in lines.values() for span in spans}
        devices = [name for name in streams if name.startswith("device:")]
        if not devices and math.prod(file.header.mesh.values()) == 1:
            raise ValueError("the run has one device, so no other waits for it")
        if not devices:
            raise ValueError(
                f"{file.path} has no spans of devices, so the rank that the others "
                "wait for is unknown; stamps record them, by default on Hopper and "
                "Blackwell GPUs (--observe.stamps)"
            )
        left_out = _interrupted(file.lines)
        for stream in sorted(devices, key=lambda name: int(name.partition(":")[2])):
            header = file.header
            workers.append(Worker(rank=header.rank, host=header.host, stream=stream))
            places.append(_place(header.mesh, int(stream.partition(":")[2])))
            steps = {
                step: found
                for step, spans in lines.items()
                if step not in left_out and (found := _step(spans, stream)) is not None
            }
            of.append(steps)
    return Steps(workers=tuple(workers), places=tuple(places), of=tuple(of))


def _interrupted(lines: Sequence[Line]) -> set[int]:
    """Return the steps with a save or an evaluation, and the steps after them."""
    hit = {
        line.step
        for line in lines
        if any(span.kind in _INTERRUPTS for span in line.spans)
    }
    return hit | {step + 1 for step in hit}


def _place(mesh: Mapping[str, int], device: int) -> Place:
    """Return the position of a device in the mesh of a header."""
    sizes = tuple(mesh.values())
    if device >= int(np.prod(sizes)):
        raise ValueError(f"device {device} is outside of the mesh {dict(mesh)}")
    index = dict(zip(mesh, map(int, np.unravel_index(device, sizes)), strict=True))
    pp, tp = index.pop("pp", 0), index.pop("tp", 0)
    dp = 0
    for axis, at in index.items():
        dp = dp * mesh[axis] + at
    return Place(pp=pp, dp=dp, tp=tp)


def _step(spans: Sequence[Span], stream: str) -> _Step | None:
    """Return a step of a device; None if passes or the norm are missing."""
    own = sorted(
        (s for s in spans if s.stream == stream), key=lambda span: span.start_ns
    )
    passes = tuple(span for span in own if span.name in PASSES)
    syncs = [span for span in own if span.name == "norm"]
    if not passes or not syncs:
        return None
    waits = [s for s in spans if s.stream == "host" and s.kind == "data"]
    return _Step(
        passes=passes,
        sync=syncs[-1],
        ready_ns=own[-1].end_ns,
        data_ns=sum(span.end_ns - span.start_ns for span in waits),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Times:
    """Times of all workers: W workers, S steps, K passes, seconds on one clock."""

    names: tuple[str, ...]
    """[K], names of the passes."""
    begin_s: np.ndarray
    """[W, S], start of the first pass."""
    ends_s: np.ndarray
    """[W, S, K], ends of the passes."""
    sync_s: np.ndarray
    """[W, S], end of the sync."""
    end_s: np.ndarray
    """[W, S], end of the step."""
    before_s: np.ndarray
    """[W], end of the step before the first one; start of the first pass if unknown."""
    data_s: np.ndarray
    """[W, S], seconds that the host waited for the batch."""


def build(steps: Steps, chosen: Sequence[int]) -> Trace:
    """Build the graph of consecutive steps.

    Args:
      steps: steps of all devices.
      chosen: numbers of the steps.
    Raises:
      ValueError: devices do not have the same passes in all steps.
    """
    times = _times(steps, chosen)
    waits_for = [_waits_for(steps.places, times, at) for at in range(len(times.names))]
    return _trace(steps.places, times, waits_for)


def _times(steps: Steps, chosen: Sequence[int]) -> _Times:
    names = {
        tuple(span.name for span in of[step].passes)
        for of in steps.of
        for step in chosen
    }
    if len(names) > 1:
        raise ValueError(
            f"devices have different passes in some steps: {sorted(map(len, names))} "
            "of them; name other steps with --from-step and --to-step"
        )
    rows = [[of[step] for step in chosen] for of in steps.of]
    earlier = [of.get(chosen[0] - 1) for of in steps.of]
    zero_ns = rows[0][0].passes[0].start_ns
    sync_ns = np.array([[step.sync.end_ns for step in row] for row in rows])
    shift_ns = np.median(sync_ns[:1] - sync_ns, axis=1).astype(np.int64)
    shift_ns[np.abs(shift_ns) < _CLOCK_ERROR_NS] = 0

    def seconds(ns: Sequence[Sequence[int]]) -> np.ndarray:
        return (np.array(ns) - zero_ns + shift_ns[:, None]) / 1e9

    begin_s = seconds([[step.passes[0].start_ns for step in row] for row in rows])
    ends_s = np.stack(
        [
            seconds([[step.passes[at].end_ns for step in row] for row in rows])
            for at in range(len(next(iter(names))))
        ],
        axis=2,
    )
    sync_s = seconds([[step.sync.end_ns for step in row] for row in rows])
    ready_s = seconds([[step.ready_ns for step in row] for row in rows])
    ready_s[:, :-1] = np.minimum(ready_s[:, :-1], begin_s[:, 1:])
    usual_s = np.sort(np.median(ready_s - sync_s, axis=1))[(len(rows) - 1) // 2]
    usual_s = max(float(usual_s), 0.0)
    before_s = begin_s[:, 0]
    if all(step is not None for step in earlier):
        ends_ns = [[step.sync.end_ns] for step in earlier if step is not None]
        before_s = np.minimum(seconds(ends_ns)[:, 0] + usual_s, before_s)
    return _Times(
        names=next(iter(names)),
        begin_s=begin_s,
        ends_s=ends_s,
        sync_s=sync_s,
        end_s=np.minimum(ready_s, sync_s + usual_s),
        before_s=before_s,
        data_s=np.array([[step.data_ns for step in row] for row in rows]) / 1e9,
    )


type _Groups = list[tuple[list[int], list[int]]]
"""Pairs of lists: workers, and the workers for which each of them waits."""


def _waits_for(places: Sequence[Place], times: _Times, at: int) -> _Groups:
    """Return which workers wait for each other in a pass."""
    before_s = times.ends_s[:, :, at - 1] if at else times.begin_s
    is_tick = times.names[at] == "tick"
    peers = _split([(place.pp,) for place in places])

    def unevenness(groups: _Groups) -> float:
        needed_s = times.ends_s[:, :, at].copy()
        for members, waited in groups:
            needed_s[members] -= before_s[waited].max(axis=0)
        apart = [
            np.abs(needed_s[each] - np.median(needed_s[each], axis=0))
            for each in peers.values()
        ]
        return float(np.mean(np.concatenate(apart)))

    near = _with_neighbours(_split([(p.pp, p.dp) for p in places]), is_tick=is_tick)
    wide = _with_neighbours(peers, is_tick=is_tick)
    return wide if unevenness(wide) < unevenness(near) else near


def _split(keys: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """Return the workers that have each key; `keys` has one for each worker."""
    groups: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for worker, key in enumerate(keys):
        groups[key].append(worker)
    return dict(groups)


def _with_neighbours(
    groups: Mapping[tuple[int, ...], list[int]], *, is_tick: bool
) -> _Groups:
    """Return groups whose members wait for each other.

    In a tick they also wait for the neighbouring stages.
    """
    num_stages = max(key[0] for key in groups) + 1
    found = []
    for (stage, *rest), members in groups.items():
        far = (-1, 0, 1) if is_tick else (0,)
        beside = {((stage + by) % num_stages, *rest) for by in far}
        # A stage may have no spans: files of some ranks can be missing.
        near = [w for key in sorted(beside) for w in groups.get(key, ())]
        found.append((members, near))
    return found


@dataclasses.dataclass
class _Table:
    """Operations and edges of a graph under construction."""

    rows: list[tuple[str, int, int, int, float, float]] = dataclasses.field(
        default_factory=list
    )
    edges: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def add(
        self,
        phase: str,
        worker: int,
        step: int,
        micro: int,
        end_s: float,
        before: Sequence[int],
        start_s: float = -np.inf,
    ) -> int:
        """Add an operation that starts after its predecessors; return its index."""
        came_s = max([self.rows[each][5] for each in before], default=start_s)
        came_s = min(max(came_s, start_s), end_s)
        self.rows.append((phase, worker, step, micro, came_s, end_s))
        self.edges += [(each, len(self.rows) - 1) for each in before]
        return len(self.rows) - 1


def _trace(
    places: Sequence[Place], times: _Times, waits_for: Sequence[_Groups]
) -> Trace:
    table, workers = _Table(), range(len(places))
    everybody = [([*workers], [*workers])]
    last: list[list[int]] = [[] for _ in workers]
    for step in range(times.begin_s.shape[1]):
        at = [_between(table, times, w, step, last[w]) for w in workers]
        for number, name in enumerate(times.names):
            ends_s = times.ends_s[:, step, number]
            at = _joint(table, name, step, number, ends_s, at, waits_for[number])
        at = _joint(table, "sync", step, -1, times.sync_s[:, step], at, everybody)
        last = [
            [table.add("optimizer", w, step, -1, times.end_s[w, step], [at[w]])]
            for w in workers
        ]
    column = [*zip(*table.rows, strict=True)]
    start_s, end_s = np.array(column[4]), np.array(column[5])
    origin_s, of = float(start_s.min()), np.array(column[1], np.int64)
    place = np.array([each.pp for each in places], np.int64)
    num_tp = max(each.tp for each in places) + 1
    share = place * num_tp + np.array([each.tp for each in places], np.int64)
    return Trace(
        phase=np.array(column[0]),
        worker=of,
        step=np.array(column[2], np.int64),
        micro=np.array(column[3], np.int64),
        stage=share[
            of
        ],  # position in the model: the same for its peers in other replicas
        backward=np.zeros(len(of), bool),
        edges=np.array(table.edges, np.int64).reshape(-1, 2),
        start_s=start_s - origin_s,
        end_s=end_s - origin_s,
        place=place,
        replica=np.array([each.dp for each in places], np.int64),
    )


def _joint(
    table: _Table,
    phase: str,
    step: int,
    micro: int,
    ends_s: np.ndarray,
    before: Sequence[int],
    groups: _Groups,
) -> list[int]:
    """Add an operation of each worker, which waits for a group; return the indices.

    A join (an operation without work) collects the ranks of a group: edges between all
    pairs of thousands of ranks would not fit into memory.
    """
    at = [*before]
    for members, waited in groups:
        came = [before[worker] for worker in waited]
        if len(came) > 1:
            came_s = max(table.rows[each][5] for each in came)
            came = [table.add("join", waited[0], step, -1, came_s, came)]
        for worker in members:
            end_s = float(ends_s[worker])
            at[worker] = table.add(phase, worker, step, micro, end_s, came)
    return at


def _between(
    table: _Table, times: _Times, worker: int, step: int, last: Sequence[int]
) -> int:
    """Add the waits for data and host before the first pass; return the last index."""
    begin_s = float(times.begin_s[worker, step])
    ended_s = times.end_s[worker, step - 1] if step else times.before_s[worker]
    gap_s = max(begin_s - float(ended_s), 0.0)
    data_s = min(gap_s, float(times.data_s[worker, step]))
    data = table.add(
        "data", worker, step, -1, begin_s - gap_s + data_s, last, begin_s - gap_s
    )
    return table.add("host", worker, step, -1, begin_s, [data])


def runs_of(steps: Sequence[int]) -> Iterator[list[int]]:
    """Yield each series of consecutive steps."""
    ordered = np.array(sorted(steps), np.int64)
    for part in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
        if len(part):
            yield part.tolist()

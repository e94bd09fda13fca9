"""A small simulator of pipelined training steps, for runs with a known slowdown.

Input: the shape of a run and the seconds that each operation needs. Output: when each
operation began and ended. It shares nothing with the planner or with the observer.

A worker is one stage of one replica, worker = replica * stages + stage. It computes in
the order of its schedule, one operation at a time:

- 1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1.
- interleaved 1F1B, for chunks > 1: the same paper, section 2.2.2. The virtual stage
  chunk * stages + stage runs on the stage.

Operations of a step, for each worker: data, then forward and backward passes, then the
gradient sync with the workers of the same stage, then the optimizer, which needs the
sync of all workers (global gradient norm). Between virtual stages on different workers
there are sends, one at a time for each worker and direction.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

type Array = np.ndarray
NAMES = ("data", "forward", "backward", "send", "sync", "optimizer")
DATA, FORWARD, BACKWARD, SEND, SYNC, OPTIMIZER = range(len(NAMES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a run."""

    stages: int
    replicas: int
    chunks: int
    """Virtual stages per worker; 1 is plain 1F1B."""
    num_micro: int
    """Microbatches of a replica in a step; a multiple of the stages."""
    num_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """Operations and their dependencies. N operations, E edges."""

    shape: Shape
    name: Array
    """[N], index in NAMES."""
    worker: Array
    """[N], worker; for a send the sender."""
    step: Array
    """[N], from 0."""
    micro: Array
    """[N], of the replica, from 0; -1 where there is none."""
    stage: Array
    """[N], virtual; of a send: that of the sender; -1 where there is none."""
    backward: Array
    """[N], bool: a backward pass or the send after one."""
    before: Array
    """[N], the operation before it on the same worker and stream; -1 for the first. A
    worker has three streams: compute (with sync and optimizer), sends forward, sends
    backward."""
    edges: Array
    """[E, 2]: an operation, and one that starts after it has ended."""


def orders(shape: Shape, stage: int) -> Iterator[tuple[bool, int, int]]:
    """Yield the passes of a worker in a step: backward, microbatch, virtual stage."""
    stages, chunks, total = shape.stages, shape.chunks, shape.num_micro * shape.chunks
    if chunks == 1:
        warmup = stages - 1 - stage
    else:
        warmup = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    warmup = min(warmup, total)

    def nth(count: int, backward: bool) -> tuple[bool, int, int]:
        turn, place = divmod(count, stages * chunks)
        chunk = place // stages
        chunk = chunks - 1 - chunk if backward else chunk
        return backward, turn * stages + place % stages, chunk * stages + stage

    for count in range(warmup):
        yield nth(count, False)
    for count in range(total - warmup):
        yield nth(warmup + count, False)
        yield nth(count, True)
    for count in range(total - warmup, total):
        yield nth(count, True)


class _Builder:
    """Collects operations and edges."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.rows: list[tuple[int, int, int, int, int, bool, int]] = []
        self.edges: list[tuple[int, int]] = []
        self.last: dict[tuple[int, str], int] = {}
        self.computed: dict[tuple[int, bool, int, int, int], int] = {}

    def add(
        self,
        name: int,
        worker: int,
        step: int,
        *,
        stream: str = "compute",
        micro: int = -1,
        stage: int = -1,
        backward: bool = False,
    ) -> int:
        """Add an operation after the last one of its stream; return its number."""
        number = len(self.rows)
        before = self.last.get((worker, stream), -1)
        self.rows.append((name, worker, step, micro, stage, backward, before))
        self.last[worker, stream] = number
        if before >= 0:
            self.edges.append((before, number))
        return number

    def add_step(self, step: int) -> None:
        """Add one step of all workers."""
        shape = self.shape
        workers = range(shape.stages * shape.replicas)
        for worker in workers:
            self.add(DATA, worker, step)
            for backward, micro, stage in orders(shape, worker % shape.stages):
                number = self.add(
                    BACKWARD if backward else FORWARD,
                    worker,
                    step,
                    micro=micro,
                    stage=stage,
                    backward=backward,
                )
                key = (worker // shape.stages, backward, micro, stage, step)
                self.computed[key] = number
        for key, number in list(self.computed.items()):
            if key[-1] == step:
                self._connect(key, number)
        ready = [self.last[worker, "compute"] for worker in workers]
        syncs = [self.add(SYNC, worker, step) for worker in workers]
        for worker in workers:
            peers = range(worker % shape.stages, len(workers), shape.stages)
            self.edges += [
                (ready[peer], syncs[worker]) for peer in peers if peer != worker
            ]
        for worker in workers:
            number = self.add(OPTIMIZER, worker, step)
            self.edges += [
                (sync, number) for peer, sync in enumerate(syncs) if peer != worker
            ]

    def _connect(self, key: tuple[int, bool, int, int, int], number: int) -> None:
        """Add the successor of an operation: a send, or the backward pass."""
        replica, backward, micro, stage, step = key
        last = self.shape.stages * self.shape.chunks - 1
        if not backward and stage == last:
            self.edges.append((number, self.computed[replica, True, micro, last, step]))
            return
        target = stage - 1 if backward else stage + 1
        if target < 0:
            return
        sent = self.add(
            SEND,
            replica * self.shape.stages + stage % self.shape.stages,
            step,
            stream=f"send {backward}",
            micro=micro,
            stage=stage,
            backward=backward,
        )
        self.edges.append((number, sent))
        self.edges.append((sent, self.computed[replica, backward, micro, target, step]))


def build(shape: Shape) -> Graph:
    """Build the graph of a run.

    Raises:
      ValueError: the microbatches are no multiple of the stages.
    """
    if shape.num_micro % shape.stages:
        raise ValueError(
            f"num_micro must be a multiple of stages={shape.stages}, "
            f"got {shape.num_micro}"
        )
    builder = _Builder(shape)
    for step in range(shape.num_steps):
        builder.add_step(step)
    columns = [np.array(column) for column in zip(*builder.rows, strict=True)]
    return Graph(
        shape=shape,
        name=columns[0],
        worker=columns[1],
        step=columns[2],
        micro=columns[3],
        stage=columns[4],
        backward=columns[5],
        before=columns[6],
        edges=np.array(builder.edges),
    )


def simulate(graph: Graph, needed_s: Array) -> tuple[Array, Array]:
    """Run all operations as early as their edges allow.

    Args:
      needed_s: [N], seconds that each needs once all that it waits for has ended.
    Returns:
      [N] begin and [N] end, float64. A sync begins when its last worker arrives.
    """
    num = len(graph.name)
    waits = np.bincount(graph.edges[:, 1], minlength=num).tolist()
    after: list[list[int]] = [[] for _ in range(num)]
    for first, then in graph.edges.tolist():
        after[first].append(then)
    begin, end, needed = [0.0] * num, [0.0] * num, needed_s.tolist()
    free = [number for number in range(num) if not waits[number]]
    done = 0
    while free:
        number = free.pop()
        done += 1
        at_s = end[number] = begin[number] + needed[number]
        for then in after[number]:
            begin[then] = max(begin[then], at_s)
            waits[then] -= 1
            if not waits[then]:
                free.append(then)
    if done < num:
        raise RuntimeError(f"{num - done} of {num} operations wait for each other")
    return np.array(begin), np.array(end)

"""One reader per host: the rows of every step, read once for all processes of a host.

Enters: the rows that each process of the host wants of a global batch. Leaves: copies
of these rows, step by step. MegaScale (arXiv:2402.15627, section 3.4) does the same:
one loader per machine writes to shared memory, and every worker copies its part.

    first process ---- starts, watches, replaces ----> reader (host_reader)
      |      |                                            |
      |      '--- socket: descriptors, liveness --.       | writes
      |                                           |       v
      '------------- copies rows --------- ring (memfd, no name)
                                                  ^
    other processes ------- copy rows ------------'

How they meet. The first process of the host (`processes.hosts`) listens on a Unix
socket of the abstract kind, whose name is no file, and posts the name in the run's
key-value store.
The others connect and say which rows they want. It answers with the open descriptors
of the ring and of two eventfds. Only processes of the same user are let in. The
connection stays: its end tells a process that the first one is gone.

Who wakes whom. A process rings the reader's doorbell (an eventfd) when it has copied a
step, the reader rings each process' bell when a step is there; nobody polls. A bell
that was rung while nobody waited stays rung.

What a death does. A reader that dies is replaced by the first process; the new one
begins at the first step that is neither in the ring nor copied by all, and since a row
is a function of the step and its number, the rows are the same. A reader that raises,
or that dies again and again without reading a step, ends the run through `read`. When
any other process dies the run is over; the reader ends with the first process. Nothing
has a name in a file system, so nothing is left behind.
"""

import dataclasses
import itertools
import os
import select
import socket
import time
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from mjax.data import host_socket
from mjax.data.host_reader import FIELDS, Block, Job, Reading
from mjax.data.reader_keeper import Keeper
from mjax.data.ring import COUNTERS, Layout, Ring, TornRowError, create
from mjax.processes import hosts
from mjax.processes.key_value import KeyValueStore

_TORN_S = 1.0
_count = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """What the processes of a host have in common."""

    blocks: tuple[Block, ...]
    """The rows in the ring: the union of what they want."""
    layout: Layout


class HostRows:
    """The rows of this process, from the ring of its host.

    `read` is called by one thread, for one step after the other. Any thread may `stop`
    it; then `close`.
    """

    def __init__(
        self,
        shared: Shared,
        consumer: int,
        descriptors: Sequence[int],
        lifeline: socket.socket | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """Attach to a ring.

        Args:
          shared: as the first process says.
          consumer: the number of this process on its host.
          descriptors: of the ring's memory, of the reader's doorbell, of our bell; they
            are ours to close.
          lifeline: ends when the first process does; None in that process.
          keeper: of the reader; None in the other processes.
        """
        memory, self._doorbell, self._bell = descriptors
        self._ring, self._consumer = Ring(memory, shared.layout), consumer
        os.close(memory)
        self._lifeline = lifeline
        self._blocks = shared.blocks
        self.keeper = keeper
        """Runs the reader; None but in the first process."""
        self._is_stopped = self._is_alone = self._is_closed = False
        self._waiting = select.poll()
        self._waiting.register(self._bell, select.POLLIN)
        if lifeline is not None:
            self._waiting.register(lifeline, select.POLLIN)

    def read(
        self, step: int, wanted: Iterable[Block]
    ) -> dict[Block, dict[str, Int32[np.ndarray, "n T"]]]:
        """Return a copy of the wanted rows of a step, waiting until they are there.

        Raises:
          RuntimeError: they will not come: the reader failed, the first process of the
            host is gone, or `stop` was called.
        """
        self._wait_for(step)
        rows = {block: self._copy(step, block) for block in wanted}
        self._ring.finish(self._consumer, step)
        os.eventfd_write(self._doorbell, 1)
        return rows

    @property
    def next_wanted(self) -> int:
        """The first step that this process has not copied."""
        return int(self._ring.wanted[self._consumer])

    def counters(self) -> dict[str, int]:
        """Return what the readers of this host have used: `ring.COUNTERS`."""
        return dict(zip(COUNTERS, self._ring.counters.tolist(), strict=True))

    def stop(self) -> None:
        """Let a `read` that waits raise, and every later one."""
        if self._is_closed:
            return
        self._is_stopped = True
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Let go of the ring, and end the reader; no thread may be reading."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._doorbell)
        os.close(self._bell)
        if self._lifeline is not None:
            self._lifeline.close()
        if self.keeper is not None:
            self.keeper.close()

    def _wait_for(self, step: int) -> None:
        while not self._ring.holds(step):
            failure = self._ring.failure(step)
            if failure is not None:
                raise RuntimeError(f"the reader of this host stopped: {failure}")
            if self._is_stopped:
                raise RuntimeError("the loader is closed")
            if self._is_alone:
                raise RuntimeError(
                    "the process that keeps the reader of this host is gone; its "
                    "output says why"
                )
            for descriptor, _ in self._waiting.poll():
                if descriptor == self._bell:
                    os.eventfd_read(self._bell)
                else:
                    self._is_alone = True

    def _copy(self, step: int, block: Block) -> dict[str, Int32[np.ndarray, "n T"]]:
        start = self._place_of(block[0])
        give_up_s = time.monotonic() + _TORN_S
        while True:
            try:
                rows = self._ring.read(step, start, start + block[1] - block[0])
                break
            except TornRowError:
                # Some processors (arm64) may show the step before the rows: look again.
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.001)
        parts = np.split(rows, len(FIELDS), axis=1)
        return dict(zip(FIELDS, parts, strict=True))

    def _place_of(self, row: int) -> int:
        """Return where a row of the global batch lies in a slot."""
        place = 0
        for start, stop in self._blocks:
            if start <= row < stop:
                return place + row - start
            place += stop - start
        raise AssertionError(f"row {row} is not in {self._blocks}")


def open_rows(wanted: Sequence[Block], reading: Reading) -> HostRows:
    """Share one reader with the processes of this host; each of them calls this.

    Args:
      wanted: the rows of the global batch that this process will read of each step.
      reading: what is read; the same in all processes.
    Raises:
      RuntimeError: the processes did not meet.
    """
    host = hosts.this_host()
    addresses, key = KeyValueStore(f"readers/{next(_count)}"), f"{host.first}"
    if host.process != host.first:
        return follow(wanted, _address(addresses, key))
    with host_socket.listen() as listener:
        addresses.post(key, host_socket.address(listener))
        guests = host_socket.accept(listener, len(host.processes) - 1)
    if host.process == 0:
        print(
            f"loader: one reader for the {len(host.processes)} processes of a host",
            flush=True,
        )
    return lead(wanted, reading, guests)


def _address(addresses: KeyValueStore, first: str) -> str:
    try:
        return addresses.read(first, timeout_s=host_socket.MEET_S)
    except TimeoutError:
        raise RuntimeError(
            f"process {first}, the first of this host, did not open the socket of the "
            f"data reader within {host_socket.MEET_S} s; its output may say why"
        ) from None


def lead(
    wanted: Sequence[Block],
    reading: Reading,
    guests: Sequence[tuple[socket.socket, Sequence[Sequence[int]]]],
) -> HostRows:
    """Make the ring, give it to the other processes, and start the reader.

    Args:
      wanted: rows of the first process.
      reading: what is read.
      guests: of the other processes, their connections and the rows that they want.
    """
    wishes = itertools.chain(wanted, *(wish for _, wish in guests))
    blocks = union((start, stop) for start, stop in wishes)
    layout = Layout(
        num_slots=reading.num_slots,
        num_rows=sum(stop - start for start, stop in blocks),
        row_words=len(FIELDS) * reading.seq_len,
        num_consumers=1 + len(guests),
    )
    shared = Shared(blocks=blocks, layout=layout)
    ring = create(layout, reading.start_step)
    doorbell, *bells = (
        os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(len(guests) + 2)
    )
    for consumer, (connection, _) in enumerate(guests, 1):
        message = {"consumer": consumer, **dataclasses.asdict(shared)}
        host_socket.answer(connection, message, [ring, doorbell, bells[consumer]])
    own = [os.dup(descriptor) for descriptor in (ring, doorbell, bells[0])]
    job = Job(
        reading=reading,
        blocks=blocks,
        layout=layout,
        ring=ring,
        doorbell=doorbell,
        bells=tuple(bells),
    )
    keeper = Keeper(job, [connection for connection, _ in guests])
    return HostRows(shared, 0, own, keeper=keeper)


def follow(wanted: Sequence[Block], at: str) -> HostRows:
    """Attach to the reader of the host as one of its other processes.

    Args:
      wanted: rows of this process.
      at: `host_socket.address` of the first process.
    Raises:
      RuntimeError: it is not there, or ended before it answered.
    """
    connection, message, descriptors = host_socket.connect(at, list(wanted))
    shared = Shared(
        blocks=tuple((start, stop) for start, stop in message["blocks"]),
        layout=Layout(**message["layout"]),
    )
    return HostRows(shared, message["consumer"], descriptors, lifeline=connection)


def union(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return the same rows once each, in ascending blocks that do not touch."""
    joined: list[Block] = []
    for start, stop in sorted(blocks):
        if joined and start <= joined[-1][1]:
            start, stop = joined[-1][0], max(stop, joined.pop()[1])
        joined.append((start, stop))
    return tuple(joined)

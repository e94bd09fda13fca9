"""Streams whose rows say where they come from, and a program that shares them.

The readers of the tests import this file by name. Its `main` is one process of a host:
`lead` prints its address and, when the other has come, the process id of the reader;
`follow ADDRESS` is the other. Each prints a line per step.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable

import numpy as np

from mjax.data import host_socket
from mjax.data.host_reader import Reading
from mjax.data.host_rows import HostRows, follow, lead
from mjax.data.stream import Stream

BATCH = 8


@dataclasses.dataclass(frozen=True)
class NumberedSamples:
    """Sample i holds i times its length, and counts up from there."""

    seq_len: int
    fail_after: int | None = None
    """Calls of `rows` before one raises."""
    calls: list = dataclasses.field(default_factory=list)

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        raise NotImplementedError

    def rows(self, indices):
        if len(self.calls) == self.fail_after:
            raise OSError("disk on fire")
        self.calls.append(None)
        tokens = indices[:, None] * self.seq_len + np.arange(self.seq_len)
        tokens = tokens.astype(np.int32)
        return {
            "tokens": tokens,
            "targets": tokens + 1,
            "segments": tokens * 0,
            "positions": tokens % self.seq_len,
        }


def numbered(seq_len: int, fail_after: int | None = None) -> Stream:
    return Stream((NumberedSamples(seq_len, fail_after),), (1.0,), 0)


def reading(reopen: Callable[[], Stream], seq_len: int, **options) -> Reading:
    options = {"start_step": 0, "num_slots": 2} | options
    return Reading(reopen=reopen, batch_size=BATCH, seq_len=seq_len, **options)


def main() -> None:
    seq_len, wanted = 64, [(0, 4)]
    if sys.argv[1] == "lead":
        with host_socket.listen() as listener:
            print(host_socket.address(listener), flush=True)
            guests = host_socket.accept(listener, 1)
        reopen = functools.partial(numbered, seq_len)
        rows: HostRows = lead(wanted, reading(reopen, seq_len), guests)
        assert rows.keeper is not None
        print(rows.keeper.pid, flush=True)
    else:
        rows = follow(wanted, sys.argv[2])
    for step in itertools.count():
        if step == 5:
            sys.stdin.readline()  # waits to be told, or killed
        rows.read(step, wanted)
        print("step", step, flush=True)

"""Plan one transaction: turn batches and marks (positions in files) into changes.

Input: batches, and the state of their files. Output: rows of all tables, new marks,
and an outcome for each batch. Pure: nothing takes effect before the commit.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from mjax.observe import spans
from mjax.observe.store import parse
from mjax.observe.store.base import Changes
from mjax.observe.store.batches import Batch, Mark, Outcome, admit, outcome

Key = tuple[str, str]
"""Run and source of a file."""
PROCESS_COLUMNS = (
    *("file_id", "run", "generation", "rank", "host", "pid", "wall_ns"),
    *("monotonic_ns", "devices", "mesh"),
)


class Known:
    """State of the store: marks and headers by file."""

    def __init__(self, marks: Iterable[Mark], processes: Sequence[tuple[Any, ...]]):
        """Build from the rows of the tables `files` and `processes`."""
        self.marks: dict[Key, Mark] = {(mark.run, mark.source): mark for mark in marks}
        self.headers: dict[int, spans.Header] = {
            row[0]: _header(row) for row in processes
        }
        self.next_id = 1 + max((m.file_id for m in self.marks.values()), default=0)
        self.claimed = {_process(h): file for file, h in self.headers.items()}
        """Id of the file that holds each (run, generation, rank)."""

    def learn(self, plan: "Plan") -> None:
        """Add committed changes."""
        self.marks |= plan.after
        self.headers |= plan.headers
        self.claimed |= {_process(h): file for file, h in plan.headers.items()}
        self.next_id = plan.next_id


class Plan:
    """A transaction in preparation."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self.next_id = known.next_id
        self.before: dict[Key, Mark] = {}
        self.after: dict[Key, Mark] = {}
        self.headers: dict[int, spans.Header] = {}
        self.outcomes: list[Outcome] = []
        self._tables: list[pa.Table] = []
        self._rewritten: dict[str, int] = {}
        self._metrics: dict[tuple[str, int], tuple[Any, ...]] = {}
        self._events: list[tuple[Any, ...]] = []
        self._bad: list[tuple[Any, ...]] = []

    def add(self, batch: Batch) -> None:
        """Add the new part of a batch."""
        key = batch.run, batch.source
        held = self._mark(key)
        verdict, reason, start = admit(batch, held)
        if verdict == "stored":
            try:
                self._take(batch, held, start)
            except ValueError as error:
                verdict, reason = "refused", f"{batch.source}: {error}"
        self.outcomes.append(outcome(batch, self._mark(key), verdict, reason))

    def changes(self) -> Changes:
        """Return the changes to write."""
        if self._tables:
            table = pa.concat_tables(self._tables).combine_chunks()
        else:
            table = parse.SPAN_SCHEMA.empty_table()
        processes = [_row(file, header) for file, header in self.headers.items()]
        return Changes(
            before=[*self.before.values()],
            after=[*self.after.values()],
            processes=processes,
            spans=table,
            totals=parse.totals(table),
            rewritten=[*self._rewritten.items()],
            metrics=[*self._metrics.values()],
            events=self._events,
            bad_lines=self._bad,
        )

    def _mark(self, key: Key) -> Mark | None:
        return self.after.get(key) or self._known.marks.get(key)

    def _take(self, batch: Batch, held: Mark | None, start: int) -> None:
        """Add the rows of a batch from a position of its file on.

        Raises:
          ValueError: the span file has no header, or the header of another process.
        """
        mark = held or self._new_mark(batch)
        data = batch.data[start - batch.start :]
        first_line = 1 if start == 0 else mark.lines + 1
        if batch.skipped is not None:
            if batch.kind == "spans" and start == 0:
                raise ValueError(batch.skipped)
            bad = [(mark.file_id, batch.revision, first_line, batch.skipped)]
            parsed = dataclasses.replace(_unchanged(mark), lines=1, bad_lines=bad)
        else:
            parsed = self._parse(batch, mark, data, start, first_line)
        if held is None:
            self.next_id += 1
        key = batch.run, batch.source
        if held is not None and key not in self.before and key not in self.after:
            self.before[key] = held
        if batch.kind == "metrics" and batch.revision > mark.revision:
            self._forget_metrics(batch.run, batch.revision)
        self._collect(parsed)
        self.after[key] = dataclasses.replace(
            mark,
            identity=batch.identity,
            revision=batch.revision,
            at_byte=batch.end,
            lines=first_line - 1 + parsed.lines,
            last_n=parsed.last_n,
            last_end_ns=parsed.last_end_ns,
            exit_code=parsed.exit_code,
            tail=batch.tail,
        )

    def _new_mark(self, batch: Batch) -> Mark:
        return Mark(
            file_id=self.next_id,
            run=batch.run,
            source=batch.source,
            kind=batch.kind,
            identity=batch.identity,
            revision=batch.revision,
            at_byte=0,
            lines=0,
            last_n=-1,
            last_end_ns=None,
            exit_code=None,
            tail="",
        )

    def _parse(
        self, batch: Batch, mark: Mark, data: bytes, start: int, first_line: int
    ) -> parse.Parsed:
        if batch.kind == "metrics":
            return parse.parse_metrics(data, start, first_line, mark, batch.revision)
        if batch.kind == "events":
            return parse.parse_events(data, start, first_line, mark, batch.revision)
        known = self.headers.get(mark.file_id) or self._known.headers.get(mark.file_id)
        parsed = parse.parse_spans(data, start, first_line, mark, known)
        if parsed.header is None:
            raise ValueError("the file has no header")
        if start == 0:
            self._check_header(batch, parsed.header)
            self.headers[mark.file_id] = parsed.header
        return parsed

    def _check_header(self, batch: Batch, header: spans.Header) -> None:
        """Refuse a file if its path or another file contradicts its header."""
        if header.run != batch.run:
            raise ValueError(f"the header has run {header.run}, not {batch.run}")
        name = batch.source.rpartition("/")[2]
        if name != spans.file_name(header):
            raise ValueError(
                f"its header belongs to a file named {spans.file_name(header)}; "
                "restore that name"
            )
        claims = [_process(other) for other in self.headers.values()]
        if _process(header) in self._known.claimed or _process(header) in claims:
            raise ValueError(
                f"rank {header.rank} of generation {header.generation} of run "
                f"{header.run} is already stored from another file; move away the file "
                "that does not belong to the run"
            )

    def _forget_metrics(self, run: str, revision: int) -> None:
        """Drop the rows of a rewritten file."""
        self._rewritten[run] = revision
        for key in [key for key in self._metrics if key[0] == run]:
            del self._metrics[key]

    def _collect(self, parsed: parse.Parsed) -> None:
        if parsed.spans is not None and parsed.spans.num_rows:
            self._tables.append(parsed.spans)
        self._metrics |= {(row[0], row[1]): row for row in parsed.metrics}
        self._events += parsed.events
        self._bad += parsed.bad_lines


def _unchanged(mark: Mark) -> parse.Parsed:
    return parse.Parsed(
        lines=0,
        last_n=mark.last_n,
        last_end_ns=mark.last_end_ns,
        exit_code=mark.exit_code,
    )


def _process(header: spans.Header) -> tuple[str, int, int]:
    return header.run, header.generation, header.rank


def _row(file_id: int, header: spans.Header) -> tuple[Any, ...]:
    """Return a row of the table `processes`, its columns in order."""
    return (
        *(file_id, header.run, header.generation, header.rank, header.host),
        *(header.pid, header.wall_ns, header.monotonic_ns),
        *(json.dumps(header.devices), json.dumps(header.mesh)),
    )


def _header(row: Sequence[Any]) -> spans.Header:
    _, run, generation, rank, host, pid, wall_ns, monotonic_ns, devices, mesh = row
    return spans.Header(
        run=run,
        generation=generation,
        rank=rank,
        host=host,
        pid=pid,
        wall_ns=wall_ns,
        monotonic_ns=monotonic_ns,
        devices=tuple(json.loads(devices)),
        mesh=json.loads(mesh),
    )

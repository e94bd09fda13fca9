"""Convert the bytes of a file to rows of the store.

Input: whole lines of spans, metrics or events. Output: rows, and skipped lines with
reasons. Pure. `mjax.observe.spans` defines the format of spans.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from mjax.observe import spans
from mjax.observe.store.batches import Mark, digest

METRIC_NUMBERS = (
    *("loss", "grad_norm", "lr", "tokens", "step_s", "data_wait_s", "tokens_per_s"),
    *("mfu", "skipped", "eval_loss"),
)
"""Fields of a row that have their own columns; the whole row is also kept."""
_WHOLE = frozenset({"tokens", "skipped"})
_INT32 = 2**31
_INT64 = 2**63
BLOCK_STEPS = 50
"""Number of steps that a row of phase_totals sums. 10 million spans of 1,024 ranks make
200 thousand rows. schema/0002.sql has the same number."""
SPAN_SCHEMA = pa.schema(
    [
        *(("file_id", pa.int32()), ("n", pa.int32()), ("i", pa.int32())),
        *(("step", pa.int32()), ("name", pa.string()), ("kind", pa.string())),
        *(("stream", pa.string()), ("start_ns", pa.int64()), ("end_ns", pa.int64())),
        ("barrier", pa.int32()),
    ]
)
TOTALS_KEY = ("file_id", "block", "name", "kind", "stream")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsed:
    """Rows of one batch, as tuples in column order."""

    lines: int
    """Number of lines in the bytes."""
    header: spans.Header | None = None
    spans: pa.Table | None = None
    metrics: Sequence[tuple[Any, ...]] = ()
    events: Sequence[tuple[Any, ...]] = ()
    bad_lines: Sequence[tuple[int, int, int, str]] = ()
    last_n: int = -1
    last_end_ns: int | None = None
    exit_code: int | None = None


def parse_spans(
    data: bytes, start: int, first_line: int, mark: Mark, header: spans.Header | None
) -> Parsed:
    """Parse lines of a file of spans.

    Numbers that fit no column are rare, so single lines are checked for them only if
    the conversion of the whole batch fails.

    Args:
      data: whole lines.
      start: position of the first line in the file.
      first_line: number of the first line; line 1 is the header.
      mark: mark of the file so far.
      header: header of the process; None if it is in `data`.
    Raises:
      ValueError: line 1 is not a header.
    """
    try:
        return _parse_spans(data, start, first_line, mark, header, is_small=True)
    except (OverflowError, pa.ArrowInvalid):
        return _parse_spans(data, start, first_line, mark, header, is_small=False)


def _parse_spans(
    data: bytes,
    start: int,
    first_line: int,
    mark: Mark,
    header: spans.Header | None,
    *,
    is_small: bool,
) -> Parsed:
    good: list[spans.Line] = []
    events, bad = [], []
    last_n = mark.last_n
    number = first_line - 1
    for at_byte, text in _lines(data, start):
        number += 1
        if number == 1:
            header = spans.decode_header(text)
            continue
        try:
            line = spans.decode_line(text)
            if line.n <= last_n:
                raise ValueError(f"n is {line.n} again, after {last_n}")
            if not is_small:
                _check_sizes(line)
        except ValueError as error:
            bad.append((mark.file_id, 0, number, _text(str(error))))
            continue
        last_n = line.n
        good.append(line)
        if line.event is not None and header is not None:
            events.append(_process_event(line.event, header, mark, at_byte, text))
    codes = [line.end for line in good if line.end is not None]
    # Exit codes are not in this table, but must also fit.
    np.array([*codes, last_n], np.int32)
    table = _span_table(good, mark.file_id)
    ends = table["end_ns"].to_numpy()
    last_end = max(mark.last_end_ns or 0, int(ends.max())) if len(ends) else None
    return Parsed(
        lines=number - first_line + 1,
        header=header,
        spans=table,
        events=events,
        bad_lines=bad,
        last_n=last_n,
        last_end_ns=mark.last_end_ns if last_end is None else last_end,
        exit_code=codes[-1] if codes else mark.exit_code,
    )


def parse_metrics(
    data: bytes, start: int, first_line: int, mark: Mark, revision: int
) -> Parsed:
    """Parse rows of metrics.jsonl; the last of several rows for a step is used."""
    rows: dict[int, tuple[Any, ...]] = {}
    bad = []
    number = first_line - 1
    for at_byte, text in _lines(data, start):
        number += 1
        try:
            row = _object(text)
            step = _whole(row, "step", _INT32)
            values = [_number(row, name) for name in METRIC_NUMBERS]
            kept = _clean(json.dumps(row))
        except ValueError as error:
            bad.append((mark.file_id, revision, number, _text(str(error))))
            continue
        rows[step] = (mark.run, step, revision, at_byte, *values, kept)
    return Parsed(
        lines=number - first_line + 1, metrics=[*rows.values()], bad_lines=bad
    )


def parse_events(
    data: bytes, start: int, first_line: int, mark: Mark, revision: int
) -> Parsed:
    """Parse lines of events.jsonl."""
    rows, bad = [], []
    number = first_line - 1
    for at_byte, text in _lines(data, start):
        number += 1
        try:
            row = _event_row(_object(text), mark, at_byte, text)
        except ValueError as error:
            bad.append((mark.file_id, revision, number, _text(str(error))))
            continue
        rows.append(row)
    return Parsed(lines=number - first_line + 1, events=rows, bad_lines=bad)


def totals(table: pa.Table) -> pa.Table:
    """Sum spans over blocks of steps; return the rows to add to `phase_totals`."""
    ns = np.subtract(table["end_ns"].to_numpy(), table["start_ns"].to_numpy())
    block = np.floor_divide(table["step"].to_numpy(), BLOCK_STEPS)
    columns = {name: table[name] for name in TOTALS_KEY if name != "block"}
    columns |= {"block": pa.array(block, pa.int32()), "ns": pa.array(ns, pa.int64())}
    sums = pa.table(columns).group_by([*TOTALS_KEY])
    summed = sums.aggregate([("ns", "count"), ("ns", "sum")])
    summed = summed.select([*TOTALS_KEY, "ns_count", "ns_sum"])
    return summed.rename_columns([*TOTALS_KEY, "spans", "ns"])


def _lines(data: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield the position of each line in the file, and the line without its newline."""
    *whole, _ = data.split(b"\n")
    for text in whole:
        yield start, text
        start += len(text) + 1


def _check_sizes(line: spans.Line) -> None:
    """Refuse numbers that fit no column."""
    numbers = [line.n, line.step, line.barrier or 0, line.end or 0]
    if not all(-_INT32 <= number < _INT32 for number in numbers):
        raise ValueError("a number does not fit into 32 bits")
    for span in line.spans:
        if not -_INT64 <= span.start_ns <= span.end_ns < _INT64:
            raise ValueError(f"the times of span {span.name} do not fit into 64 bits")


def _span_table(lines: Sequence[spans.Line], file_id: int) -> pa.Table:
    """Put the spans of lines into columns."""
    flat = [span for line in lines for span in line.spans]
    if not flat:
        return SPAN_SCHEMA.empty_table()
    names, kinds, streams, starts, ends = zip(*flat, strict=True)
    counts = np.array([len(line.spans) for line in lines])
    first = np.repeat(np.cumsum(counts) - counts, counts)
    barriers = [line.barrier for line in lines for _ in line.spans]
    columns = [
        np.full(len(flat), file_id, np.int32),
        np.repeat(np.array([line.n for line in lines], np.int32), counts),
        (np.arange(len(flat)) - first).astype(np.int32),
        np.repeat(np.array([line.step for line in lines], np.int32), counts),
        _all_clean(names),
        kinds,
        _all_clean(streams),
        np.array(starts, np.int64),
        np.array(ends, np.int64),
        barriers,
    ]
    arrays = [
        pa.array(column, field.type)
        for column, field in zip(columns, SPAN_SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=SPAN_SCHEMA)


def _process_event(
    event: spans.Event, header: spans.Header, mark: Mark, at_byte: int, text: bytes
) -> tuple[Any, ...]:
    """Return a row of the table `events` for an event that a process wrote."""
    found = {"time_ns": event.time_ns, "source": "process", "kind": event.kind}
    found |= {"generation": header.generation, "host": header.host}
    found |= {"rank": header.rank, "severity": event.severity, "text": event.text}
    return _event_row(found | {"data": event.data}, mark, at_byte, text)


def _event_row(
    event: dict[str, Any], mark: Mark, at_byte: int, text: bytes
) -> tuple[Any, ...]:
    """Return a row of the table `events`, its columns in order."""
    words = [_word(event, name) for name in ("source", "kind", "severity", "text")]
    source, kind, severity, said = words
    generation, rank = (
        None if event.get(name) is None else _whole(event, name, _INT32)
        for name in ("generation", "rank")
    )
    host = None if event.get("host") is None else _word(event, "host")
    time_ns = _whole(event, "time_ns", _INT64)
    data = _clean(json.dumps(event.get("data", {})))
    return (
        *(mark.file_id, at_byte, digest(text), mark.run, time_ns, source),
        *(generation, host, rank, kind, severity, said, data),
    )


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, dict):
        raise ValueError("the line is not an object")
    return found


def _whole(row: dict[str, Any], name: str, limit: int) -> int:
    value = row.get(name)
    if type(value) is not int or not -limit <= value < limit:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return value


def _number(row: dict[str, Any], name: str) -> int | float | None:
    value = row.get(name)
    if value is None:
        return None
    if name in _WHOLE:
        return _whole(row, name, _INT32 if name == "skipped" else _INT64)
    if type(value) not in (int, float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _word(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}")
    return _clean(value)


def _all_clean(texts: Sequence[str]) -> Sequence[str]:
    """Escape many texts that have few distinct values."""
    escaped = {text: _clean(text) for text in set(texts)}
    if all(text == clean for text, clean in escaped.items()):
        return texts
    return [escaped[text] for text in texts]


def _clean(text: str) -> str:
    """Escape NUL and lone surrogates, which PostgreSQL's text or UTF-8 cannot hold."""
    if text.isascii():
        return text.replace("\0", "\\x00") if "\0" in text else text
    whole = text.encode("utf-8", "backslashreplace").decode()
    return whole.replace("\0", "\\x00")


def _text(message: str) -> str:
    """Shorten a message to one line."""
    return _clean(" ".join(message.split()))[:200]

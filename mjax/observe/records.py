"""Read the records in a run's work dir, for the comparison of runs.

Input: a work dir. Output: its config, starts, rows, summary, spans, events, the
fingerprint of its data, and reading problems. A part without a file is absent.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mjax.observe import events, output, spans
from mjax.observe.events import Event
from mjax.observe.spans import SpanFile
from mjax.records import config_json

_OBJECT = dict[str, Any]
_LARGEST = 2**63
"""Largest whole number of a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The records of a run."""

    path: Path
    config: Mapping[str, Any] | None
    """Values by dotted name of the field, such as `optim.lr`."""
    starts: tuple[Mapping[str, Any], ...]
    """Records of its starts, oldest first."""
    rows: Mapping[int, Mapping[str, Any]]
    """Rows of metrics.jsonl, by step."""
    summary: Mapping[str, Any] | None
    files: tuple[SpanFile, ...]
    events: tuple[Event, ...] | None
    """Events; None: there is no events.jsonl."""
    data: str | None
    """`samples H`: two runs have the same H exactly if all their samples are the same;
    or `corpus H`: H is the hash of the texts. None: neither was recorded."""
    problems: tuple[str, ...]
    """Reading problems, for people."""


def read(path: Path, flag: str) -> Record:
    """Read the records of a run.

    Args:
      path: work dir of the run.
      flag: flag that gave the path, for messages.
    Raises:
      ValueError: the path is not a folder, or has no records of a run.
    """
    output.check_folder(path, flag)
    problems: list[str] = []

    def object_in(file: Path) -> Mapping[str, Any] | None:
        return _guarded(file, _decode_object, problems)

    config = _guarded(path / "config.json", _decode_config, problems)
    starts = [object_in(file) for file in sorted((path / "starts").glob("*.json"))]
    rows = _guarded(
        path / "metrics.jsonl", lambda data: rows_of(data, problems), problems
    )
    if config is None and not starts and not rows:
        raise ValueError(
            f"{flag} {path} has neither config.json, starts nor metrics.jsonl; give "
            "the work dir of a run"
        )
    files: list[SpanFile] = []
    if (path / spans.FOLDER).is_dir():
        try:
            files, more = spans.read_run(path)
            problems += more
        except ValueError as error:
            problems.append(str(error))
    told, more = events.read(path)
    summary = object_in(path / "summary.json")
    problems += more
    return Record(
        path=path,
        config=None if config is None else dict(flat(config)),
        starts=tuple(start for start in starts if start is not None),
        rows=rows or {},
        summary=summary,
        files=tuple(files),
        events=tuple(told) if (path / events.NAME).exists() else None,
        data=_fingerprint(path, config or {}, summary or {}, problems),
        problems=tuple(f"{path}: {problem}" for problem in problems),
    )


def flat(nested: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested objects: return their leaves by dotted name."""
    found: list[tuple[str, Any]] = []
    for name, value in nested.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _guarded[T](
    file: Path, decode: Callable[[bytes], T], problems: list[str]
) -> T | None:
    """Return the contents of a file; None if it is absent or cannot be read."""
    try:
        return decode(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{file.name} cannot be read: {error.strerror}")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        problems.append(f"{file.name} is left out: {error}")
    return None


def _decode_config(data: bytes) -> Mapping[str, Any]:
    return config_json.current(_decode_object(data))


def _decode_object(data: bytes) -> Mapping[str, Any]:
    return msgspec.json.decode(data, type=_OBJECT)


def rows_of(data: bytes, problems: list[str]) -> dict[int, Mapping[str, Any]]:
    """Return the rows of metrics.jsonl by step, the last one of each step.

    Args:
      data: contents of the file.
      problems: gets a description of each line that is not a row.
    """
    *whole, rest = data.split(b"\n")
    found: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(whole, start=1):
        try:
            row = _decode_object(line)
            if any(type(x) is int and abs(x) > _LARGEST for x in row.values()):
                raise msgspec.ValidationError("a number is too large")
            found[msgspec.convert(row.get("step"), int)] = row
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problems.append(f"metrics.jsonl, line {number} is left out: {error}")
    if rest:
        number = len(whole) + 1
        problems.append(f"metrics.jsonl, line {number} is left out: it has no end")
    return found


def _fingerprint(
    path: Path,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    problems: list[str],
) -> str | None:
    """Return the data fingerprint of the newest checkpoint, or the corpus hash."""
    own = dict(flat(config)).get("ckpt.dir")
    folder = path / "checkpoints" if own is None else Path(str(own))
    steps = [
        of for of in folder.glob("[0-9]*/checkpoint.json") if of.parent.name.isdigit()
    ]
    for file in sorted(steps, key=lambda of: int(of.parent.name), reverse=True)[:1]:
        # Its first line is a checksum, see `mjax.ckpt.manifest`.
        sealed = _guarded(
            file, lambda data: _decode_object(data.partition(b"\n")[2]), problems
        )
        found = ((sealed or {}).get("run") or {}).get("data_fingerprint")
        if isinstance(found, str):
            return f"samples {found}"
    found = summary.get("corpus_hash")
    return f"corpus {found}" if isinstance(found, str) else None

"""Read the texts or records of a file of any format, in bounded memory.

A text file is one text, in pieces of about a megabyte. Lines of JSONL, objects of a
JSON array, and rows of CSV and of parquet are records; one field holds the text. Errors
about unreadable content name the file and the line.
"""

import codecs
import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

from mjax.data.compressed import opened, plain_name
from mjax.data.files import File, RemotePath, size_of

RecordKind = Literal["jsonl", "json", "csv", "parquet"]
"""Format of a file that holds records."""
type Hook = Callable[[list[tuple[str, Any]]], dict[str, Any]]
"""Makes an object of JSON from its fields."""
_BETWEEN = re.compile(r"\s*(,?)\s*(\]?)")  # text between two values of an array

PIECE_CHARS = 1 << 20
"""Characters per piece; longer documents are passed on and tokenized in pieces."""
MAX_LINE_BYTES = 1 << 28
"""Maximum bytes of a line of JSONL; decoding it takes several times this memory."""


def split_text(text: str) -> Iterator[str]:
    """Split a text into pieces of at most PIECE_CHARS, after a newline if possible.

    The result is deterministic, and the joined pieces equal the text. Byte-level BPE
    may tokenize a few characters around a boundary differently than in the whole text.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = end if end > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def read_text(path: File, on_read: Callable[[int], None]) -> Iterator[str]:
    """Yield a decoded text file in pieces; keep newlines and byte order marks.

    Args:
      path: path of the file.
      on_read: called after each read from the file, with the number of bytes read.
    Raises:
      ValueError: the file cannot be read, is truncated, or is not text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest, num_read = "", 0
    with opened(path, on_read) as file:
        while block := file.read(PIECE_CHARS):
            if b"\0" in block:
                offset = num_read + block.index(b"\0")
                raise ValueError(f"{path} {_not_text(f'NUL at byte {offset}')}")
            rest += _decode(decoder, block, path, num_read)
            num_read += len(block)
            *complete, rest = split_text(rest) if rest else [""]
            yield from complete
    rest += _decode(decoder, b"", path, num_read)
    yield from split_text(rest)


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, path: File, num_read: int
) -> str:
    pending = len(decoder.getstate()[0])  # start of a split character
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {num_read - pending + error.start}"
        raise ValueError(f"{path} {_not_text(where)}") from None


def _not_text(where: str) -> str:
    return (
        f"is not UTF-8 text ({where}); convert it, or move it out of the corpus "
        "(files that are read: text, .jsonl, .csv, .parquet)"
    )


def read_texts(
    path: File,
    kind: RecordKind,
    field: str,
    first: int,
    on_read: Callable[[int], None],
) -> Iterator[tuple[int, str]]:
    """Yield (number, text) for the records of a file from number `first` on.

    Args:
      path: path of the file.
      kind: format of the file.
      field: field that holds the text; if no field is named a.b, a.b means the field b
        of the object a.
      first: number of the first record to yield.
      on_read: called after each read from the file, with the number of bytes read.
    Raises:
      ValueError: as in `read_records`, or a record has no text in the field.
    """
    for number, record in read_records(path, kind, first, on_read, field):
        yield number, _text_of(record, field, f"{path}:{number}")


def read_records(
    path: File,
    kind: RecordKind,
    first: int,
    on_read: Callable[[int], None],
    field: str | None = None,
    *,
    is_unique: bool = False,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, record) for the records of a file from number `first` on.

    Args:
      path: path of the file.
      kind: format of the file. Lines of JSONL, objects of a JSON array and rows of CSV
        are numbered from 1, rows of parquet from 0.
      first: number of the first record to yield.
      on_read: called after each read from the file, with the number of bytes read.
      field: the only field to read; None reads all fields.
      is_unique: whether to refuse JSON and CSV that name a field twice; if not, the
        last one counts.
    Raises:
      ValueError: the file cannot be read, is truncated, is not of its format, or has no
        column for the field.
    """
    hook = _unique if is_unique else None
    match kind:
        case "jsonl":
            return _read_jsonl(path, first, on_read, hook)
        case "json":
            return _read_json(path, first, on_read, hook)
        case "csv":
            return _read_csv(path, first, on_read, field, is_unique=is_unique)
        case "parquet":
            return _read_parquet(path, first, on_read, field)


def _text_of(record: dict[str, Any], field: str, where: str) -> str:
    text = record
    for name in [field] if field in record else field.split("."):
        if text is None:
            break
        if not isinstance(text, dict) or name not in text:
            raise ValueError(
                f"{where} has no field {field!r}, only {sorted(record)}; "
                "set --data.text-field"
            )
        text = text[name]
    if text is None:
        raise ValueError(
            f"{where}: field {field!r} is null; remove the record, or write a text "
            'there: a document with the text "" is left out'
        )
    if isinstance(text, bytes):
        raise ValueError(
            f"{where}: field {field!r} is binary, not a string; cast the column to "
            "string, or set --data.text-field to the field with the text"
        )
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: field {field!r} is a {type(text).__name__}, not a string; "
            "set --data.text-field to the field with the text"
        )
    check_encodable(text, where)
    return text


def check_encodable(text: str, where: str) -> None:
    """Refuse text that UTF-8 cannot encode; JSON can escape half a surrogate pair.

    Raises:
      ValueError: the text has such a character; the message begins with `where`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(
            f"{where}: the text has half a surrogate pair, \\u{code:04x}, after "
            f"{text[max(0, error.start - 20) : error.start]!r}, which UTF-8 cannot "
            "encode; write the whole pair, or \\ufffd in its place"
        ) from None


# -------------------------------------------------------------------------------- JSON


class _RepeatedError(ValueError):
    """A field occurs twice; the message has its name."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object; refuse a repeated one."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedError(next(name for name in names if names.count(name) > 1))
    return fields


def _read_jsonl(
    path: File,
    first: int,
    on_read: Callable[[int], None],
    hook: Hook | None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object); blank lines are skipped."""
    with opened(path, on_read) as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if number < first or not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                with _json_limits(where):
                    record = json.loads(line.rstrip(), object_pairs_hook=hook)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} {_not_text(error.reason)}") from None
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where} is not JSON ({error.msg}, column {error.colno}); "
                    "JSONL holds one object a line"
                ) from None
            yield number, _checked_object(record, where)


def _lines(file: io.BufferedIOBase, path: File) -> Iterator[bytes]:
    """Yield the lines of a file; refuse a line that is too long for memory."""
    lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"{path}:{number} has over {MAX_LINE_BYTES} bytes; give a document "
                "this long as a text file, which is read in pieces"
            )
        yield line


def _read_json(
    path: File,
    first: int,
    on_read: Callable[[int], None],
    hook: Hook | None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, object) of a JSON array; without an array, of each line."""
    with opened(path) as file:
        while (char := file.read(1)).isspace():
            pass
    if char != b"[":
        yield from _read_jsonl(path, first, on_read, hook)
        return
    with opened(path, on_read) as file:
        while file.read(1) != b"[":
            pass
        for number, record in enumerate(_array_items(file, path, hook), start=1):
            if number >= first:
                yield number, _checked_object(record, f"{path}:{number}")


def _array_items(
    file: io.BufferedIOBase, path: File, hook: Hook | None
) -> Iterator[Any]:
    """Yield the values after a JSON array's bracket, one in memory at a time."""
    decoder = json.JSONDecoder(object_pairs_hook=hook)
    decode = codecs.getincrementaldecoder("utf-8")().decode
    text, at, size, is_at_end = "", 0, PIECE_CHARS, False
    for number in itertools.count(1):
        where = f"{path}:{number}"
        while True:
            between = _BETWEEN.match(text, at)
            assert between is not None  # the pattern also matches the empty string
            start, has_comma = between.end(), bool(between[1])
            if between[2] and not has_comma:
                if text[start:].strip() or file.read().strip():
                    raise ValueError(
                        f"{path} has text after its array; give one array of objects, "
                        "or one object a line"
                    )
                return
            if start < len(text) and has_comma != (number > 1):
                raise ValueError(
                    f"{where} is not JSON (a comma before it is missing or extra)"
                )
            with contextlib.suppress(json.JSONDecodeError):
                with _json_limits(where):
                    value, end = decoder.raw_decode(text, start)
                if end < len(text) or is_at_end:  # a number may continue
                    break
            if is_at_end or len(text) - at > MAX_LINE_BYTES:
                raise ValueError(
                    f"{where} is cut off, is not JSON, or has over {MAX_LINE_BYTES} "
                    "characters; download or copy the file again, or give one object a "
                    "line"
                )
            block = file.read(size)
            size, is_at_end = 2 * size, not block
            try:
                text, at = text[at:] + decode(block, final=is_at_end), 0
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} {_not_text(error.reason)}") from None
        yield value
        at, size = end, PIECE_CHARS


@contextlib.contextmanager
def _json_limits(where: str) -> Iterator[None]:
    """Add the place to errors about Python's limits; pass on syntax errors."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except _RepeatedError as error:
        raise ValueError(
            f"{where} has the field {str(error)!r} twice; remove one"
        ) from None
    except (RecursionError, ValueError) as error:
        # Too deeply nested brackets, or a number with thousands of digits.
        raise ValueError(
            f"{where} cannot be read as JSON ({error}); leave the line "
            "out, or shorten what is nested or long in it"
        ) from None


def _checked_object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{where} holds a {type(record).__name__}, not an object")
    return record


# ----------------------------------------------------------------------------- columns


def _read_csv(
    path: File,
    first: int,
    on_read: Callable[[int], None],
    field: str | None,
    *,
    is_unique: bool,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number, {column: cell}); the first row names the columns."""
    csv.field_size_limit(MAX_LINE_BYTES)
    delimiter = "\t" if plain_name(path.name).lower().endswith(".tsv") else ","
    number = 0
    with opened(path, on_read) as file:
        lines = codecs.iterdecode(_lines(file, path), "utf-8-sig")
        found = csv.reader(lines, delimiter=delimiter, strict=True)
        rows = (row for row in found if row)
        try:
            columns = next(rows, [])
            if field is not None:
                _check_columns(path, columns, field)
            for column in columns if is_unique else ():
                _check_columns(path, columns, column)
            for number, row in enumerate(rows, start=1):
                if len(row) != len(columns):
                    raise ValueError(
                        f"{path}:{number} has {len(row)} cells, but its header names "
                        f"{len(columns)} columns; fix the row, or quote the cell "
                        f"that holds {delimiter!r} or a line break"
                    )
                if number >= first:
                    yield number, dict(zip(columns, row, strict=True))
        except UnicodeDecodeError as error:
            where = f"{path}:{number + 1}"
            raise ValueError(f"{where} {_not_text(error.reason)}") from None
        except csv.Error as error:
            raise ValueError(
                f"{path}:{number + 1} is not CSV ({error}); put quotes around cells "
                "that hold line breaks or quotes, and double the quotes"
            ) from None


def _read_parquet(
    path: File, first: int, on_read: Callable[[int], None], field: str | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number, {column: value}), reading a few rows at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path}: reading parquet needs pyarrow; pip install 'mjax[data]'"
        ) from None
    index = 0
    try:
        content = path
        if isinstance(path, RemotePath):
            content = io.BufferedReader(path.open("rb"))
        with pyarrow.parquet.ParquetFile(
            content, page_checksum_verification=True
        ) as file:
            columns = file.schema_arrow.names
            wanted = None if field is None else [_check_columns(path, columns, field)]
            size, num_rows, num_read = size_of(path), file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=64, columns=wanted):
                rows = batch.column(0) if wanted else batch.to_struct_array()
                for row in rows:
                    if index >= first:
                        found = row.as_py()
                        yield index, {wanted[0]: found} if wanted else found
                    index += 1
                on_read(size * index // num_rows - num_read)
                num_read = size * index // num_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a readable parquet file (rows before {index} were read): "
            f"{error}; write it again, or leave it out"
        ) from None


def _check_columns(path: File, columns: list[str], field: str) -> str:
    """Return the column that holds a field; refuse a field without a column."""
    column = field if field in columns else field.partition(".")[0]
    if columns.count(column) > 1:
        raise ValueError(
            f"{path} has several columns {column!r}; remove or rename all but one"
        )
    if column not in columns:
        raise ValueError(
            f"{path} has no column {field!r}, only {sorted(columns)}; set "
            "--data.text-field"
        )
    return column

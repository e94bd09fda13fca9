"""Files of one format in, their texts or records out, in bounded memory.

A text file is one text, in pieces of about a megabyte; a line of JSONL and a row of
parquet are records, of which one field holds the text. What cannot be read is refused
with the file and the line.
"""

import codecs
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from mjax.data.compressed import opened

PIECE_CHARS = 1 << 20
"""A longer document is handed on (and tokenized) in pieces of about this size."""
MAX_LINE_BYTES = 1 << 28
"""A longer line of JSONL is refused: it is decoded in memory, at several times this."""


def split_text(text: str) -> Iterator[str]:
    """Cut a text in pieces of at most PIECE_CHARS, after a newline where there is one.

    Deterministic; joined, the pieces are the text. Byte-level BPE may tokenize the few
    characters around a cut differently than in the whole text.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = end if end > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def read_text(path: pathlib.Path, on_read: Callable[[int], None]) -> Iterator[str]:
    """Decode a text file piece by piece; newlines and byte order marks are kept.

    Args:
      path: of the file.
      on_read: called with the number of bytes whenever some are read from the file.
    Raises:
      ValueError: it cannot be read, is cut off, or is not text.
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
    decoder: codecs.IncrementalDecoder, block: bytes, path: pathlib.Path, num_read: int
) -> str:
    pending = len(decoder.getstate()[0])  # bytes of a character begun in the last block
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {num_read - pending + error.start}"
        raise ValueError(f"{path} {_not_text(where)}") from None


def _not_text(where: str) -> str:
    return (
        f"is not UTF-8 text ({where}); convert it, or move it out of the corpus "
        "(files that are read: text, .jsonl, .parquet)"
    )


def read_jsonl(
    path: pathlib.Path, field: str, first: int, on_read: Callable[[int], None]
) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) from line `first` on; blank lines are skipped.

    Args:
      path: of the file.
      field: that holds the text.
      first: number of the first line to yield.
      on_read: called with the number of bytes whenever some are read from the file.
    Raises:
      ValueError: it cannot be read, is cut off, or a line has no text in the field.
    """
    for number, record in read_records(path, first, on_read):
        yield number, _text_of(record, field, f"{path}:{number}")


def read_records(
    path: pathlib.Path, first: int, on_read: Callable[[int], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) from line `first` on; blank lines are skipped.

    Args:
      path: of the file.
      first: number of the first line to yield.
      on_read: called with the number of bytes whenever some are read from the file.
    Raises:
      ValueError: it cannot be read, is cut off, or a line is no object.
    """
    with opened(path, on_read) as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}:{number} has over {MAX_LINE_BYTES} bytes; a document this "
                    "long is given as a text file, which is read in pieces"
                )
            if number < first or not line.strip():
                continue
            try:
                record = json.loads(line.rstrip())
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number} {_not_text(error.reason)}") from None
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}:{number} is not JSON ({error.msg}, column {error.colno}); "
                    "JSONL holds one object a line"
                ) from None
            except (RecursionError, ValueError) as error:
                # Too many brackets, or a number of thousands of digits.
                raise ValueError(
                    f"{path}:{number} cannot be read as JSON ({error}); leave the line "
                    "out, or what is nested or long in it"
                ) from None
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}:{number} holds a {type(record).__name__}, not an object"
                )
            yield number, record


def _text_of(record: dict, field: str, where: str) -> str:
    if field not in record:
        raise ValueError(
            f"{where} has no field {field!r}, only {sorted(record)}; "
            "set --data.text-field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: field {field!r} is a {type(text).__name__}, not a string; "
            "set --data.text-field to the field with the text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"{where} {_not_text(error.reason)}") from None
    return text


def read_parquet(
    path: pathlib.Path, field: str, first: int, on_read: Callable[[int], None]
) -> Iterator[tuple[int, str]]:
    """Yield (row number, text) from row `first` on, reading a few rows at a time.

    Args:
      path: of the file.
      field: that holds the text.
      first: number of the first row to yield.
      on_read: called with the number of bytes whenever some are read from the file.
    Raises:
      ValueError: it cannot be read, or has no such column of text.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path}: reading parquet needs pyarrow; pip install 'mjax[data]'"
        ) from None
    index = 0
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise ValueError(
                    f"{path} has no column {field!r}, only {sorted(columns)}; "
                    "set --data.text-field"
                )
            for batch in file.iter_batches(batch_size=64, columns=[field]):
                for value in batch.column(0):
                    if index >= first:
                        where = f"{path}:{index}"
                        yield index, _text_of({field: value.as_py()}, field, where)
                    index += 1
        on_read(path.stat().st_size)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a readable parquet file (rows before {index} were read): "
            f"{error}; write it again, or leave it out"
        ) from None

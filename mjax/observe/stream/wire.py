"""Encode batches and answers as bytes.

Input: batches, requests, answers. Output: compressed bytes of batches, JSON of the
rest, and the reverse. Incoming data is untrusted: its types are verified, those of
batches with their sizes and checksums.

A body is a compressed sequence of frames, one for each batch. A frame consists of the
length of its header, the header (JSON), and lines, whose size in bytes the header
gives.
"""

import dataclasses
import gzip
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mjax.observe.store.batches import Batch, Mark, Outcome

VERSION = 1
_LENGTH = struct.Struct(">I")
_LEVEL = 1
"""Level of gzip. This level compresses to a seventh; level 6 takes 5 times as long for
10% less."""
_MAX_BODY = 256 * 2**20
"""Maximum decompressed size of a body in bytes. It is far above any valid body."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarksRequest:
    """A request for the stored size of files."""

    run: str
    sources: Sequence[str]
    collector: str = ""
    """Name of the sender: its host and work dir."""
    behind_bytes: int = 0
    """Bytes of the sender's files that are not sent yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarksAnswer:
    """Marks of the files; files without stored bytes are absent."""

    marks: Sequence[Mark]
    pending: int = 0
    """Number of messages in the queue, read before the marks: if it is 0, the marks
    include all messages that were queued before the request."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Files whose bytes the ingester refuses, with reasons."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SendAnswer:
    """Results of batches, in their order."""

    outcomes: Sequence[Outcome]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorAnswer:
    """Answer to a refused or failed request."""

    error: str


def encode_batches(batches: Iterable[Batch]) -> bytes:
    """Put batches into one body."""
    parts = []
    for batch in batches:
        fields = {field.name: getattr(batch, field.name) for field in _HEADER_FIELDS}
        fields |= {"version": VERSION, "size": len(batch.data)}
        fields |= {"crc32": zlib.crc32(batch.data)}
        header = msgspec.json.encode(fields)
        parts += [_LENGTH.pack(len(header)), header, batch.data]
    return gzip.compress(b"".join(parts), _LEVEL, mtime=0)


def decode_batches(body: bytes) -> list[Batch]:
    """Take batches out of a body.

    Raises:
      ValueError: it is damaged, too large, or has another version.
    """
    unpacker = zlib.decompressobj(wbits=31)
    try:
        data = unpacker.decompress(body, _MAX_BODY)
    except zlib.error as error:
        raise ValueError(f"the body is no valid gzip data: {error}") from error
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError(f"the body is truncated, or unpacks to over {_MAX_BODY} bytes")
    return [*_frames(memoryview(data))]


def encode(value: Any) -> bytes:
    """Write a request or an answer."""
    return msgspec.json.encode(value)


def decode(data: bytes, kind: Any) -> Any:
    """Read a request or an answer.

    Raises:
      ValueError: the bytes are not a request or an answer of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


_HEADER_FIELDS = tuple(f for f in dataclasses.fields(Batch) if f.name != "data")
_Header = msgspec.defstruct(
    "Header",
    [
        *((field.name, field.type) for field in _HEADER_FIELDS),
        *(("version", int), ("size", int), ("crc32", int)),
    ],
    kw_only=True,
    forbid_unknown_fields=True,
)
_Version = msgspec.defstruct("Version", [("version", int)])
_decode_header: Callable[[memoryview], Any] = msgspec.json.Decoder(_Header).decode
_decode_version: Callable[[memoryview], Any] = msgspec.json.Decoder(_Version).decode


def _frames(data: memoryview) -> Iterator[Batch]:
    position = 0
    while position < len(data):
        if len(data) - position < _LENGTH.size:
            raise ValueError("the body ends within a frame")
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        header = _header(data[position : position + length])
        position += length
        lines = bytes(data[position : position + header.size])
        position += header.size
        if len(lines) != header.size or zlib.crc32(lines) != header.crc32:
            raise ValueError(f"the lines of {header.source} are damaged or truncated")
        yield _batch(header, lines)


def _header(data: memoryview) -> Any:
    try:
        # The header of another version may have other fields.
        version: int = _decode_version(data).version
        if version != VERSION:
            raise ValueError(
                f"a batch of version {version}, this mjax reads {VERSION}; run the "
                "same mjax on all hosts"
            )
        return _decode_header(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the header of a batch is damaged: {error}") from error


def _batch(header: Any, lines: bytes) -> Batch:
    """Make a batch; refuse inconsistent headers."""
    fields = {field.name: getattr(header, field.name) for field in _HEADER_FIELDS}
    batch = Batch(**fields, data=lines)
    size = batch.end - batch.start
    is_whole = batch.skipped is None and lines.endswith(b"\n")
    is_whole = is_whole and len(lines) == size
    is_skip = batch.skipped is not None and not lines and size > 0
    if batch.start < 0 or batch.first_line < 1 or not (is_whole or is_skip):
        raise ValueError(
            f"bytes {batch.start} to {batch.end} of {batch.source} are not complete "
            "lines"
        )
    return batch

"""The manifest of a saved step: leaves, pieces, checksums, metadata of the run.

A leaf is a named array of the state. A box is a rectangular part of an array, given by
its (start, stop) in every dim (`boxes`); a piece is a box as it was written. Besides
the arrays, a step's folder holds

- `pieces.<i>.json`: the pieces that process i wrote, each with its box and the CRC32C
  of its bytes, computed in host memory before they were written;
- `checkpoint.json`, written last: step, leaves, the checksums of the files above, and
  JSON metadata of the run (config, data position, seed, versions).

Both kinds of file are *sealed*: their first line has the name of the format, its
version, and a CRC32C of the name, the version and the rest of the file.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import ml_dtypes  # noqa: F401  registers bfloat16 and the FP8 types in numpy
import numpy as np
from jaxtyping import Shaped

from mjax import checked_json
from mjax.ckpt.boxes import Box, size_of

FORMAT = "mjax-checkpoint"
VERSION = 1
"""Version of the format; increased when older readers would misread a new file."""

MAIN_FILE = "checkpoint.json"
_SUM_BYTES = 1 << 24  # bytes per call; other threads run between two calls


class DamagedError(RuntimeError):
    """Files of a step are missing or damaged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """Shape and dtype of one global array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.size * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a leaf, as one process wrote it."""

    box: Box
    crc32c: int


Pieces = dict[str, list[Piece]]
"""Leaf name -> its pieces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of checkpoint.json."""

    step: int
    """Number of optimizer steps in the state."""
    save_id: str
    """Id of the save; two saves of the same step have different ids."""
    leaves: Mapping[str, Leaf]
    part_sums: Sequence[int]
    """Element i is the CRC32C of the text of `pieces.<i>.json`."""
    run: Mapping[str, Any]
    """JSON metadata: config, data position, seed, versions."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.num_bytes for leaf in self.leaves.values())


def crc32c(array: Shaped[np.ndarray, "..."]) -> int:
    """Return the CRC32C (Castagnoli) of an array's bytes in C order.

    Source: RFC 3720, appendix B.4.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    total = 0
    for start in range(0, data.size, _SUM_BYTES):
        total = google_crc32c.extend(total, data[start : start + _SUM_BYTES])
    return total


def text_crc32c(text: str) -> int:
    """Return the CRC32C of a text encoded as UTF-8."""
    return google_crc32c.value(text.encode())


def part_name(process: int) -> str:
    """Return the name of the file that lists the pieces of one process."""
    return f"pieces.{process}.json"


def seal(body: Any) -> str:
    """Return a sealed text: a line with format, version and checksum, then the JSON."""
    text = json.dumps(body, indent=1, sort_keys=True)
    total = _seal_crc32c(FORMAT, VERSION, text)
    head = {"format": FORMAT, "version": VERSION, "crc32c": total}
    return f"{json.dumps(head)}\n{text}\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Head:
    """The first line of a sealed text."""

    format: str
    version: int
    crc32c: int


def unseal(text: str, where: str, kind: Any = Any) -> Any:
    """Check a sealed text and return its body as a value of type `kind`.

    Args:
      text: text of the file.
      where: name of the file, for messages.
      kind: type of the body, as in `checked_json.read`.
    Raises:
      DamagedError: the text is not one that `seal` returned.
      ValueError: a newer version of mjax wrote the text.
    """
    first, _, rest = text.partition("\n")
    try:
        head: _Head = checked_json.read(first, _Head)
    except ValueError as error:
        raise DamagedError(f"{where} does not begin with its checksum") from error
    body = rest.removesuffix("\n")
    total = _seal_crc32c(head.format, head.version, body)
    if head.format != FORMAT or total != head.crc32c:
        raise DamagedError(f"{where} differs from what was written (CRC32C)")
    if head.version > VERSION:
        raise ValueError(
            f"{where} has format {head.version}, this version of mjax reads up to "
            f"{VERSION}; install the version that wrote it"
        )
    try:
        return checked_json.read(body, kind)
    except ValueError as error:
        raise DamagedError(f"{where}: {error}") from error


def _seal_crc32c(name: str, version: int, text: str) -> int:
    """Return the CRC32C of the format, its version and the body.

    The checksum covers the version, because a flipped bit could make the file look
    newer.
    """
    return text_crc32c(f"{name} {version}\n{text}")


def write_manifest(manifest: Manifest) -> str:
    """Return the text of checkpoint.json."""
    return seal(dataclasses.asdict(manifest))


def read_manifest(text: str, where: str) -> Manifest:
    """Parse a text of `write_manifest`; errors as in `unseal`."""
    found: Manifest = unseal(text, where, Manifest)
    for name, leaf in found.leaves.items():
        try:
            np.dtype(leaf.dtype)
        except TypeError as error:
            raise DamagedError(f"{where}: {name} has dtype {leaf.dtype}") from error
    return found


def write_pieces(pieces: Pieces) -> str:
    """Return the text of the file that lists one process's pieces."""
    return seal(
        {name: [[p.box, p.crc32c] for p in some] for name, some in pieces.items()}
    )


def read_pieces(text: str, where: str) -> Pieces:
    """Parse a text of `write_pieces`; errors as in `unseal`."""
    return {
        name: [Piece(box, crc) for box, crc in some]
        for name, some in unseal(text, where, dict[str, list[tuple[Box, int]]]).items()
    }


def check_complete(leaves: Mapping[str, Leaf], pieces: Pieces, where: str) -> None:
    """Check that the pieces cover every element of every leaf.

    Raises:
      DamagedError: elements are missing; the message names the leaf.
    """
    for name, leaf in leaves.items():
        found = sum(size_of(piece.box) for piece in pieces.get(name, ()))
        if found != leaf.size:
            raise DamagedError(f"{where}: {name} has {found} of {leaf.size} elements")

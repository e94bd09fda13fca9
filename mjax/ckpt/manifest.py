"""The manifest of a saved step: leaves, pieces, checksums, facts of the run.

A step's folder holds, beside the arrays,

- `pieces.<i>.json`: the boxes of leaves that process i wrote, each with the CRC32C of
  its bytes, computed in host memory before they were written;
- `checkpoint.json`, written last: step, leaves, checksums of the files above, facts.

Both are *sealed*: the first line holds the format, and the CRC32C of it and the rest.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import ml_dtypes  # noqa: F401  numpy learns bfloat16 and its kin
import numpy as np
from jaxtyping import Shaped

from mjax import checked_json
from mjax.ckpt.boxes import Box, size_of

FORMAT = "mjax-checkpoint"
VERSION = 1
"""Increased when an older reader would misread the new format."""

MAIN_FILE = "checkpoint.json"
_SUM_BYTES = 1 << 24  # Other threads run between two parts of this size.


class DamagedError(RuntimeError):
    """Files of a step are missing or damaged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One global array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Elements."""
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
"""Pieces by the name of the leaf."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of checkpoint.json."""

    step: int
    """Optimizer steps that the state has seen."""
    save_id: str
    """Id that differs between two saves of one step."""
    leaves: Mapping[str, Leaf]
    part_sums: Sequence[int]
    """CRC32C of the text of `pieces.<i>.json`, by i."""
    run: Mapping[str, Any]
    """JSON facts: config, data position, seed, versions."""

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
    """Return the CRC32C of a text in UTF-8."""
    return google_crc32c.value(text.encode())


def part_name(process: int) -> str:
    """Return the name of the file of one process."""
    return f"pieces.{process}.json"


def seal(body: Any) -> str:
    """Write JSON below a line with the format and the checksum of what follows."""
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
    """Return what `seal` wrote, as the type of its value.

    Args:
      text: text of the file.
      where: name of the file, for messages.
      kind: as for `checked_json.read`.
    Raises:
      DamagedError: not what `seal` wrote.
      ValueError: a newer version wrote it.
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
    """Sum the version too: one flipped bit would make a newer format of it."""
    return text_crc32c(f"{name} {version}\n{text}")


def write_manifest(manifest: Manifest) -> str:
    """Return the text of checkpoint.json."""
    return seal(dataclasses.asdict(manifest))


def read_manifest(text: str, where: str) -> Manifest:
    """Return what `write_manifest` wrote; raises as `unseal`."""
    found: Manifest = unseal(text, where, Manifest)
    for name, leaf in found.leaves.items():
        try:
            np.dtype(leaf.dtype)
        except TypeError as error:
            raise DamagedError(f"{where}: {name} has dtype {leaf.dtype}") from error
    return found


def write_pieces(pieces: Pieces) -> str:
    """Return the text of one process' file."""
    return seal(
        {name: [[p.box, p.crc32c] for p in some] for name, some in pieces.items()}
    )


def read_pieces(text: str, where: str) -> Pieces:
    """Return what `write_pieces` wrote; raises as `unseal`."""
    return {
        name: [Piece(box, crc) for box, crc in some]
        for name, some in unseal(text, where, dict[str, list[tuple[Box, int]]]).items()
    }


def check_complete(leaves: Mapping[str, Leaf], pieces: Pieces, where: str) -> None:
    """Check that the pieces cover every leaf.

    Raises:
      DamagedError: elements are missing; the message names the leaf.
    """
    for name, leaf in leaves.items():
        found = sum(size_of(piece.box) for piece in pieces.get(name, ()))
        if found != leaf.size:
            raise DamagedError(f"{where}: {name} has {found} of {leaf.size} elements")

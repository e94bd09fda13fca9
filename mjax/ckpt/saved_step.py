"""Read a saved step: its manifest, and its arrays piece by piece.

Every value that this module returns has been compared with its checksum.
"""

import json
import threading
import time
from collections.abc import Iterable, Sequence
from types import EllipsisType

import numpy as np
from etils import epath
from jaxtyping import Shaped

from mjax.ckpt import arrays, boxes, manifest
from mjax.ckpt.boxes import Box
from mjax.ckpt.manifest import DamagedError, Leaf, Manifest, Piece, Pieces
from mjax.ckpt.store import manifest_in, pieces_in

# Error codes of TensorStore that say nothing about the stored data.
_STORE_TROUBLE = (
    *("UNAVAILABLE", "PERMISSION_DENIED", "UNAUTHENTICATED", "DEADLINE_EXCEEDED"),
    *("ABORTED", "RESOURCE_EXHAUSTED"),
)
# Code of TensorStore for any other error of a disk or a network. The read is repeated,
# because the error may be temporary; if it persists, the step counts as damaged.
_UNKNOWN = "UNKNOWN"
_PAUSES_S = (0.5, 1.0, 2.0)


class SavedStep:
    """A committed step, written by any mesh and any number of processes."""

    def __init__(self, path: epath.Path) -> None:
        """Read the manifest and the list of pieces.

        Args:
          path: path of the step's folder.
        Raises:
          DamagedError: these files are missing, incomplete, or not what was written.
          ValueError: a newer version of mjax wrote them.
        """
        self.path = path
        self.manifest: Manifest = manifest_in(path)
        self.bytes_read = 0
        """Bytes of all pieces that this object has read."""
        self.pieces: Pieces = pieces_in(path, self.manifest)
        self._reader = arrays.Reader(path)
        self._lock = threading.Lock()

    def names(self) -> Iterable[str]:
        """Return the names of the leaves."""
        return self.manifest.leaves.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a leaf."""
        return self.manifest.leaves[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a leaf."""
        return np.dtype(self.manifest.leaves[name].dtype)

    def read(
        self, name: str, index: tuple[slice, ...] | EllipsisType = ...
    ) -> Shaped[np.ndarray, "..."]:
        """Return a part of a leaf; errors as in `read_boxes`."""
        shape = self.shape(name)
        whole = tuple(slice(None) for _ in shape)
        box = boxes.box_of(whole if index is ... else index, shape)
        return self.read_boxes(name, [box])[0]

    def read_boxes(
        self, name: str, wanted: Sequence[Box]
    ) -> list[Shaped[np.ndarray, "..."]]:
        """Return the values of boxes of a leaf; each piece they overlap is read once.

        Raises:
          DamagedError, RuntimeError: as in `read_checked`.
        """
        dtype = self.dtype(name)
        out = [np.empty(boxes.shape_of(box), dtype) for box in wanted]
        for piece in self.pieces[name]:
            shared = [boxes.overlap(piece.box, box) for box in wanted]
            if not any(part is not None for part in shared):
                continue
            data = self.read_piece(name, piece)
            for part, box, array in zip(shared, wanted, out, strict=True):
                if part is not None:
                    source = data[boxes.within(part, piece.box)]
                    array[boxes.within(part, box)] = source
        return out

    def read_piece(self, name: str, piece: Piece) -> Shaped[np.ndarray, "..."]:
        """Return the values of one piece, as saved.

        Raises:
          DamagedError, RuntimeError: as in `read_checked`.
        """
        where = f"{self.path.name}/{arrays.STATE}"
        data = read_checked(
            self._reader, name, self.manifest.leaves[name], piece, where
        )
        with self._lock:
            self.bytes_read += data.nbytes
        return data

    def config(self) -> str:
        """Return the config of the run that saved the step, as JSON text.

        Raises:
          ValueError: the step was saved without a config.
        """
        if "config" not in self.manifest.run:
            raise ValueError(f"{self.path} does not record its config")
        return json.dumps(self.manifest.run["config"])

    def verify(self) -> None:
        """Read all pieces and compare them with their checksums.

        Also checks that Orbax alone reads the same arrays; this starts a backend of
        jax.

        Raises:
          DamagedError, RuntimeError: as in `read_checked`, for the first piece that
            fails.
        """
        arrays.check_orbax_reads(self.path, self.names())
        for name, pieces in self.pieces.items():
            for piece in pieces:
                self.read_piece(name, piece)


def read_checked(
    reader: arrays.Reader, name: str, leaf: Leaf, piece: Piece, where: str
) -> Shaped[np.ndarray, "..."]:
    """Return the values of a piece, compared with its checksum.

    Raises:
      DamagedError: the piece is missing, or differs from its checksum.
      RuntimeError: the store does not answer; the piece may be intact.
    """
    where = f"{where}: {name} {list(piece.box)}"
    data = _read_patiently(reader, name, leaf, piece, where)
    if manifest.crc32c(data) != piece.crc32c:
        raise DamagedError(f"{where} differs from what was saved (CRC32C)")
    return data


def _read_patiently(
    reader: arrays.Reader, name: str, leaf: Leaf, piece: Piece, where: str
) -> Shaped[np.ndarray, "..."]:
    """Return the values of a piece; retry after errors that may be temporary."""
    for pause_s in (*_PAUSES_S, None):
        try:
            return reader.read(name, leaf, piece.box)
        except (ValueError, OSError, IndexError) as error:
            reason = str(error).splitlines()[0]
            # The rest of the text may contain any path.
            is_trouble = reason.startswith(_STORE_TROUBLE)
            if pause_s is not None and (is_trouble or reason.startswith(_UNKNOWN)):
                time.sleep(pause_s)
                continue
            if is_trouble:
                raise RuntimeError(
                    f"{where} cannot be read now: {reason}; check its permissions and "
                    "connection, then repeat"
                ) from error
            raise DamagedError(f"{where} cannot be read: {reason}") from error
    raise AssertionError("the last try returns or raises")

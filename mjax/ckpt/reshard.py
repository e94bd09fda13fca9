"""Copy a step to another folder of steps, in smaller pieces if requested.

Each piece of the source is read once, compared with its checksum, split, and written;
this takes the memory of a few pieces. As in a save, the copy is read back before it is
committed under its number.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from etils import epath

from mjax.ckpt import arrays, manifest
from mjax.ckpt.boxes import Box, shape_of, within
from mjax.ckpt.journal import new_save_id, origin_of, start_of
from mjax.ckpt.manifest import Manifest, Piece, Pieces
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import Store, write_file

_HELD_BYTES = 1 << 26  # bytes written together, so small leaves share a file


def copy_step(
    source: SavedStep, store: Store, max_piece_bytes: int | None = None
) -> Manifest:
    """Copy a step atomically: the destination has the complete step or none.

    Args:
      source: step to copy.
      store: destination; its folder need not exist, and no run may write there.
      max_piece_bytes: maximum size of a piece of the copy; None keeps the pieces.
    Returns:
      The manifest of the copy. It equals the source's manifest, except for a new save
      id that begins with the same run id, and the checksum of the new list of pieces.
    Raises:
      ValueError: the destination already has the step, or is in use.
      DamagedError: the source differs from what was saved; the copy is deleted.
      OSError: the destination cannot be written, for example because it is full.
    """
    step = source.manifest.step
    if step in store.steps():
        raise ValueError(
            f"{store.directory} has a step {step}; choose another folder, or delete it"
        )
    if unfinished := store.unfinished():
        raise ValueError(
            f"{store.directory} has {unfinished[0]}: a run writes there, or a process "
            "that did has died; choose another folder, or delete it"
        )
    folder = store.begin(step, source.manifest.num_bytes)
    try:
        copied = _write(source, folder, max_piece_bytes)
        SavedStep(folder).verify()
        store.commit(folder, step)
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmtree()
        raise
    return copied


def smaller_chunk(
    chunk: Sequence[int], shape: Sequence[int], itemsize: int, max_bytes: int
) -> tuple[int, ...]:
    """Split a piece along its first dims until it has at most `max_bytes`.

    If an array has several pieces along a dim, the new size divides the old size, so no
    new piece overlaps two old pieces.

    Args:
      chunk: present shape of a piece.
      shape: shape of the array.
      itemsize: bytes of an element.
      max_bytes: maximum size of a new piece; at least `itemsize`.
    Returns:
      The shape of a new piece.
    """
    new = list(chunk)
    for dim, size in enumerate(chunk):
        row_bytes = math.prod(new[dim + 1 :]) * itemsize
        if row_bytes * size <= max_bytes:
            break
        largest = max(1, max_bytes // row_bytes)
        if size == shape[dim]:
            new[dim] = math.ceil(size / math.ceil(size / largest))
        else:
            new[dim] = max(n for n in range(1, largest + 1) if size % n == 0)
    return tuple(new)


def _write(source: SavedStep, folder: epath.Path, max_bytes: int | None) -> Manifest:
    """Write a copy of the step into an unfinished folder; return its manifest."""
    chunks = {name: _chunk(source, name, max_bytes) for name in source.names()}
    leaves = {name: (source.manifest.leaves[name], chunks[name]) for name in chunks}
    writer = arrays.PieceWriter(folder, leaves)
    pieces: Pieces = {name: [] for name in chunks}
    held_bytes = 0
    for name, piece in _all_pieces(source):
        data = source.read_piece(name, piece)
        for box in _cut(piece.box, chunks[name]):
            part = data[(*within(box, piece.box), ...)]
            pieces[name].append(Piece(box, manifest.crc32c(part)))
            writer.add(name, box, part)
        held_bytes += data.nbytes
        if held_bytes >= _HELD_BYTES:
            writer.flush()
            held_bytes = 0
    writer.flush()
    arrays.merge_parts(folder)
    text = manifest.write_pieces(pieces)
    write_file(folder / manifest.part_name(0), text)
    copied = dataclasses.replace(
        source.manifest,
        save_id=new_save_id(
            origin_of(source.manifest.save_id), start_of(source.manifest.save_id)
        ),
        part_sums=[manifest.text_crc32c(text)],
    )
    write_file(folder / manifest.MAIN_FILE, manifest.write_manifest(copied))
    return copied


def _all_pieces(source: SavedStep) -> Iterator[tuple[str, Piece]]:
    for name, pieces in source.pieces.items():
        for piece in pieces:
            yield name, piece


def _chunk(source: SavedStep, name: str, max_bytes: int | None) -> tuple[int, ...]:
    """Return the shape of a leaf's new pieces; the last pieces may be smaller."""
    [first] = {
        shape_of(piece.box)
        for piece in source.pieces[name]
        if all(start == 0 for start, _ in piece.box)
    }
    if max_bytes is None:
        return first
    itemsize = source.dtype(name).itemsize
    return smaller_chunk(first, source.shape(name), itemsize, max_bytes)


def _cut(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """Yield the parts of a box on a grid of pieces; the box begins on the grid."""
    edges = [
        [(at, min(at + size, stop)) for at in range(start, stop, size)]
        or [(start, stop)]
        for (start, stop), size in zip(box, (max(1, c) for c in chunk), strict=True)
    ]
    return itertools.product(*edges)

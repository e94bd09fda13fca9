"""A Megatron-LM indexed dataset (PREFIX.idx, PREFIX.bin) in, its documents out.

PREFIX.bin holds token ids and nothing else. PREFIX.idx says of which type they are,
where each sequence begins, and which sequences form a document. Both are mapped into
memory, never copied; ids are little-endian.

Source: the file format of Megatron-LM, `megatron/core/datasets/indexed_dataset.py`,
version 1. Differs: sequences that carry a mode (multimodal data) are refused, and so
are documents without tokens.
"""

import dataclasses
import pathlib
import struct

import numpy as np
from jaxtyping import Int64, Integer

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, documents + 1
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}


@dataclasses.dataclass(frozen=True)
class IndexedDataset:
    """The documents of one pair of files, mapped into memory."""

    path: pathlib.Path
    """Of the .bin file."""
    tokens: Integer[np.ndarray, "_"]
    """All ids, document after document, of the type of the file."""
    starts: Int64[np.ndarray, "_"]
    """For D documents D + 1 places in tokens: where each begins, and the end."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, document: int) -> Integer[np.ndarray, "_"]:
        """Return the ids of a document; they are mapped, not copied.

        Args:
          document: from 0; an IndexError of numpy ends an iteration.
        """
        assert document >= 0
        return self.tokens[self.starts[document] : self.starts[document + 1]]

    def check_ids(self, vocab_size: int) -> None:
        """Read all ids once, and refuse one that is outside a vocabulary.

        Raises:
          ValueError: an id is negative, or at least vocab_size.
        """
        block = 1 << 24
        for start in range(0, len(self.tokens), block):
            ids = self.tokens[start : start + block]
            # A comparison with a bound beyond the type would not fit it.
            is_bad = ids > min(vocab_size - 1, np.iinfo(ids.dtype).max)
            if ids.dtype.kind == "i":
                is_bad |= ids < 0
            if is_bad.any():
                place = start + int(np.argmax(is_bad))
                document = int(np.searchsorted(self.starts, place, side="right")) - 1
                raise ValueError(
                    f"{self.path} has the token id {self.tokens[place]} in document "
                    f"{document}, but the vocabulary has {vocab_size} tokens; name "
                    "the tokenizer that the file was made with"
                )


def open_indexed(path: pathlib.Path) -> IndexedDataset:
    """Map an indexed dataset into memory and check that both files fit together.

    Args:
      path: PREFIX.bin or PREFIX.idx; the other one lies beside it.
    Raises:
      ValueError: a file cannot be read, is cut off or altered, is not of version 1, has
        no integer type, has sequences with a mode, or has a document without tokens.
    """
    idx, bin_ = path.with_suffix(".idx"), path.with_suffix(".bin")
    content = _mapped(idx)
    dtype, num_sequences, num_bounds = _read_header(idx, content[: _HEADER.size])
    sizes = [4 * num_sequences, 8 * num_sequences, 8 * num_bounds]
    expected = _HEADER.size + sum(sizes)
    if len(content) == expected + num_sequences and num_sequences:
        raise ValueError(
            f"{idx} gives each sequence a mode, as multimodal data have; only text can "
            "be read, prepare the data without modes"
        )
    if len(content) != expected:
        raise ValueError(
            f"{idx} has {len(content)} bytes, but its header counts {num_sequences} "
            f"sequences, which take {expected}; copy it again"
        )
    ends = np.cumsum([_HEADER.size, *sizes])
    lengths = content[ends[0] : ends[1]].view("<i4")
    pointers = content[ends[1] : ends[2]].view("<i8")
    bounds = content[ends[2] : ends[3]].view("<i8")
    places = _sequence_places(idx, lengths, pointers, dtype)
    starts = _document_starts(idx, bounds, places)
    tokens = _mapped(bin_)
    if len(tokens) != places[-1] * dtype.itemsize:
        raise ValueError(
            f"{bin_} has {len(tokens)} bytes, but {idx} counts {places[-1]} tokens of "
            f"{dtype.itemsize} bytes, {places[-1] * dtype.itemsize} bytes; copy both "
            "files again"
        )
    return IndexedDataset(bin_, tokens.view(dtype), starts)


def _mapped(path: pathlib.Path) -> np.ndarray:
    try:
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty; copy it again")
        return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; an indexed dataset is a .bin "
            "and an .idx file of the same name"
        ) from None


def _read_header(idx: pathlib.Path, header: np.ndarray) -> tuple[np.dtype, int, int]:
    """Return the type of ids, the number of sequences, and of documents plus one."""
    raw = header.tobytes()
    if raw[: len(_MAGIC)] != _MAGIC:
        raise ValueError(
            f"{idx} does not begin as an index of Megatron-LM: {_MAGIC!r} expected, "
            f"got {raw[: len(_MAGIC)]!r}"
        )
    if len(raw) < _HEADER.size:
        raise ValueError(f"{idx} is cut off after {len(raw)} bytes; copy it again")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(raw)
    if version != _VERSION:
        swapped = int.from_bytes(version.to_bytes(8, "little"), "big")
        why = " in big-endian order" if swapped == _VERSION else ""
        raise ValueError(
            f"{idx} is an index of version {version}{why}, must be version {_VERSION} "
            "in little-endian order; write it again with Megatron-LM"
        )
    if code not in _DTYPES:
        name = _FLOATS.get(code, f"code {code}")
        raise ValueError(
            f"{idx} holds values of type {name}, must be integers (codes "
            f"{', '.join(map(str, _DTYPES))}); it is no dataset of tokens"
        )
    if num_bounds < 2:
        raise ValueError(f"{idx} has no documents; leave it out")
    return np.dtype(_DTYPES[code]), num_sequences, num_bounds


def _sequence_places(
    idx: pathlib.Path, lengths: np.ndarray, pointers: np.ndarray, dtype: np.dtype
) -> Int64[np.ndarray, "_"]:
    """Return where sequences begin, in tokens, and the end."""
    if (lengths < 0).any():
        sequence = int(np.argmax(lengths < 0))
        raise ValueError(
            f"{idx} gives sequence {sequence} {lengths[sequence]} tokens; copy it again"
        )
    places = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=places[1:])
    is_off = pointers != places[:-1] * dtype.itemsize
    if is_off.any():
        sequence = int(np.argmax(is_off))
        raise ValueError(
            f"{idx} places sequence {sequence} at byte {pointers[sequence]}, but the "
            f"sequences before it end at {places[sequence] * dtype.itemsize}; copy it "
            "again"
        )
    return places


def _document_starts(
    idx: pathlib.Path, bounds: np.ndarray, places: np.ndarray
) -> Int64[np.ndarray, "_"]:
    """Return where documents begin, in tokens, and the end."""
    num_sequences = len(places) - 1
    if bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{idx} must divide its {num_sequences} sequences into documents from 0 to "
            f"{num_sequences} in order, got bounds from {bounds[0]} to {bounds[-1]}; "
            "copy it again"
        )
    starts = places[bounds]
    if (np.diff(starts) == 0).any():
        document = int(np.argmax(np.diff(starts) == 0))
        raise ValueError(
            f"{idx} has no tokens in document {document}; prepare the data without "
            "empty documents"
        )
    return starts

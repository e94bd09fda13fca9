"""Read the documents of a Megatron-LM indexed dataset (PREFIX.idx, PREFIX.bin).

PREFIX.bin holds only token ids, little-endian. PREFIX.idx holds their type, the start
of each sequence, and which sequences form a document. Both are mapped into memory. The
ids are copied into token files like those of tokenized text, with the same checksums,
end tokens and split.

Source: the file format of Megatron-LM, `megatron/core/datasets/indexed_dataset.py`,
version 1. Differs: sequences with a mode (multimodal data), and documents without
tokens, are refused.
"""

import dataclasses
import logging
import pathlib
import struct
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int64, Integer

from mjax.data.names import BYTES, trained_vocab_size
from mjax.data.tokenizers import Tokenizer

TOKENS, INDEX = ".bin", ".idx"
"""Suffixes of the two files."""
PIECE_TOKENS = 1 << 18
"""Tokens per piece; longer documents are passed on in pieces."""
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, documents + 1
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_WRAP = 1 << 32  # old writers summed pointers in 32 bits
_FLOATS = {6: "float64", 7: "float32"}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class IndexedDataset:
    """The documents of one pair of files, mapped into memory."""

    path: pathlib.Path
    """Path of the .bin file."""
    tokens: Integer[np.ndarray, "_"]
    """Token ids of all documents in order, in the file's dtype."""
    starts: Int64[np.ndarray, "_"]
    """[D + 1] for D documents: position of the first token of each document, then the
    end of the last document."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, document: int) -> Integer[np.ndarray, "_"]:
        """Return the token ids of a document; they are mapped, not copied.

        Args:
          document: number of the document, from 0. Beyond the last document numpy
            raises IndexError, which ends an iteration.
        """
        assert document >= 0
        return self.tokens[self.starts[document] : self.starts[document + 1]]


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Consecutive token ids of a document."""

    ids: Int64[np.ndarray, "n"]
    num_bytes: Int64[np.ndarray, "n"]
    """Bytes of text that each token encodes."""

    def __len__(self) -> int:
        return len(self.ids)

    def split_at(self, num_bytes: int) -> tuple["TokenIds", "TokenIds"]:
        """Return the longest prefix that encodes at most num_bytes, and the rest."""
        ends = np.cumsum(self.num_bytes)
        place = int(np.searchsorted(ends, num_bytes, side="right"))
        return (
            TokenIds(self.ids[:place], self.num_bytes[:place]),
            TokenIds(self.ids[place:], self.num_bytes[place:]),
        )


def has_tokens(path: pathlib.Path) -> bool:
    """Return whether a file is an index whose .bin file beside it holds tokens."""
    tokens = path.with_suffix(TOKENS)
    is_index = path.suffix.lower() == INDEX
    return is_index and tokens.is_file() and tokens.stat().st_size > 0


def check_pair(path: pathlib.Path) -> None:
    """Refuse a name of --data.path that is not the .bin file of an indexed dataset.

    Args:
      path: path that ends in .bin or .idx, optionally followed by .gz or .zst.
    Raises:
      ValueError: the path is the index, is compressed, or has no index in its folder.
    """
    suffix = path.suffix.lower()
    if suffix == INDEX and has_tokens(path):
        raise ValueError(
            f"--data.path {str(path)!r} is the index of an indexed dataset; give "
            f"{str(path.with_suffix(TOKENS))!r} alone, or its folder"
        )
    if suffix == INDEX:
        raise ValueError(
            f"--data.path {str(path)!r} is read as the index of an indexed dataset of "
            f"Megatron-LM, but {path.with_suffix(TOKENS).name} beside it is missing or "
            "empty; copy it there, or move the index away"
        )
    if suffix != TOKENS:
        raise ValueError(
            f"--data.path {str(path)!r}: an indexed dataset is not read from {suffix}; "
            "decompress both of its files"
        )
    if not path.with_suffix(INDEX).is_file():
        raise ValueError(
            f"--data.path {str(path)!r} is read as an indexed dataset of Megatron-LM, "
            f"but {path.with_suffix(INDEX).name} beside it is missing; copy it there, "
            "or move the file away"
        )


def check_tokenizer(path: pathlib.Path, name: str) -> None:
    """Refuse a --data.tokenizer that cannot have made the ids of a file.

    Raises:
      ValueError: the tokenizer is bytes (the default), or is to be trained.
    """
    if name == BYTES or trained_vocab_size(name) is not None:
        raise ValueError(
            f"{path} holds token ids, so --data.tokenizer must be the tokenizer.json "
            f"that they were made with, got {name}"
        )


def read_documents(
    path: pathlib.Path,
    tokenizer: Tokenizer,
    first: int,
    on_read: Callable[[int], None],
) -> Iterator[tuple[int, Iterator[TokenIds]]]:
    """Yield (number, pieces) for the documents of an indexed dataset.

    An end token at the end of a document is left out, because the caller adds one to
    every document.

    Args:
      path: path of the .bin file.
      tokenizer: tokenizer that made the ids.
      first: number of the first document to read, from 0.
      on_read: called after each read from the file, with the number of bytes read.
    Raises:
      ValueError: a file is bad, see `open_indexed`, or an id is outside the vocabulary.
    """
    dataset = open_indexed(path)
    for number in range(first, len(dataset)):
        yield number, _pieces(dataset, number, tokenizer, on_read)


def _pieces(
    dataset: IndexedDataset,
    number: int,
    tokenizer: Tokenizer,
    on_read: Callable[[int], None],
) -> Iterator[TokenIds]:
    mapped = dataset[number]
    end = len(mapped) - int(mapped[-1] == tokenizer.eos_id)
    on_read((len(mapped) - end) * mapped.itemsize)
    for start in range(0, end, PIECE_TOKENS):
        ids = mapped[start : min(start + PIECE_TOKENS, end)].astype(np.int64)
        is_bad = (ids < 0) | (ids >= tokenizer.vocab_size)
        if is_bad.any():
            raise ValueError(
                f"{dataset.path} has the token id {ids[np.argmax(is_bad)]} in document "
                f"{number}, but the vocabulary of --data.tokenizer has "
                f"{tokenizer.vocab_size} tokens; name the tokenizer that the file was "
                "made with"
            )
        on_read(len(ids) * mapped.itemsize)
        yield TokenIds(ids, tokenizer.token_num_bytes[ids])


def open_indexed(path: pathlib.Path) -> IndexedDataset:
    """Map an indexed dataset into memory and check that both files fit together.

    Args:
      path: PREFIX.bin or PREFIX.idx; the other file is in the same folder.
    Raises:
      ValueError: a file cannot be read, is truncated or altered, is not of version 1,
        does not hold integers, has sequences with a mode, or has a document without
        tokens.
    """
    idx, bin_ = path.with_suffix(INDEX), path.with_suffix(TOKENS)
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
    """Return the dtype of ids, the sequence count, and the document count plus one."""
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
            f"{', '.join(map(str, _DTYPES))}); it is not a dataset of tokens"
        )
    if num_bounds < 2:
        raise ValueError(f"{idx} has no documents; leave it out")
    return np.dtype(_DTYPES[code]), num_sequences, num_bounds


def _sequence_places(
    idx: pathlib.Path, lengths: np.ndarray, pointers: np.ndarray, dtype: np.dtype
) -> Int64[np.ndarray, "_"]:
    """Return the position of each sequence's first token, and the end of the last."""
    if (lengths < 0).any():
        sequence = int(np.argmax(lengths < 0))
        raise ValueError(
            f"{idx} gives sequence {sequence} {lengths[sequence]} tokens; copy it again"
        )
    places = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=places[1:])
    difference = pointers - places[:-1] * dtype.itemsize
    is_off = difference % _WRAP != 0
    if is_off.any():
        sequence = int(np.argmax(is_off))
        raise ValueError(
            f"{idx} places sequence {sequence} at byte {pointers[sequence]}, but the "
            f"sequences before it end at {places[sequence] * dtype.itemsize}; copy it "
            "again"
        )
    if (wrong := np.flatnonzero(difference)).size:
        # The lengths alone determine the places; the size of the .bin file confirms it.
        _log.warning(
            "%s has the wrong places of %d sequences, from sequence %d on: a writer "
            "with 32-bit pointers wrapped around at 2^32 bytes; they are computed from "
            "the lengths of the sequences instead",
            *(idx, wrong.size, wrong[0]),
        )
    return places


def _document_starts(
    idx: pathlib.Path, bounds: np.ndarray, places: np.ndarray
) -> Int64[np.ndarray, "_"]:
    """Return the position of each document's first token, and the end of the last."""
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

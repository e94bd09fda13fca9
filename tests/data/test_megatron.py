"""Indexed datasets of Megatron-LM are read as written, and damage is refused."""

import struct

import numpy as np
import pytest

from mjax.data.megatron import open_indexed

_CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def _write(folder, documents, dtype="u2", **header):
    """Write documents, each a list of sequences, byte by byte as Megatron-LM does."""
    sequences = [np.array(s, f"<{dtype}") for d in documents for s in d]
    lengths = [len(sequence) for sequence in sequences]
    bounds = np.cumsum([0, *map(len, documents)])
    pointers = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    raw = header.get("magic", b"MMIDIDX\x00\x00")
    raw += struct.pack(
        "<QBQQ",
        header.get("version", 1),
        header.get("code", _CODES[dtype]),
        len(sequences),
        len(bounds),
    )
    raw += np.array(lengths, "<i4").tobytes()
    raw += pointers.astype("<i8").tobytes() + bounds.astype("<i8").tobytes()
    raw += header.get("modes", b"")
    (folder / "corpus.idx").write_bytes(raw)
    (folder / "corpus.bin").write_bytes(b"".join(s.tobytes() for s in sequences))
    return folder / "corpus.bin"


@pytest.mark.parametrize("dtype", _CODES)
def test_documents_are_their_sequences_joined(tmp_path, dtype):
    path = _write(tmp_path, [[[1, 2, 3], [4]], [[5, 6]], [[7], [8, 9]]], dtype)
    found = open_indexed(path)
    documents = [document.tolist() for document in found]
    assert len(found) == 3
    assert documents == [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    assert found.tokens.dtype == np.dtype(dtype)
    assert open_indexed(path.with_suffix(".idx")).starts.tolist() == [0, 4, 6, 9]


def test_ids_are_mapped_and_not_copied(tmp_path):
    found = open_indexed(_write(tmp_path, [[[1, 2]]]))
    assert not found.tokens.flags.owndata
    assert not found[0].flags.writeable


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "does not begin as an index"),
        ({"version": 2}, "version 2, must be version 1"),
        ({"version": 1 << 56}, "in big-endian order"),
        ({"code": 7}, "type float32, must be integers"),
        ({"code": 99}, "type code 99"),
        ({"modes": b"\x00\x01"}, "gives each sequence a mode"),
        ({"modes": b"\x00"}, "its header counts 2 sequences"),
    ],
)
def test_an_index_of_another_kind_is_refused(tmp_path, header, message):
    path = _write(tmp_path, [[[1, 2]], [[3]]], **header)
    with pytest.raises(ValueError, match=message):
        open_indexed(path)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_file_that_is_cut_off_is_refused(tmp_path, suffix, cut):
    path = _write(tmp_path, [[[1, 2]], [[3]]]).with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match="copy"):
        open_indexed(path)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_one_file_without_the_other_is_refused(tmp_path, suffix):
    path = _write(tmp_path, [[[1, 2]]])
    path.with_suffix(suffix).unlink()
    with pytest.raises(ValueError, match=f"corpus{suffix} cannot be read"):
        open_indexed(path)


@pytest.mark.parametrize("documents", [[[[1]], []], [[[1]], [[]], [[2]]]])
def test_a_document_without_tokens_is_refused(tmp_path, documents):
    with pytest.raises(ValueError, match="no tokens in document 1"):
        open_indexed(_write(tmp_path, documents))


def test_sequences_out_of_order_are_refused(tmp_path):
    path = _write(tmp_path, [[[1, 2]], [[3]]])
    raw = bytearray(path.with_suffix(".idx").read_bytes())
    raw[34 + 8 : 34 + 8 + 8] = struct.pack("<q", 2)  # first pointer
    path.with_suffix(".idx").write_bytes(raw)
    with pytest.raises(ValueError, match="places sequence 0 at byte 2"):
        open_indexed(path)


def test_an_id_outside_the_vocabulary_names_its_document(tmp_path):
    found = open_indexed(_write(tmp_path, [[[1, 2]], [[3, 300]]]))
    found.check_ids(301)
    found.check_ids(1 << 20)  # more than the type can hold
    with pytest.raises(ValueError, match="id 300 in document 1, but the vocab"):
        found.check_ids(300)


def test_a_negative_id_is_refused(tmp_path):
    found = open_indexed(_write(tmp_path, [[[1], [-1]]], "i4"))
    with pytest.raises(ValueError, match="id -1 in document 0"):
        found.check_ids(300)

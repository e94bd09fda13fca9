"""Indexed datasets of Megatron-LM are read as written, and damage is refused.

As a corpus they give the token files that the text of their documents gives.
"""

import pathlib
import struct

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mjax.data import byte_level, corpora, megatron, prepare, unfinished
from mjax.data.config import DataConfig
from mjax.data.dataset import Dataset, open_dataset, prepare_files
from mjax.data.megatron import open_indexed, read_documents
from mjax.data.prepare import SIDES
from mjax.data.stream import read
from mjax.data.tokenizers import (
    END_OF_TEXT,
    BytesTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)

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


def test_pointers_that_overflowed_32_bits_are_replaced_by_the_lengths(tmp_path, caplog):
    path = _write(tmp_path, [[[1, 2]], [[3], [4, 5]]], "u2")
    whole = [document.tolist() for document in open_indexed(path)]
    assert not caplog.text
    raw = bytearray(path.with_suffix(".idx").read_bytes())
    raw[34 + 12 + 8 : 34 + 12 + 16] = struct.pack("<q", 4 - 2**32)  # second pointer
    path.with_suffix(".idx").write_bytes(raw)
    assert [document.tolist() for document in open_indexed(path)] == whole
    assert "wrong places of 1 sequences, from sequence 1 on" in caplog.text


def test_an_id_outside_the_vocabulary_names_its_document(tmp_path):
    path = _write(tmp_path, [[[1, 256]], [[3, 257]]])
    with pytest.raises(ValueError, match="id 257 in document 1, but the vocab"):
        _read(path)
    assert _read(path, last=1) == [[1]], "without the end"


def test_a_negative_id_is_refused(tmp_path):
    with pytest.raises(ValueError, match="id -1 in document 0"):
        _read(_write(tmp_path, [[[1], [-1]]], "i4"))


def _read(path, last=None) -> list[list[int]]:
    documents = read_documents(path, BytesTokenizer(), 0, lambda num_bytes: None)
    return [
        [i for piece in pieces for i in piece.ids.tolist()]
        for number, pieces in documents
        if last is None or number < last
    ]


@pytest.fixture
def texts() -> list[str]:
    """Return 40 documents with characters of one, two and three bytes."""
    rng = np.random.default_rng(0)
    return [
        " ".join(f"wörd{n} \u2013" for n in rng.integers(50, size=3 + i))
        for i in range(40)
    ]


@pytest.fixture
def tokenizer_path(tmp_path, texts) -> pathlib.Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(texts, 300))
    return path


def _config(tmp_path, tokenizer, *paths, **changes) -> DataConfig:
    return DataConfig(
        path=tuple(str(path) for path in paths),
        tokenizer=str(tokenizer),
        cache_dir=str(tmp_path / "cache"),
        **{"seq_len": 16, "held_out_fraction": 0.2} | changes,
    )


def _tokenized(texts: list[str], tokenizer: Tokenizer, ends=(True,)) -> list:
    """Return each text as one sequence of ids, some with the token that ends it."""
    encoded = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    return [
        [ids + [tokenizer.eos_id] * ends[i % len(ends)]]
        for i, ids in enumerate(encoded)
    ]


def _token_files(dataset: Dataset, side: str) -> np.ndarray:
    (samples,) = getattr(dataset, side).corpora
    return samples.stream[:]


def _assert_equal(found: Dataset, expected: Dataset, size: int = 4) -> None:
    (corpus,), (other,) = found.corpora, expected.corpora
    assert corpus.counts == other.counts
    assert (corpus.split, corpus.num_bytes) == (other.split, other.num_bytes)
    assert found.num_documents == expected.num_documents
    assert found.unigram_bits_per_byte == expected.unigram_bits_per_byte
    for step in range(3):
        ids = found.train.ids(step, size)
        batch = read(found.train.corpora, ids)
        assert (ids == expected.train.ids(step, size)).all()
        for name, rows in read(expected.train.corpora, ids).items():
            assert (batch[name] == rows).all()


@pytest.mark.parametrize("ends", [(True,), (False,), (True, False)])
@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_corpus_of_ids_is_that_of_its_text(
    tmp_path, texts, tokenizer_path, monkeypatch, packing, ends
):
    """The token that ends a document is there once, whether the file has it or not."""
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "corpus.parquet")
    tokenizer = load_tokenizer(str(tokenizer_path))
    path = _write(tmp_path, _tokenized(texts, tokenizer, ends))
    # Names decide the side, and those of both files differ.
    monkeypatch.setattr(prepare, "is_held_out", lambda name, _: name.endswith("3"))
    monkeypatch.setattr(megatron, "PIECE_TOKENS", 7)
    changes = {"packing": packing}
    found, expected = (
        open_dataset(_config(tmp_path, tokenizer_path, file, **changes), seed=1)
        for file in (path, tmp_path / "corpus.parquet")
    )
    _assert_equal(found, expected)
    assert found.corpora[0].counts["held_out"].num_documents == 4
    if packing == "windows":
        for side in SIDES:
            assert (_token_files(found, side) == _token_files(expected, side)).all()


def test_one_document_is_split_by_position_as_its_text_is(tmp_path, monkeypatch):
    text = "some words of one document, " * 40
    (tmp_path / "one.txt").write_text(text)
    tokenizer_path = tmp_path / "tokenizer.json"
    tokenizer_path.write_text(byte_level.spec_json(END_OF_TEXT))
    tokenizer = load_tokenizer(str(tokenizer_path))
    path = _write(tmp_path, _tokenized([text], tokenizer), "i4")
    monkeypatch.setattr(megatron, "PIECE_TOKENS", 100)
    found, expected = (
        open_dataset(_config(tmp_path, tokenizer_path, file), seed=1)
        for file in (path, tmp_path / "one.txt")
    )
    assert found.corpora[0].split == "position"
    _assert_equal(found, expected)
    for side in SIDES:
        assert (_token_files(found, side) == _token_files(expected, side)).all()


def test_a_stopped_copy_goes_on_where_it_ended(
    tmp_path, texts, tokenizer_path, monkeypatch
):
    tokenizer = load_tokenizer(str(tokenizer_path))
    path = _write(tmp_path, _tokenized(texts, tokenizer))
    config = _config(tmp_path, tokenizer_path, path)
    (whole,) = prepare_files(config)
    expected = [(whole.folder / f"{side}.tokens").read_bytes() for side in SIDES]
    whole.folder.rename(tmp_path / "aside")
    left, firsts = 3, []

    def advance(self, place, meter):
        nonlocal left
        original(self, place, meter)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    def noted(path, tokenizer, first, on_read):
        firsts.append(first)
        return read_documents(path, tokenizer, first, on_read)

    original = prepare._Streams.advance
    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "SAVE_S", 0)
        patch.setattr(prepare, "_BATCH_CHARS", 200)
        patch.setattr(prepare._Streams, "advance", advance)
        with pytest.raises(KeyboardInterrupt):
            prepare_files(config)
    monkeypatch.setattr(megatron, "read_documents", noted)
    (files,) = prepare_files(config)
    assert [(files.folder / f"{s}.tokens").read_bytes() for s in SIDES] == expected
    assert len(firsts) == 1
    assert firsts[0] > 5


def test_another_index_of_the_same_ids_is_another_corpus(tmp_path, tokenizer_path):
    """The .bin file is the same, its division into documents is not."""
    ids = [list(range(i, i + 20)) for i in range(60)]
    config = _config(tmp_path, tokenizer_path, tmp_path / "corpus.bin")
    _write(tmp_path, [[d] for d in ids])
    (first,) = prepare_files(config)
    _write(tmp_path, [[a, b] for a, b in zip(ids[::2], ids[1::2], strict=True)])
    (second,) = prepare_files(config)
    assert first.survey.num_documents == 60
    assert second.survey.num_documents == 30


def test_a_folder_gives_each_pair_once(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    _write(folder, [[[1, 2]]])
    (folder / "a.txt").write_text("text")
    found = corpora.find_sources((str(folder),))
    assert [(s.name, s.kind) for s in found] == [
        ("a.txt", "text"),
        ("corpus.bin", "megatron"),
    ]


@pytest.mark.parametrize(
    ("given", "missing", "message"),
    [
        (["corpus.bin", "corpus.idx"], None, "give '.*corpus.bin' alone, or its fold"),
        (["corpus.bin"], "corpus.idx", "corpus.idx beside it is missing"),
        (["corpus.idx"], "corpus.bin", "corpus.bin beside it is missing or empty"),
        ([""], "corpus.bin", "corpus.bin beside it is missing or empty"),
        ([""], "corpus.idx", "corpus.idx beside it is missing"),
        (["corpus.bin.gz"], None, "not read from .gz; decompress"),
    ],
)
def test_half_a_pair_and_both_of_its_files_are_refused(
    tmp_path, given, missing, message
):
    folder = tmp_path / "corpus"
    folder.mkdir()
    path = _write(folder, [[[1, 2]]])
    if given == ["corpus.bin.gz"]:
        path.rename(folder / "corpus.bin.gz")
    if missing:
        (folder / missing).unlink()
    with pytest.raises(ValueError, match=message):
        corpora.find_sources(tuple(str(folder / name) for name in given))


@pytest.mark.parametrize("name", ["bytes", "train:300"])
def test_the_tokenizer_of_the_ids_must_be_named(tmp_path, name):
    path = _write(tmp_path, [[[1, 2]]])
    with pytest.raises(ValueError, match=f"must be the tokenizer.json .* got {name}"):
        prepare_files(_config(tmp_path, name, path))


def test_ids_outside_the_vocabulary_are_refused_before_anything_is_written(
    tmp_path, tokenizer_path
):
    path = _write(tmp_path, [[[1, 2]], [[300]]])
    with pytest.raises(ValueError, match="id 300 in document 1, but the vocabulary"):
        prepare_files(_config(tmp_path, tokenizer_path, path))
    assert not list((tmp_path / "cache").glob("*/*.tokens"))


def test_ids_are_no_chats(tmp_path, tokenizer_path):
    path = _write(tmp_path, [[[1, 2]]])
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    chats = {"format": "chat", "chat_template": str(template)}
    with pytest.raises(ValueError, match=r"corpus.bin .* chat reads records"):
        prepare_files(_config(tmp_path, tokenizer_path, path, **chats))


def test_other_readers_of_text_refuse_ids(tmp_path):
    path = _write(tmp_path, [[[1, 2]]])
    with pytest.raises(ValueError, match="dataset of token ids, which only training"):
        corpora.check_text(corpora.find_sources((str(path),)))

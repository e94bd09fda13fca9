import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

from mjax.config.train import TrainConfig
from mjax.data import prepare
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset, prepare_files
from mjax.data.prepare import is_held_out
from mjax.data.samples import PackedSamples, Samples
from mjax.data.stream import HeldOut, Stream


def config(tmp_path: pathlib.Path, *paths: pathlib.Path | str, **changes) -> DataConfig:
    changes = {"seq_len": 16, "held_out_fraction": 0.2} | changes
    path = tuple(str(path) for path in paths)
    return DataConfig(path=path, cache_dir=str(tmp_path / "cache"), **changes)


def stream(side: Stream | Samples) -> np.ndarray:
    assert isinstance(side, Stream | HeldOut)
    (samples,) = side.corpora
    assert isinstance(samples, PackedSamples)
    return samples.stream[:]


def text_of(dataset, samples) -> str:
    return dataset.tokenizer.decode(np.asarray(stream(samples)))


def held_out_counts(dataset):
    (corpus,) = dataset.corpora
    return corpus.counts["held_out"]


def test_the_two_sides_are_whole_documents_chosen_by_name(corpus, tmp_path):
    dataset = open_dataset(config(tmp_path, corpus), seed=0)
    expected = {True: "", False: ""}
    for file in sorted(corpus.iterdir()):
        expected[is_held_out(file.name, 0.2)] += file.read_text() + "<|endoftext|>"
    assert text_of(dataset, dataset.held_out) == expected[True]
    assert text_of(dataset, dataset.train) == expected[False]
    assert dataset.corpora[0].split == "document"
    assert dataset.num_documents == 60
    assert held_out_counts(dataset).num_documents == expected[True].count("<|")


def test_a_document_stays_on_its_side_when_others_come(corpus, tmp_path):
    before = open_dataset(config(tmp_path, corpus), seed=0)
    (corpus / "zz.txt").write_text("one more document")
    after = open_dataset(config(tmp_path, corpus), seed=0)
    for side in ("train", "held_out"):
        text = text_of(before, getattr(before, side))
        assert text_of(after, getattr(after, side)).startswith(text)
    assert before.corpus_hash != after.corpus_hash


def test_about_the_asked_share_of_names_is_held_out():
    names = [f"folder/file{i}.py" for i in range(20_000)]
    share = sum(is_held_out(name, 0.05) for name in names) / len(names)
    # Standard deviation sqrt(0.05 * 0.95 / 20000) = 0.0015.
    assert share == pytest.approx(0.05, abs=0.006)


@pytest.mark.parametrize("tokenizer", ["bytes", "train:290"])
def test_a_single_document_is_split_by_position(tmp_path, tokenizer):
    text = "".join(f"line {i}: é is two bytes\n" for i in range(200))
    (tmp_path / "one.txt").write_text(text)
    one = config(tmp_path, tmp_path / "one.txt", tokenizer=tokenizer)
    dataset = open_dataset(one, seed=0)
    train, held_out = (text_of(dataset, s) for s in (dataset.train, dataset.held_out))
    assert dataset.corpora[0].split == "position"
    assert train + held_out == text + "<|endoftext|>"
    size = len(text.encode())
    assert held_out_counts(dataset).num_bytes == pytest.approx(0.2 * size, abs=4)
    assert dataset.num_bytes == size


def test_few_documents_are_split_by_position_across_a_border(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    assert not any(is_held_out(f"{name}.txt", 0.01) for name in "abc")
    dataset = open_dataset(
        config(
            tmp_path, *sorted(tmp_path.glob("*.txt")), held_out_fraction=0.01, seq_len=2
        ),
        seed=0,
    )
    assert text_of(dataset, dataset.held_out) == "ccc<|endoftext|>"


@pytest.mark.parametrize("tokenizer", ["bytes", "train:290"])
def test_counts_of_the_held_out_text_are_exact(corpus, tmp_path, tokenizer):
    dataset = open_dataset(config(tmp_path, corpus, tokenizer=tokenizer), seed=0)
    names = [f.name for f in corpus.iterdir() if is_held_out(f.name, 0.2)]
    held_out = b"".join((corpus / name).read_bytes() for name in names)
    shares = [held_out.count(byte) / len(held_out) for byte in set(held_out)]
    entropy = -sum(share * math.log2(share) for share in shares)
    assert held_out_counts(dataset).num_bytes == len(held_out)
    assert dataset.unigram_bits_per_byte == pytest.approx(entropy, rel=1e-12)
    ids = stream(dataset.held_out)
    assert dataset.tokenizer.token_num_bytes[ids].sum() == len(held_out)
    num_train = dataset.num_bytes - len(held_out)
    assert dataset.bytes_per_token == num_train / len(stream(dataset.train))
    ids = [*stream(dataset.train), *stream(dataset.held_out)]
    assert dataset.max_token_id == max(ids)


def test_target_bytes_skip_what_has_no_target_and_special_tokens(dataset):
    targets = np.array([[65, dataset.tokenizer.eos_id, -1], [66, 67, -1]])
    assert dataset.count_target_bytes(targets) == 3


def test_long_documents_give_the_same_bytes_in_pieces(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text("é line\n" * 300)
    whole = open_dataset(config(tmp_path, tmp_path / "one.txt"), seed=0)
    monkeypatch.setattr("mjax.data.formats.PIECE_CHARS", 11)
    monkeypatch.setattr(prepare, "_BATCH_CHARS", 50)
    other = tmp_path / "other"
    pieces = open_dataset(config(other, tmp_path / "one.txt"), seed=0)
    assert (stream(pieces.train) == stream(whole.train)).all()
    assert (stream(pieces.held_out) == stream(whole.held_out)).all()
    assert pieces.fingerprint == whole.fingerprint


def test_the_fingerprint_names_the_data_not_the_place(corpus, tmp_path):
    base = config(tmp_path, corpus)
    moved = corpus.rename(tmp_path / "moved")
    there = open_dataset(dataclasses.replace(base, path=(str(moved),)), seed=1)
    moved.rename(corpus)
    here = open_dataset(base, seed=0)
    assert here.fingerprint == there.fingerprint
    for change in (
        {"seq_len": 8},
        {"held_out_fraction": 0.3},
        {"isolate_documents": False},
        {"tokenizer": "train:290"},
        {"packing": "documents"},
        {"one_batch": True},
    ):
        changed = open_dataset(dataclasses.replace(base, **change), seed=0)
        assert changed.fingerprint != here.fingerprint
    (corpus / "00.txt").write_text("changed")
    assert open_dataset(base, seed=0).fingerprint != here.fingerprint


def test_ids_above_16_bits_are_kept(corpus, tmp_path):
    learned = config(tmp_path, corpus, tokenizer="train:290")
    open_dataset(learned, seed=0)
    (trained,) = (tmp_path / "cache").glob("*/tokenizer.json")
    spec = json.loads(trained.read_text())
    vocab = spec["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 70_000
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    dataset = open_dataset(config(tmp_path, corpus, tokenizer=str(path)), seed=0)
    assert dataset.tokenizer.vocab_size == 70_001
    assert dataset.max_token_id == 70_000 == stream(dataset.train).max()
    trained_ids = stream(open_dataset(learned, seed=0).train)
    ids = stream(dataset.train)
    assert (np.where(ids == 70_000, 289, ids) == trained_ids).all()


def test_a_vocabulary_below_the_largest_token_is_refused(dataset):
    dataset.check_vocab_size(257)
    with pytest.raises(
        ValueError, match=r"must be at least 257 for the token ids.*-size 257"
    ):
        dataset.check_vocab_size(256)


def test_a_corpus_shorter_than_one_sequence_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("x" * 100)
    for seq_len, side in ((200, "train"), (50, "held-out")):
        short = config(tmp_path, tmp_path / "one.txt", seq_len=seq_len)
        for version, needs in ((1, rf"seq-len \+ 1 = {seq_len + 1}"), (2, seq_len)):
            one = dataclasses.replace(short, version=version)
            message = rf"\(100 bytes\) has \d+ {side} tokens, .*{needs};"
            with pytest.raises(ValueError, match=message):
                open_dataset(one, seed=0)


def test_documents_without_text_leave_no_trace_and_only_those_are_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="the corpus holds no text"):
        open_dataset(config(tmp_path, file), seed=0)
    file.write_text('{"text": ""}\n' + '{"text": "some text"}\n' * 40)
    dataset = open_dataset(config(tmp_path, file, seq_len=4), seed=0)
    assert dataset.num_documents == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ()}, r"--data\.path must name .*, got nothing"),
        ({"path": ("",)}, r"--data\.path must name .*, got ''"),
        ({"seq_len": 0}, "--data.seq-len must be at least 1, got 0"),
        ({"held_out_fraction": 0.0}, "must be above 0 and below 1, got 0.0"),
        ({"held_out_fraction": 1.0}, "must be above 0 and below 1, got 1.0"),
        ({"tokenizer": "train:9"}, "must be train:N with N from 257 .*, got train:9;"),
        ({"mixture": ("a",)}, "--data.mixture must be weight=path .*, got 'a'"),
        ({"mixture": ("1=a,",)}, "must be weight=path .*, got '1=a,'"),
        ({"mixture": ("1=a", "1/3=b")}, "must be a positive .*, got '1/3' in '1/3=b'"),
        ({"mixture": ("-1=a",)}, "must be a positive decimal .*, got '-1'"),
        ({"mixture": ("inf=a",)}, "must be a positive decimal .*, got 'inf'"),
        ({"mixture": ("1e-400=a",)}, "must be a positive .*, got '1e-400'"),
        ({"mixture": ("0.1234567890123456789=a",)}, "of at most 15 digits"),
        ({"mixture": ("1=a", "2=a")}, "names a more than once; give it once"),
        ({"mixture": ("1=a", "123457=b")}, "which repeat after 123458 in the ratio"),
        (
            {"mixture": ("1=a",), "path": ("b",)},
            "--data.path b and --data.mixture 1=a both set the data",
        ),
    ],
)
def test_a_bad_configuration_is_refused_where_it_is_made(change, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mixture": ("1=a", "2=b,c")},
            "--data.path a b c, and give the tokenizer.json that it prints",
        ),
        (
            {"format": "chat", "path": ("a",)},
            "--data.format chat needs an existing tokenizer, got --data.tokenizer",
        ),
    ],
)
def test_a_tokenizer_is_not_trained_for_data_that_need_an_existing_one(change, message):
    """With --init-from a run takes that of the model instead."""
    data = DataConfig(tokenizer="train:290", **change)
    for refuse in (
        lambda: TrainConfig(data=data),
        lambda: open_dataset(data, seed=0),
        lambda: prepare_files(data),
    ):
        with pytest.raises(ValueError, match=message):
            refuse()
    assert TrainConfig(data=data, init_from="x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "train:290"}, "--data.tokenizer must be bytes, got train:290"),
        ({"packing": "documents"}, "--data.packing must be windows, got documents"),
    ],
)
def test_synthetic_data_are_windows_of_bytes(change, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(DataConfig(path=("synthetic",), **change), seed=0)


def test_a_tokenizer_that_loses_text_is_refused(corpus, tmp_path):
    open_dataset(config(tmp_path, corpus, tokenizer="train:290"), seed=0)
    (trained,) = (tmp_path / "cache").glob("*/tokenizer.json")
    spec = json.loads(trained.read_text())
    spec["normalizer"] = {
        "type": "Replace", "pattern": {"String": "e"}, "content": ""
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    with pytest.raises(ValueError, match="text would be lost"):
        open_dataset(config(tmp_path, corpus, tokenizer=str(path)), seed=0)


@pytest.fixture
def second(tmp_path) -> pathlib.Path:
    """Another folder of documents, in capitals."""
    folder = tmp_path / "second"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index}.txt").write_text("MORE TEXT IN CAPITALS " * (index + 1))
    return folder


def mixed(tmp_path, *parts: str, **changes) -> DataConfig:
    return config(tmp_path, pathlib.Path("stdlib"), mixture=parts, **changes)


def test_a_mixture_reads_each_corpus_in_its_share(corpus, second, tmp_path):
    dataset = open_dataset(mixed(tmp_path, f"0.7={corpus}", f"0.3={second}"), seed=5)
    capitals = np.isin(dataset.train.rows(3, 100)["tokens"], list(b"CAPITLS")).any(1)
    assert capitals.sum() == 30
    assert dataset.train.ids(3, 100)[:, 0].tolist() == capitals.tolist()
    capitals = np.isin(dataset.held_out.rows(np.arange(30))["tokens"], list(b"CAPITLS"))
    assert capitals.any(1).sum() == 9
    alone = [open_dataset(config(tmp_path, c), seed=5) for c in (corpus, second)]
    for index, dataset_alone in enumerate(alone):
        assert dataset.corpora[index] == dataset_alone.corpora[0]
        assert len(dataset.train.corpora[index]) == dataset_alone.train.num_samples
    for name in ("num_documents", "num_bytes"):
        assert getattr(dataset, name) == sum(getattr(one, name) for one in alone)


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_figures_of_a_mixture_are_those_of_what_is_read(
    corpus, second, tmp_path, packing
):
    """Counted over a whole period in which every sample is read equally often."""
    parts = (f"2={corpus}", f"1={second}")
    dataset = open_dataset(mixed(tmp_path, *parts, packing=packing), seed=0)
    sizes = [len(samples) for samples in dataset.held_out.corpora]
    counts = [c.counts["held_out"] for c in dataset.corpora]
    times = [2 * sizes[1], sizes[0]]  # 2 : 1 samples, each corpus whole times
    read = np.dot(times, [c.byte_counts for c in counts])
    shares = read[read > 0] / read.sum()
    entropy = -(shares * np.log2(shares)).sum()
    assert dataset.unigram_bits_per_byte == pytest.approx(entropy, rel=1e-12)
    times = [2 / len(dataset.train.corpora[0]), 1 / len(dataset.train.corpora[1])]
    train = [c.counts["train"] for c in dataset.corpora]
    num_bytes, num_tokens = (
        sum(t * getattr(c, name) for t, c in zip(times, train, strict=True))
        for name in ("num_bytes", "num_tokens")
    )
    assert dataset.bytes_per_token == pytest.approx(num_bytes / num_tokens, rel=1e-12)


def test_the_fingerprint_covers_the_mixture(corpus, second, tmp_path):
    def fingerprint(*parts: str, seed: int = 0) -> str:
        return open_dataset(mixed(tmp_path, *parts), seed=seed).fingerprint

    base = fingerprint(f"0.7={corpus}", f"0.3={second}")
    assert fingerprint(f"7={corpus}", f"3={second}", seed=1) == base
    others = [
        fingerprint(f"0.6={corpus}", f"0.4={second}"),
        fingerprint(f"0.3={second}", f"0.7={corpus}"),
        fingerprint(f"1={corpus},{second}"),
        fingerprint(f"1={corpus}"),
    ]
    (second / "0.txt").write_text("changed")
    others.append(fingerprint(f"0.7={corpus}", f"0.3={second}"))
    assert len({base, *others}) == 6
    # A mixture of one corpus reads what that corpus alone reads.
    alone = open_dataset(config(tmp_path, corpus), seed=0)
    assert alone.fingerprint == fingerprint(f"1={corpus}")


def test_unpacked_samples_are_the_documents_and_padding(corpus, tmp_path):
    one = config(tmp_path, corpus, packing="documents", seq_len=1000)
    dataset = open_dataset(one, seed=0)
    (samples,) = dataset.train.corpora
    kept = [f for f in sorted(corpus.iterdir()) if not is_held_out(f.name, 0.2)]
    assert len(samples) == len(kept)
    for index, file in enumerate(kept):
        sample, size = samples[index], file.stat().st_size
        tokens = sample["tokens"][sample["segments"] == 0]
        assert dataset.tokenizer.decode(tokens) == "<|endoftext|>" + file.read_text()
        assert sample["targets"][size] == dataset.tokenizer.eos_id
        assert (sample["targets"][size + 1 :] == -1).all()


def test_text_without_a_target_in_any_document_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("ab")
    one = config(
        tmp_path, tmp_path / "one.txt", packing="documents", held_out_fraction=0.5
    )
    assert len(open_dataset(one, seed=0).held_out) == 1  # the first token is a target
    with pytest.raises(ValueError, match="has 1 train tokens, no two of them in one"):
        open_dataset(dataclasses.replace(one, version=1), seed=0)
    empty = dataclasses.replace(one, held_out_fraction=0.99)
    with pytest.raises(ValueError, match="has 0 train tokens, too few; give more text"):
        open_dataset(empty, seed=0)


def test_the_standard_library_makes_a_corpus(tmp_path):
    dataset = open_dataset(DataConfig(cache_dir=str(tmp_path)), seed=0)
    assert dataset.num_documents > 400
    assert 0.02 < held_out_counts(dataset).num_bytes / dataset.num_bytes < 0.1
    assert 4 < dataset.unigram_bits_per_byte < 6


def shared(tmp_path: pathlib.Path, num_documents: int) -> dict[str, str]:
    """Return paths that lead to the same documents, each a line that is unique."""
    folder = tmp_path / "shared"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "copies").mkdir()
    (tmp_path / "hard").mkdir()
    for index in range(num_documents):
        file = folder / "sub" / f"{index:03}.txt"
        file.write_text(f"document {index:03} {'.' * (100 + index)}\n")
        (tmp_path / "copies" / f"copy of {file.name}").write_bytes(file.read_bytes())
        (tmp_path / "hard" / f"link to {file.name}").hardlink_to(file)
    (tmp_path / "symbolic").symlink_to(folder / "sub")
    lines = "".join(
        json.dumps({"text": f"line {i:03} {'.' * 100}\n"}) + "\n"
        for i in range(num_documents)
    )
    for name in ("lines", "other"):
        (tmp_path / f"{name}.jsonl").write_text(lines)
    found = {path.stem: f"{path}" for path in tmp_path.iterdir()}
    return found | {"sub": f"{folder}/sub", "slash": f"{folder}/sub/"}


def lines_of(tokenizer, side: Stream | HeldOut) -> list[str]:
    streams = []
    for samples in side.corpora:
        assert isinstance(samples, PackedSamples)
        streams.append(samples.stream[:])
    text = tokenizer.decode(np.concatenate(streams))
    return [line for line in text.replace("<|endoftext|>", "").split("\n") if line]


OVERLAPS = [
    ["shared sub"],
    ["sub shared"],
    ["sub slash shared symbolic hard copies"],
    ["lines other"],
    ["shared", "sub"],
    ["sub", "shared"],
    ["copies", "sub lines", "hard symbolic"],
    ["lines shared", "other"],
    ["sub", "slash"],
]


@pytest.mark.parametrize("corpora", OVERLAPS, ids=" | ".join)
def test_no_document_is_both_held_out_and_trained_on(tmp_path, corpora):
    found = shared(tmp_path, 60)
    paths = [[found[name] for name in names.split()] for names in corpora]
    both = config(tmp_path, *paths[0], seq_len=4)
    if len(paths) > 1:
        parts = (f"1={','.join(names)}" for names in paths)
        both = dataclasses.replace(mixed(tmp_path, *parts), seq_len=4)
    dataset = open_dataset(both, seed=0)
    assert {corpus.split for corpus in dataset.corpora} == {"document"}
    held_out = lines_of(dataset.tokenizer, dataset.held_out)
    trained_on = lines_of(dataset.tokenizer, dataset.train)
    assert not set(held_out) & set(trained_on)
    # Every path to a document is still read.
    num_read = sum(1 for names in corpora for name in names.split()) * 60
    assert len(held_out) + len(trained_on) == num_read
    assert held_out


@pytest.mark.parametrize("names", [n for n in OVERLAPS if len(n) == 1], ids=" | ".join)
@pytest.mark.parametrize("fraction", [0.02, 0.05])
def test_copies_are_split_by_position_where_the_original_is(tmp_path, names, fraction):
    found = shared(tmp_path, 3)
    paths = [found[name] for name in names[0].split()]
    small = config(tmp_path, *paths, seq_len=1, held_out_fraction=fraction)
    dataset = open_dataset(small, seed=0)
    assert dataset.corpora[0].split == "position"
    held_out = text_of(dataset, dataset.held_out)
    trained_on = text_of(dataset, dataset.train)
    num_copies = len(paths)
    distinct = config(tmp_path, paths[0], seq_len=1, held_out_fraction=fraction)
    alone = open_dataset(distinct, seed=0)
    assert held_out == text_of(alone, alone.held_out) * num_copies
    assert trained_on == text_of(alone, alone.train) * num_copies


def test_a_file_shared_with_a_corpus_split_by_position_is_refused(tmp_path, corpus):
    one = corpus / "07.txt"
    for parts in ((f"1={corpus}", f"1={one}"), (f"1={one}", f"1={corpus}")):
        with pytest.raises(
            ValueError, match=r"07\.txt of --data\.mixture has too few doc"
        ):
            open_dataset(mixed(tmp_path, *parts), seed=0)


def test_the_same_bytes_as_text_and_as_lines_are_refused(tmp_path):
    found = shared(tmp_path, 20)
    text = tmp_path / "lines.txt"
    text.write_bytes(pathlib.Path(found["lines"]).read_bytes())
    both = config(tmp_path, found["lines"], text)
    with pytest.raises(ValueError, match="one is read as jsonl and one as text"):
        open_dataset(both, seed=0)


def test_copies_on_one_side_leave_the_data_as_they_were(corpus, tmp_path):
    # The hashes are those that version 0.1 gave these corpora.
    kept = [f for f in sorted(corpus.iterdir()) if not is_held_out(f.name, 0.2)]
    once = open_dataset(config(tmp_path, corpus, version=1), seed=0)
    assert once.fingerprint[:12] == "7e62871a9702"
    assert open_dataset(config(tmp_path, corpus), seed=0).fingerprint[:6] != "7e6287"
    twice = open_dataset(config(tmp_path, corpus, kept[0], version=1), seed=0)
    assert twice.fingerprint[:12] == "44076fb72126"
    # A copy on the other side is moved, and other data have another fingerprint.
    moved = next(n for n in map("m{}.txt".format, range(99)) if is_held_out(n, 0.2))
    (corpus / moved).write_bytes(kept[0].read_bytes())
    third = open_dataset(config(tmp_path, corpus, version=1), seed=0)
    assert third.fingerprint[:12] != "c8d20f3621c0"

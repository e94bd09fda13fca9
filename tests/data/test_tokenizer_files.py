"""A tokenizer as files is the tokenizer, for us and for the `tokenizers` library."""

import builtins
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from mjax.data import byte_level
from mjax.data.config import DataConfig
from mjax.data.names import BYTES
from mjax.data.tokenizer_files import TokenizerFiles, files_of, read_files, with_start
from mjax.data.tokenizers import (
    END_OF_TEXT,
    BytesTokenizer,
    load_tokenizer,
    start_of,
    train_bpe,
)

BPE_JSON = train_bpe(["the then them thesis, the quick brown fox\n" * 3], 262)
OURS = BytesTokenizer()
THEIRS = library.Tokenizer.from_str(byte_level.spec_json(END_OF_TEXT))


def save(files: TokenizerFiles, folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.contents.items():
        (folder / name).write_bytes(content)
    return folder


@given(text=st.text())
def test_the_library_reads_bytes_from_the_file(text: str):
    assert THEIRS.encode(text).ids == OURS.encode(text).tolist()


@given(ids=st.lists(st.integers(0, 256)))
def test_the_library_decodes_any_ids_as_we_do(ids: list[int]):
    """Half a character, and the end of a document in the middle of one, too."""
    ours = OURS.decode(np.array(ids, np.int64))
    assert THEIRS.decode(ids, skip_special_tokens=False) == ours


def test_the_text_by_which_runs_are_known_does_not_change():
    text = byte_level.spec_json(END_OF_TEXT)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == (
        "e0e7db210473d052fe7236e96fce639f71c0b23352c49538280fc59c3a6077cc"
    )
    begun = byte_level.spec_json(END_OF_TEXT, has_start=True)
    digest = hashlib.sha256(begun.encode()).hexdigest()
    assert digest == (
        "36e988f14a9200f5e55d95a08657ee8014124ae9403404b8af7a79cf3773eaf4"
    )


def test_the_files_of_bytes_are_bytes_again_without_the_library(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("tokenizers"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    files = read_files(BYTES)
    folder = save(files, tmp_path / "tokenizer")
    assert isinstance(load_tokenizer(str(folder)), BytesTokenizer)
    assert read_files(str(folder)) == files
    assert (files.vocab_size, files.eos_id, files.digest) == (257, 256, OURS.digest)


BOS = library.processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", 262), ("</s>", 263)]
)
AFTER = library.processors.TemplateProcessing(
    single="$A </s>", special_tokens=[("</s>", 263)]
)
BYTE_LEVEL = library.processors.ByteLevel(trim_offsets=False)


def with_processor(folder: Path, processor) -> str:
    """Save a BPE with a post-processor; <|endoftext|> ends a document."""
    spec = library.Tokenizer.from_str(BPE_JSON)
    spec.add_special_tokens(["<s>", "</s>"])
    if processor is not None:
        spec.post_processor = processor
    folder.mkdir()
    (folder / "tokenizer.json").write_text(spec.to_str(), "utf-8")
    config = {"eos_token": END_OF_TEXT, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("processor", "own", "exported"),
    [
        (None, (), (0,)),
        (BYTE_LEVEL, (), (0,)),
        (AFTER, (), (0,)),
        (BOS, (262,), (262,)),
        (library.processors.Sequence([BYTE_LEVEL, BOS]), (262,), (262,)),
        (
            library.processors.RobertaProcessing(("</s>", 263), ("<s>", 262)),
            *2 * [(262,)],
        ),
    ],
    ids=["none", "byte level", "after", "bos", "sequence", "roberta"],
)
def test_an_exported_tokenizer_begins_a_text_as_training_begins_a_document(
    processor, own, exported, tmp_path
):
    name = with_processor(tmp_path / "run", processor)
    tokenizer = load_tokenizer(name)
    assert tokenizer.start_ids == own
    assert (start_of(DataConfig(), tokenizer),) == exported
    files = with_start(read_files(name))
    folder = save(files, tmp_path / "exported")
    again = load_tokenizer(str(folder))
    assert again.start_ids == exported
    assert again.encode("them fox").tolist() == tokenizer.encode("them fox").tolist()
    whole = library.Tokenizer.from_file(f"{folder}/tokenizer.json").encode("them").ids
    assert whole[: len(own) or 1] == [*exported]
    assert with_start(files) == files
    bos = json.loads(files.contents["tokenizer_config.json"])["bos_token"]
    assert bos == (None if own else END_OF_TEXT)


def test_an_exported_tokenizer_of_bytes_is_bytes_with_a_start_token(tmp_path):
    files = with_start(read_files(BYTES))
    folder = save(files, tmp_path / "exported")
    again = load_tokenizer(str(folder))
    assert isinstance(again, BytesTokenizer)
    assert again.start_ids == (256,)
    assert read_files(str(folder)) == files
    assert files.digest == again.digest == OURS.digest
    whole = library.Tokenizer.from_file(f"{folder}/tokenizer.json").encode("ab").ids
    assert whole == [256, *b"ab"]


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({}, 262),
        ({"packing": "documents", "isolate_documents": False}, 262),
        ({"isolate_documents": False}, 0),  # the end token separates documents
        ({"version": 1}, None),
        ({"path": ("synthetic",)}, None),
        ({"path": ("a.jsonl",), "format": "chat", "tokenizer": "t.json"}, None),
    ],
    ids=str,
)
def test_a_document_begins_with_the_token_before_a_text(changes, start, tmp_path):
    tokenizer = load_tokenizer(with_processor(tmp_path / "run", BOS))
    assert start_of(DataConfig(**changes), tokenizer) == start


def test_a_tokenizer_json_is_copied_and_its_end_is_named(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(BPE_JSON, "utf-8")
    opened = load_tokenizer(str(path))
    files = files_of(opened, str(path))
    folder = save(files, tmp_path / "tokenizer")
    assert (folder / "tokenizer.json").read_bytes() == path.read_bytes()
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
    }
    again = load_tokenizer(str(folder))
    assert again.digest == opened.digest == files.digest
    assert again.vocab_size == files.vocab_size == 262


def test_the_end_that_the_run_was_given_is_the_end_of_the_copy(tmp_path):
    """Though a usual name is in the vocabulary, and the folder names that one."""
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(BPE_JSON)
    config = {"tokenizer_class": "GPT2TokenizerFast", "eos_token": END_OF_TEXT, "x": 1}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    opened = load_tokenizer(str(folder), eos_token="t")
    files = files_of(opened, str(folder))
    copy = save(files, tmp_path / "tokenizer")
    again = load_tokenizer(str(copy))
    assert (again.eos_id, again.digest) == (opened.eos_id, opened.digest)
    found = json.loads((copy / "tokenizer_config.json").read_text())
    assert found == config | {"eos_token": "t"}
    assert (copy / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_config_that_says_all_is_copied_byte_for_byte(tmp_path):
    config = '{"eos_token": {"content": "<|endoftext|>"},  "tokenizer_class": "A"}'
    (tmp_path / "tokenizer.json").write_text(BPE_JSON)
    (tmp_path / "tokenizer_config.json").write_text(config)
    contents = read_files(str(tmp_path)).contents
    assert contents["tokenizer_config.json"] == config.encode()


def test_lines_that_end_as_on_windows_do_not_change_the_digest(tmp_path):
    text = json.dumps(json.loads(BPE_JSON), indent=1).replace("\n", "\r\n")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(text.encode())
    assert read_files(str(path)).digest == load_tokenizer(str(path)).digest


def test_a_file_that_changed_after_it_was_opened_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE_JSON)
    opened = load_tokenizer(str(path))
    path.write_text(BPE_JSON + " ")
    with pytest.raises(ValueError, match=r"has changed since this run opened it"):
        files_of(opened, str(path))


def test_without_an_end_there_is_no_digest_and_any_token_may_be_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE_JSON.replace(END_OF_TEXT, "<stop>"))
    files = read_files(str(path))
    assert (files.eos_id, files.digest) == (None, None)
    assert "eos_token" not in json.loads(files.contents["tokenizer_config.json"])
    by_name, by_id = (read_files(str(path), eos=eos) for eos in ("<stop>", 0))
    assert by_name == by_id
    assert by_name.digest == load_tokenizer(str(path), eos_token="<stop>").digest
    with pytest.raises(ValueError, match="no token of id 262; its ids are below 262"):
        read_files(str(path), eos=262)
    with pytest.raises(
        ValueError, match="'stop', which should end a document, is not a token"
    ):
        read_files(str(path), eos="stop")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "is not a tokenizer.json: .* must be an object"),
        ('{"model": {"vocab": {}}}', "is not a tokenizer.json: it has no tokens"),
        ('{"model": {"vocab": {"a": "b"}}}', "model.vocab.a must be a whole number"),
        (
            '{"model": {"vocab": [["a", 0.0]]}, "added_tokens": [{}]}',
            "each added token must have content and id",
        ),
        ('{"model": {"vocab": [["a", 0.0], []]}}', r"entries \[token, score\]"),
        ("\ud800", "cannot be read"),
    ],
)
def test_another_file_is_refused_with_the_reason(tmp_path, text, says):
    path = tmp_path / "tokenizer.json"
    path.write_text(text, "utf-8", "surrogatepass")
    with pytest.raises(ValueError, match=says):
        read_files(str(path))


def test_the_ids_of_a_list_of_pieces_are_their_places(tmp_path):
    path = tmp_path / "tokenizer.json"
    spec = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0], ["</s>", 0]]}}
    path.write_text(json.dumps(spec))
    files = read_files(str(path))
    assert (files.vocab_size, files.eos_id) == (3, 2)

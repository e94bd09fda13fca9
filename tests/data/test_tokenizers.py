import base64
import json
import sys

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.names import trained_vocab_size
from mjax.data.tokenizer_files import read_files
from mjax.data.tokenizers import (
    END_OF_TEXT,
    BytesTokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
    train_bpe,
)

TEXT = "the quick brown fox jumps over the lazy dog\n" * 3 + "the then them thesis é\n"
BPE_JSON = train_bpe([TEXT], 290)
BPE = HuggingFaceTokenizer(BPE_JSON, origin="test")


def metaspace_json() -> str:
    """A small SentencePiece-like tokenizer with byte fallback and a hole in its ids."""
    vocab = {"<unk>": 0, "</s>": 1, "\u2581": 2, "a": 3, "b": 4, "\u2581a": 900}
    vocab |= {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}
    model = library.models.BPE(
        vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = library.decoders.Sequence(
        [
            library.decoders.Replace("\u2581", " "),
            library.decoders.ByteFallback(),
            library.decoders.Fuse(),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer.to_str()


SENTENCEPIECE = HuggingFaceTokenizer(metaspace_json(), origin="test")


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), BPE, SENTENCEPIECE])
@given(text=st.text())
def test_text_survives_and_every_byte_is_counted(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_num_bytes[ids].sum() == len(text.encode())
    with_end = np.array([*ids, tokenizer.eos_id], np.int64)
    assert tokenizer.text_bytes(with_end).tobytes() == text.encode()
    assert len(tokenizer.token_num_bytes) == tokenizer.vocab_size
    assert ids.max(initial=0) < tokenizer.vocab_size


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), BPE])
def test_the_end_of_a_document_has_no_bytes_and_no_text_can_fake_it(tokenizer):
    assert tokenizer.token_num_bytes[tokenizer.eos_id] == 0
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    joined = np.array(
        [*tokenizer.encode("a"), tokenizer.eos_id, *tokenizer.encode("b")]
    )
    assert tokenizer.decode(joined) == f"a{END_OF_TEXT}b"


def test_ids_beyond_the_number_of_tokens_fit_the_vocabulary():
    spec = json.loads(metaspace_json())
    assert len(spec["model"]["vocab"]) < 900
    assert SENTENCEPIECE.vocab_size == 901
    assert 900 in SENTENCEPIECE.encode(" a")


@pytest.mark.parametrize("of_model", [{}, {"dropout": 0.5, "alpha": 0.1}])
def test_options_that_cut_pad_or_draw_tokens_are_off(of_model, caplog):
    spec = json.loads(BPE_JSON)
    spec["model"] |= of_model
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst"}
    spec["truncation"] = cut | {"stride": 0}
    spec["padding"] = {"strategy": {"Fixed": 99}, "direction": "Left", "pad_id": 0}
    spec["padding"] |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "!"}
    tokenizer = HuggingFaceTokenizer(json.dumps(spec), origin=f"file {of_model}")
    for _ in range(10):
        for name in ("encode", "encode_special"):
            ids = getattr(tokenizer, name)(TEXT)
            np.testing.assert_array_equal(ids, getattr(BPE, name)(TEXT))
    assert tokenizer.start_ids == ()
    assert ("dropout 0.5, alpha 0.1 of its model is off" in caplog.text) == bool(
        of_model
    )


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "vocab",
            10**9,
            r"291 tokens must have ids below 1048576, but 'zz' has 10000000",
        ),
        (
            "added",
            2_000_000,
            r"292 tokens must have ids below 1048576, but '<far>' has 2000000",
        ),
        ("added", "5", "id of the added token '<far>' must be a whole number, got '5'"),
        ("charsmap", b"", "normalizer has 0 bytes, too few for a trie of 0"),
        (
            "charsmap",
            b"\xff\xff\xff\xffabc",
            "has 7 bytes, too few for a trie of 429496",
        ),
        ("charsmap", None, "too few for a trie"),
    ],
)
def test_numbers_that_would_take_gigabytes_are_refused(tmp_path, path, value, says):
    spec = json.loads(BPE_JSON)
    spec["model"]["vocab"]["zz"] = value if path == "vocab" else 290
    if path == "added":
        spec["added_tokens"].append({"id": value, "content": "<far>", "special": True})
    if path == "charsmap":
        encoded = None if value is None else base64.b64encode(value).decode()
        table = {"type": "Precompiled", "precompiled_charsmap": encoded}
        spec["normalizer"] = {"type": "Sequence", "normalizers": [table]}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(spec))
    for read in (load_tokenizer, read_files):
        with pytest.raises(ValueError, match=f"is not a tokenizer.json: .*{says}"):
            read(str(file))


@pytest.mark.parametrize(("index", "name"), [(1000, "<far>"), (5, END_OF_TEXT)])
def test_an_added_token_whose_id_the_library_changes_is_refused(index, name):
    spec = json.loads(BPE_JSON)
    token = spec["added_tokens"][0] | {"id": index, "content": name}
    spec["added_tokens"].append(token)
    with pytest.raises(ValueError, match=rf"gives '.*' the id {index}, but .* uses "):
        HuggingFaceTokenizer(json.dumps(spec), origin="test")


def test_training_is_deterministic_and_gives_the_size_asked_for():
    assert train_bpe([TEXT], 290) == BPE_JSON
    assert BPE.vocab_size == 290
    assert len(BPE.encode(TEXT)) < len(TEXT) / 1.5


def test_training_for_more_tokens_than_the_text_has_is_refused():
    with pytest.raises(
        ValueError, match=r"at most train:26\d .*, got train:1000; lower it"
    ):
        train_bpe(["abc abc abcd abcd"], 1000)


@pytest.mark.parametrize(
    "name", ["train:", "train", "train:x", "train:-5", "train:256"]
)
def test_a_bad_size_is_refused(name):
    with pytest.raises(ValueError, match=rf"with N from 257 .*, got {name};"):
        trained_vocab_size(name)


def test_an_unknown_tokenizer_names_the_nearest(tmp_path):
    with pytest.raises(
        ValueError, match=r"must be bytes, .*, got 'byte'; did you mean 'bytes'"
    ):
        load_tokenizer("byte")
    with pytest.raises(ValueError, match=r"train:N, hf://NAME.* or .*none\.json'$"):
        load_tokenizer(str(tmp_path / "none.json"))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_the_end_token_is_found_named_or_asked_for(tmp_path):
    path = tmp_path / "tokenizer.json"
    renamed = BPE_JSON.replace(END_OF_TEXT, "<stop>")
    path.write_text(renamed)
    with pytest.raises(ValueError, match=r"name the token .* with --data.eos-token"):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), eos_token="<stop>").eos_id == BPE.eos_id
    with pytest.raises(
        ValueError,
        match=r"eos-token '<stp>' is not a token of .*; did you mean '<stop>'",
    ):
        load_tokenizer(str(path), eos_token="<stp>")
    config = {"eos_token": {"content": "<stop>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(path)).eos_id == BPE.eos_id


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", r"must be an object, got \[\]"),
        ('{"eos_token": 5}', "eos_token must be text or null, got 5"),
        ('{"eos_token": {}}', r"eos_token\.content must be text, got None"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "not JSON"),
    ],
)
def test_a_tokenizer_config_of_another_form_is_refused(tmp_path, text, says):
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE_JSON)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(
        ValueError, match=rf"--data\.tokenizer .*config\.json: .*{says}"
    ):
        load_tokenizer(str(path))


def test_a_tokenizer_whose_tokens_have_unknown_bytes_is_refused():
    tokenizer = library.Tokenizer(
        library.models.WordLevel({"</s>": 0}, unk_token="</s>")
    )
    with pytest.raises(ValueError, match="the bytes of its tokens are unknown"):
        HuggingFaceTokenizer(tokenizer.to_str(), origin="test")


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'mjax\[data\]'"):
        train_bpe([TEXT], 290)


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), BPE])
def test_the_name_of_a_special_token_is_the_token_only_where_that_is_asked(tokenizer):
    text = f"né{END_OF_TEXT}{END_OF_TEXT}b"
    ids = tokenizer.encode_special(text)
    assert (ids == tokenizer.eos_id).tolist().count(True) == 2
    assert tokenizer.decode(ids) == text
    assert not (tokenizer.encode(text) == tokenizer.eos_id).any()


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), BPE])
@given(parts=st.lists(st.text(), max_size=4))
def test_spans_say_which_characters_a_token_is_of(tokenizer, parts):
    text = END_OF_TEXT.join(parts)
    ids, spans = tokenizer.encode_spans(text)
    assert spans.shape == (len(ids), 2)
    covered = {i for start, end in spans.tolist() for i in range(start, end)}
    assert covered == set(range(len(text)))
    for index, (start, end) in zip(ids.tolist(), spans.tolist(), strict=True):
        if index == tokenizer.eos_id:
            assert text[start:end] == END_OF_TEXT

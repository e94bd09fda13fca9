"""Tokenizers: bytes, a tokenizer.json, or BPE trained on the corpus.

Every tokenizer has one token that ends a document, and a table of the bytes that each
token encodes, so losses can be reported in bits per byte for any vocabulary.
"""

import base64
import binascii
import difflib
import functools
import hashlib
import json
import logging
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, Integer, UInt8

from mjax import checked_json
from mjax.data import byte_level, hub_tokenizers
from mjax.data.config import DataConfig
from mjax.data.hub_tokenizers import FLAG
from mjax.data.names import BYTES, NUM_BYTES, TRAIN

END_OF_TEXT = "<|endoftext|>"

EOS_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<|im_end|>")
"""Usual names of the token that ends a document, most common first."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_DRAWS = ("dropout", "alpha", "nbest_size")
"""Options of a model in a tokenizer.json that draw the tokens at random."""
_SMALL_VOCAB = 1 << 20
"""Ids below this may leave any gaps: tables of this size take 24 MB."""
_log = logging.getLogger(__name__)


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    vocab_size: int
    """V; every token id is below V."""
    eos_id: int
    """The token that ends a document."""
    start_ids: tuple[int, ...]
    """Tokens that the tokenizer puts before a text, as transformers does."""
    token_num_bytes: Int64[np.ndarray, "V"]
    """Bytes of text that each token encodes; 0 for special tokens."""
    added: Mapping[str, int]
    """Ids of the tokens that are no pieces of text, by name."""
    digest: str
    """Hash of everything that determines the ids."""

    def encode(self, text: str) -> Int64[np.ndarray, "n"]:
        """Return the ids of text, without special tokens."""
        ...

    def encode_batch(self, texts: list[str]) -> list[Int64[np.ndarray, "_"]]:
        """Return the ids of each text; faster than one call per text."""
        ...

    def encode_special(self, text: str) -> Int64[np.ndarray, "n"]:
        """Return the ids of text in which the names of special tokens are tokens."""
        ...

    def encode_spans(
        self, text: str
    ) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n 2"]]:
        """Return the result of `encode_special`, and the span of each id.

        A span is (start, end) in characters of the text. Tokens that encode parts of
        one character all have the span of that character.
        """
        ...

    def decode(self, ids: Integer[np.ndarray, "n"]) -> str:
        """Return the text of ids; special tokens by name, broken UTF-8 as U+FFFD."""
        ...

    def text_bytes(self, ids: Int64[np.ndarray, "n"]) -> UInt8[np.ndarray, "_"]:
        """Return the bytes that ids encode; none for special tokens."""
        ...


class BytesTokenizer:
    """Tokenizer of UTF-8 bytes, and one more token that ends a document."""

    vocab_size = NUM_BYTES + 1
    eos_id = NUM_BYTES
    added: Mapping[str, int] = MappingProxyType({END_OF_TEXT: NUM_BYTES})
    digest = BYTES

    def __init__(self, *, has_start: bool = False) -> None:
        """Make the tokenizer; with has_start it puts the end token before a text."""
        self.start_ids = (self.eos_id,) if has_start else ()
        self.token_num_bytes = np.ones(self.vocab_size, np.int64)
        self.token_num_bytes[self.eos_id] = 0

    def encode(self, text: str) -> Int64[np.ndarray, "n"]:
        """Return the UTF-8 bytes of text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def encode_batch(self, texts: list[str]) -> list[Int64[np.ndarray, "_"]]:
        """Encode several texts."""
        return [self.encode(text) for text in texts]

    def encode_special(self, text: str) -> Int64[np.ndarray, "n"]:
        """Return the bytes of text; END_OF_TEXT in the text is the end token."""
        return self.encode_spans(text)[0]

    def encode_spans(
        self, text: str
    ) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n 2"]]:
        """Encode text in which END_OF_TEXT is a token; return ids and spans."""
        ids, starts, ends, start = [], [], [], 0
        for number, part in enumerate(text.split(END_OF_TEXT)):
            if number:
                ids.append(np.array([self.eos_id]))
                starts.append(np.array([start]))
                start += len(END_OF_TEXT)
                ends.append(np.array([start]))
            widths = np.array([len(char.encode()) for char in part], np.int64)
            chars = np.repeat(np.arange(len(part)) + start, widths)
            ids.append(self.encode(part))
            starts.append(chars)
            ends.append(chars + 1)
            start += len(part)
        spans = np.stack([np.concatenate(starts), np.concatenate(ends)], axis=1)
        return np.concatenate(ids), spans

    def decode(self, ids: Integer[np.ndarray, "n"]) -> str:
        """Return the text of ids; the end token becomes END_OF_TEXT."""
        listed = ids.tolist()
        if self.eos_id not in listed:  # fast, for decoding token by token
            return bytes(listed).decode(errors="replace")
        parts = np.split(ids, np.flatnonzero(ids == self.eos_id))
        texts = [
            part[part != self.eos_id]
            .astype(np.uint8)
            .tobytes()
            .decode(errors="replace")
            for part in parts
        ]
        return END_OF_TEXT.join(texts)

    def text_bytes(self, ids: Int64[np.ndarray, "n"]) -> UInt8[np.ndarray, "_"]:
        """Return the bytes that ids encode."""
        return ids[ids != self.eos_id].astype(np.uint8)


class HuggingFaceTokenizer:
    """A tokenizer.json, run by the `tokenizers` library.

    The name of a special token in text is ordinary text, so text cannot end a document.
    Only `encode_special` and `encode_spans`, for text that a chat template rendered,
    treat the name as the token. Special tokens are not added. Options of the file that
    truncate, pad or draw tokens at random are off.
    """

    def __init__(
        self,
        spec_json: str,
        *,
        origin: str,
        eos_token: str | None = None,
        flag: str = FLAG,
    ):
        """Build the tokenizer from the text of a tokenizer.json.

        Args:
          spec_json: content of the file.
          origin: name of the file, for messages.
          eos_token: token that ends a document; None looks for a usual name.
          flag: the flag that names the tokenizer, for messages.
        Raises:
          ValueError: the text is not a tokenizer.json, has no token that ends a
            document, or does not determine the bytes that its tokens encode.
        """
        library, where = _import_library(origin, flag), f"{flag} {origin}"
        try:
            spec, in_file = parse_spec(spec_json)
            pure_json = _without_options(spec_json, spec, where)
            self._tokenizer = library.Tokenizer.from_str(pure_json)
        except Exception as error:  # the library raises no more precise type
            raise ValueError(f"{where} is not a tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True
        # A second object, because encode_special_tokens applies to all threads.
        self._with_special = library.Tokenizer.from_str(pure_json)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        for token, index in in_file.items():
            if vocab.get(token, index) != index:
                raise ValueError(
                    f"{where} gives {token!r} the id {index}, but the tokenizers "
                    f"library, and so transformers, uses {vocab[token]}: added tokens "
                    "get the ids after the vocabulary; give it that id in the file"
                )
        # Ids may have gaps, so the number of tokens can be below the largest id.
        self.vocab_size = max(vocab.values()) + 1
        self.eos_id = vocab[_find_eos(vocab, eos_token, origin, flag)]
        self.start_ids = self._find_starts()
        self.added = added_tokens(spec, vocab, self.eos_id)
        spelled = _spell_tokens(spec, vocab, self.vocab_size, where)
        spelled[self.eos_id] = b""
        self.token_num_bytes = np.array([len(token) for token in spelled], np.int64)
        self._spelled = np.frombuffer(b"".join(spelled), np.uint8)
        self._spelled_starts = np.cumsum(self.token_num_bytes) - self.token_num_bytes
        self.digest = digest_of(spec_json, self.eos_id)

    def _find_starts(self) -> tuple[int, ...]:
        """Return the tokens that the post-processor puts before a text.

        Given this file, transformers ignores add_bos_token. Tokens after a text are
        left out.

        Source: transformers 5.23, `tokenization_utils_base.py`.
        """
        plain, whole = self.encode("a").tolist(), self._tokenizer.encode("a").ids
        offsets = (n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
        return tuple(whole[: next(offsets, 0)])

    def encode(self, text: str) -> Int64[np.ndarray, "n"]:
        """Return the ids of text, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[Int64[np.ndarray, "_"]]:
        """Return the ids of each text, computed on all cores."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode_special(self, text: str) -> Int64[np.ndarray, "n"]:
        """Return the ids of text in which the names of special tokens are tokens."""
        return self.encode_spans(text)[0]

    def encode_spans(
        self, text: str
    ) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n 2"]]:
        """Encode like `encode_special`; return ids and spans."""
        encoding = self._with_special.encode(text, add_special_tokens=False)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.int64), spans

    def decode(self, ids: Integer[np.ndarray, "n"]) -> str:
        """Return the text of ids, with special tokens by name."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def text_bytes(self, ids: Int64[np.ndarray, "n"]) -> UInt8[np.ndarray, "_"]:
        """Return the bytes that ids encode."""
        sizes = self.token_num_bytes[ids]
        shifts = self._spelled_starts[ids] - (np.cumsum(sizes) - sizes)
        return self._spelled[np.repeat(shifts, sizes) + np.arange(sizes.sum())]


def start_of(config: DataConfig, tokenizer: Tokenizer) -> int | None:
    """Return the token that precedes each document in training, or None.

    It is the token that the tokenizer itself puts before a text, otherwise the end
    token. Without isolation, the end token separates documents. In data version 1, and
    in chats and synthetic data, no token precedes a document.
    """
    if not config.has_starts:
        return None
    is_joined = config.packing == "windows" and not config.isolate_documents
    return (
        tokenizer.eos_id if is_joined else [tokenizer.eos_id, *tokenizer.start_ids][-1]
    )


def digest_of(spec_json: str, eos_id: int) -> str:
    """Return the digest of the tokenizer that a tokenizer.json describes.

    Args:
      spec_json: content of the file.
      eos_id: the token that ends a document.
    """
    return hashlib.sha256(f"{spec_json}\0{eos_id}".encode()).hexdigest()


def added_tokens(
    spec: Mapping[str, Any], vocab: Mapping[str, int], eos_id: int | None
) -> Mapping[str, int]:
    """Return the ids of tokens that are no pieces of text, by name.

    They are the added tokens and the token that ends a document.
    """
    names = [str(token["content"]) for token in spec.get("added_tokens", [])]
    ends = [name for name, index in vocab.items() if index == eos_id]
    return {name: vocab[name] for name in [*names, *ends]}


def parse_spec(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Parse a tokenizer.json without the library.

    Args:
      text: content of the file.
    Returns:
      The parsed file; token -> id, including added tokens.
    Raises:
      ValueError: the text has another format, its ids leave too large gaps, or a table
        in it is damaged.
    """
    spec = checked_json.read(text, dict[str, Any])
    model = checked_json.check(spec.get("model"), dict[str, Any], "model")
    added = checked_json.check(
        spec.get("added_tokens", []), list[dict[str, Any]], "added_tokens"
    )
    tokens = model.get("vocab")
    if isinstance(tokens, list):  # Unigram: list of (token, score) in order of ids
        if not all(isinstance(entry, list) and entry for entry in tokens):
            raise ValueError("model.vocab must have entries [token, score]")
        tokens = {str(entry[0]): i for i, entry in enumerate(tokens)}
    vocab = {**checked_json.check(tokens, dict[str, int], "model.vocab")}
    for token in added:
        if "content" not in token or "id" not in token:
            raise ValueError("each added token must have content and id")
        place = f"the id of the added token {token['content']!r}"
        vocab[str(token["content"])] = checked_json.check(token["id"], int, place)
    if not vocab:
        raise ValueError("it has no tokens")
    most = max(_SMALL_VOCAB, 2 * len(vocab))
    last = max(vocab, key=vocab.__getitem__)
    if vocab[last] >= most:
        raise ValueError(
            f"its {len(vocab)} tokens must have ids below {most}, but {last!r} has "
            f"{vocab[last]}; every unused id would take a row of the embedding"
        )
    for part in _parts(spec.get("normalizer")):
        if part["type"] == "Precompiled":
            _check_charsmap(part.get("precompiled_charsmap"))
    return spec, vocab


def _check_charsmap(encoded: Any) -> None:
    """Refuse a damaged table of characters; the library would abort on it.

    The table is the number of bytes of a trie (4 bytes, little-endian), the trie, and
    the replacements.
    """
    try:
        table = base64.b64decode(checked_json.check(encoded, str), validate=True)
    except (ValueError, binascii.Error):
        table = b""
    num_bytes = int.from_bytes(table[:4], "little")
    if len(table) < 4 or num_bytes > len(table) - 4:
        raise ValueError(
            f"precompiled_charsmap of its normalizer has {len(table)} bytes, too few "
            f"for a trie of {num_bytes}; copy the file again"
        )


def _without_options(text: str, spec: dict[str, Any], where: str) -> str:
    """Return a tokenizer.json whose ids depend on the text alone."""
    off: dict[str, Any] = {k: None for k in ("truncation", "padding") if spec.get(k)}
    drawn = {key: spec["model"][key] for key in _DRAWS if spec["model"].get(key)}
    if drawn:
        _warn_of_draws(where, ", ".join(f"{k} {v}" for k, v in drawn.items()))
        off["model"] = spec["model"] | dict.fromkeys(drawn)
    return json.dumps(spec | off) if off else text


@functools.cache  # once, however often a run opens the tokenizer
def _warn_of_draws(where: str, options: str) -> None:
    _log.warning(
        "%s: %s of its model is off: a text has one tokenization", where, options
    )


def load_tokenizer(
    name: str, *, eos_token: str | None = None, flag: str = FLAG
) -> Tokenizer:
    """Return a tokenizer that needs no training.

    Args:
      name: `bytes`, a tokenizer.json, a folder that holds one, or hf://NAME@REVISION,
        which is downloaded.
      eos_token: the token that ends a document in a tokenizer.json.
      flag: the flag that names the tokenizer, for messages.
    Raises:
      ValueError: the tokenizer does not exist or cannot be used, or the hub does not
        return it.
    """
    if name == BYTES:
        return BytesTokenizer()
    path = hub_tokenizers.local(name, flag=flag)
    if not path.is_file():
        trained = [f"{TRAIN}:8192"] if flag == FLAG else []
        near = difflib.get_close_matches(name, [BYTES, *trained], n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{flag} must be bytes, {f'{TRAIN}:N, ' if trained else ''}"
            f"hf://NAME@REVISION or the path of a tokenizer.json, got {name!r}{hint}"
        )
    try:
        spec_json = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path} cannot be read: {error}") from None
    if eos_token is None:
        eos_token = _configured_eos(path.with_name("tokenizer_config.json"), flag)
    is_bytes = eos_token in (None, END_OF_TEXT)
    for has_start in (False, True):  # a run stores `bytes` as such a file
        spec = byte_level.spec_json(END_OF_TEXT, has_start=has_start)
        if is_bytes and spec_json == spec:
            return BytesTokenizer(has_start=has_start)
    return HuggingFaceTokenizer(
        spec_json, origin=str(path), eos_token=eos_token, flag=flag
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE and return its tokenizer.json.

    Args:
      texts: pieces of text; none may be empty.
      vocab_size: total number of tokens, including the 256 bytes and the end token.
    Raises:
      ValueError: the text is too small for so many tokens.
    """
    library = _import_library(f"{TRAIN}:{vocab_size}")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    num_found = tokenizer.get_vocab_size()
    if num_found < vocab_size:
        raise ValueError(
            f"--data.tokenizer must be at most {TRAIN}:{num_found} (the corpus has no "
            f"pairs for more tokens), got {TRAIN}:{vocab_size}; lower it, or give more "
            "text"
        )
    return tokenizer.to_str()


def _import_library(what: str, flag: str = FLAG) -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ValueError(
            f"{flag} {what} needs the tokenizers library; pip install 'mjax[data]'"
        ) from None
    return tokenizers


def _configured_eos(path: pathlib.Path, flag: str) -> str | None:
    """Return the end token named by tokenizer_config.json; None if it names none."""
    if not path.is_file():
        return None
    try:
        config = checked_json.read(path.read_bytes(), dict[str, Any])
        eos = config.get("eos_token")
        if isinstance(eos, dict):
            return checked_json.check(eos.get("content"), str, "eos_token.content")
        return checked_json.check(eos, str | None, "eos_token")
    except ValueError as error:
        raise ValueError(f"{flag} {path}: {error}") from None


def _find_eos(
    vocab: dict[str, int], eos_token: str | None, origin: str, flag: str
) -> str:
    if eos_token is not None:
        if eos_token in vocab:
            return eos_token
        raise ValueError(
            f"--data.eos-token {eos_token!r} is not a token of {origin}"
            + "".join(
                f"; did you mean {near!r}?"
                for near in difflib.get_close_matches(eos_token, vocab, n=1)
            )
        )
    for name in EOS_NAMES:
        if name in vocab:
            return name
    remedy = "with --data.eos-token"
    if flag != FLAG:
        remedy = "as eos_token in a tokenizer_config.json beside it"
    raise ValueError(
        f"{flag} {origin} has none of {', '.join(EOS_NAMES)}; "
        f"name the token that ends a document {remedy}"
    )


def _spell_tokens(
    spec: dict[str, Any], vocab: dict[str, int], vocab_size: int, where: str
) -> list[bytes]:
    """Return the bytes that each token encodes, derived from the decoder."""
    decoders = {part["type"] for part in _parts(spec.get("decoder"))}
    added = {
        token["content"]: token["special"] for token in spec.get("added_tokens", [])
    }
    if "ByteLevel" in decoders:
        spell = byte_level.spell
    elif decoders & {"Metaspace", "ByteFallback"}:
        spell = _spell_sentencepiece
    else:
        raise ValueError(
            f"{where} decodes by {sorted(decoders) or 'nothing'}, "
            "so the bytes of its tokens are unknown; use ByteLevel (byte-level BPE), "
            "Metaspace or ByteFallback (SentencePiece)"
        )
    spelled = [b""] * vocab_size
    for token, index in vocab.items():
        if token in added:
            spelled[index] = b"" if added[token] else token.encode()
        else:
            spelled[index] = spell(token)
    return spelled


def _spell_sentencepiece(token: str) -> bytes:
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()  # U+2581 represents a space


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects with a "type" in a part of a tokenizer.json, at any depth."""
    if isinstance(node, dict) and isinstance(node.get("type"), str):
        yield node
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _parts(child)

"""The files of a tokenizer. A run keeps them and exports them with its weights.

Input: the name `bytes`, a tokenizer.json, a folder that holds one, or a name on a hub.
`bytes` is the tokenizer whose tokens are bytes. Output: the contents of tokenizer.json,
tokenizer_config.json, generation_config.json with all end tokens and, if there is one,
chat_template.jinja, with vocabulary size and digest. The library `tokenizers` is not
needed.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from mjax import checked_json
from mjax.data import byte_level, chat_template, end_tokens, hub_tokenizers
from mjax.data.chat_template import ChatTemplate
from mjax.data.end_tokens import GENERATION_CONFIG
from mjax.data.hub_tokenizers import CONFIG, SPEC, TEMPLATE
from mjax.data.names import BYTES
from mjax.data.tokenizers import (
    END_OF_TEXT,
    EOS_NAMES,
    BytesTokenizer,
    Tokenizer,
    added_tokens,
    digest_of,
    parse_spec,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The files of a tokenizer, and what they determine."""

    contents: Mapping[str, bytes]
    """File name -> content."""
    vocab_size: int
    """V; every token id is below V."""
    eos_id: int | None
    """Id of the token that ends a document; None if it is unknown."""
    digest: str | None
    """Digest of the `Tokenizer` of these files; None without an end token."""
    added: Mapping[str, int]
    """Ids of the tokens that are no pieces of text, by name."""
    end_ids: tuple[int, ...]
    """Tokens at which generation ends, `eos_id` first."""

    def with_template(self, template: ChatTemplate) -> "TokenizerFiles":
        """Return the files with another chat template, whose end of a turn is added."""
        ids = end_tokens.end_ids(self.eos_id, self.added, self.end_ids, template)
        contents = {**self.contents, TEMPLATE: template.text.encode()}
        return dataclasses.replace(self, contents=contents).with_end_ids(ids)

    def with_end_ids(self, ids: Iterable[int]) -> "TokenizerFiles":
        """Return the files with additional end tokens."""
        ids = tuple(dict.fromkeys([*self.end_ids, *ids]))
        contents = {**self.contents, GENERATION_CONFIG: end_tokens.as_file(ids)}
        return dataclasses.replace(self, contents=contents, end_ids=ids)


def read_files(name: str, *, eos: str | int | None = None) -> TokenizerFiles:
    """Read the files of an existing tokenizer; this function trains none.

    The returned content of tokenizer.json is that of the file. The returned content of
    tokenizer_config.json gets the class of the tokenizer if the file names none, and
    the end token, if known, unless the file names the same one. That of
    generation_config.json lists all end tokens. The files themselves are not changed.

    Args:
      name: `bytes`, a tokenizer.json, a folder that holds one, or hf://NAME@REVISION.
      eos: token that ends a document, or its id. None uses the token that
        tokenizer_config.json names; if it names none, a token with a usual name.
    Raises:
      ValueError: a file cannot be read or downloaded from the hub, has another format,
        or lacks the token.
      RuntimeError: the file that lists end tokens is damaged.
    """
    if name == BYTES:
        return _of_bytes()
    path = hub_tokenizers.local(name)
    contents = {SPEC: _read(path)}
    for other in (CONFIG, TEMPLATE):
        if path.with_name(other).is_file():
            contents[other] = _read(path.with_name(other))
    text = _text(contents[SPEC])
    try:
        spec, vocab = parse_spec(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    config = _config(contents.get(CONFIG), path.with_name(CONFIG))
    found = _find_eos(vocab, eos, _named_eos(config), path)
    eos_id = None if found is None else vocab[found]
    ours = [byte_level.spec_json(END_OF_TEXT, has_start=has) for has in (False, True)]
    is_bytes = found == END_OF_TEXT and text in ours
    digest = None if eos_id is None else digest_of(text, eos_id)
    added = added_tokens(spec, vocab, eos_id)
    template = chat_template.read_beside(path.parent)
    if template is not None:
        template = dataclasses.replace(template, eos_token=found or "")
    listed = end_tokens.listed(path.parent)
    return TokenizerFiles(
        contents={**contents, CONFIG: _completed(contents.get(CONFIG), config, found)},
        vocab_size=max(vocab.values()) + 1,
        eos_id=eos_id,
        digest=BYTES if is_bytes else digest,
        added=added,
        end_ids=(),
    ).with_end_ids(end_tokens.end_ids(eos_id, added, listed, template))


def with_start(files: TokenizerFiles) -> TokenizerFiles:
    """Return the files with the end token before a text, as it is before a document.

    A tokenizer that puts tokens of its own before a text keeps them.
    """
    spec, config = (json.loads(files.contents[name]) for name in (SPEC, CONFIG))
    before, name = spec.get("post_processor"), _named_eos(config)
    if files.eos_id is None or _has_start(before):
        return files
    after = byte_level.start_before(name, files.eos_id)
    parts = [before, after]
    spec["post_processor"] = (
        {"type": "Sequence", "processors": parts} if before else after
    )
    config["bos_token"] = config.get("bos_token") or name
    texts = {SPEC: json.dumps(spec, indent=1), CONFIG: json.dumps(config, indent=2)}
    written = {name: f"{text}\n".encode() for name, text in texts.items()}
    return dataclasses.replace(files, contents={**files.contents, **written})


def _has_start(processor: Any) -> bool:
    """Return whether a post-processor puts a token before a text."""
    match processor:
        case {"type": "Sequence", "processors": [*parts]}:
            return any(map(_has_start, parts))
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": _}, *_]}:
            return True
        case {"type": "BertProcessing" | "RobertaProcessing"}:
            return True
    return False


def files_of(tokenizer: Tokenizer, name: str) -> TokenizerFiles:
    """Read the files of a tokenizer that is in use.

    Args:
      tokenizer: the tokenizer in use.
      name: name of the tokenizer, as in `read_files`.
    Raises:
      ValueError: the files cannot be read, or are no longer those of the tokenizer.
    """
    found = read_files(name, eos=None if name == BYTES else tokenizer.eos_id)
    if found.digest != tokenizer.digest:
        raise ValueError(
            f"the tokenizer in {name} has changed since this run opened it; start the "
            "run again"
        )
    return found


def _of_bytes() -> TokenizerFiles:
    """Return the files of the `bytes` tokenizer, which has no files of its own."""
    spec = byte_level.spec_json(END_OF_TEXT)
    return TokenizerFiles(
        contents={SPEC: spec.encode(), CONFIG: _completed(None, {}, END_OF_TEXT)},
        vocab_size=BytesTokenizer.vocab_size,
        eos_id=BytesTokenizer.eos_id,
        digest=BytesTokenizer.digest,
        added=BytesTokenizer.added,
        end_ids=(),
    ).with_end_ids([BytesTokenizer.eos_id])


def _completed(
    content: bytes | None, config: Mapping[str, Any], eos: str | None
) -> bytes:
    """Return a tokenizer_config.json with a class and, if known, the end token.

    Without a class, transformers uses the class of the model's family, which splits
    text in its own way. A new file also sets `clean_up_tokenization_spaces`. Without
    it, transformers before release 5 removes spaces before punctuation in decoded text.

    Args:
      content: content of the file; None if there is no file.
      config: parsed content.
      eos: name of the end token; None if unknown.
    """
    added: dict[str, Any] = {}
    if content is None:
        added["clean_up_tokenization_spaces"] = False
    if "tokenizer_class" not in config:
        added["tokenizer_class"] = "PreTrainedTokenizerFast"
    if _named_eos(config) != eos:
        added["eos_token"] = eos
    if content is not None and not added:
        return content
    return (json.dumps({**config, **added}, indent=2) + "\n").encode()


def _config(content: bytes | None, path: pathlib.Path) -> Mapping[str, Any]:
    """Parse a tokenizer_config.json."""
    try:
        return {} if content is None else checked_json.read(content, dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _named_eos(config: Mapping[str, Any]) -> Any:
    """Return the name of the end token, which may be inside an object."""
    named = config.get("eos_token")
    return named.get("content") if isinstance(named, dict) else named


def _find_eos(
    vocab: Mapping[str, int], eos: str | int | None, named: Any, path: pathlib.Path
) -> str | None:
    """Return the name of the token that ends a document; None if unknown."""
    if isinstance(eos, int):
        found = next((token for token, index in vocab.items() if index == eos), None)
        if found is None:
            raise ValueError(
                f"{path} has no token of id {eos}; its ids are below "
                f"{max(vocab.values()) + 1}"
            )
        return found
    wanted = named if eos is None else eos
    if wanted is not None:
        if not isinstance(wanted, str) or wanted not in vocab:
            raise ValueError(
                f"{wanted!r}, which should end a document, is not a token of {path}"
            )
        return wanted
    return next((name for name in EOS_NAMES if name in vocab), None)


def _text(content: bytes) -> str:
    """Decode a file like `Path.read_text`; digests are computed over this text."""
    return content.decode().replace("\r\n", "\n").replace("\r", "\n")


def _read(path: pathlib.Path) -> bytes:
    """Return the bytes of a file."""
    try:
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return content

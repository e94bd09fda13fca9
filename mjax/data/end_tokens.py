"""The tokens at which generation ends.

A run, its samples, its exports and what generates from them share one list: the token
that ends a document, the tokens that the folder of a model lists, and the token with
which the chat template ends an answer.
"""

import json
import logging
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from mjax import checked_json
from mjax.data import chat_template
from mjax.data.chat_template import ChatTemplate

GENERATION_CONFIG = "generation_config.json"
"""File that lists end tokens, in the folder of a model or of a run's tokenizer."""

_MODEL_CONFIG = "config.json"
_KEY = "eos_token_id"
_ANSWER = "An answer."
_CHATS = (
    [{"role": "user", "content": "A question?"}],
    [
        {"role": "system", "content": "Some advice."},
        {"role": "user", "content": "A question?"},
    ],
)
"""Beginnings of chats; a template may refuse one of them."""

_log = logging.getLogger(__name__)


def listed(folder: pathlib.Path) -> tuple[int, ...]:
    """Return the end tokens that a folder lists; none if it lists none.

    Without generation_config.json, the config.json of a model is used, as in
    transformers.

    Raises:
      RuntimeError: the file is damaged.
    """
    paths = [folder / GENERATION_CONFIG, folder / _MODEL_CONFIG]
    for path in [path for path in paths if path.is_file()][:1]:
        try:
            config = checked_json.read(path.read_bytes(), dict[str, Any])
            value = config.get(_KEY)
            ids = value if isinstance(value, list) else [value]
            return tuple(checked_json.check(i, int, _KEY) for i in ids if i is not None)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{path} is damaged: {error}") from error
    return ()


def as_file(ids: Iterable[int]) -> bytes:
    """Return the content of a generation_config.json that lists end tokens."""
    return (json.dumps({_KEY: [*ids]}, indent=2) + "\n").encode()


def end_ids(
    eos_id: int | None,
    added: Mapping[str, int],
    listed: Iterable[int],
    template: ChatTemplate | None,
) -> tuple[int, ...]:
    """Return the end tokens of a tokenizer, each once.

    Args:
      eos_id: the token that ends a document; it comes first.
      added: ids of the tokens that are no pieces of text, by name.
      listed: tokens that the folder of the model lists.
      template: the chat template, with its special tokens.
    """
    ids = [*([] if eos_id is None else [eos_id]), *listed]
    text = None if template is None else text_after_answer(template)
    name = None if text is None else first_name(text, added)
    if name is not None:
        ids.append(added[name])
    return tuple(dict.fromkeys(ids))


def text_after_answer(template: ChatTemplate) -> str | None:
    """Return the text with which a template ends an answer; None if it is unknown.

    It is unknown if the template refuses a question with an answer, or if jinja2 is
    not installed; both are logged.
    """
    error = "it changes an answer"
    for messages in _CHATS:
        chat = [*messages, {"role": "assistant", "content": _ANSWER}]
        try:
            text = chat_template.render(template, chat, add_generation_prompt=False)
        except ValueError as refusal:
            error = refusal
            continue
        _, answer, after = text.rpartition(_ANSWER)
        if answer:
            return after
    _log.warning(
        "the token that ends a turn of the chat template is unknown: %s; generation "
        "may go on after an answer",
        error,
    )
    return None


def first_name(text: str, names: Iterable[str]) -> str | None:
    """Return the name that begins first in a text, the longest of several.

    Blank names are left out: some tokenizers have tokens for several line breaks.
    """
    inside = [name for name in names if name.strip() and name in text]
    places = [(text.find(name), -len(name), name) for name in inside]
    return min(places)[2] if places else None

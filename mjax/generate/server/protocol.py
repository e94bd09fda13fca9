"""Parse requests of OpenAI's API, field by field.

Input: the body of a request. Output: a checked request; prompts are text or token ids.
Every field is used, ignored because it cannot change the answer, or refused by name.

Source: OpenAI's API reference, from the types of openai-python 3.54.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mjax.generate.server import fields
from mjax.generate.server.errors import malformed, unsupported

MOST_STOPS = 4
"""Maximum number of stop texts of a request; OpenAI's limit."""
_MOST_STOP_CHARS = 1000
"""Maximum number of characters of a stop text. A stream may hold back that many
characters."""
_MOST_CHOICES = 128
"""Largest n; OpenAI's limit."""
_MOST_TEMPERATURE = 2.0
"""Largest temperature; OpenAI's limit."""
_MOST_COMPLETION_LOGPROBS, _MOST_CHAT_LOGPROBS = 5, 20
"""Maximum number of alternatives per token; OpenAI's limits."""
_MOST_TOP_K = 1 << 31
_MOST_TEXT_PROMPTS = 2048
"""Maximum number of prompts of a request; OpenAI's limit. The queue may allow fewer."""
SEED_RANGE = 1 << 63
"""OpenAI's seeds are signed 64-bit integers."""

_SHARED = frozenset(
    {"model", "max_tokens", "n", "seed", "stop", "stream", "stream_options"}
    | {"temperature", "top_k", "top_p"}
)
_COMPLETION = _SHARED | {"prompt", "echo", "logprobs", "best_of"}
_CHAT = _SHARED | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
_ROLES = ("system", "developer", "user", "assistant")

type Prompt = str | tuple[int, ...]
"""Text, or token ids."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options for drawing and sending an answer."""

    model: str | None
    """Requested model name; None: the served model."""
    max_tokens: int | None
    """Maximum number of tokens of the answer; None if the client gives none."""
    num_choices: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int | None
    """Seed of the draws; None: a new seed each time."""
    stop: tuple[str, ...]
    num_alternatives: int | None
    """Alternatives listed per token; None: no log-probabilities."""
    stream: bool
    include_usage: bool
    """End a stream with the token counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A request to /v1/completions."""

    prompts: tuple[Prompt, ...]
    echo: bool
    """Put the prompt before each answer."""
    options: Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """A request to /v1/chat/completions."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages with `role`, `content` and optionally `name`, all text."""
    options: Options


def read_completion(body: bytes) -> Completion:
    """Check a request to /v1/completions; return its fields.

    Raises:
      ApiError: 400 or 422, which names the field.
    """
    given = fields.parse(body)
    fields.check_names(given, _COMPLETION)
    alternatives = fields.whole(
        given, "logprobs", least=0, most=_MOST_COMPLETION_LOGPROBS
    )
    max_tokens = fields.whole(given, "max_tokens", least=1)
    options = _options(given, max_tokens, alternatives)
    best_of = fields.whole(given, "best_of", least=1)
    if best_of not in (None, options.num_choices):
        raise unsupported(
            "best_of", f"best_of must equal n here, got {best_of}; remove it"
        )
    echo = fields.flag(given, "echo")
    if echo and alternatives is not None:
        raise unsupported(
            "echo",
            "echo with logprobs is not supported: prompts have no log-probabilities "
            "here; remove one of the two",
        )
    prompts = _prompts(given.get("prompt"))
    return Completion(prompts=prompts, echo=echo, options=options)


def read_chat(body: bytes) -> Chat:
    """Check a request to /v1/chat/completions; return its fields.

    Raises:
      ApiError: 400 or 422, which names the field.
    """
    given = fields.parse(body)
    fields.check_names(given, _CHAT)
    new = fields.whole(given, "max_completion_tokens", least=1)
    old = fields.whole(given, "max_tokens", least=1)
    if new is not None and old is not None and new != old:
        raise malformed(
            f"max_completion_tokens is {new} and max_tokens is {old}; give one of them",
            "max_completion_tokens",
        )
    top = fields.whole(given, "top_logprobs", least=0, most=_MOST_CHAT_LOGPROBS)
    alternatives = None
    if fields.flag(given, "logprobs"):
        alternatives = top or 0
    elif top is not None:
        raise malformed(
            "top_logprobs needs logprobs: true; add it, or remove top_logprobs",
            "top_logprobs",
        )
    return Chat(
        messages=_messages(given.get("messages")),
        options=_options(given, new or old, alternatives),
    )


def _options(
    given: Mapping[str, Any], max_tokens: int | None, num_alternatives: int | None
) -> Options:
    stream = fields.flag(given, "stream")
    model = given.get("model")
    return Options(
        model=None if model is None else fields.text(model, "model"),
        max_tokens=max_tokens,
        num_choices=fields.whole(given, "n", least=1, most=_MOST_CHOICES) or 1,
        temperature=fields.number(given, "temperature", 1.0, most=_MOST_TEMPERATURE),
        top_k=fields.whole(given, "top_k", least=1, most=_MOST_TOP_K),
        top_p=fields.number(given, "top_p", 1.0, most=1.0, excludes_zero=True),
        seed=fields.whole(given, "seed", least=-SEED_RANGE, most=SEED_RANGE - 1),
        stop=_stop(given.get("stop")),
        num_alternatives=num_alternatives,
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream),
    )


def _include_usage(given: Any, stream: bool) -> bool:
    if given is None:
        return False
    name = "stream_options"
    if not isinstance(given, dict):
        raise malformed(f"{name} must be an object, got {fields.shown(given)}", name)
    if not stream:
        raise malformed(f"{name} needs stream: true; add it, or remove {name}", name)
    # Obfuscation pads a stream against eavesdroppers and does not change the text.
    for key in given.keys() - {"include_usage", "include_obfuscation"}:
        raise malformed(f"unknown field {name}.{fields.shown(key)}; remove it", name)
    return fields.flag(given, "include_usage")


def _stop(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list):
        raise malformed(
            f"stop must be text or a list of texts, got {fields.shown(given)}", "stop"
        )
    if len(stops) > MOST_STOPS:
        raise malformed(
            f"stop must have at most {MOST_STOPS} texts, got {len(stops)}", "stop"
        )
    for index, stop in enumerate(stops):
        name = f"stop[{index}]"
        if not fields.text(stop, name):
            raise malformed(f"{name} is empty and would end every answer", "stop")
        if len(stop) > _MOST_STOP_CHARS:
            raise malformed(
                f"{name} must have at most {_MOST_STOP_CHARS} characters, got "
                f"{len(stop)}",
                "stop",
            )
    return tuple(stops)


def _prompts(given: Any) -> tuple[Prompt, ...]:
    """Return the prompts from text, a list of texts, token ids, or a list of these."""
    if isinstance(given, list) and given and all(type(x) is int for x in given):
        return (_ids(given, "prompt"),)
    several = given if isinstance(given, list) else [given]
    if given is None or not several:
        raise malformed(
            "prompt must be text, a list of texts, token ids or a list of these, got "
            f"{fields.shown(given)}",
            "prompt",
        )
    if len(several) > _MOST_TEXT_PROMPTS:
        raise malformed(
            f"prompt must have at most {_MOST_TEXT_PROMPTS} prompts, got "
            f"{len(several)}",
            "prompt",
        )
    if not isinstance(given, list):
        return (_prompt(given, "prompt"),)
    return tuple(_prompt(each, f"prompt[{i}]") for i, each in enumerate(several))


def _prompt(given: Any, name: str) -> Prompt:
    if isinstance(given, list):
        return _ids(given, name)
    return fields.text(given, name)


def _ids(given: list[Any], name: str) -> tuple[int, ...]:
    for index, each in enumerate(given):
        if type(each) is not int or each < 0:
            raise malformed(
                f"{name}[{index}] must be a token id, a whole number at least 0, got "
                f"{fields.shown(each)}",
                "prompt",
            )
    return tuple(given)


def _messages(given: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(given, list) or not given:
        raise malformed(
            "messages must be a list of at least one message, got "
            f"{fields.shown(given)}",
            "messages",
        )
    return tuple(_message(each, f"messages[{i}]") for i, each in enumerate(given))


def _message(given: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise malformed(
            f"{name} must be an object with role and content, got "
            f"{fields.shown(given)}",
            "messages",
        )
    role = given.get("role")
    if role in ("tool", "function"):
        raise unsupported("messages", f"{name}.role {role} is not supported here")
    if role not in _ROLES:
        raise malformed(
            f"{name}.role must be one of {', '.join(_ROLES)}, got {fields.shown(role)}",
            "messages",
        )
    for key, value in given.items():
        if key not in ("role", "content", "name") and value is not None:
            raise unsupported(
                "messages",
                f"{name} has {fields.shown(key)}, which is not supported; remove it",
            )
    message = {"role": role, "content": _content(given.get("content"), name)}
    if given.get("name") is not None:
        message["name"] = fields.text(given["name"], f"{name}.name")
    return message


def _content(given: Any, name: str) -> str:
    """Return the text of a message; join its text parts."""
    if not isinstance(given, list):
        return fields.text(given, f"{name}.content")
    texts = []
    for index, part in enumerate(given):
        at = f"{name}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise malformed(
                f"{at} must be an object with a type, got {fields.shown(part)}",
                "messages",
            )
        if kind != "text":
            raise unsupported(
                "messages",
                f"{at} has type {fields.shown(kind)}; only text is supported",
            )
        texts.append(fields.text(part.get("text"), f"{at}.text"))
    return "".join(texts)

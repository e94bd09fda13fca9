"""Convert client requests to engine requests: token ids within the limits.

Input: a checked request, and the served model. Output: one engine request per answer,
or an ApiError that names the field, its value and the limit.
"""

import dataclasses
import secrets
from collections.abc import Callable, Sequence

import numpy as np

from mjax.data.tokenizers import Tokenizer
from mjax.generate.chat import ChatEncoder
from mjax.generate.requests import NUM_SEEDS, Request, Sampling
from mjax.generate.server import fields
from mjax.generate.server.errors import ApiError, malformed
from mjax.generate.server.limits import Limits
from mjax.generate.server.protocol import Chat, Completion, Options, Prompt
from mjax.generate.stops import check_stops

_DEFAULT_TOKENS = 16
"""Tokens of a completion without max_tokens; OpenAI's default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """Properties of the served model that requests depend on."""

    name: str
    """Model name that clients request."""
    created_s: int
    """Unix time at which the model was opened."""
    tokenizer: Tokenizer
    vocab_size: int
    """Token ids of prompts must be below this."""
    max_len: int
    """Maximum number of tokens of prompt and answer together."""
    num_slots: int
    """Answers generated concurrently."""
    limits: Limits
    encode_text: Callable[[str], Sequence[int]]
    """Converts a text to the token ids of its prompt; see `Opened.prompt_ids`."""
    encode_chat: ChatEncoder | None
    """Converts messages to token ids with the model's template; raises ValueError.
    None: the model has no template."""

    @property
    def capacity(self) -> int:
        """Maximum number of open answers, including waiting ones."""
        return self.num_slots + self.limits.queue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Engine requests of one HTTP request, in order of the prompts."""

    requests: tuple[Request, ...]
    echoes: tuple[str, ...]
    """Text to put before each answer: its prompt, or empty without echo."""
    num_prompt_tokens: int
    """Total tokens of the prompts; each prompt counts once."""


def check_model(asked: str | None, served: Served) -> None:
    """Refuse a request for a model that is not served.

    Raises:
      ApiError: 404.
    """
    if asked is not None and asked != served.name:
        raise ApiError(
            404,
            f"the model {asked[:100]!r} is not served here; this server has "
            f"{served.name!r}",
            param="model",
            code="model_not_found",
        )


def completion_job(asked: Completion, served: Served) -> Job:
    """Encode the prompts of a completion.

    Raises:
      ApiError: another model is requested, a stop text cannot occur, or a limit is
        exceeded.
    """
    check_model(asked.options.model, served)
    _check_room(len(asked.prompts), asked.options, served)
    encoded = [_encode(prompt, served) for prompt in asked.prompts]
    echoes = []
    for prompt, ids in zip(asked.prompts, encoded, strict=True):
        text = prompt if isinstance(prompt, str) else _decode(ids, served)
        echoes += [text if asked.echo else ""] * asked.options.num_choices
    return Job(
        requests=tuple(
            request
            for index, ids in enumerate(encoded)
            for request in _requests(
                ids, asked.options, served, _DEFAULT_TOKENS, index=index
            )
        ),
        echoes=tuple(echoes),
        num_prompt_tokens=sum(map(len, encoded)),
    )


def chat_job(asked: Chat, served: Served) -> Job:
    """Encode the messages of a chat.

    Raises:
      ApiError: another model is requested, the model has no template, the template
        refuses the messages, a stop text cannot occur, or a limit is exceeded.
    """
    check_model(asked.options.model, served)
    _check_room(1, asked.options, served)
    if served.encode_chat is None:
        raise malformed(
            f"the model {served.name!r} has no chat template, so it cannot make "
            "prompts from messages; send text to /v1/completions, or put a "
            "chat_template.jinja beside the tokenizer of the model",
            "messages",
            "no_chat_template",
        )
    try:
        ids = tuple(map(int, served.encode_chat(asked.messages)))
    except ValueError as error:
        raise malformed(
            f"messages: {error}",
            "messages",
            "chat_template",
        ) from None
    requests = _requests(ids, asked.options, served, served.limits.max_tokens)
    return Job(
        requests=requests,
        echoes=("",) * len(requests),
        num_prompt_tokens=len(ids),
    )


def _check_room(num_prompts: int, options: Options, served: Served) -> None:
    """Refuse more answers than the server's capacity."""
    asked = num_prompts * options.num_choices
    if asked > served.capacity:
        raise malformed(
            f"n times the number of prompts must be at most {served.capacity} (--slots "
            f"plus --queue of this server), got {asked}; send several requests",
            "n" if num_prompts == 1 else "prompt",
        )


def _encode(prompt: Prompt, served: Served) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(served.encode_text(prompt))
    largest = max(prompt, default=0)
    if largest >= served.vocab_size:
        shown = largest if largest < 1 << 63 else "a number of more than 63 bits"
        raise malformed(
            f"prompt: token ids must be below {served.vocab_size}, the size of the "
            f"vocabulary, got {shown}",
            "prompt",
        )
    return prompt


def _decode(ids: Sequence[int], served: Served) -> str:
    return served.tokenizer.decode(np.asarray(ids, np.int64))


def _requests(
    ids: tuple[int, ...],
    options: Options,
    served: Served,
    default_tokens: int,
    *,
    index: int = 0,
) -> tuple[Request, ...]:
    """Return the requests of a prompt; choice i of all prompts uses seed + i."""
    if not ids:
        raise malformed(
            "the prompt must have at least one token, got none; write some text",
            "prompt",
        )
    try:
        check_stops(served.tokenizer, options.stop)
    except ValueError as error:
        raise malformed(f"stop: {error}", "stop") from None
    seed = secrets.randbelow(NUM_SEEDS) if options.seed is None else options.seed
    first = seed + index * options.num_choices
    max_tokens = _num_tokens(len(ids), options, served, default_tokens)
    return tuple(
        Request(
            prompt=ids,
            sampling=Sampling(
                max_tokens=max_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=(first + choice) % NUM_SEEDS,
                stop=options.stop,
                logprobs=options.num_alternatives,
            ),
        )
        for choice in range(options.num_choices)
    )


def _num_tokens(
    num_prompt: int, options: Options, served: Served, default_tokens: int
) -> int:
    """Return the maximum tokens of an answer; a default is lowered until it fits."""
    room = served.max_len - num_prompt
    if room < 1:
        raise malformed(
            f"the prompt has {num_prompt} tokens, and prompt and answer together may "
            f"have {served.max_len} (--max-len of this server); shorten the prompt",
            "prompt",
            "context_length_exceeded",
        )
    most = served.limits.max_tokens
    if options.max_tokens is None:
        return min(default_tokens, most, room)
    if options.max_tokens > most:
        raise malformed(
            f"max_tokens must be at most {most} (--max-tokens of this server), got "
            f"{fields.shown(options.max_tokens)}",
            "max_tokens",
        )
    if options.max_tokens > room:
        raise malformed(
            f"max_tokens must be at most {room} after a prompt of {num_prompt} tokens "
            f"(--max-len {served.max_len} of this server), got {options.max_tokens}",
            "max_tokens",
            "context_length_exceeded",
        )
    return options.max_tokens

"""Chat in the terminal: messages from standard input, streamed answers.

Input: an opened model with a chat template, and flags. Output: the answers on stdout,
notes on stderr. One line is one message. For each answer the template renders all
turns again, as the server does with the messages of a request.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence

from mjax.cli import interrupts
from mjax.generate.chat import ChatEncoder, Message, encoder
from mjax.generate.engine import Engine
from mjax.generate.opened import Opened
from mjax.generate.options import GenerateFlags
from mjax.generate.requests import Request

RESET, QUIT = "/reset", "/quit"
_PROMPT = "> "


def chat(asked: GenerateFlags, opened: Opened, max_len: int) -> None:
    """Answer the messages of standard input until its end.

    Args:
      asked: flags, including the sampling options.
      opened: the model.
      max_len: maximum number of tokens of the conversation, including the next
        answer.
    Raises:
      ValueError: the model has no chat template, the template is broken or does not
        accept --system, or a message is not UTF-8.
    """
    encode = encoder(opened)
    if encode is None:
        raise ValueError(
            f"{opened.name} has no chat template, so --chat cannot make prompts from "
            "messages; put a chat_template.jinja beside the tokenizer of the model "
            "(the folder tokenizer of a work dir), or continue a text with --prompt"
        )
    first = _first(asked.system, encode)
    engine, turns, number = Engine(opened, slots=1, max_len=max_len), [*first], 0
    if sys.stdin.isatty():
        _say(f"{RESET} starts a new conversation; {QUIT} or Ctrl-D ends")
    for text in _messages():
        if text == QUIT:
            return
        if text == RESET:
            turns = [*first]
            _say("a new conversation")
            continue
        message = {"role": "user", "content": text}
        request = _request(asked, encode, [*turns, message], max_len, number)
        if request is not None:
            answer = _answer(engine, request, is_bounded=asked.tokens is not None)
            turns += [message, {"role": "assistant", "content": answer}]
            number += 1


def _first(system: str | None, encode: ChatEncoder) -> list[Message]:
    """Return the messages that begin each conversation.

    Raises:
      ValueError: the template refuses or ignores system messages.
    """
    user = {"role": "user", "content": "-"}
    alone = encode([user])
    if system is None:
        return []
    message = {"role": "system", "content": system}
    try:
        is_ignored = encode([message, user]) == alone
    except ValueError as error:
        raise ValueError(f"--system cannot be used: {error}; leave it out") from None
    if is_ignored:
        raise ValueError(
            "--system cannot be used: the model's chat template ignores system "
            "messages; write it into your first message"
        )
    return [message]


def _messages() -> Iterator[str]:
    """Yield the messages read, one per line, without empty lines.

    Raises:
      ValueError: a line is not UTF-8.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  `input` edits lines with it
    try:
        while line := _typed() if is_terminal else sys.stdin.readline():
            line.encode()  # an invalid byte may arrive as half a surrogate pair
            if text := line.strip():
                yield text
    except EOFError:
        print(flush=True)
    except UnicodeError as error:
        raise ValueError(f"a message must be UTF-8: {error}") from None


def _typed() -> str:
    """Return a line from the terminal; after Ctrl-C, `input` restores the settings."""
    with interrupts.raised():
        return input(_PROMPT) + "\n"


def _request(
    asked: GenerateFlags,
    encode: ChatEncoder,
    messages: Sequence[Message],
    max_len: int,
    number: int,
) -> Request | None:
    """Return the request of one turn; if refused, print the reason and return None."""
    try:
        prompt = tuple(encode(messages))
    except ValueError as error:
        _say(f"{error}; write another message, or {RESET}")
        return None
    room = max_len - len(prompt)
    if room < 1:
        _say(
            f"the conversation has {len(prompt)} tokens with this message, and the "
            f"model takes {max_len} including the answer: shorten the message, or "
            f"{RESET}"
        )
        return None
    sampling = asked.sampling(number, room=room)
    num = room if asked.tokens is None else min(asked.tokens, room)
    return Request(
        prompt=prompt, sampling=dataclasses.replace(sampling, max_tokens=num)
    )


def _answer(engine: Engine, request: Request, *, is_bounded: bool) -> str:
    """Print one answer while it is generated; return it."""
    engine.submit(request)
    text, finished = "", None
    while not engine.is_idle:
        for event in engine.step():
            print(event.text, end="", flush=True)
            text, finished = text + event.text, event.finished
    print(flush=True)
    room = engine.max_len - len(request.prompt)
    if finished == "length" and request.sampling.max_tokens == room:
        _say(
            f"the model takes {engine.max_len} tokens, and the conversation has used "
            f"all of them: {RESET}"
        )
    elif finished == "length" and is_bounded:
        _say(f"truncated after --tokens {request.sampling.max_tokens}")
    return text


def _say(text: str) -> None:
    print(f"generate: {text}", file=sys.stderr, flush=True)

"""Answers in the format of OpenAI's API, complete and streamed.

Input: events of the engine. Output: JSON objects. `Writer` has the ids and counts of
one answer; it touches no socket.
"""

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from mjax.generate.requests import Event
from mjax.generate.server.prompts import Job

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; OpenAI's value."""

type Kind = Literal["completion", "chat"]


@dataclasses.dataclass(kw_only=True)
class _Choice:
    """The generated part of one choice."""

    text: str
    num_tokens: int = 0
    finish_reason: str | None = None
    entries: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Log-probabilities, one entry per token."""


class Writer:
    """Converts the events of one HTTP request to its answer."""

    def __init__(
        self,
        kind: Kind,
        job: Job,
        *,
        model: str,
        decode: Callable[[int], str],
        with_logprobs: bool,
        include_usage: bool,
    ) -> None:
        """Start an answer.

        Args:
          kind: which of the two endpoints answers.
          job: requests of the engine.
          model: name in the answer.
          decode: returns the text of a token.
          with_logprobs: list tokens with their log-probabilities.
          include_usage: count tokens at the end of a stream.
        """
        self._kind, self._job, self._decode = kind, job, decode
        self._with_logprobs, self._include_usage = with_logprobs, include_usage
        self._choices = [_Choice(text=echo) for echo in job.echoes]
        is_chat = kind == "chat"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._whole = "chat.completion" if is_chat else "text_completion"
        self._piece = "chat.completion.chunk" if is_chat else "text_completion"

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far."""
        return sum(choice.num_tokens for choice in self._choices)

    def add(self, events: Sequence[tuple[int, Event]]) -> None:
        """Add pairs of (index of the choice, event) to the complete answer."""
        for index, event in events:
            choice = self._choices[index]
            choice.entries += self._entries(choice, event)
            _advance(choice, event)

    def whole(self) -> bytes:
        """Return the answer after its last event."""
        choices = [
            {
                "index": index,
                **self._content(choice.text, "message"),
                "logprobs": self._logprobs(choice.entries),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return msgspec.json.encode(
            self._head
            | {"object": self._whole, "choices": choices, "usage": self.usage()}
        )

    def first(self) -> bytes:
        """Return the first chunks of a stream: chat roles or the echoed prompts."""
        if self._kind == "chat":
            role = {"delta": {"role": "assistant", "content": ""}}
            return b"".join(
                self._chunk(index, role) for index in range(len(self._choices))
            )
        return b"".join(
            self._chunk(index, {"text": choice.text})
            for index, choice in enumerate(self._choices)
            if choice.text
        )

    def pieces(self, events: Sequence[tuple[int, Event]]) -> bytes:
        """Return the chunks of new events, at most one per choice.

        A choice has a chunk if it has new text or log-probabilities, or ends.

        Args:
          events: pairs of (index of the choice, event).
        """
        chunks = []
        for index in dict.fromkeys(index for index, _ in events):
            choice = self._choices[index]
            entries: list[dict[str, Any]] = []
            before = len(choice.text)
            for event in (event for i, event in events if i == index):
                entries += self._entries(choice, event)
                _advance(choice, event)
            text = choice.text[before:]
            if text or entries or choice.finish_reason:
                content = self._content(text, "delta")
                chunks.append(
                    self._chunk(index, content, entries, choice.finish_reason)
                )
        return b"".join(chunks)

    def last(self) -> bytes:
        """Return the end of a stream: the token counts if requested, then `[DONE]`."""
        end = b"data: [DONE]\n\n"
        if not self._include_usage:
            return end
        usage = {"object": self._piece, "choices": [], "usage": self.usage()}
        return _event(self._head | usage) + end

    def usage(self) -> dict[str, int]:
        """Return the token counts."""
        prompt, answer = self._job.num_prompt_tokens, self.num_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        entries: Sequence[dict[str, Any]] = (),
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            **content,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": finish_reason,
        }
        chunk = self._head | {"object": self._piece, "choices": [choice]}
        return _event(chunk | ({"usage": None} if self._include_usage else {}))

    def _content(self, text: str, name: str) -> dict[str, Any]:
        if self._kind == "completion":
            return {"text": text}
        role = {"role": "assistant"} if name == "message" else {}
        return {name: role | {"content": text}}

    def _entries(self, choice: _Choice, event: Event) -> list[dict[str, Any]]:
        """Return the entry of an event's token; empty without log-probabilities."""
        if not self._with_logprobs or event.token is None or event.logprob is None:
            return []
        return [
            {
                **self._token(event.token, event.logprob),
                "offset": len(choice.text),
                "top": [self._token(token, value) for token, value in event.top],
            }
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode(token)
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB)}

    def _logprobs(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        if self._kind == "chat":
            return {
                "content": [
                    {
                        **_with_bytes(entry),
                        "top_logprobs": [_with_bytes(each) for each in entry["top"]],
                    }
                    for entry in entries
                ]
            }
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {each["token"]: each["logprob"] for each in entry["top"]}
                for entry in entries
            ],
            "text_offset": [entry["offset"] for entry in entries],
        }


def error_event(body: dict[str, Any]) -> bytes:
    """Return an error as the end of a started stream."""
    return _event(body)


def _advance(choice: _Choice, event: Event) -> None:
    choice.text += event.text
    choice.num_tokens += event.token is not None
    choice.finish_reason = event.finished


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with the token's bytes; null if it is part of a character."""
    text = entry["token"]
    known = None if text.startswith("token_id:") else list(text.encode())
    return {"token": text, "logprob": entry["logprob"], "bytes": known}


def _event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event (WHATWG HTML, 9.2)."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"

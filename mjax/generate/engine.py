"""Continuous batching: a queue of requests, and slots that advance step by step.

Input: requests. Output: events, one per token. A request waits until a slot is free.
One program then prefills its prompt, and another draws the next tokens of all slots.
Shapes are fixed, so programs are compiled once: for the number of slots, and for each
power of two that prompts are padded to. The number of steps per dispatch depends on
measured time; the drawn tokens do not depend on it.

An answer depends on the model, the prompt and the sampling, and not on the slot or on
other requests.

Source: iteration-level scheduling, Yu et al. 2022 (Orca), OSDI, section 3.1.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mjax.generate.decode import MOST_STEPS, Prompt, State, make_decoder
from mjax.generate.opened import Opened
from mjax.generate.requests import Event, Finished, Request, Sampling
from mjax.generate.sampling import Draw, Drawn
from mjax.generate.stops import TextOfTokens, Words
from mjax.mesh.axes import DP, TP

_SHORTEST_PROMPT = 16
"""Prompts are padded to this number of tokens times a power of two. Fewer lengths mean
fewer programs to compile."""
_STEPS_WHILE_WAITING = 8
"""Maximum number of steps of a dispatch while requests wait, because the slot of an
ended text stays empty until the dispatch is done. Not measured."""
_LAST_STEPS = 4
"""Maximum number of steps of the dispatch in which a request ends. No dispatch is
queued after it, so the devices wait while the host decodes its tokens. It bounds the
cost of one more dispatch."""
_BURST_S = 0.05
"""Target seconds of one dispatch if a step takes less. Twenty pieces of text per second
look like single tokens, and with a fast model many steps share the cost of a
dispatch."""


@dataclasses.dataclass(kw_only=True)
class _Running:
    """A request in a slot."""

    id: int
    request: Request
    text: TextOfTokens
    num_tokens: int = 0


class _Token(NamedTuple):
    """One drawn token, on the host."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class _Drawing(NamedTuple):
    """A dispatch whose tokens the devices are drawing."""

    drawn: Drawn
    """Draws [MOST_STEPS, slots]; only the first num_steps rows are used."""
    num_steps: int
    with_logprobs: bool
    slots: dict[int, _Running]
    """Request of each slot at the dispatch. When the tokens are read, the slot may
    already have another request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The complete answer to a request."""

    tokens: tuple[int, ...]
    """All tokens, including the one that ended the answer."""
    text: str
    logprobs: tuple[float, ...]
    """Log-probabilities of the tokens; empty if not requested."""
    finished: Finished


class Engine:
    """Continues texts with one model."""

    def __init__(self, opened: Opened, *, slots: int, max_len: int) -> None:
        """Create empty slots; the programs are compiled when they are first used.

        Args:
          opened: the model.
          slots: number of concurrent texts, rounded up to a multiple of dp x tp.
          max_len: maximum number of tokens of a prompt and its answer together.
        Raises:
          ValueError: a number is below 1, or max_len exceeds the learned positions.
        """
        for name, number in (("slots", slots), ("max_len", max_len)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        rows = opened.model.learned_positions
        if rows is not None and max_len > rows:
            raise ValueError(
                f"max_len must be at most {rows}, the number of learned positions of "
                f"the model, got {max_len}"
            )
        self._opened, self._words = opened, Words(opened.tokenizer)
        sizes = opened.mesh.shape
        self._tp = sizes[TP]
        multiple = self._tp * int(np.prod([sizes[axis] for axis in DP]))
        self.num_slots = -(-slots // multiple) * multiple
        self.max_len = max_len
        self._decoder, self._weights = make_decoder(
            opened, num_slots=self.num_slots, max_len=max_len
        )
        self._state: State = self._decoder.new_state()
        self._read = jax.jit(self._decoder.read, donate_argnums=1)
        self._advance = jax.jit(self._decoder.advance, donate_argnums=1)
        self._ids = itertools.count()
        self._waiting: collections.OrderedDict[int, Request] = collections.OrderedDict()
        self._running: dict[int, _Running] = {}  # by slot
        self._drawing: _Drawing | None = None
        self._read_s: float | None = None  # time at which the last tokens arrived
        self._steps_at_once = 1

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests with a slot."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    def check(self, request: Request) -> None:
        """Refuse a request that cannot be answered.

        Raises:
          ValueError: the prompt is empty, has an unknown token or is too long, or too
            many tokens are requested.
        """
        prompt, vocab_size = request.prompt, self._opened.model.vocab_size
        if not prompt:
            raise ValueError(
                "the prompt is empty; give at least one token, such as the one that "
                "ends a document"
            )
        if not all(0 <= token < vocab_size for token in prompt):
            wrong = next(t for t in prompt if not 0 <= t < vocab_size)
            raise ValueError(
                f"a token of the prompt must be from 0 to {vocab_size - 1}, got {wrong}"
            )
        if len(prompt) >= self.max_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, and the model takes "
                f"{self.max_len} including the answer; shorten it to at most "
                f"{self.max_len - 1}"
            )
        room = self.max_len - len(prompt)
        if request.sampling.max_tokens > room:
            raise ValueError(
                f"the model takes {self.max_len} tokens and the prompt has "
                f"{len(prompt)}: at most {room} can follow, got "
                f"{request.sampling.max_tokens}; request fewer, or shorten the prompt"
            )

    def submit(self, request: Request) -> int:
        """Queue a request.

        Returns:
          id of the request, used in its events.
        Raises:
          ValueError: as `check`.
        """
        self.check(request)
        request_id = next(self._ids)
        self._waiting[request_id] = request
        return request_id

    def cancel(self, request_id: int) -> bool:
        """Free the slot of a request or remove it from the queue; no event follows.

        Returns:
          whether it had a slot.
        """
        self._waiting.pop(request_id, None)
        for slot, running in self._running.items():
            if running.id == request_id:
                del self._running[slot]
                return True
        return False

    def step(self) -> list[Event]:
        """Prefill prompts into free slots, then draw the next tokens of all slots.

        Returns:
          events, in order for each request.
        """
        events: list[Event] = []
        free = (slot for slot in range(self.num_slots) if slot not in self._running)
        for slot in list(free)[: len(self._waiting)]:
            request_id, request = self._waiting.popitem(last=False)
            events.append(self._admit(slot, request_id, request))
        if self._running:
            events += self._draw()
        return events

    def _admit(self, slot: int, request_id: int, request: Request) -> Event:
        """Prefill a prompt into a slot; return the event of the first token."""
        sampling, length = request.sampling, len(request.prompt)
        tokens = np.zeros((1, _padded(length, self._tp, self.max_len)), np.int32)
        tokens[0, :length] = request.prompt
        self._state, drawn = self._read(
            self._weights,
            self._state,
            Prompt(
                tokens=_small(tokens, np.int32),
                length=_small(length, np.int32),
                slot=_small(slot, np.int32),
                how=_how(sampling, self._decoder.model.padded_vocab),
                with_logprobs=_small(sampling.logprobs is not None, np.bool_),
            ),
        )
        text = TextOfTokens(self._words, sampling.stop, before=request.prompt)
        running = _Running(id=request_id, request=request, text=text)
        self._running[slot] = running
        (token,) = _on_host(drawn, with_logprobs=sampling.logprobs is not None)
        return self._event(slot, running, token)

    def _draw(self) -> Iterator[Event]:
        """Draw tokens of all slots; yield their events, up to the end of each answer.

        The next dispatch starts before the tokens of this one are read, so that the
        devices compute while the host decodes text.
        """
        ahead = self._drawing
        drawing = ahead or self._dispatch(None)
        assert drawing is not None  # every running request has a token outstanding
        self._drawing = self._dispatch(drawing)
        drawn = _on_host(drawing.drawn, with_logprobs=drawing.with_logprobs)
        self._set_pace(None if ahead is None else ahead.num_steps)
        for step in range(drawing.num_steps):
            for slot, running in drawing.slots.items():
                if self._running.get(slot) is running:
                    token = drawn[step * self.num_slots + slot]
                    yield self._event(slot, running, token)

    def _set_pace(self, num_steps: int | None) -> None:
        """Choose the steps of the next dispatch from the time of the last dispatch.

        Args:
          num_steps: steps taken since the previous tokens arrived; None if the devices
            have been idle in between.
        """
        now_s = time.perf_counter()
        if num_steps is not None and self._read_s is not None:
            step_s = (now_s - self._read_s) / num_steps
            self._steps_at_once = min(max(int(_BURST_S / step_s), 1), MOST_STEPS)
        self._read_s = now_s

    def _dispatch(self, before: _Drawing | None) -> _Drawing | None:
        """Queue and return the next dispatch; None if a request ends in `before`."""

        def left(slot: int, running: _Running) -> int:
            is_drawn = before is not None and before.slots.get(slot) is running
            num = running.num_tokens + (before.num_steps if before and is_drawn else 0)
            return running.request.sampling.max_tokens - num

        num_left = min(left(*item) for item in self._running.items())
        if num_left < 1:
            return None
        samplings = [r.request.sampling for r in self._running.values()]
        with_logprobs = any(s.logprobs is not None for s in samplings)
        most = _STEPS_WHILE_WAITING if self._waiting else MOST_STEPS
        num_steps = min(num_left, self._steps_at_once, most)
        if num_steps > num_left - _LAST_STEPS > 0:
            num_steps = num_left - _LAST_STEPS
        self._state, drawn = self._advance(
            self._weights,
            self._state,
            _small(num_steps, np.int32),
            _small(with_logprobs, np.bool_),
        )
        return _Drawing(
            drawn=drawn,
            num_steps=num_steps,
            with_logprobs=with_logprobs,
            slots=dict(self._running),
        )

    def _event(self, slot: int, running: _Running, drawn: _Token) -> Event:
        """Return the event of a drawn token; free the slot if the answer ends."""
        sampling, finished = running.request.sampling, None
        running.num_tokens += 1
        if drawn.token in self._opened.end_ids:
            text, _ = running.text.end()
            finished: Finished | None = "stop"
        else:
            text, stopped = running.text.add(drawn.token)
            if not stopped and running.num_tokens == sampling.max_tokens:
                rest, stopped = running.text.end()
                text, finished = text + rest, "length"
            finished = "stop" if stopped else finished
        if finished is not None:
            del self._running[slot]
        num_top = sampling.logprobs
        return Event(
            request_id=running.id,
            token=drawn.token,
            text=text,
            logprob=None if num_top is None else drawn.logprob,
            top=() if num_top is None else drawn.top[:num_top],
            finished=finished,
        )


def answer_all(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Answer requests in order, as many at a time as the engine has slots.

    Raises:
      ValueError: as `Engine.check`, before anything is computed.
    """
    for request in requests:
        engine.check(request)
    ids = [engine.submit(request) for request in requests]
    events: dict[int, list[Event]] = {request_id: [] for request_id in ids}
    while not engine.is_idle:
        for event in engine.step():
            events[event.request_id].append(event)
    return [answer_of(events[request_id]) for request_id in ids]


def answer_of(events: Sequence[Event]) -> Answer:
    """Join the events of one request to an answer."""
    finished = events[-1].finished
    assert finished is not None
    tokens = [event.token for event in events if event.token is not None]
    logprobs = [event.logprob for event in events if event.logprob is not None]
    return Answer(
        tokens=tuple(tokens),
        text="".join(event.text for event in events),
        logprobs=tuple(logprobs),
        finished=finished,
    )


def _on_host(drawn: Drawn, *, with_logprobs: bool) -> list[_Token]:
    """Wait for drawn tokens; return them in order of the steps, then of the slots."""
    if not with_logprobs:
        return [_Token(token, 0.0, ()) for token in np.ravel(drawn.token).tolist()]
    host = jax.device_get(drawn)
    num = host.token.size
    tokens = host.top_tokens.reshape(num, -1).tolist()
    logprobs = host.top_logprobs.reshape(num, -1).tolist()
    tops = [
        tuple(zip(*each, strict=True)) for each in zip(tokens, logprobs, strict=True)
    ]
    columns = host.token.ravel().tolist(), host.logprob.ravel().tolist(), tops
    return [_Token(*row) for row in zip(*columns, strict=True)]


def _padded(length: int, tp: int, max_len: int) -> int:
    """Return the padded length of a prompt, one of few different numbers.

    The length is rounded up to the shortest length times a power of two, limited to
    the longest text, and rounded up to a multiple of tp.
    """
    double = max(_SHORTEST_PROMPT, 1 << (length - 1).bit_length())
    return -(-min(double, max_len) // tp) * tp


def _how(sampling: Sampling, vocab: int) -> Draw:
    """Return the sampling options of one slot, as arrays [1]."""
    top_k = vocab if sampling.top_k is None else min(sampling.top_k, vocab)
    return Draw(
        temperature=_small([sampling.temperature], np.float32),
        top_k=_small([top_k], np.int32),
        top_p=_small([sampling.top_p], np.float32),
        seed=_small([sampling.seed], np.uint32),
    )


def _small(values: Any, dtype: Any) -> Any:
    """Return a host array; the call of a program transfers it to the devices.

    Making it on a device would need another program, which takes longer.
    """
    return np.asarray(values, dtype)

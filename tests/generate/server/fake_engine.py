"""An engine without a model: each token is a letter determined by the request."""

import dataclasses
import hashlib
import threading

from mjax.generate.requests import Event, Request


@dataclasses.dataclass(kw_only=True)
class _Running:
    request: Request
    text: str = ""


def letter(request: Request, position: int) -> int:
    """Return the token at a position of an answer, independent of other requests."""
    drawn = f"{request.prompt} {request.sampling.seed} {position}".encode()
    return 97 + hashlib.sha256(drawn).digest()[0] % 26


def whole_text(request: Request) -> str:
    """Return the text of a complete answer."""
    sampling = request.sampling
    text = ""
    for position in range(sampling.max_tokens):
        text += chr(letter(request, position))
        for stop in sampling.stop:
            if stop in text:
                return text[: text.index(stop)]
    return text


class FakeEngine:
    """Answers with `whole_text`, one letter per step, in a few slots."""

    def __init__(self, *, slots: int = 4, max_len: int = 64) -> None:
        self.slots, self.max_len = slots, max_len
        self.may_step = threading.Event()
        self.may_step.set()
        self.fails_in: int | None = None
        """Steps after which the engine raises; None means never."""
        self.cancelled: list[int] = []
        self.submitted: list[Request] = []
        self.most_running = 0
        self._waiting: dict[int, _Running] = {}
        self._running: dict[int, _Running] = {}

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check(self, request: Request) -> None:
        if len(request.prompt) + request.sampling.max_tokens > self.max_len:
            raise ValueError("the prompt is too long")

    def submit(self, request: Request) -> int:
        self.submitted.append(request)
        self._waiting[len(self.submitted)] = _Running(request=request)
        return len(self.submitted)

    def cancel(self, request_id: int) -> bool:
        self.cancelled.append(request_id)
        self._waiting.pop(request_id, None)
        return self._running.pop(request_id, None) is not None

    def step(self) -> list[Event]:
        assert self.may_step.wait(30)
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise RuntimeError("the device is gone")
        while self._waiting and len(self._running) < self.slots:
            first = next(iter(self._waiting))
            self._running[first] = self._waiting.pop(first)
        self.most_running = max(self.most_running, len(self._running))
        return [self._advance(i, r) for i, r in list(self._running.items())]

    def _advance(self, request_id: int, running: _Running) -> Event:
        sampling = running.request.sampling
        token = letter(running.request, len(running.text))
        running.text += chr(token)
        finished = None
        if any(stop in running.text for stop in sampling.stop):
            finished = "stop"
        elif len(running.text) == sampling.max_tokens:
            finished = "length"
        if finished:
            del self._running[request_id]
        # Earlier events have shown the beginning of any stop text of several letters.
        listed = sampling.logprobs is not None
        top = tuple((token + i, -1.0 - i) for i in range(sampling.logprobs or 0))
        return Event(
            request_id=request_id,
            token=token,
            text="" if finished == "stop" else chr(token),
            logprob=-1.0 if listed else None,
            top=top,
            finished=finished,
        )

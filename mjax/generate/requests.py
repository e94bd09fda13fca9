"""What is asked of a model, and what comes back; no JAX, no model.

Enters: tokens of a prompt, and how to continue them. Leaves: a checked `Request`, and
the `Event`s that answer it, one a token.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

MAX_LOGPROBS = 20
"""Most alternatives with their log-probabilities a token; as OpenAI's chat API has it
(platform.openai.com/docs/api-reference/chat, top_logprobs)."""

Finished = Literal["stop", "length", "cancelled"]
"""Why an answer ended: its end or a stop text, max_tokens, or the caller."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn, and when to stop."""

    max_tokens: int
    """Tokens to draw at most."""
    temperature: float = 1.0
    """Logits are divided by this; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from this many likeliest tokens; None is all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens with this probability together."""
    seed: int = 0
    """A draw depends on it and on the position alone."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these texts."""
    logprobs: int | None = None
    """Likeliest tokens to report with each token; None reports no log-probability."""

    def __post_init__(self) -> None:
        """Refuse values that no draw can use.

        Raises:
          ValueError: a value is out of range.
        """
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                "temperature must be finite and at least 0, got "
                f"{self.temperature}; 0 takes the likeliest token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k must be at least 1, got {self.top_k}; leave it out to draw "
                "from all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1, got {self.top_p}; 1 draws from "
                "all tokens"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to {2**32 - 1}, got {self.seed}")
        if "" in self.stop:
            raise ValueError("a stop text must not be empty; leave it out")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(
                f"logprobs must be from 0 to {MAX_LOGPROBS}, got {self.logprobs}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to be continued."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: Sampling


class Event(NamedTuple):
    """A token of an answer, or its end."""

    request_id: int
    token: int | None
    """None: the answer ended without one more."""
    text: str
    """What can be shown now: whole characters, nothing that may begin a stop text."""
    logprob: float | None
    """Of the token, in the distribution of the model: before temperature and cuts."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens with their log-probabilities, the likeliest first."""
    finished: Finished | None
    """None: more is to come."""

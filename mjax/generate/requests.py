"""Requests to a model and events of the answers. Imports no JAX and no model.

Input: tokens of a prompt, and sampling options. Output: a checked `Request`, and the
`Event`s of its answer, one per token.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

MAX_LOGPROBS = 20
"""Maximum number of alternatives per token, as in OpenAI's chat API
(platform.openai.com/docs/api-reference/chat, top_logprobs)."""

NUM_SEEDS = 1 << 32

Finished = Literal["stop", "length", "cancelled"]
"""Why an answer ended: an end token or stop text, max_tokens, or the caller."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options and stop conditions."""

    max_tokens: int
    """Maximum number of tokens to draw."""
    temperature: float = 1.0
    """Logits are divided by this; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens; None for all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens with at least this total probability."""
    seed: int = 0
    """Seed of the draws; a draw depends only on it, the position and the logits."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these texts."""
    logprobs: int | None = None
    """Number of the likeliest tokens to report per token; None for no
    log-probabilities."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be used.

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
        if not 0 <= self.seed < NUM_SEEDS:
            raise ValueError(f"seed must be from 0 to {NUM_SEEDS - 1}, got {self.seed}")
        if "" in self.stop:
            raise ValueError("a stop text must not be empty; leave it out")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(
                f"logprobs must be from 0 to {MAX_LOGPROBS}, got {self.logprobs}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: Sampling


class Event(NamedTuple):
    """A token of an answer, or its end."""

    request_id: int
    token: int | None
    """None if the answer ended without another token."""
    text: str
    """Text that can be shown now: complete characters that cannot begin a stop text."""
    logprob: float | None
    """Log-probability of the token under the model, before temperature and cuts."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens with their log-probabilities, the likeliest first."""
    finished: Finished | None
    """Why the answer ended; None if more events follow."""

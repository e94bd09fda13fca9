"""Limits of the server per request, and of waiting requests.

Input: flags. Output: a checked config.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on memory and time; requests beyond them are refused."""

    max_tokens: int = 1024
    """Maximum number of tokens of an answer."""
    queue: int = 64
    """Maximum number of waiting answers; further requests get status 429."""
    max_body_bytes: int = 1 << 20
    """Maximum size of a request's body in bytes."""
    body_s: float = 30.0
    """Seconds within which the body of a request must arrive."""
    request_s: float = 600.0
    """Seconds from acceptance to the end of an answer, including waiting."""
    grace_s: float = 30.0
    """Seconds that accepted requests have left after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("queue", 0), ("max_body_bytes", 1024)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{_flag(name)} must be at least {least}, got {value}")
        for name in ("body_s", "request_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{_flag(name)} must be a number above 0, got {value}")
        if not math.isfinite(self.grace_s) or self.grace_s < 0:
            raise ValueError(
                f"--grace-s must be a number from 0 on, got {self.grace_s}"
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

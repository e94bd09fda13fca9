"""Counters of the server in Prometheus format.

Input: outcomes of requests. Output: text (Prometheus exposition format 0.0.4).
"""

import bisect
import itertools
from collections import Counter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histograms. Two per decade,
around the usual seconds of an answer."""


class Histogram:
    """Histogram of durations."""

    def __init__(self, name: str, help: str) -> None:
        """Start without durations."""
        self._name, self._help = name, help
        self._counts = [0] * (len(_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect.bisect_left(_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def lines(self) -> list[str]:
        """Return the lines of the histogram."""
        lines = [f"# HELP {self._name} {self._help}", f"# TYPE {self._name} histogram"]
        ends = [*map(str, _BUCKETS_S), "+Inf"]
        for end, count in zip(ends, itertools.accumulate(self._counts), strict=True):
            lines.append(f'{self._name}_bucket{{le="{end}"}} {count}')
        lines.append(f"{self._name}_sum {self._sum_s:.6f}")
        lines.append(f"{self._name}_count {sum(self._counts)}")
        return lines


class Metrics:
    """Counters since the start of the server. Used in the event loop only."""

    def __init__(self) -> None:
        """Start at zero."""
        self.answers: Counter[tuple[str, int]] = Counter()
        """Answers by path and status; 499: the client disconnected."""
        self.num_prompt_tokens = self.num_tokens = 0
        self.request_s = Histogram(
            "mjax_request_seconds", "From acceptance to the end of the answer."
        )
        self.first_token_s = Histogram(
            "mjax_first_token_seconds", "From acceptance to the first token."
        )

    def text(self, gauges: dict[str, int], counts: dict[str, int]) -> str:
        """Return all counters as text.

        Args:
          gauges: current values by name.
          counts: the fields of `scheduler.Counts`, by name.
        """
        lines = ["# TYPE mjax_answers_total counter"]
        for (path, status), count in sorted(self.answers.items()):
            labels = f'path="{path}",status="{status}"'
            lines.append(f"mjax_answers_total{{{labels}}} {count}")
        counters = {
            "mjax_prompt_tokens_total": self.num_prompt_tokens,
            "mjax_generated_tokens_total": self.num_tokens,
        } | {f"mjax_requests_{name}_total": count for name, count in counts.items()}
        for name, value in counters.items():
            lines += [f"# TYPE {name} counter", f"{name} {value}"]
        for name, value in gauges.items():
            lines += [f"# TYPE mjax_{name} gauge", f"mjax_{name} {value}"]
        lines += self.request_s.lines() + self.first_token_s.lines()
        return "\n".join(lines) + "\n"

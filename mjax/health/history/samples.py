"""Convert samples of hosts from JSON lines to tables.

Input: lines, one object for each host and sample: `{"host": "gpu001", "sample": 12,
"step_s": 1.93, "gpu_temperature_c": 61, ...}`. `sample` is the step, or a time in
nanoseconds, and orders the samples of all hosts. Every other number is a statistic.
Output: [hosts, samples] for each statistic, NaN where a host has no sample.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mjax import checked_json

STEP = "step_s"
_KEYS = ("host", "sample")
MAX_LINE_BYTES = 2**20
"""Maximum length of a line. A line has tens of numbers."""
MAX_VALUES = 50_000_000
"""Maximum number of values of all tables, 400 MB. That many values are 500 hosts, 5,000
samples and 20 statistics."""


def read(
    lines: Iterable[bytes], source: str
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the statistics and the step times.

    Args:
      lines: the lines, with their line ends.
      source: name of the lines in messages.
    Returns:
      a map from names to [hosts, samples], and step_s of the same shape.
    Raises:
      ValueError: a line is not such an object or is unterminated, a host has the same
        sample twice, or no line has step_s.
    """
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for number, text in enumerate(lines, 1):
        place = f"{source}:{number}"
        if not text.endswith(b"\n"):
            raise ValueError(
                f"{place} does not end with a newline: the file was truncated"
            )
        try:
            host, sample, values = _row(text)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if (host, sample) in rows:
            raise ValueError(f"{place}: a second sample {sample} of {host}")
        rows[host, sample] = values
    tables = _tables(rows, source)
    return tables, tables.pop(STEP)


def _tables(
    rows: Mapping[tuple[str, int], Mapping[str, float]], source: str
) -> dict[str, np.ndarray]:
    """Return the values of each statistic as a table, [hosts, samples], by name.

    Raises:
      ValueError: no row has step_s, or there are too many values.
    """
    names = sorted({name for values in rows.values() for name in values})
    if STEP not in names:
        raise ValueError(f"{source} has no {STEP}, to compare statistics with")
    hosts = sorted({host for host, _ in rows})
    samples = sorted({sample for _, sample in rows})
    if len(hosts) * len(samples) * len(names) > MAX_VALUES:
        raise ValueError(
            f"{source} makes {len(names)} tables of {len(hosts)} hosts and "
            f"{len(samples)} samples, more than {MAX_VALUES} values; take fewer"
        )
    host_index = {host: index for index, host in enumerate(hosts)}
    sample_index = {sample: index for index, sample in enumerate(samples)}
    tables = {name: np.full((len(hosts), len(samples)), np.nan) for name in names}
    for (host, sample), values in rows.items():
        for name, value in values.items():
            tables[name][host_index[host], sample_index[sample]] = value
    return tables


def _row(text: bytes) -> tuple[str, int, dict[str, float]]:
    """Return the host, the sample, and the statistics by name of a line."""
    fields = checked_json.read(text, dict[str, Any])
    host = checked_json.check(fields.get("host"), str, "host")
    sample = checked_json.check(fields.get("sample"), int, "sample")
    values = {
        name: checked_json.check(value, float, name)
        for name, value in fields.items()
        if name not in _KEYS and value is not None
    }
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}; leave it out")
    return host, sample, values

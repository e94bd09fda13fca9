"""The verdict of the page follows from the figures."""

import pytest

from mjax.data.config import DataConfig
from scripts.loader_case import Case, Found
from scripts.loader_ways import verdict


def found(tokens_per_s: float, cpu_s: float, fetched_mb: float) -> Found:
    return Found(
        tokens_per_s=tokens_per_s,
        cpu_s=cpu_s,
        memory_mb=1.0,
        start_s=1.0,
        fetched_mb=fetched_mb,
        checksums=(),
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokens_per_s", ("per-process", "per-process 1.50x")),
        ("cpu_s", ("reader", "reader 2.00x")),
        ("memory_mb", ("equal", "equal")),
        ("fetched_mb", ("Grain", "Grain 20.00x")),
    ],
)
def test_the_reader_is_compared_with_the_best_of_the_others(name, expected):
    ways = {
        "reader": found(2e6, 1.0, 20.0),
        "per-process": found(3e6, 3.0, 5.0),
        "Grain": found(1e6, 2.0, 0.0),
    }
    assert verdict(ways, name) == expected


@pytest.mark.parametrize(("pattern", "num_wanted"), [("disjoint", 1), ("same", 4)])
def test_each_row_is_wanted_by_one_process_or_by_all(pattern, num_wanted):
    case = Case("reader", "warm", pattern, 4, 1.0, DataConfig())
    wanted = [row for index in range(4) for row in range(*case.block(index))]
    assert sorted(wanted) == sorted([*range(case.batch_size)] * num_wanted)

"""The measurement of the mirror counts what it says, and would notice a fault."""

import dataclasses

import pytest

from scripts.data import data_mirror, mirror_faults
from scripts.data.data_mirror import HOSTS, Found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    folder = tmp_path_factory.mktemp("mirror")
    return data_mirror.measure("reading", folder, 44 * 4096 - 5, 4096)


def test_a_small_case_kills_a_real_process_and_counts_every_byte(found):
    assert data_mirror.problems(found) == []
    assert found.num_reads == 3 * -(-(44 * 4096 - 5) // 1228)
    assert sum(found.before.values()) == 44 * 4096 - 5
    assert sum(found.kept.values()) == 3 * (44 * 4096 - 5 + 44 * 32)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"num_failed": 1}, "1 reads failed"),
        ({"num_wrong": 2}, "2 hosts read other content"),
        ({"most_reads": 2}, "remote bytes were read again"),
        ({"before": dict(zip(HOSTS, (112, 96, 96, 96), strict=True))}, "remote"),
        ({"kept": dict(zip(HOSTS, (112, 96, 96, 96), strict=True))}, "kept"),
    ],
)
def test_a_fault_is_a_problem(found, change, wanted):
    [problem] = data_mirror.problems(dataclasses.replace(found, **change))
    assert wanted in problem


@pytest.mark.parametrize("place", data_mirror.PLACEMENTS.values())
def test_each_placement_gives_each_block_three_hosts(place):
    table = place([f"block {i}" for i in range(20)])
    assert all(len({*hosts}) == 3 == len(hosts) for hosts in table.values())


def test_the_mirror_alone_stays_within_the_bound():
    worst = {row[0]: row[5].rstrip("%") for row in data_mirror.placement_rows(40, 5)}
    within = [name for name, share in worst.items() if float(share) <= 10]
    assert within == ["mirror"]


def test_a_planted_fault_fails_no_read():
    name = "a host sends half of each block"
    shown = mirror_faults.measure(name)
    assert mirror_faults.problems(name, shown) == []
    assert shown.num_reads == 3 * -(-mirror_faults.NUM_BYTES // 78643)
    slow = dataclasses.replace(shown, num_failed=1, num_wrong=2, slowest_s=61.0)
    wanted = ["1 reads failed", "2 hosts read other content", "a read took 61 s"]
    assert mirror_faults.problems(name, slow) == [f"{name}: {what}" for what in wanted]
    silent = dataclasses.replace(shown, num_failed=4, error="failed")
    words = f"{mirror_faults.LOST}: the error says 'failed'"
    assert mirror_faults.problems(mirror_faults.LOST, silent) == [words]

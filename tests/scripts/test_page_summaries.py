"""Summaries that pages of evidence show in the place of their rows."""

from scripts.health.mutate import by_group
from scripts.kernels.planted_bugs import by_module


def test_planted_bugs_are_counted_by_module_and_by_what_caught_them():
    rows = [
        ("no change: dq", "`op`", "nothing"),
        ("a", "`dq`", "race"),
        ("b", "`dq`", "numbers: dq 3.1"),
        ("c", "`dq`", "numbers: dk inf, dv inf"),
        ("d", "`masks`", "nothing"),
    ]
    table = by_module(rows)
    assert table.header == ("module", "nothing", "numbers", "race", "all")
    assert table.rows == [["`dq`", "0", "2", "1", "3"], ["`masks`", "1", "0", "0", "1"]]


def test_checks_are_summed_up_by_group():
    rows = [
        ["`gpu.count`", "2", "6", "5", "5"],
        ["`gpu.name`", "1", "8", "6", "4"],
        ["`raid.state`", "1", "3", "9", "9"],
    ]
    assert by_group(rows).rows == [
        ["`gpu`", "2", "11", "9", "4"],
        ["`raid`", "1", "9", "9", "9"],
    ]

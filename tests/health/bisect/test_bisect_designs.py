import itertools

import pytest

from mjax.health.bisect.designs import crossed, grid_width, round_robin, waves


def test_48_hosts_are_6_rows_of_8_and_8_columns_of_6():
    rows, columns = crossed(48)
    assert [len(row) for row in rows] == [8] * 6
    assert [len(column) for column in columns] == [6] * 8
    assert rows[0] == tuple(range(8))
    assert columns[0] == (0, 8, 16, 24, 32, 40)
    for row, column in itertools.product(rows, columns):
        assert len(set(row) & set(column)) == 1


@pytest.mark.parametrize(("num", "width"), [(16, 4), (96, 12), (97, 11), (1, 1)])
def test_a_grid_is_nearly_square(num: int, width: int):
    assert grid_width(num) == width


@pytest.mark.parametrize("num", range(1, 140))
def test_rows_and_columns_hold_each_host_once(num: int):
    for design in crossed(num):
        assert sorted(itertools.chain(*design)) == list(range(num))


@pytest.mark.parametrize(("least", "most"), [(1, 3), (2, 4), (4, 8), (8, 8), (5, 16)])
@pytest.mark.parametrize("num", [16, 40, 48, 96])
def test_groups_keep_the_limits_where_these_divide_the_hosts(
    num: int, least: int, most: int
):
    for design in crossed(num, least=least, most=most):
        sizes = [len(group) for group in design]
        assert max(sizes) <= most
        # Sizes of a round differ by one at most; the caller fills up a smaller one.
        assert max(sizes) - min(sizes) <= 1
        if most >= 2 * least:
            assert min(sizes) >= least


def test_rounds_that_are_compared_have_enough_groups():
    rows, columns = crossed(8, least_groups=4)
    assert len(rows) == len(columns) == 4
    assert sorted(rows) != sorted(columns)


@pytest.mark.parametrize("num", range(2, 20))
def test_each_two_hosts_meet_once_in_rounds_of_disjoint_pairs(num: int):
    rounds = round_robin(num)
    assert len(rounds) == num - 1 + num % 2
    met = list(itertools.chain(*rounds))
    assert sorted(met) == list(itertools.combinations(range(num), 2))
    for pairs in rounds:
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs) == num - num % 2


def test_a_wave_has_no_host_twice_and_no_more_tests_than_allowed():
    groups = [("a", "b"), ("c",), ("b", "c"), ("d",), ("e",)]
    assert waves(groups, 3) == [[0, 1, 3], [2, 4]]
    assert waves(groups, 1) == [[0], [1], [2], [3], [4]]

import numpy as np
import pytest

from mjax.health.bisect.links import LinkProgress, advance_links
from mjax.health.bisect.problem import Outcome, Problem
from tests.health.bisect.simulated import find, flaky, named, names_of, problem


def link(a: str, b: str) -> frozenset[str]:
    return frozenset((a, b))


def links_of(found: object) -> set[frozenset[str]]:
    assert isinstance(found, LinkProgress)
    return {frozenset(one.hosts) for one in found.links}


def test_a_bad_link_is_told_from_a_bad_host():
    bad_links = frozenset({link("n1", "n6"), link("n2", "n3")})
    found, outcomes, num_rounds = find(
        problem(8), {"n4"}, bad_links=bad_links, links=True
    )
    assert names_of(found) == {"n4"}
    assert links_of(found) == set(bad_links)
    assert (len(outcomes), num_rounds) == (28, 7)
    assert found.error_probability <= 0.01


@pytest.mark.parametrize("num", [4, 5, 9, 10])
def test_healthy_hosts_have_no_bad_links(num: int):
    found, outcomes, _ = find(problem(num), set(), links=True)
    assert (found.verdict, names_of(found), links_of(found)) == ("none", set(), set())
    assert len(outcomes) == num * (num - 1) // 2


def test_flaky_pairs_are_repeated():
    for seed in range(4):
        random = np.random.default_rng(seed)
        a, b, c = (f"n{i}" for i in random.choice(10, 3, replace=False))
        found, outcomes, _ = find(
            flaky(10), {a}, bad_links=frozenset({link(b, c)}), links=True, seed=seed
        )
        assert (names_of(found), links_of(found)) == ({a}, {link(b, c)})
        assert len(outcomes) > 45
        assert found.error_probability <= 0.01


def test_a_host_with_two_bad_links_of_nine_is_not_bad():
    bad_links = frozenset({link("n0", "n1"), link("n0", "n2")})
    found, _, _ = find(problem(10), set(), bad_links=bad_links, links=True)
    assert (names_of(found), links_of(found)) == (set(), set(bad_links))


def test_a_host_whose_links_are_nearly_all_bad_is_bad():
    bad_links = frozenset(link("n0", f"n{i}") for i in range(1, 9))
    found, _, _ = find(problem(10), set(), bad_links=bad_links, links=True)
    assert names_of(found) == {"n0"}
    assert links_of(found) == set()


def test_pairs_that_all_fail_are_not_judged_one_by_one():
    found, _, _ = find(problem(6), set(named(6)), links=True)
    assert found.verdict == "all"
    assert "or the test itself fails" in found.reason


def test_links_are_not_ok_before_all_pairs_have_run():
    progress = advance_links(problem(4), [])
    assert len(progress.rounds) == 3
    assert progress.error_probability == 1


def test_a_search_gives_up_and_says_so():
    found, outcomes, _ = find(problem(8, max_tests=10), set(), links=True)
    assert (found.verdict, len(outcomes)) == ("undecided", 12)
    assert "gave up after 12 tests (--max-tests 10)" in found.reason
    assert found.error_probability == 1


def test_bad_input_is_answered():
    with pytest.raises(ValueError, match="--links needs at least 4 hosts here, got 3"):
        advance_links(problem(3), [])
    with pytest.raises(ValueError, match="--links does not use --good"):
        advance_links(Problem(hosts=named(4), good=("g",)), [])
    three = Outcome(hosts=named(3), failed=False)
    with pytest.raises(
        ValueError, match="each test must have 2 hosts, got an outcome of 3"
    ):
        advance_links(problem(4), [three])

"""Every check judges recorded outputs correctly, and is never ok by accident."""

import dataclasses
import string
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.health.check import judge
from mjax.health.checks.table import BY_NAME, CHECKS
from mjax.health.findings import State
from mjax.health.settings import EXPECTED, VERSIONS, Settings
from mjax.health.sources import Reading
from tests.health import cases
from tests.health.cases import Case

NAMES = sorted(BY_NAME)
CASES = cases.cases()


@pytest.mark.parametrize("name", NAMES)
def test_a_check_says_of_each_output_what_it_must(name):
    for case in cases.of_check(name):
        finding = case.play()
        assert case.is_met_by(finding), (case, finding)
        assert (finding.state is State.OK) == (finding.reason == ""), finding


@pytest.mark.parametrize("name", NAMES)
def test_a_check_has_been_seen_ok_and_not_ok(name):
    states = {case.state for case in cases.of_check(name)}
    assert State.OK in states
    assert State.FAILED in states or State.UNKNOWN in states


def test_names_are_unique_and_all_fields_are_told():
    assert len(BY_NAME) == len(CHECKS)
    assert not {case.check for case in cases.cases()} - BY_NAME.keys()
    for check in CHECKS:
        group, _, rest = check.name.partition(".")
        assert group
        assert rest
        assert set(check.name) <= {*string.ascii_lowercase, *string.digits, "_", "."}
        for text in (check.what, check.action):
            assert text.endswith("."), check.name
    assert all(case.expect.keys() <= EXPECTED.keys() for case in cases.cases())


class Asked(dict[str, Any]):
    """A table that notes which of its keys are read."""

    def __init__(self, fields: Mapping[str, Any], names: set[str]) -> None:
        super().__init__(fields)
        self._names = names

    def get(self, key: str, default: Any = None) -> Any:
        self._names.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._names.add(str(key))
        return super().__contains__(key)


def test_the_versions_that_may_be_expected_are_those_that_checks_compare():
    names: set[str] = set()
    for case in CASES:
        versions = Asked(case.expect.get("versions", {}), names)
        expect = dict(case.expect) | {"versions": versions}
        settings = Settings(limits=cases.limits(), expect=expect)
        judge(BY_NAME[case.check], case.reading, settings)
    assert names == {*VERSIONS}


def test_every_limit_has_a_source_and_a_check():
    for name, limit in cases.limits().items():
        assert name in BY_NAME
        source = limit["source"]
        assert source.startswith(("https://", "chosen: ")), (name, source)


@pytest.mark.parametrize("name", NAMES)
def test_an_output_that_was_cut_is_never_ok(name):
    """Even if only one byte is missing, because the runner counts the bytes."""
    case = next(c for c in cases.of_check(name) if c.state is State.OK)
    text = case.text
    num_bytes = len(text.encode(errors="surrogateescape"))
    for end in {0, 1, len(text) // 2, len(text) - 2, len(text) - 1} - {-1, len(text)}:
        reading = Reading(text=text[: max(0, end)], num_bytes=num_bytes)
        finding = judge(BY_NAME[name], reading, case.settings)
        assert finding.state is State.INCOMPLETE or num_bytes == 0
    late = Reading(text=text, num_bytes=num_bytes, status=None)
    assert judge(BY_NAME[name], late, case.settings).state is State.INCOMPLETE


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_that_is_required_fails_the_host(name):
    reading = Reading(absent="there is no such thing")
    settings = Settings(limits=cases.limits())
    assert judge(BY_NAME[name], reading, settings).state is State.UNKNOWN
    for pattern in (name, f"{name.partition('.')[0]}.*"):
        settings = Settings(limits=cases.limits(), expect={"require": [pattern]})
        finding = judge(BY_NAME[name], reading, settings)
        assert finding.state is State.FAILED
        assert "no such thing" in finding.reason


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Case, str]:
    """A recorded output with lines and bytes that are lost, doubled or changed."""
    case = draw(st.sampled_from(CASES))
    lines = case.text.splitlines(keepends=True)
    for _ in range(draw(st.integers(0, 3))):
        if not lines:
            break
        at = draw(st.integers(0, len(lines) - 1))
        match draw(
            st.sampled_from(["drop", "double", "swap", "cut", "junk", "number"])
        ):
            case "drop":
                del lines[at]
            case "double":
                lines.insert(at, lines[at])
            case "swap":
                other = draw(st.integers(0, len(lines) - 1))
                lines[at], lines[other] = lines[other], lines[at]
            case "cut":
                lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
            case "junk":
                lines[at] = draw(st.text(max_size=40)) + lines[at]
            case _:
                digit = draw(st.sampled_from(string.digits))
                new = draw(
                    st.sampled_from(["", "-1", "9" * 30, "N/A", "1e9", "٣", "²"])
                )
                lines[at] = lines[at].replace(digit, new, 1)
    return case, "".join(lines)


@given(damaged())
def test_no_output_raises_and_each_verdict_is_complete(example):
    case, text = example
    finding = judge(BY_NAME[case.check], Reading(text=text), case.settings)
    assert finding.state in (State.OK, State.FAILED, State.UNKNOWN)
    assert (finding.state is State.OK) == (finding.reason == "")


@given(st.sampled_from(CHECKS), st.text(max_size=400) | st.binary(max_size=400))
def test_junk_raises_nothing(check, junk):
    text = junk if isinstance(junk, str) else junk.decode(errors="surrogateescape")
    finding = judge(check, Reading(text=text), Settings(limits=cases.limits()))
    assert dataclasses.asdict(finding)["name"] == check.name

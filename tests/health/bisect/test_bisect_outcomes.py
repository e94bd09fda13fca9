from pathlib import Path

import pytest

from mjax.health.bisect.outcomes import (
    Criteria,
    Record,
    as_toml,
    judge,
    read,
    write,
)


def record(hosts: str, outcome: str = "pass", **facts: object) -> Record:
    return Record(hosts=tuple(hosts), outcome=outcome, **facts)  # pyright: ignore


def failures(records: list[Record], criteria: Criteria) -> list[str]:
    return ["".join(o.hosts) for o in judge(records, criteria) if o.failed]


def timed(**seconds: float) -> list[Record]:
    return [record(hosts, seconds=took_s) for hosts, took_s in seconds.items()]


def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    records = [
        record("ab", seconds=1.5, output="x", round=2),
        record("c", "fail", reason="exit code 1"),
    ]
    write(tmp_path / "o.json", records)
    assert read(tmp_path / "o.json") == records
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


def test_the_printed_form_is_a_file_once_it_is_filled_in(tmp_path: Path):
    form = as_toml([("n1", "n2"), ("n3",)], 4, Criteria())
    path = tmp_path / "o.toml"
    path.write_text(form)
    with pytest.raises(ValueError, match=r"tests\[0\].outcome must be one of 'pass'"):
        read(path)
    path.write_text(form.replace('""', '"pass"', 1).replace('""', '"fail"', 1))
    first, second = read(path)
    assert (first.hosts, first.outcome, first.round) == (("n1", "n2"), "pass", 4)
    assert (second.hosts, second.outcome) == (("n3",), "fail")


def test_a_form_asks_for_what_tests_are_compared_by(tmp_path: Path):
    path = tmp_path / "o.toml"
    form = as_toml([("n1",)], 1, Criteria(slow=2.0, same_output=True))
    form = form.replace('outcome = ""', 'outcome = "pass"')
    path.write_text(form)
    with pytest.raises(ValueError, match="at line 4"):
        read(path)
    path.write_text(form.replace("seconds =  ", "seconds = 61.5"))
    (found,) = read(path)
    assert (found.seconds, found.output) == (61.5, "")  # refused by `judge`


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{}", "an object with tests"),
        ("[]", "must be an object"),
        ('{"tests": [{"hosts": ["a"]}]}', "an object with outcome"),
        ('{"tests": [{"hosts": "ab", "outcome": "pass"}]}', "must be a list"),
        ('{"tests": [{"hosts": ["a"], "outcome": "ok"}]}', "got 'ok'"),
        ('{"tests": [{"hosts": ["a"], "outcome": true}]}', "got True"),
        ('{"tests": [{"hosts": ["a"], "outcome": "pass", "round": 0}]}', "round 0"),
        (
            '{"tests": [{"hosts": ["a"], "outcome": "pass", "seconds": -1}]}',
            "test 1 took -1.0 seconds",
        ),
        (
            '{"tests": [{"hosts": ["a"], "outcome": "pass", "seconds": NaN}]}',
            "test 1 took nan seconds",
        ),
        ('{"tests": [{"hosts": ["a"], "outcome": "pass"', "not JSON"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(
    tmp_path: Path, text: str, message: str
):
    path = tmp_path / "o.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"o\.json") as caught:
        read(path)
    assert message in str(caught.value)


def test_an_absent_file_and_one_that_is_not_text_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "absent.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "b.json")


def test_without_criteria_the_command_decides():
    assert failures([record("a"), record("b", "fail")], Criteria()) == ["b"]


# ------------------------------------------------------------------------------- times


def test_a_test_is_slow_beyond_the_factor_and_not_at_it():
    slow = Criteria(slow=2.0)
    assert failures(timed(a=1.0, b=1.0, c=1.0, d=1.0, e=2.0), slow) == []
    assert failures(timed(a=1.0, b=1.0, c=1.0, d=1.0, e=2.001), slow) == ["e"]


def test_rows_are_compared_with_rows_and_columns_with_columns():
    """A test of fewer hosts takes less time."""
    rows = [
        record(h, seconds=s) for h, s in zip("abcd", (9.0, 9.0, 9.0, 30.0), strict=True)
    ]
    columns = [
        record(h, seconds=s, round=2)
        for h, s in zip("efgh", (1.0, 1.0, 5.0, 1.0), strict=True)
    ]
    assert failures(rows + columns, Criteria(slow=2.0)) == ["d", "g"]


def test_later_rounds_are_compared_with_the_first_two():
    """In a later round most groups may have a bad host."""
    rows = timed(a=1.0, b=1.0, c=1.0, d=5.0)
    later = [record(h, seconds=5.0, round=7) for h in "efghi"]
    assert failures([*rows, *later], Criteria(slow=2.0)) == list("defghi")


def test_the_time_of_a_failed_test_is_no_measure():
    """A test that fails at once would make all others slow."""
    records = [record(h, "fail", seconds=0.01) for h in "abc"]
    records += timed(d=1.0, e=1.0, f=1.0)
    assert failures(records, Criteria(slow=2.0)) == list("abc")


def test_times_are_not_judged_before_there_are_enough():
    assert judge(timed(a=1.0, b=9.0, c=1.0), Criteria(slow=2.0)) == []
    assert len(judge(timed(a=1.0, b=9.0, c=1.0), Criteria())) == 3


def test_a_test_without_a_time_is_refused():
    records = [*timed(a=1.0, b=1.0, c=1.0), record("d")]
    with pytest.raises(
        ValueError, match="--slow needs the seconds of each test; test 4"
    ):
        judge(records, Criteria(slow=2.0))


# ----------------------------------------------------------------------------- outputs


def printed(**outputs: str) -> list[Record]:
    return [record(hosts, output=text) for hosts, text in outputs.items()]


def test_a_test_that_prints_something_else_than_most_fails():
    records = printed(a="x", b="x", c="y", d="x", e="z")
    assert failures(records, Criteria(same_output=True)) == ["c", "e"]


def test_the_output_of_failed_tests_does_not_count():
    records = [record(h, "fail", output="boom") for h in "abc"]
    records += printed(d="x", e="x")
    assert failures(records, Criteria(same_output=True)) == list("abc")


@pytest.mark.parametrize("outputs", [("x", "y", "z", "w"), ("x", "x", "y", "y")])
def test_outputs_without_a_majority_are_refused(outputs: tuple[str, ...]):
    records = printed(**dict(zip("abcd", outputs, strict=True)))
    with pytest.raises(ValueError, match="no output is the most frequent"):
        judge(records, Criteria(same_output=True))


def test_a_test_that_printed_nothing_is_refused():
    records = [*printed(a="x", b="x", c="x"), record("d")]
    with pytest.raises(ValueError, match="test 4 has no output"):
        judge(records, Criteria(same_output=True))


def test_a_file_that_cannot_be_written_to_its_end_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "o.json"
    write(path, [record("a")])

    def full(target: Path, text: str) -> None:
        with target.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, [record("a"), record("b")])
    assert read(path) == [record("a")]


def test_an_output_that_is_no_text_is_written_and_read(tmp_path: Path):
    """A lone surrogate: UTF-8 has none, and JSON escapes it."""
    odd = record("b", output="\ud800")
    write(tmp_path / "o.json", [odd])
    assert read(tmp_path / "o.json") == [odd]

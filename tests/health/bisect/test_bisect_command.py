import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mjax.health.bisect.command import main

HOSTS = ("--hosts", *(f"n{index}" for index in range(8)))
FAILS_WITH_N5 = (
    sys.executable,
    "-S",
    "-c",
    "import sys; sys.exit('n5' in sys.argv[1].split(','))",
    "{hosts}",
)


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Run with --json: one object on stdout and nothing else."""
    code = main(["--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_is_printed_as_commands_and_nothing_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    marker = tmp_path / "ran"
    code = main(["--plan", *HOSTS, "--", "touch", str(marker), "{hosts}", "{num}"])
    text = capsys.readouterr().out
    assert code == 3
    assert not marker.exists()
    lines = [line.strip() for line in text.splitlines()]
    assert "round 1, 2 tests (rows):" in lines
    assert f"touch {marker} n0,n1,n2,n3 4" in lines
    assert "round 2, 4 tests (columns):" in lines
    assert f"touch {marker} n1,n5 2" in lines
    assert "each bad with a probability of 0.02" in text
    assert 'hosts = ["n1", "n5"]' in lines


def test_a_person_who_fills_in_the_forms_gets_the_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """As `--plan` prints them, round after round, into one file."""
    path, known, words = tmp_path / "o.toml", "", HOSTS
    code, text = 3, ""
    for _ in range(8):
        code = main([*words])
        text = capsys.readouterr().out
        if code != 3:
            break
        form = text[text.index("[[tests]]") :]
        for entry in form.split("[[tests]]")[1:]:
            fails = '"n5"' in entry or '"n2"' in entry
            outcome = '"fail"' if fails else '"pass"'
            known += "[[tests]]" + entry.replace('""', outcome, 1)
        path.write_text(known)
        words = (*HOSTS, "--outcomes", str(path))
    assert code == 1
    assert "bad: n2" in text
    assert "bad: n5" in text
    assert "probability that this is not the exact answer:" in text


def test_it_runs_the_tests_and_names_the_host(capsys: pytest.CaptureFixture[str]):
    code, found = answered(capsys, "--run", *HOSTS, "--", *FAILS_WITH_N5)
    assert code == 1
    assert found["ok"] is False
    assert [one["host"] for one in found["bad"]] == ["n5"]
    assert found["bad"][0]["probability"] > 0.99
    assert found["error_probability"] < 0.01
    assert (found["tests"], found["rounds"], found["links"]) == (6, 2, [])
    assert (found["verdict"], found["next"]) == ("some", [])


def test_healthy_hosts_are_ok(capsys: pytest.CaptureFixture[str]):
    code, found = answered(capsys, "--run", *HOSTS, "--", "true", "{hosts}")
    assert (code, found["ok"], found["verdict"]) == (0, True, "none")
    assert found["error_probability"] < 0.01


def test_a_plan_is_never_ok(capsys: pytest.CaptureFixture[str]):
    code, found = answered(capsys, *HOSTS)
    assert (code, found["ok"], found["verdict"]) == (3, False, "pending")
    assert [len(one["tests"]) for one in found["next"]] == [2, 4]
    assert found["next"][0]["tests"][0]["command"] is None


def test_a_test_that_always_fails_is_pointed_out(capsys: pytest.CaptureFixture[str]):
    code, found = answered(capsys, "--run", *HOSTS, "--", "false", "{hosts}")
    assert (code, found["verdict"]) == (1, "all")
    assert "or the test itself fails" in found["reason"]


def test_a_run_that_was_stopped_goes_on_from_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = tmp_path / "o.json"
    words = ("--run", *HOSTS, "--outcomes", str(path))
    _, whole = answered(capsys, *words, "--", *FAILS_WITH_N5)
    tests = json.loads(path.read_text())["tests"]
    assert len(tests) == whole["tests"] == 6
    path.write_text(json.dumps({"tests": tests[:3]}))
    marker = tmp_path / "count"
    command = [*FAILS_WITH_N5]
    command[3] = f"open({str(marker)!r}, 'a').write('x'); {command[3]}"
    _, again = answered(capsys, *words, "--", *command)
    assert again == whole
    assert marker.read_text() == "xxx"  # 3 tests were not repeated


def test_errors_that_contradict_the_rates_are_pointed_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """n5 passes half of its tests, although tests are declared not to err."""
    tests = [
        {"hosts": ["n5"], "outcome": "pass" if i % 2 else "fail"} for i in range(8)
    ]
    tests += [{"hosts": [f"n{i}"], "outcome": "pass"} for i in range(8) if i != 5]
    row = [f"n{i}" for i in range(4)]
    tests += [{"hosts": row, "outcome": "pass"}]
    tests += [{"hosts": ["n4", "n5", "n6", "n7"], "outcome": "fail"}]
    tests += [
        {"hosts": [f"n{i}", f"n{i + 4}"], "outcome": "fail" if i == 1 else "pass"}
        for i in range(4)
    ]
    path = tmp_path / "o.json"
    path.write_text(json.dumps({"tests": tests}))
    code, found = answered(capsys, *HOSTS, "--outcomes", str(path))
    assert code == 1
    assert [one["host"] for one in found["bad"]] == ["n5"]
    (warning,) = found["warnings"]
    assert "4 of 10 tests with a bad host passed; these contradict the" in warning
    assert "more than --false-negative 1e-06 allows" in warning


def test_bad_links_are_named_with_both_ends(capsys: pytest.CaptureFixture[str]):
    code_text = "import sys; sys.exit(sys.argv[1] == 'n1,n4')"
    command = (sys.executable, "-S", "-c", code_text, "{hosts}")
    code, found = answered(
        capsys, "--run", "--links", "--parallel", "3", *HOSTS[:7], "--", *command
    )
    assert (code, found["ok"], found["bad"]) == (1, False, [])
    assert [one["hosts"] for one in found["links"]] == [["n1", "n4"]]
    assert found["tests"] == 15


def test_a_test_that_prints_something_else_fails(capsys: pytest.CaptureFixture[str]):
    """Its exit code is 0."""
    code_text = "import sys; print(7 + ('n6' in sys.argv[1].split(',')))"
    command = (sys.executable, "-S", "-c", code_text, "{hosts}")
    words = ("--same-output", "--min-hosts", "2", "--max-hosts", "2")
    code, found = answered(capsys, "--run", *words, *HOSTS, "--", *command)
    assert code == 1
    assert [one["host"] for one in found["bad"]] == ["n6"]


def test_hosts_are_read_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "hosts"
    path.write_text("# rack 1\nn0\nn1  # spare\n\nn2\nn3\n")
    _, found = answered(capsys, "--hosts-file", str(path))
    assert found["next"][0]["tests"][0]["hosts"] == ["n0", "n1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--hosts is empty"),
        (("--hosts", "a", "--run"), "the test command is missing"),
        (("--hosts", "a", "--", "./test"), "has no {hosts}"),
        (("--hosts", "a", "--run", "--plan"), "give one of them"),
        (("--hosts", "a", "--slow", "1"), "--slow must be above 1, got 1"),
        (("--hosts", "a", "b", "--slow", "2"), "that takes 4 hosts"),
        (("--hosts", "a", "--time-limit-s", "0"), "--time-limit-s must be positive"),
        (("--hosts", "a", "--outcomes", "absent.json"), "absent.json cannot be read"),
        (("--hosts", "a", "--same-output"), "the same value, got 1 and None"),
        (
            ("--hosts", "a", "--run", "--outcomes", "o.toml", "--", "x", "{hosts}"),
            ".json",
        ),
        (
            ("--hosts", "a", "--run", "--outcomes", "/no/o.json", "--", "x", "{hosts}"),
            "--outcomes /no/o.json: its folder does not exist; make it first",
        ),
        (("--hosts", "a", "--hosts-file", "x"), "both name the hosts"),
        (("--hosts-file", "/absent"), "--hosts-file /absent cannot be read"),
        (("--host", "a"), "unknown flag --host; the nearest is --hosts"),
        (("--hosts", "a", "--run", "--", "/absent/x", "{hosts}"), "cannot be started"),
        (("--hosts", "a", "--prior", "2"), "--prior must be above 0"),
    ],
)
def test_bad_input_is_one_message_and_code_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
):
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1

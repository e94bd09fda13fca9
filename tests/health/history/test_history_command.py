"""`health history` from its flags to its exit code."""

import json
from pathlib import Path

import numpy as np
import pytest

from mjax.health.history.command import main


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def events(path: Path, *failed: str) -> Path:
    rows = [{"time_ns": 1, "kind": "driver", "text": "started"}]
    for index, host in enumerate(failed):
        row = {"time_ns": 10 + index, "generation": 1, "kind": "failure", "text": "x"}
        rows.append(row | {"data": {"cause": "GPU fault", "hosts": [host]}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_host_that_failed_in_a_run_returns_after_a_burn(capsys, tmp_path: Path):
    history = tmp_path / "hosts.db"
    path = events(tmp_path / "events.jsonl", "gpu2")
    words = ["import", "--history", history, "--events", path]
    assert run(capsys, *words)[:2] == (0, "1 new events of hosts from 2 lines\n")
    assert run(capsys, *words)[:2] == (0, "0 new events of hosts from 2 lines\n")
    may = ["may-return", "--history", history, "--host"]
    code, out, _ = run(capsys, *may, "gpu2")
    assert (code, "gpu2 may not return: fault: GPU fault" in out) == (1, True)
    code, out, _ = run(capsys, *may, "gpu1")
    assert (code, out) == (0, "yes; no event of it is known\n")
    order = ["order", "--history", history, "--hosts", "gpu[1-3]", "--json"]
    assert json.loads(run(capsys, *order)[1])["hosts"] == ["gpu1", "gpu3", "gpu2"]
    record = ["record", "--history", history, "--host", "gpu2", "--kind"]
    assert run(capsys, *record, "check_ok")[1] == "recorded; gpu2 may not be used\n"
    assert run(capsys, *record, "burn_passed")[1] == "recorded; gpu2 may be used\n"
    code, out, _ = run(capsys, *may, "gpu2", "--json")
    assert (code, json.loads(out)["may_return"]) == (0, True)


def test_a_history_is_shown(capsys, tmp_path: Path):
    history = tmp_path / "hosts.db"
    record = ["record", "--history", history, "--host", "gpu2"]
    said = "fan\x1b[2J\nsecond line"
    run(capsys, *record, "--kind", "fault", "--cause", "host fault", "--text", said)
    _, out, _ = run(capsys, "show", "--history", history)
    assert out.split()[:4] == ["gpu2", "8.00", "1", "faults"]
    assert "may not be used: fault: host fault" in out
    _, out, _ = run(capsys, "show", "--history", history, "--host", "gpu2")
    assert "fault (host fault)  fan\\x1b[2J\n" in out
    words = ["show", "--history", history, "--host", "gpu2", "--json"]
    found = json.loads(run(capsys, *words)[1])
    assert found["events"][0]["cause"] == "host fault"
    assert found["hosts"][0]["score"] == pytest.approx(8.0, rel=1e-3)  # seconds old


def test_lines_that_could_not_be_read_end_with_1(capsys, tmp_path: Path):
    path = events(tmp_path / "events.jsonl", "gpu2")
    with path.open("a") as file:
        file.write('nothing\n{"time_ns": 3')
    words = ["import", "--history", tmp_path / "hosts.db", "--events", path]
    code, out, err = run(capsys, *words)
    assert code == 1
    assert "1 new events" in out
    assert "the last line is incomplete" in out
    assert "1 lines could not be read, first" in err
    code, out, _ = run(capsys, *words, "--json")
    found = json.loads(out)
    assert (code, found["new"], found["is_cut"]) == (1, 0, True)


def test_statistics_are_correlated_with_step_times(capsys, tmp_path: Path):
    generator = np.random.default_rng(31)
    path = tmp_path / "samples.jsonl"
    with path.open("w") as file:
        for sample in range(200):
            slow = float(generator.standard_normal())
            for host in ("gpu1", "gpu2"):
                row = {"host": host, "sample": sample, "step_s": 2.0 + slow}
                row["temperature"] = 60.0 + slow + float(generator.standard_normal())
                row["fan"] = float(generator.standard_normal())
                file.write(json.dumps(row | {"power_limit": 700}) + "\n")
    code, out, _ = run(capsys, "correlate", "--samples", path)
    assert code == 0
    lines = out.splitlines()
    assert lines[1].startswith("temperature")
    assert lines[1].endswith("<- stands out")
    assert "stands out" not in lines[2]
    assert "power_limit" in lines[3]
    assert "1 of 2 statistics stand out" in out
    found = json.loads(run(capsys, "correlate", "--samples", path, "--json")[1])
    assert all("null_rho" in one for one in found["associations"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "--history", "{t}/none.db"], "none.db does not exist"),
        (["order", "--history", "{t}/none.db", "--hosts", "a"], "does not exist"),
        (["order", "--history", "{t}/none.db", "--hosts", "a,a"], "a host twice"),
        (["order", "--history", "{t}/none.db", "--hosts", "a["], "its partner"),
        (
            ["import", "--history", "{t}/a.db", "--events", "{t}/none.jsonl"],
            "none.jsonl cannot be read",
        ),
        (
            ["record", "--history", "{t}/a.db", "--host", "a b", "--kind", "returned"],
            "a host needs a name without spaces, got 'a b'",
        ),
        (
            ["record", "--history", "{t}/a.db", "--host", "a", "--kind", "fault"],
            "--kind fault needs --cause",
        ),
        (
            ["show", "--history", "{t}/notes.txt"],
            "notes.txt is damaged (file is not a database)",
        ),
        (["correlate", "--samples", "{t}/none"], "--samples {t}/none cannot be read"),
        (["correlate", "--samples", "{t}/notes.txt"], "notes.txt:1: not JSON"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(
    capsys, tmp_path: Path, words: list[str], told: str
):
    (tmp_path / "notes.txt").write_text("these are notes\n" * 400)
    code, out, err = run(capsys, *[word.format(t=tmp_path) for word in words])
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert told.format(t=tmp_path) in err


def test_a_half_life_is_taken_from_its_flag(capsys, tmp_path: Path):
    history = tmp_path / "hosts.db"
    words = ["record", "--history", history, "--host", "a", "--kind", "returned"]
    run(capsys, *words)
    code, _, err = run(capsys, "show", "--history", history, "--half-life-days", 0)
    assert (code, "--half-life-days must be positive, got 0" in err) == (2, True)

"""The trainer under a launch: every phase is marked, and a kill keeps the rows."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mjax.launch import __main__ as command
from mjax.processes import progress
from mjax.processes.progress import Phase
from mjax.run.metrics import read_computed

FLAGS = [
    *("--recipe", "debug", "--data.path", "synthetic", "--steps", "12"),
    *("--ckpt.every", "4", "--eval.every", "6", "--simulate-devices", "2"),
    *("--log.sample-tokens", "4"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Compile once."""
    home = tmp_path_factory.mktemp("cache")
    return {**os.environ, "XDG_CACHE_HOME": str(home)}


def events(work_dir, kind):
    path = work_dir / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [event for event in found if event["kind"] == kind]


def test_a_killed_rank_costs_no_row_and_every_phase_is_marked(
    tmp_path, environment, capsys
):
    alone, launched = tmp_path / "alone", tmp_path / "launched"
    word, seen = tmp_path / "word", set()
    process = subprocess.Popen(
        [sys.executable, "-m", "mjax.train", *FLAGS, "--work-dir", str(alone)],
        env={**environment, progress.FILE_VARIABLE: str(word)},
    )
    while process.poll() is None:
        if (found := progress.read(word)) is not None:
            seen.add(found.phase)
        time.sleep(0.001)
    assert process.returncode == 0
    # Importing ends before the first mark. Evaluations are longer than the poll
    # interval.
    assert seen >= {*Phase} - {Phase.IMPORT, Phase.INIT}
    last = progress.read(word)
    assert last is not None
    assert (last.phase, last.step, last.saved_step) == (Phase.EXIT, 12, 12)

    words = [sys.executable, "-m", "mjax.launch", "--", *FLAGS]
    launch = subprocess.Popen(
        [*words, "--work-dir", str(launched)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    rows = launched / "metrics.jsonl"
    while launch.poll() is None:
        if rows.exists() and len(rows.read_text().splitlines()) >= 6:
            break
        time.sleep(0.01)
    assert command.main(["status", "--work-dir", str(launched), "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    os.kill(rank["pid"], signal.SIGKILL)
    output = launch.communicate(timeout=200)[0]
    assert launch.returncode == 0, output
    assert "step 12/12" in output
    (failure,) = events(launched, "failure")
    assert (failure["rank"], failure["data"]["cause"]) == (0, "killed")
    assert [event["generation"] for event in events(launched, "generation")] == [1, 2]
    assert read_computed(launched) == read_computed(alone)
    folder = launched / "launch" / "generation-0002"
    assert "start-up: load" in (folder / "rank-0.log").read_text()
    (under_way,) = [e for e in events(launched, "under_way") if e["generation"] == 2]
    spent_s = under_way["data"]["spent_s"]
    assert spent_s["import"] < 0.1 * sum(spent_s.values()), "it was not forked"
    starts = [json.loads(p.read_text()) for p in (launched / "starts").iterdir()]
    assert sorted(start["generation"] for start in starts) == [1, 2]

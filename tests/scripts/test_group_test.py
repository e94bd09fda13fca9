"""Real processes, searched by the command."""

import json
import sys
from typing import Any

import pytest

from mjax.health.bisect.command import main
from scripts.health.group_test import compute

HOSTS = ("--hosts", *(f"n{index}" for index in range(8)))
PROGRAM = (sys.executable, "-m", "scripts.health.group_test", "--hosts", "{hosts}")


def searched(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["--run", "--json", "--parallel", "4", "--min-hosts", "2", *words])
    return json.loads(capsys.readouterr().out)


def test_two_hosts_that_compute_wrong_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Alone they pass: a test needs two hosts, and good ones fill up its group."""
    monkeypatch.setenv("WRONG_HOSTS", "n1,n5")
    assert len({compute("n0"), compute("n1"), compute("n5")}) == 3
    found = searched(capsys, *HOSTS, "--", *PROGRAM, "--work-s", "0")
    assert [one["host"] for one in found["bad"]] == ["n1", "n5"]
    assert found["error_probability"] < 0.01


def test_healthy_processes_agree(capsys: pytest.CaptureFixture[str]):
    found = searched(capsys, *HOSTS, "--", *PROGRAM, "--work-s", "0")
    assert (found["ok"], found["bad"]) == (True, [])


@pytest.mark.slow
def test_one_slow_and_one_wrong_host_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLOW_HOSTS", "n2")
    monkeypatch.setenv("WRONG_HOSTS", "n5")
    found = searched(capsys, "--slow", "3", *HOSTS, "--", *PROGRAM)
    assert [one["host"] for one in found["bad"]] == ["n2", "n5"]

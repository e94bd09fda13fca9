"""The page about starting a process group."""

import os

import pytest

from mjax.health.startup.model import PhaseTimes, read_phases
from mjax.health.startup.report import Size
from scripts.health import init_scale


def test_nothing_is_measured_on_a_busy_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.1, 0.0, 0.0))
    monkeypatch.setattr(init_scale, "measure", lambda asked: pytest.fail("measured"))
    assert init_scale.main([]) == 1
    assert "load average is 3.1" in capsys.readouterr().out


def test_every_row_has_a_cell_for_each_column():
    starts = {
        size: [
            tuple(
                PhaseTimes(
                    name=name,
                    wall_s=(1.0,) * size,
                    cpu_s=(1.0,) * size,
                    coordinator_s=0.1,
                )
                for name in ("import", "barrier", "collective", "end")
            )
        ]
        for size in (2, 4, 8)
    }
    phases = read_phases(starts, {16: [starts[2][0][1:2]]})
    size = Size(hosts=10_000, round_trip_s=1e-4)
    pages = init_scale.tables(phases, size, "How.")
    assert [len(table.rows) for table in pages] == [4, 4, 4, 5, 4]
    for table in pages:
        assert {len(row) for row in table.rows} == {len(table.header)}

"""A save that fails on one of two processes that train together over gloo."""

import pytest

from scripts.faults import save_faults


@pytest.mark.slow
def test_a_phase_that_fails_on_one_process_stops_no_training_and_is_saved_later(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(save_faults, "KNOWN_LIMIT_S", save_faults.PATIENCE_S)
    faults = [("written", "1"), ("committed", "0")]
    numbers = [save_faults.FAULTS.index(fault) for fault in faults]
    rows = save_faults.fail_each(tmp_path, numbers)
    assert [row[:2] for row in rows] == [[*fault] for fault in faults]
    assert [row[-1] for row in rows] == ["nothing", "nothing"]

"""What a start says of the steps that an earlier one has taken and not saved."""

import json
from unittest.mock import Mock

import pytest

from mjax.ckpt.recovery import Restored
from mjax.run import first_state
from mjax.run.prepare import Run


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Return what a start prints whose newest saved step is given; None for none."""
    monkeypatch.setattr(first_state, "_new_state", lambda run: "new")
    monkeypatch.setattr(first_state.report, "describe_new_steps", lambda *words: ())

    def begin(num_rows, restored_step):
        rows = [json.dumps({"step": step + 1}) + "\n" for step in range(num_rows)]
        (tmp_path / "metrics.jsonl").write_text("".join(rows))
        run = Mock(spec=Run, work_dir=tmp_path, program=Mock(), agreement=Mock(rank=0))
        found = None
        if restored_step is not None:
            found = Mock(
                spec=Restored,
                step=restored_step,
                source="here",
                bytes_read=0,
                put_aside=(),
                run={"config": {}},
                state=None,
            )
        run.checkpoints = Mock(**{"restore.return_value": found})
        run.config = Mock()
        assert first_state.first_state(run).step == (restored_step or 0)
        return capsys.readouterr().out

    return begin


def test_a_restart_without_a_saved_step_says_that_it_begins_at_step_0(said):
    assert said(13, None) == (
        "starting at step 0, because no step was saved; steps 1 to 13 of the earlier "
        "start will be taken again\n"
    )


def test_a_new_run_and_a_run_that_lost_nothing_say_nothing_of_lost_steps(said):
    assert said(0, None) == ""
    assert "again" not in said(8, 8)


@pytest.mark.parametrize(("num_rows", "which"), [(9, "step 9"), (13, "steps 9 to 13")])
def test_a_restart_says_which_steps_were_not_saved(said, num_rows, which):
    lines = said(num_rows, 8).splitlines()
    assert lines[0].startswith("resuming after step 8, from here; ")
    assert lines[1:] == [f"{which} of the earlier start will be taken again"]

"""Runs that mjax f0052866 saved: they are continued and read as it did.

tests/old_runs/expected.json is the output of `old_runs use` with that version.
"""

import json
import shutil

import pytest

from scripts.correctness import old_runs

EXPECTED = json.loads((old_runs.OLD_RUNS / "expected.json").read_text())


@pytest.mark.parametrize("name", old_runs.RUNS)
def test_an_old_run_is_continued_generated_from_evaluated_and_exported(tmp_path, name):
    """Also if the base of its adapters is gone: each checkpoint has it."""
    expected, folder = EXPECTED[name], tmp_path / "runs_without_their_base"
    shutil.copytree(old_runs.OLD_RUNS, folder, ignore=shutil.ignore_patterns("base"))
    result = old_runs.use(folder, old_runs.ROOT, [name])[name]
    assert result["batches"] == expected["batches"]
    assert result["tensors"] == expected["tensors"]
    assert result["generated"] == expected["generated"]
    # Float32 sums of another order differ by less; another batch or rate by 1e-2.
    values = [float.fromhex(x) for x in result["losses"]]
    before = [float.fromhex(x) for x in expected["losses"]]
    assert values == pytest.approx(before, rel=1e-5)
    assert result["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-5)

"""The step at two commits on a GPU, and its model, as a page."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mjax.config.command_line import parse_with
from mjax.plan.options import Options
from mjax.recipes import RECIPES
from scripts.gpu import changes, training


@pytest.mark.parametrize("name", changes.TRAINING_FLAGS)
def test_the_flags_of_a_case_say_what_was_measured(name: str):
    flags = f"{changes.FLAGS} {changes.TRAINING_FLAGS[name]}".split()
    config, _, _ = parse_with(Options(), flags, RECIPES, "case")
    case = training.cases(False)[name]
    assert config.model == dataclasses.replace(case.model, attention="mosaic_gpu")
    assert config.optim.name == case.optimizer.name
    assert config.data.seq_len == case.seq_len
    assert config.batch.size * case.seq_len == case.tokens
    assert config.data.isolate_documents == case.isolate_documents


def measured(folder: Path, remat: str, what: str) -> Any:
    if what == "kernels":
        return {"nvjet_x": (2, 30.0), "attention_dq_x": (1, 5.0), "loop_x": (3, 25.0)}
    step_ms = {"old": 100.0, "new": 80.0}[folder.name]
    return {"step_ms": step_ms, "mfu": 40 / step_ms, "peak_bytes": 2**30}


def test_each_commit_is_measured_and_kept_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []

    def run(folder: Path, remat: str, what: str) -> Any:
        path = tmp_path / "gpu_changes.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        seen.append((folder.name, remat, what, len(rows)))
        return measured(folder, remat, what)

    monkeypatch.setattr(changes, "run", run)
    changes.measure({"a": tmp_path / "old", "b": tmp_path / "new"}, tmp_path)
    assert seen == [
        ("old", "core", "time", 0),
        ("new", "core", "time", 1),
        ("old", "none", "time", 2),
        ("new", "none", "time", 3),
        ("new", "core", "kernels", 4),
    ]
    found = json.loads((tmp_path / "gpu_changes.json").read_text())
    names = list(changes.TRAINING_FLAGS)
    steps = {
        "commit": "a",
        "rows": [
            {"case": n, "status": "ok", "step_ms": 50.0, "mfu": 0.2} for n in names
        ],
    }
    asked = []

    def model(commit: str, flags: str) -> Any:
        asked.append((commit, flags.removeprefix(changes.FLAGS).strip()))
        return dict.fromkeys(changes._PARTS, 0.02)

    pairs, compared, kinds, longest = changes.tables(found, steps, model)
    assert pairs.rows[0][:4] == ["core", "100.0", "80.0", "0.800"]
    # 3 x 20 ms against 100 ms; the first row's own MFU is the null model's.
    assert compared.rows[0] == ["remat core", "a", "60.0", "100.0", "0.600", "1.000"]
    assert compared.rows[1] == ["remat core", "b", "60.0", "80.0", "0.750", "1.250"]
    assert compared.rows[-1][:5] == ["AdamW", "a", "60.0", "50.0", "1.200"]
    assert asked[1] == ("b", "--model.remat core")
    assert [row[2] for row in kinds.rows] == ["30.0", "5.0", "25.0", "60.0"]
    assert longest.rows[0] == ["`nvjet_x`", "2", "30.00"]

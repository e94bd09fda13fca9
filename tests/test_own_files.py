"""A run that files describe: a config file, and a recipe of the user."""

import json
from pathlib import Path

import pytest

from mjax import train
from mjax.cli import exit_codes

pytestmark = pytest.mark.usefixtures("caches")

OWN = """\
import dataclasses
from mjax.recipes import RECIPES

def small():
    debug = RECIPES["debug"]()
    model = dataclasses.replace(debug.model, layers=1, window=(None,), rope=(True,))
    return dataclasses.replace(debug, steps=3, model=model)
"""


def test_a_run_of_files_is_resumed_without_them(tmp_path, capsys, monkeypatch):
    """Its config.json has all that a config file and an own recipe said."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("c.toml").write_text(
        'recipe = "own.py:small"\nlog.sample_tokens = 0\noptim.lr = 1e-3\n'
        '[data]\npath = ["synthetic"]\n[distributed]\ntimeout_s = 299\n'
    )
    assert train.main(["--config", "c.toml", "--work-dir", "run"]) == exit_codes.DONE
    out = capsys.readouterr().out
    assert "resume with: python -m mjax.train --work-dir run\n" in out
    Path("own.py").unlink()
    Path("c.toml").unlink()
    monkeypatch.setenv("MJAX_LAUNCH", "launch")
    assert train.main(["--work-dir", "run", "--steps", "4"]) == exit_codes.DONE
    out = capsys.readouterr().out
    assert "work dir run, resumed by the launch; after its end, repeat the" in out
    assert "resume with" not in out
    assert "resuming after step 3" in out
    monkeypatch.delenv("MJAX_LAUNCH")
    config = json.loads(Path("run/config.json").read_text())
    assert (config["model"]["layers"], config["optim"]["lr"]) == (1, 1e-3)
    assert config["distributed"]["timeout_s"] == 300, "of a start, not of a run"
    Path("more.toml").write_text("steps = 5\nseed = 7\n")
    more = ["--work-dir", "run", "--config", "more.toml"]
    assert train.main(more) == exit_codes.BAD_INPUT
    assert "seed: 0 there, 7 in this run" in capsys.readouterr().err
    assert train.main([*more, "--seed", "0"]) == exit_codes.DONE
    assert "resuming after step 4" in capsys.readouterr().out

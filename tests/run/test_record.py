"""Records of starts."""

import hashlib
import json
import os

import jax
import numpy as np
from jax.sharding import Mesh

from mjax.processes.agreement import Agreement
from mjax.processes.comparison import code_facts
from mjax.run import record


def read(path):
    return json.loads(path.read_text())


def test_each_start_has_a_record_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("MY_VARIABLE", "never")
    monkeypatch.setenv("SLURM_JWT", "never")
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("pp", "tp"))
    facts = code_facts()
    agreement = Agreement("record")
    write = (tmp_path, mesh, agreement, facts, ["--recipe", "debug"])
    record.write(*write, launch="a", generation=1, start_step=0)
    first = read(tmp_path / "starts" / "0001.json")
    record.write(*write, launch="a", generation=2, start_step=8)
    assert read(tmp_path / "starts" / "0001.json") == first
    second = read(tmp_path / "starts" / "0002.json")
    assert (second["generation"], second["start_step"]) == (2, 8)
    assert second["argv"] == ["--recipe", "debug"]
    assert second["mesh"] == {"pp": 1, "tp": 2}
    assert [one["pid"] for one in second["processes"]] == [os.getpid()]
    assert second["environment"]["NCCL_ALGO"] == "Ring"
    assert "never" not in json.dumps(second)
    assert second["facts"]["jax"] == jax.__version__
    assert len(second["commit"]) in (0, 40)
    assert second["code"] == first["code"] != hashlib.sha256(b"{}").hexdigest()


def test_another_line_of_code_is_another_record(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    for digest in ("a1", "a2"):
        facts = {"mjax/step/plain.py": digest}
        record.write(tmp_path, mesh, Agreement("record"), facts, [])
    codes = {read(path)["code"] for path in (tmp_path / "starts").iterdir()}
    assert len(codes) == 2

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


def a_start(work_dir, number=1):
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    return record.write(work_dir, mesh, Agreement(f"record {number}"), {}, [])


def test_a_record_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    first = a_start(tmp_path)
    (tmp_path / "starts" / "0002.json.tmp").mkdir()  # in the way of the next one
    second = a_start(tmp_path, 2)
    assert second == record.Start(run=first.run, number=2)
    said = capsys.readouterr().out
    assert "0002.json cannot be written, training continues: Is a directory" in said
    spans = tmp_path / "spans" / "a-host-0-2.jsonl"
    spans.parent.mkdir()
    spans.touch()
    assert a_start(tmp_path, 3).number == 3  # the second start has files of this number
    (tmp_path / "starts").rename(tmp_path / "away")
    (tmp_path / "starts").touch()
    assert a_start(tmp_path, 4).number == 3
    assert (
        "0003.json cannot be written, training continues: File exists"
        in capsys.readouterr().out
    )

"""`python -m mjax.ckpt`: what it prints, changes and refuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.ckpt import store
from mjax.ckpt.__main__ import main
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.journal import QUARANTINED, Journal
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.manifest import crc32c
from mjax.ckpt.reshard import smaller_chunk
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import Store
from tests.ckpt.states import (
    abstract,
    assert_same,
    copy_as_step,
    flip_a_bit,
    make_newer,
    saved,
    sharding,
)

ROOT = Path(__file__).parents[2]


def make_state():
    where = sharding(4, 2, "rows", "columns")
    values = np.arange(8 * 100_000, dtype=np.float32).reshape(8, 100_000)
    whole = sharding(8, 1)
    return {
        "table": jax.device_put(values, where),  # 8 pieces of 0.38 MiB
        "one_piece": jax.device_put(-values, whole),  # of 3.05 MiB
        "half": jax.device_put(values[:4, :8].astype(jnp.bfloat16), where),
        "count": jax.device_put(np.int32(7), whole),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    work_dir = tmp_path_factory.mktemp("written")
    manager = Checkpoints(work_dir, CkptConfig())
    state = make_state()
    config = {"model": {"layers": 2}, "ckpt": {"dir": None}}
    for step, loss in ((10, 2.5), (20, None)):
        facts = {"config": config, "eval_loss": loss, "versions": {"jax": "1.2"}}
        saved(manager, state, step, **facts)
    manager.attempts()
    manager.close()
    return work_dir


@pytest.fixture
def run(written, tmp_path):
    """A work dir with steps 10 and 20, to be spoiled."""
    return Path(shutil.copytree(written, tmp_path / "run"))


@pytest.fixture
def ask(capsys):
    """Run a command; return its exit code, stdout and stderr."""

    def run_(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run_


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


# ------------------------------------------------------------------------------ looking


def test_ls_tells_the_state_of_every_step(run, ask):
    steps = Store(run / "checkpoints")
    for step in (30, 40, 50):
        copy_as_step(steps.path(20), steps.path(step))
    steps.quarantine(30, "a flipped bit")
    (steps.path(40) / "pieces.0.json").unlink()
    make_newer(steps.path(50))
    (steps.directory / "60.unfinished-0a1b").mkdir()
    (steps.directory / "notes").mkdir()
    save_id = steps.manifest(10).save_id
    Journal(run / "checkpoints.jsonl").write(
        QUARANTINED, 10, save_id=save_id, reason="cannot be renamed"
    )
    code, out, _ = ask("ls", run)
    lines = [line.split() for line in out.splitlines()]
    assert code == 1  # step 40
    assert lines[0] == [str(steps.directory)]
    assert lines[1] == ["step", "MB", "leaves", "written", "eval_loss", "state"]
    assert [line[0] for line in lines[2:]] == [
        *("10", "20", "40", "50", "30.damaged", "60.unfinished-0a1b")
    ]
    rows = {line[0]: line for line in lines[2:]}
    assert rows["10"][1:3] == ["6.4", "4"]
    assert rows["10"][5:] == ["2.5000", "quarantined:", "cannot", "be", "renamed"]
    assert rows["20"][5:] == ["-", "good"]
    assert " ".join(rows["40"]).endswith("damaged: 40/pieces.0.json is missing")
    assert " ".join(rows["30.damaged"]).endswith("quarantined: a flipped bit")
    assert "newer: 50/checkpoint.json has format 2" in " ".join(rows["50"])
    code, out, _ = ask("ls", "--json", run)
    listed = {entry["name"]: entry for entry in json.loads(out)["steps"]}
    assert code == 1
    assert listed["20"]["num_bytes"] == 2 * 3_200_000 + 64 + 4
    assert listed["20"]["state"] == "good"
    assert listed["60.unfinished-0a1b"]["written_at"] is None


@pytest.mark.parametrize("form", ["work dir", "folder", "step", "step elsewhere"])
def test_a_path_is_a_work_dir_a_folder_of_steps_or_a_step(run, ask, form, monkeypatch):
    steps = run / "checkpoints"
    monkeypatch.chdir(steps)
    shutil.copytree(steps / "20", run.parent / "copy")
    path = {
        "work dir": run,
        "folder": ".",
        "step": steps / "20",
        "step elsewhere": run.parent / "copy",
    }[form]
    code, out, err = ask("show", path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["step"] == 20
    assert ask("verify", path)[0] == 0


def test_the_folder_that_the_config_names_is_looked_into(run, ask):
    (run / "checkpoints").rename(run.parent / "elsewhere")
    (run / "checkpoints").mkdir()
    config = {"ckpt": {"dir": str(run.parent / "elsewhere")}}
    (run / "config.json").write_text(json.dumps(config))
    code, out, _ = ask("ls", run)
    assert code == 0
    assert out.splitlines()[0] == str(run.parent / "elsewhere")


def test_show_tells_what_a_step_holds_and_who_wrote_it(run, ask):
    code, out, _ = ask("show", run, "--step", 10)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    for line in (
        f"path {run / 'checkpoints' / '10'}",
        "step 10",
        "bytes 6400068 in 4 leaves",
        "config.model.layers 2",
        "eval_loss 2.5",
        "versions.jax 1.2",
        "8 0.381 3.200 table float32[8, 100000]",
        "1 3.052 3.200 one_piece float32[8, 100000]",
        "1 0.000 0.000 count int32[]",
    ):
        assert line in lines
    code, out, _ = ask("show", run, "--step", 10, "--json")
    shown = json.loads(out)
    assert shown["run"]["config"] == {"model": {"layers": 2}, "ckpt": {"dir": None}}
    assert shown["leaves"]["half"] == {
        **{"shape": [4, 8], "dtype": "bfloat16"},
        **{"num_bytes": 64, "num_pieces": 8},
    }


def test_verify_names_the_damage_and_changes_nothing(run, ask):
    assert ask("verify", run) == (
        *(0, "10: OK, 6.4 MB read\n20: OK, 6.4 MB read\n", ""),
    )
    flip_a_bit(run / "checkpoints" / "10")
    before = contents(run)
    code, out, _ = ask("verify", run)
    assert code == 1
    damaged, good = out.splitlines()
    assert damaged.startswith("10: damaged: 10/state: ")
    assert good == "20: OK, 6.4 MB read"
    assert ask("verify", run, "--step", 20)[0] == 0
    assert ask("verify", run / "checkpoints" / "10")[0] == 1
    assert contents(run) == before


def test_a_newer_format_is_bad_input_and_no_damage(run, ask):
    make_newer(run / "checkpoints" / "20")
    code, out, _ = ask("verify", run)
    assert code == 2
    assert "20: not verified: 20/checkpoint.json has format 2" in out
    code, _, err = ask("show", run)
    assert code == 2
    assert "install the version that wrote it" in err


def test_looking_imports_no_jax_and_nothing_takes_a_device_but_the_cpu(run):
    code = f"""
import sys
from mjax.ckpt.__main__ import main
assert main(["ls", {str(run)!r}]) == main(["show", {str(run)!r}]) == 0
assert "jax" not in sys.modules
from jax._src import xla_bridge
assert main(["verify", {str(run)!r}]) == 0
assert [*xla_bridge._backends] == ["cpu"]
assert main(["reshard", {str(run)!r}, {str(run.parent / "out")!r}]) == 0
assert [*xla_bridge._backends] == ["cpu"]
import jax
assert jax.config.jax_platforms == "cpu"
"""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------ reshard


@pytest.mark.parametrize("max_piece_mib", [None, 1])
def test_a_resharded_step_is_restored_bitwise(run, ask, tmp_path, max_piece_mib):
    out_dir = tmp_path / "new" / "store"
    limit = [] if max_piece_mib is None else ["--max-piece-mib", max_piece_mib]
    code, out, err = ask("reshard", run, out_dir, "--step", 10, *limit)
    assert (code, err) == (0, "")
    pieces = {None: 18, 1: 21}[max_piece_mib]
    assert f"6.4 MB, 18 pieces -> {pieces}, all checksums as saved" in out
    copy = SavedStep(Store(out_dir).path(10))
    source = SavedStep(Store(run / "checkpoints").path(10))
    assert len(copy.pieces["one_piece"]) == {None: 1, 1: 4}[max_piece_mib]
    assert set(copy.pieces["table"]) == set(source.pieces["table"])
    assert copy.manifest.run == source.manifest.run
    assert copy.manifest.save_id != source.manifest.save_id
    for name, some in copy.pieces.items():
        for piece in some:
            assert crc32c(copy.read_piece(name, piece)) == piece.crc32c
    manager = Checkpoints(tmp_path / "next", CkptConfig(dir=str(out_dir)))
    state = make_state()
    restored = manager.restore(abstract(state))
    assert restored is not None
    assert_same(restored.state, state)
    manager.close()
    assert ask("verify", out_dir)[0] == 0
    assert [path.name for path in out_dir.iterdir()] == ["10"]


def test_pieces_written_together_are_all_there(run, ask, tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.ckpt.reshard._HELD_BYTES", 1)  # a flush after each
    assert ask("reshard", run, tmp_path / "out")[0] == 0
    assert ask("verify", tmp_path / "out")[0] == 0


@pytest.mark.parametrize(
    ("chunk", "shape", "max_bytes", "expected"),
    [
        ((8, 100), (8, 100), 3200, (8, 100)),
        ((8, 100), (8, 100), 3199, (4, 100)),
        ((7, 100), (7, 100), 2000, (4, 100)),  # 4 and 3, not 5 and 2
        ((6, 100), (12, 100), 2000, (3, 100)),  # 6 = 3 + 3; 5 would cross pieces
        ((8, 100), (8, 100), 200, (1, 50)),
        ((2, 3, 4), (2, 3, 4), 4, (1, 1, 1)),
        ((), (), 4, ()),
        ((0, 5), (0, 5), 4, (0, 5)),
    ],
)
def test_pieces_are_cut_along_their_first_dims(chunk, shape, max_bytes, expected):
    assert smaller_chunk(chunk, shape, 4, max_bytes) == expected


def test_a_damaged_step_is_not_copied(run, ask, tmp_path):
    flip_a_bit(run / "checkpoints" / "20")
    code, _, err = ask("reshard", run, tmp_path / "out")
    assert code == 1
    assert err.startswith("error: 20/state: ")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_copy_that_cannot_be_read_back_does_not_appear(
    run, ask, tmp_path, monkeypatch
):
    monkeypatch.setattr("mjax.ckpt.arrays.PieceWriter.flush", lambda self: None)
    code, _, _ = ask("reshard", run, tmp_path / "out")
    assert code != 0
    assert list((tmp_path / "out").iterdir()) == []


def test_a_copy_needs_an_own_folder_with_space(run, ask, tmp_path, monkeypatch):
    steps = run / "checkpoints"

    def refused(out):
        code, _, err = ask("reshard", run, out)
        assert code == 2
        assert err.count("\n") == 1
        return err

    assert f"{steps} has a step 20; choose another folder" in refused(steps)
    assert f"copy to, like {steps}" in refused(run)
    (tmp_path / "busy" / "5.unfinished-00").mkdir(parents=True)
    assert "has 5.unfinished-00: a run writes there" in refused(tmp_path / "busy")
    (tmp_path / "other" / "photos").mkdir(parents=True)
    assert "holds no checkpoint of mjax, but photos" in refused(tmp_path / "other")
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: full)
    assert "no space: the checkpoint takes 6.5 MB" in refused(tmp_path / "out")
    assert not (tmp_path / "out" / "20").exists()


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("command", "out"), [("ls", []), ("verify", []), ("show", []), ("reshard", ["out"])]
)
def test_of_several_runs_the_newest_is_named(ask, tmp_path, monkeypatch, command, out):
    monkeypatch.chdir(tmp_path)
    for age_s, name in enumerate(["b", "a"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 1000 - age_s))
    code, _, err = ask(command, "a", "b", *out)
    says = "error: 2 runs are given: a b; give one; the newest is b\n"
    assert (code, err) == (2, says)


@pytest.mark.parametrize("command", ["ls", "verify", "show", "reshard"])
def test_a_path_without_checkpoints_is_refused_in_one_line(ask, tmp_path, command):
    more = [tmp_path / "out"] if command == "reshard" else []

    def refused(path):
        code, out, err = ask(command, path, *more)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err

    assert "missing does not exist; give a work dir" in refused(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    assert "file is a file; give a work dir" in refused(tmp_path / "file")
    (tmp_path / "photos").mkdir()
    assert "photos is empty; give a work dir" in refused(tmp_path / "photos")
    (tmp_path / "photos" / "cat.jpeg").touch()
    assert "no checkpoint of mjax, but cat.jpeg; give" in refused(tmp_path / "photos")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "checkpoints: nothing was saved yet" in refused(tmp_path / "run")
    Journal(tmp_path / "run" / "checkpoints.jsonl").write("saved", 7, save_id="a")
    assert "the run has saved step 7; mount the store" in refused(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("[]")
    assert "config.json is not the config of a run" in refused(tmp_path / "run")
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf" / name).touch()
    said = "is damaged" if command == "show" else "is a model in the form of Hugging"
    assert said in refused(tmp_path / "hf")


def test_a_step_that_is_not_there_is_refused_with_those_that_are(run, ask):
    for command in ("show", "verify"):
        code, _, err = ask(command, run, "--step", 7)
        assert code == 2
        assert "no step 7 in" in err
        assert "only 10, 20; give one of these" in err
    code, _, err = ask("show", run / "checkpoints" / "10", "--step", 20)
    assert code == 2
    assert "leave out --step 20" in err


def test_a_step_without_manifest_is_damaged(run, ask):
    (run / "checkpoints" / "20" / "checkpoint.json").unlink()
    code, _, err = ask("show", run)
    assert (code, err) == (1, "error: 20/checkpoint.json is missing\n")


def test_bad_flags_are_refused(run, ask):
    code, _, err = ask("reshard", run, run / "out", "--max-piece-mib", 0)
    assert code == 2
    assert "--max-piece-mib must be at least 1, got 0" in err

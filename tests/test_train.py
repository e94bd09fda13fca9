"""The command: exit codes, files, resuming after signals and kills."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from mjax import train
from mjax.ckpt import __main__ as ckpt_command
from mjax.cli import exit_codes
from mjax.data import __main__ as data_command
from mjax.processes import lock
from mjax.run import executables, loop
from mjax.run.metrics import read_computed, read_rows

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("caches")


def flags(work_dir, *more):
    return [
        *("--recipe", "debug", "--data.path", "synthetic", "--steps", "12"),
        *("--ckpt.every", "4", "--eval.every", "6", "--log.sample-tokens", "4"),
        *("--work-dir", str(work_dir)),
        *more,
    ]


def command(work_dir, *more):
    words = flags(work_dir, "--simulate-devices", "2", *more)
    return [sys.executable, "-m", "mjax.train", *words]


def start_and_signal(work_dir, number, at_row, log):
    """Start the command; send a signal once it has written `at_row` rows."""
    with (
        log.open("w") as out,
        subprocess.Popen(
            command(work_dir), cwd=REPOSITORY, stdout=out, stderr=out
        ) as process,
    ):
        while process.poll() is None:
            if len(read_rows(work_dir / "metrics.jsonl")) >= at_row:
                holder = lock.holder_of(work_dir / lock.TRAINING)
                assert holder is not None
                assert holder.pid == process.pid
                os.kill(process.pid, number)
                break
            time.sleep(0.02)
        return process.wait(timeout=120)


def test_a_run_leaves_its_files_and_resumes_to_more_steps(tmp_path, capsys):
    path = tmp_path / "run"
    assert train.main(flags(path)) == exit_codes.DONE
    out = capsys.readouterr().out
    for said in ("mesh pp 1", "parameters", "attention", "resume with", "first step"):
        assert said in out
    assert re.search(r"^data: .*; 12 steps read [0-9.e-]+ epochs$", out, re.MULTILINE)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["exit"] == 0
    assert summary["eval_bits_per_byte"] == pytest.approx(
        read_computed(path)[-1]["eval_bits_per_byte"]
    )
    assert (path / "plots" / "curves.png").stat().st_size > 1000
    assert "continued by the model" in (path / "sample.txt").read_text()
    (path / "sample.txt").unlink()
    config = json.loads((path / "config.json").read_text())
    assert config["data"]["path"] == ["synthetic"]
    assert [row["step"] for row in read_computed(path)] == list(range(1, 13))

    more = ["--steps", "14", "--log.sample-tokens", "0"]
    assert train.main(flags(path, *more)) == exit_codes.DONE
    out = capsys.readouterr().out
    assert "resuming after step 12" in out
    [said] = re.findall("learning rate: .*", out)
    was, now = re.findall(r"\d\.\d+e-\d+", said)
    rows = read_computed(path)
    assert float(now) == pytest.approx(rows[12]["lr"], rel=1e-3)
    assert float(was) == pytest.approx(rows[11]["lr"], rel=1e-3)  # stays at the end
    assert "--steps was 12 when this checkpoint was saved and is 14 now" in said
    assert [row["step"] for row in read_computed(path)] == list(range(1, 15))
    assert not (path / "sample.txt").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "5"], "seed: 0 there, 5 in this run"),
        (["--model.d-ff", "96"], "model.d_ff"),
        (["--steps", "3"], "--steps must be at least the 12 steps"),
        (["--data.path", "/absent"], "/absent"),
        (["--init-from", "hf://org/model@main"], "init_from: null there"),
        (["--batch.size", "9"], "batch.size"),
        (["--mesh.tp", "16"], "16"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(finished, capsys, more, message):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    assert train.main(flags(finished, *more)) == exit_codes.BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    after = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    assert after == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    assert train.main(flags(path)) == exit_codes.DONE
    return path


def test_a_checkpoint_of_another_model_is_refused_without_its_config(finished, capsys):
    config = finished / "config.json"
    text = config.read_text()
    config.unlink()
    try:
        assert train.main(flags(finished, "--model.d-ff", "96")) == exit_codes.BAD_INPUT
        assert "is of another model or optimizer" in capsys.readouterr().err
        assert not config.exists()
    finally:
        config.write_text(text)


def test_an_unwritable_work_dir_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train.main(flags(tmp_path / "file" / "run")) == exit_codes.BAD_INPUT
    assert "cannot write the work dir" in capsys.readouterr().err


def test_a_dry_run_compiles_says_what_has_no_form_and_leaves_nothing(tmp_path, capsys):
    more = ["--dry-run", "--model.activation", "gelu"]
    assert train.main(flags(tmp_path / "run", *more)) == exit_codes.DONE
    out = capsys.readouterr().out
    assert re.search("start-up: (compile|load)", out)
    assert "--model.activation swiglu would make it cohere2\n" in out
    assert list(tmp_path.iterdir()) == []


def test_a_work_dir_alone_resumes_the_run_in_it(finished, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    alone = ["--work-dir", str(path)]
    assert train.main([*alone, "--steps", "14"]) == exit_codes.DONE
    out = capsys.readouterr().out
    assert f"resuming the run in {path}: its config.json gives the flags" in out
    assert "resuming after step 12" in out
    assert read_computed(path)[:12] == read_computed(finished)
    assert [row["step"] for row in read_computed(path)] == list(range(1, 15))
    assert train.main([*alone, "--steps", "14", "--seed", "5"]) == exit_codes.BAD_INPUT
    assert "seed: 0 there, 5 in this run" in capsys.readouterr().err
    # A recipe, or a new beginning, takes nothing from there.
    for begins in (["--recipe", "demo"], ["--restart-from-scratch"]):
        assert train.main([*alone, *begins, "--print-config"]) == exit_codes.DONE
        assert (
            json.loads(capsys.readouterr().out)["model"]
            != (json.loads((finished / "config.json").read_text())["model"])
        )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"stepz": 3}', "config.json: unknown field stepz; the nearest is steps"),
        ('{"steps": "x"}', "config.json: "),
        ("[]", "must be an object, got []"),
    ],
)
def test_a_config_that_no_run_wrote_resumes_nothing(tmp_path, capsys, text, says):
    (tmp_path / "config.json").write_text(text)
    assert train.main(["--work-dir", str(tmp_path)]) == exit_codes.BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: cannot ")
    assert says in error
    assert "Traceback" not in error


@pytest.mark.parametrize("more", [[], ["--ckpt.local-dir", "copies"]])
def test_a_bad_init_from_leaves_nothing(tmp_path, monkeypatch, capsys, more):
    monkeypatch.chdir(tmp_path)
    bad = flags("run", "--init-from", "absent", *more)
    assert train.main(bad) == exit_codes.BAD_INPUT
    assert "absent" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_a_bad_init_from_moves_no_old_run_aside(finished, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    again = ["--restart-from-scratch", "--init-from"]
    assert (
        train.main(flags(path, *again, str(tmp_path / "absent")))
        == exit_codes.BAD_INPUT
    )
    assert (
        train.main(flags(path, *again, str(path / "checkpoints")))
        == exit_codes.BAD_INPUT
    )
    assert "which --restart-from-scratch moves aside" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [path]
    assert read_computed(path) == read_computed(finished)


STAGED = [
    *("--mesh.pp", "2", "--mesh.dp", "4", "--model.layers", "4", "--batch.size", "32"),
    *("--batch.microbatches", "4", "--model.remat", "none", "--dry-run"),
]


@pytest.mark.slow
def test_a_pipeline_says_what_it_will_do_and_need(tmp_path, capsys):
    assert train.main(flags(tmp_path / "run", *STAGED)) == exit_codes.DONE
    out = capsys.readouterr().out
    for said in (
        "pipeline: 1f1b, 2 stages x 1 virtual, 4 microbatches; 6 ticks",
        "stash: residuals, 3 buffer entries x ",
        "memory of one device, estimated",
    ):
        assert said in out
    size = r"([\d.]+) ([KM])iB"
    [(slot, unit, stash, total_unit)] = re.findall(rf"3 slots x {size} = {size}", out)
    bytes_per = {"K": 2**10, "M": 2**20}
    # Both are rounded to a tenth of their unit.
    total = float(stash) * bytes_per[total_unit]
    slack = 0.15 * bytes_per[unit] + 0.05 * bytes_per[total_unit]
    assert total == pytest.approx(3 * float(slot) * bytes_per[unit], abs=slack)
    assert re.search(rf"stash +{stash} {total_unit}iB\n", out)


def test_a_run_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, capsys):
    more = [*STAGED[:-1], "--device-memory-gib", "0.005"]
    assert train.main(flags(tmp_path / "run", *more)) == exit_codes.BAD_INPUT
    out, error = capsys.readouterr()
    assert "start-up: compile" not in out
    fix = r"a device has 5\.1 MiB; --pipeline.stash input fits, with \d\.\d MiB\n$"
    assert re.search(
        f"^error: a step needs an estimated .* of device memory, and {fix}", error
    )
    assert list(tmp_path.iterdir()) == []


def test_printing_config_and_mesh_leaves_nothing(tmp_path, capsys):
    assert train.main(flags(tmp_path / "run", "--print-config")) == exit_codes.DONE
    assert json.loads(capsys.readouterr().out)["steps"] == 12
    assert train.main(flags(tmp_path / "run", "--print-mesh")) == exit_codes.DONE
    assert capsys.readouterr().out.startswith("mesh pp 1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_starting_from_scratch_keeps_the_old_run(tmp_path):
    path, store = tmp_path / "run", tmp_path / "store"
    two_steps = ["--steps", "2", "--ckpt.dir", str(store)]
    assert train.main(flags(path, *two_steps)) == exit_codes.DONE
    old = read_computed(path)
    again = flags(path, *two_steps, "--seed", "1", "--restart-from-scratch")
    assert train.main(again) == exit_codes.DONE
    assert read_computed(tmp_path / "run.1") == old
    assert (tmp_path / "store.1" / "2").is_dir()
    assert (store / "2").is_dir()
    assert read_computed(path) != old


def test_checkpoints_of_another_run_are_refused(finished, tmp_path, capsys):
    store = str(finished / "checkpoints")
    path = tmp_path / "run"
    assert (
        train.main(flags(path, "--ckpt.dir", store, "--seed", "5"))
        == exit_codes.BAD_INPUT
    )
    error = capsys.readouterr().err
    assert f"the checkpoint at step 12 in {store} holds another run" in error
    assert "seed: 0 there, 5 in this run" in error


def test_a_run_goes_back_behind_data_that_it_leaves_out(finished, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    # Step 8, or 9 where the save of step 4 took until then.
    saved = [int(p.name) for p in (path / "checkpoints").iterdir() if p.name.isdigit()]
    behind = max(step for step in saved if step < 12)
    skip = ["--data.skip", f"{behind}:3", "--log.sample-tokens", "0"]
    assert train.main(flags(path, *skip)) == exit_codes.DONE
    out = capsys.readouterr().out
    assert f"data: 3 batches after step {behind} are skipped" in out
    aside = path / "checkpoints" / "12.rolled-back"
    why = f"it has read data that --data.skip {behind}:3 excludes"
    assert f"warning: a checkpoint was put aside: {aside}: {why}" in out
    assert f"resuming after step {behind}" in out
    before, after = read_computed(finished), read_computed(path)
    assert [row["step"] for row in after] == list(range(1, 13))
    assert after[:behind] == before[:behind]
    assert after[behind]["loss"] != before[behind]["loss"]
    # What the run has left out it cannot read after all.
    assert train.main(flags(path)) == exit_codes.BAD_INPUT
    assert f'data.skip: ["{behind}:3"] there, [] in this run' in capsys.readouterr().err


@pytest.mark.slow
def test_data_are_shown_only_if_they_are_those_that_the_run_has_read(tmp_path, capsys):
    corpus, path = tmp_path / "text", tmp_path / "run"
    corpus.mkdir()
    for name in "abc":
        (corpus / name).write_text(f"{name} is a letter. " * 400)
    text = ["--data.path", str(corpus), "--steps", "2"]
    assert train.main(flags(path, *text)) == exit_codes.DONE
    capsys.readouterr()
    show = ["show", "--work-dir", str(path), "--step", "1"]
    assert data_command.main(show) == 0
    assert "is a letter" in capsys.readouterr().out
    (corpus / "a").write_text("Another text. " * 500)
    assert data_command.main(show) == 2
    assert "the data are not those that the run of" in capsys.readouterr().err
    assert train.main(flags(path, *text, "--steps", "3")) == exit_codes.BAD_INPUT
    assert "the data are not those of the checkpoint" in capsys.readouterr().err


def test_damaged_tokens_end_the_run_with_one_message(tmp_path, capsys):
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("the quick brown fox\n" * 2000)
    words = flags(tmp_path / "run", "--data.path", str(text), "--steps", "2")
    words += ["--data.cache-dir", str(cache), "--ckpt.every", "2", "--eval.every", "2"]
    assert train.main([*words, "--dry-run"]) == 0
    (tokens,) = cache.glob("*/train.tokens")
    content = bytearray(tokens.read_bytes())
    content[100] ^= 4
    tokens.write_bytes(content)
    assert train.main(words) == 1
    error = capsys.readouterr().err
    assert "error: " in error
    assert "train.tokens is damaged: bytes 0 to" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("place", "name", "more", "what"),
    [
        (executables.Executables, "compile", ["--no-keep-compiled"], "compilation"),
        (loop, "read_numbers", [], "training"),
    ],
)
def test_a_full_memory_ends_the_run_with_one_message(
    tmp_path, monkeypatch, capsys, place, name, more, what
):
    text = "RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes."

    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(text + "\nmore lines")

    monkeypatch.setattr(place, name, fail)
    assert train.main(flags(tmp_path / "run", *more)) == exit_codes.FAILED
    error = capsys.readouterr().err
    start = f"error: the memory of the host is full during {what} ({text}); "
    assert error.startswith(start)
    assert "; use --zero 3 or fewer simulated devices or a smaller model" in error
    assert "Traceback" not in error


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    finished, tmp_path, capsys
):
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    for manifest in (path / "checkpoints").glob("*/checkpoint.json"):
        manifest.write_bytes(manifest.read_bytes()[:-5])
    for _ in range(2):
        assert train.main(flags(path)) == exit_codes.GAVE_UP
        assert "no intact checkpoint is left" in capsys.readouterr().err
    assert read_computed(path) == read_computed(finished)


@pytest.mark.slow
def test_a_run_begins_with_what_another_has_exported(tmp_path, capsys):
    llama = ["--model.block", "serial", "--model.norm", "rmsnorm", "--steps", "2"]
    llama += ["--model.activation", "swiglu", "--model.window", "None"]
    llama += ["--model.rope", "True", "--model.no-rope-interleaved"]
    path, folder = tmp_path / "run", tmp_path / "exported"
    assert train.main(flags(path, *llama)) == exit_codes.DONE
    assert ckpt_command.main(["export", str(path), str(folder)]) == 0
    assert "llama, float32, end of text 256" in capsys.readouterr().out
    assert ckpt_command.main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out.split()
    still = ["--steps", "2", "--optim.lr", "1e-12", "--init-from", str(folder)]
    assert train.main(flags(tmp_path / "next", *shown, *still)) == exit_codes.DONE
    # Another value of the learning rate is another compilation.
    assert read_computed(tmp_path / "next")[-1]["eval_loss"] == pytest.approx(
        read_computed(path)[-1]["eval_loss"], rel=1e-6
    )


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another(finished, tmp_path, capsys):
    path = tmp_path / "run"
    still = ["--steps", "2", "--optim.lr", "1e-12", "--init-from", str(finished)]
    assert train.main(flags(path, *still, "--mesh.tp", "2")) == exit_codes.DONE
    assert f"parameters from {finished / 'checkpoints' / '12'}" in (
        capsys.readouterr().out
    )
    # float32 sums in another order, with tp.
    assert read_computed(path)[-1]["eval_loss"] == pytest.approx(
        read_computed(finished)[-1]["eval_loss"], rel=1e-5
    )
    wider = ["--model.d-ff", "96", "--init-from", str(finished)]
    assert train.main(flags(tmp_path / "wider", *wider)) == exit_codes.BAD_INPUT
    error = capsys.readouterr().err
    assert "params.blocks.mlp.w_in: there (2, 64, 256), this run (2, 64, 96)" in error


def test_a_killed_run_and_a_stopped_run_continue_bitwise(tmp_path):
    undisturbed = tmp_path / "undisturbed"
    subprocess.run(
        command(undisturbed), cwd=REPOSITORY, check=True, capture_output=True
    )
    path, log = tmp_path / "run", tmp_path / "log.txt"
    assert start_and_signal(path, signal.SIGKILL, 6, log) == -signal.SIGKILL
    code = start_and_signal(path, signal.SIGTERM, 7, log)
    assert code == exit_codes.PREEMPTED, log.read_text()
    assert (
        json.loads((path / "summary.json").read_text())["exit"] == exit_codes.PREEMPTED
    )
    subprocess.run(command(path), cwd=REPOSITORY, check=True, capture_output=True)
    assert read_computed(path) == read_computed(undisturbed)


def test_two_processes_train_to_the_end_as_one(finished, tmp_path):
    """All of a run of several processes: barriers, rows, checkpoints, the sample."""
    with socket.create_server(("localhost", 0)) as probe:
        coordinator = f"localhost:{probe.getsockname()[1]}"
    together = ["--distributed.num-processes", "2", "--simulate-devices", "2"]
    together += ["--distributed.coordinator", coordinator, "--distributed.process-id"]
    path = tmp_path / "run"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "mjax.train", *flags(path, *together, str(index))],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "continued by the model" in (path / "sample.txt").read_text()
    losses = [row["loss"] for row in read_computed(path)]
    # float32 sums in another order, on 4 devices instead of 8.
    assert losses == pytest.approx(
        [row["loss"] for row in read_computed(finished)], rel=1e-5
    )

"""The command: one compilation read back, formulas without a compiler, bad input."""

import contextlib
import io
import json
import pathlib
import re
from typing import Any

import pytest
from jax.experimental import topologies

from mjax.plan.__main__ import main

FLAGS = (
    "--recipe debug --model.layers 1 --model.window 16 --model.rope True "
    "--optim.name adamw --precision.compute bfloat16 --mesh.tp 2 "
    "--gpu h100 --nodes 2 --gpus-per-node 2"
)


def run(flags: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main(flags.split())
    return code, out.getvalue(), err.getvalue()


def refused(flags: str) -> str:
    """Return the message of a command that is bad input, before it compiles."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = main(flags.split())
        except SystemExit as left:
            code = left.code
    assert (code, out.getvalue()) == (2, "")
    return err.getvalue()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[dict[str, Any], str, pathlib.Path]:
    """Compile a small run once: its object, what was said, its HTML page."""
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    code, out, err = run(f"{FLAGS} --json --html {path}")
    assert code == 0
    return json.loads(out), err, path


@pytest.mark.plan
def test_stdout_is_one_object_and_progress_is_elsewhere(compiled):
    found, err, _ = compiled
    assert found["compiled"] is True
    assert found["compile_s"] > 0
    assert "compiled in" in err


@pytest.mark.plan
def test_the_collectives_of_the_run_are_found(compiled):
    rows = {(row["role"], row["kind"]): row for row in compiled[0]["collectives"]}
    # The layer's parallel block: one forward, one backward.
    assert rows["tp", "reduce-scatter"]["count"] >= 2
    assert rows["tp", "all-gather"]["tier"] == "node"
    assert rows["dp", "reduce-scatter"]["tier"] == "network"
    assert rows["dp", "all-gather"]["dtype"] == "bf16"
    assert set(compiled[0]["overlapped_bytes_fraction"]) == {"tp", "dp", "pp"}
    assert compiled[0]["overlapped_bytes_fraction"]["pp"] is None
    assert compiled[0]["communicators"] >= 2


@pytest.mark.plan
def test_the_memory_read_holds_at_least_the_state(compiled):
    found = compiled[0]
    parts = found["memory_parts_bytes"]
    assert sum(parts.values()) == found["memory_bytes"]
    # Parameters in float32, split over tp 2 and, but for some small ones, dp 2.
    assert found["params"] <= parts["parameters"] < 1.5 * found["params"]
    assert parts["optimizer state"] == pytest.approx(2 * parts["parameters"], rel=0.01)
    assert found["fits"] is True
    assert found["memory_source"] == "executable"


@pytest.mark.plan
def test_the_modelled_step_is_made_of_its_parts(compiled):
    model = compiled[0]["modelled"]
    assert model["step_s"] == pytest.approx(sum(model["parts_s"].values()))
    assert model["parts_s"]["matrix products"] > 0
    assert model["bubble"] == 0
    tokens = compiled[0]["batch_size"] * compiled[0]["seq_len"]
    assert model["tokens_per_s"] == pytest.approx(tokens / model["step_s"])
    assert model["bottleneck"]


@pytest.mark.plan
def test_the_schedule_is_drawn(compiled):
    text = compiled[2].read_text()
    titles = re.findall("<h2 title='[^']*'>(.*)</h2>", text)
    assert titles[0] == "The whole step"
    assert "class='tp'" in text
    assert "class='product'" in text


@pytest.fixture
def no_plugin(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)


def test_without_the_plugin_formulas_answer_and_say_how_to_get_it(no_plugin):
    code, out, err = run(f"{FLAGS} --json")
    found = json.loads(out)
    assert code == 0
    assert "make env-plan" in err
    assert found["compiled"] is False
    assert found["collectives"] is None
    assert found["memory_bytes"] > 0
    assert "formulas" in found["notes"][0]
    assert found["modelled"]["source"].startswith("closed form")


def test_cudnn_has_a_stand_in_wherever_a_step_is_traced(no_plugin):
    small = "--batch.size 4 --data.no-isolate-documents --device-memory-gib 1e-4"
    code, out, _ = run(f"{FLAGS} {small}")
    assert code == 0
    assert "uses cuDNN, which can be compiled on a GPU only" in out
    assert "from the trace" in out  # advice: a second trace, of a smaller run


def test_a_search_prints_its_table_and_the_best_page(no_plugin):
    small = "--recipe debug --model.layers 4 --precision.compute bfloat16"
    given = "--mesh.dp_shard=2 --model.remat full"
    code, out, err = run(f"{small} {given} --nodes 1 --search --search-compile 1")
    for flag in ("--mesh.dp-shard", "--model.remat"):
        assert f"no effect on a search, which tries all values: {flag}\n" in err
    assert "values: --mesh.tp" not in err
    table, page = out.split("best layout:")
    assert code == 0
    rows = table.splitlines()[2:-1]
    assert rows[0].split()[0] == "1"
    assert all("   -       -       -   --mesh.pp" in row for row in rows)
    assert "make env-plan" in page
    assert page.strip().startswith("plan of debug on 1 x 8 = 8 NVIDIA H200")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--gpu h20", "--gpu h20 is not described; the nearest is h200 (of a100-80g"),
        ("--nodes 0", "--nodes must be at least 1, got 0"),
        ("--nodes two", "--nodes must be a whole number, got two"),
        (
            "--recipe megascale-175b --nodes 3",
            "a multiple of --mesh.pp 8 x --mesh.tp 8 = 64, got 24; nearest that fit: "
            "--nodes 8, or --mesh.pp 3",
        ),
        (
            "--recipe megascale-175b --nodes 20",
            "= 64, got 160; nearest that fit: --nodes 16",
        ),
        (
            "--recipe gpt-1b3 --mesh.dp 1 --mesh.tp 4",
            "= 4, got 8; nearest that fit: --mesh.pp 2, or --mesh.dp -1, or --mesh.tp",
        ),
        (
            "--recipe gpt-1b3 --mesh.dp 16",
            "the number of devices must be --mesh.pp 1 x --mesh.dp 16 x --mesh.tp 1 = "
            "16, got 8; nearest that fit: --mesh.dp -1, or --nodes 2",
        ),
        (
            "--recipe debug --mesh.tp 16 --nodes 2",
            "the 8 devices of a host, got 16; nearest that fit: --mesh.tp 8, or",
        ),
        ("--bacth.size 3", "unknown flag --bacth.size; the nearest is --batch.size"),
        ("--html /absent/x.html", "there is no folder /absent; make it"),
        ("--html .", "--html . is a folder; name a file, for example --html plan.html"),
        (
            "--recipe gpt-13b --zero 2 --nodes 8 --mesh.pp 4 --pipeline.idle skip",
            "plan with --pipeline.idle compute, or auto",
        ),
        (
            "--recipe debug --gpu h100 --device-memory-gib 100",
            "--device-memory-gib must be at most the 79.1 GiB of --gpu h100, got 100",
        ),
        ("--search-compile 0", "--search-compile must be at least 1, got 0"),
        (
            "--search-window 0",
            "--search-window must be at least 1 (a query sees itself), got 0",
        ),
        (
            "--recipe debug --search --device-memory-gib 1e-5",
            "of --batch.size 8 over 8 GPUs of --gpu h200 divides evenly and fits in",
        ),
        (
            "--recipe debug --zero 3 --model.remat none",
            "--zero 3 with --model.remat none would keep",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(flags, words, no_plugin):
    assert words in refused(flags)


def test_flags_of_train_that_mean_nothing_here_are_named(no_plugin):
    _, _, err = run(f"{FLAGS} --simulate-devices 8 --dry-run")
    assert "no effect on a plan: --simulate-devices" in err
    assert "no effect on a plan: --dry-run" in err


def test_the_config_is_printed_as_train_prints_it():
    code, out, _ = run("--recipe debug --gpu b200 --print-config")
    assert code == 0
    assert json.loads(out)["model"]["layers"] == 2

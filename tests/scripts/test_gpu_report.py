"""The GPU report: what can be shown of it without a GPU."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.recipes.gpt import gpt_1b3
from scripts import gpu_report
from scripts.gpu import (
    attention,
    correctness,
    kernel_times,
    layers,
    pages,
    supervise,
    timing,
    training,
)
from scripts.gpu.parts import PARTS
from scripts.gpu.setting import Part, make_setting
from tests.scripts import planted_part

PLANTED = Part(name="planted", title="", path=planted_part.__name__, timeout_s=4)
MACHINE = {"device_kind": "NVIDIA H200", "driver": "1", "versions": {"jax": "2"}}
ORIGIN = pages.Origin(
    mode="gpu", commit="abc", date="2026-01-01", command="report", machine=MACHINE
)
# None of these is needed where the report runs; a run of the trainer needs them.
BLOCKED = ("tyro", "grain", "tokenizers", "pyarrow", "torch", "tokamax")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Run every part small, in processes that cannot import what a GPU may lack."""
    blocked = tmp_path_factory.mktemp("blocked")
    for name in BLOCKED:
        (blocked / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    out = tmp_path_factory.mktemp("report")
    env = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_report", "--rehearse", "--out", str(out)],
        env=env,
        capture_output=True,
        text=True,
    )
    return out, done


def test_the_rehearsal_runs_every_part_without_the_trainers_packages(rehearsal):
    out, done = rehearsal
    assert done.returncode == 0, done.stdout + done.stderr
    for name in PARTS:
        stored = json.loads((out / f"gpu_{name}.json").read_text())
        assert [row["case"] for row in stored["rows"]] == list(
            PARTS[name].module.cases(True)
        )
        for row in stored["rows"]:
            needs_more = any(
                word in row["case"] for word in ("cudnn", "torch", "tokamax")
            )
            skipped = needs_more or name == "kernels"
            assert row["status"] == ("skipped" if skipped else "ok"), row
            assert skipped == ("why" in row)


def test_pages_of_a_rehearsal_say_that_they_measure_nothing(rehearsal):
    out, _ = rehearsal
    for name in PARTS:
        page = (out / f"gpu_{name}.md").read_text()
        assert "**A rehearsal on a CPU with tiny shapes: no measurement.**" in page
        assert "no torch here" in page or name != "attention"


def test_a_contender_that_is_not_there_has_its_reason_in_the_table(rehearsal):
    out, _ = rehearsal
    page = (out / "gpu_attention.md").read_text()
    assert "skipped: cuDNN plans its kernels with its library" in page
    assert page.count("skipped: no torch here") > 0


def run_planted(**changes) -> tuple[dict, list]:
    rows = []
    options = {"deadline": time.time() + 600, "on_row": rows.append} | changes
    supervise.run_cases(PLANTED, planted_part.cases(False), "rehearse", **options)
    return {row["case"]: row for row in rows}, rows


def test_a_case_that_fails_is_a_row_and_the_rest_goes_on():
    rows, in_order = run_planted()
    assert [row["case"] for row in in_order] == list(planted_part.ORDER)
    assert {name: row["status"] for name, row in rows.items()} == {
        "fine": "ok",
        "raises": "error",
        "dies": "error",
        "fine after": "ok",
        "hangs": "error",
        "absent": "skipped",
        "last": "ok",
    }
    assert rows["raises"]["why"] == "ValueError: planted"
    assert rows["dies"]["why"] == "its process ended with code 7; last words"
    assert rows["hangs"]["why"].startswith("killed: no result in 4 s")
    assert rows["absent"]["why"] == "No module named 'planted'"
    # What shares a process does, until one dies; what asks for its own has it.
    pids = [rows[name]["pid"] for name in ("fine", "fine after", "last")]
    assert len(set(pids)) == 3


def test_a_case_that_outlives_the_budget_is_no_failure(monkeypatch):
    monkeypatch.setattr(supervise, "GRACE_S", 0.5)
    cases = {name: name for name in ("hangs", "last")}
    rows = []
    patient = dataclasses.replace(PLANTED, timeout_s=600)
    # Time to start, which a loaded machine needs more of.
    deadline = time.time() + 30
    monkeypatch.setattr(supervise.time, "time", HurriedClock(deadline))
    supervise.run_cases(
        patient, cases, "rehearse", deadline=deadline, on_row=rows.append
    )
    assert [row["status"] for row in rows] == ["not run", "not run"]
    assert rows[0]["why"].startswith("killed: the budget was spent")
    assert rows[1]["why"] == "the budget was spent"


class HurriedClock:
    """Says that there is time until a case has begun, then that there is none."""

    def __init__(self, deadline: float):
        self.deadline, self.readings = deadline, 0

    def __call__(self) -> float:
        # Read before a group, before its first message, before its second.
        self.readings += 1
        return self.deadline + (1.0 if self.readings > 2 else -600.0)


def test_no_case_begins_when_the_budget_is_spent():
    rows, _ = run_planted(deadline=time.time() - 1)
    assert list(rows) == list(planted_part.ORDER)
    assert {(r["status"], r["why"]) for r in rows.values()} == {
        ("not run", "the budget was spent")
    }


class _Importable(Part):
    """A part that this process can import and a worker cannot."""

    module = planted_part  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def test_processes_that_cannot_start_are_not_started_for_ever():
    rows = []
    path = "scripts.gpu.no_such_part"
    broken = _Importable(name="planted", title="", path=path, timeout_s=4)
    supervise.run_cases(
        broken,
        dict.fromkeys("abcde"),
        "rehearse",
        deadline=time.time() + 600,
        on_row=rows.append,
    )
    assert [row["status"] for row in rows] == ["error"] * 3 + ["not run"] * 2
    assert "No module named 'scripts.gpu.no_such_part'" in rows[0]["why"]
    assert rows[-1]["why"] == "3 processes in a row ended without a result"


def test_a_part_that_cannot_be_imported_spoils_no_other(tmp_path, capsys):
    broken = dataclasses.replace(PLANTED, path="scripts.gpu.no_such_part")
    options = {"deadline": time.time() + 600, "keep": False}
    assert gpu_report.run_part(broken, ORIGIN, tmp_path, **options) == 1
    assert "No module named 'scripts.gpu.no_such_part'" in capsys.readouterr().out


def test_without_a_gpu_the_report_ends_before_any_work(tmp_path, capsys):
    out = tmp_path / "out"
    assert gpu_report.main(["--part", "ceilings", "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "an NVIDIA GPU that jax can use is needed" in message
    assert "--rehearse" in message
    assert not out.exists()


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("error", 1)])
def test_compiling_only_ends_with_1_if_a_case_does_not_compile(
    status, code, monkeypatch, capsys
):
    def run(part, cases, mode, *, deadline, on_row):
        assert mode == "compile"
        # What a GPU will run, not what is rehearsed.
        assert list(cases) == list(part.module.cases(False))
        row = {"status": status, "why": "spoilt", "seconds": 1.0, "bytes": {"": 2**30}}
        for name in cases:
            on_row({"case": name, **row})

    monkeypatch.setattr(supervise, "run_cases", run)
    monkeypatch.setattr(supervise, "probe", lambda mode: {"device_kind": "cpu"})
    flags = ["--compile-only", "--part", "ceilings", "--commit", "abc"]
    assert gpu_report.main(flags) == code
    out = capsys.readouterr().out
    assert f"4 {status}" in out
    assert ("1.00 GiB" in out) == (status == "ok")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--part", "speed"], "invalid choice: 'speed'"),
        (["--budget-s", "0"], "must be positive and finite, got 0"),
        (["--rehearse", "--compile-only"], "not allowed with argument"),
    ],
)
def test_bad_arguments_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_report.main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_git_the_commit_must_be_given(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_report, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="give it with --commit"):
        gpu_report.find_commit()


def test_rows_are_on_disk_after_every_case(tmp_path, monkeypatch):
    seen = []

    def run(part, cases, mode, *, deadline, on_row):
        for name in cases:
            on_row({"case": name, "status": "ok", "seconds": 1.0})
            seen.append(json.loads(pages.json_path(tmp_path, part).read_text())["rows"])

    monkeypatch.setattr(supervise, "run_cases", run)
    options = {"deadline": 0.0, "keep": False}
    assert gpu_report.run_part(PLANTED, ORIGIN, tmp_path, **options) == 0
    assert [len(rows) for rows in seen] == list(range(1, len(planted_part.ORDER) + 1))
    assert [p.suffix for p in sorted(tmp_path.iterdir())] == [".json", ".md"]


def test_rows_of_an_earlier_call_are_kept_where_they_fit(tmp_path):
    rows = {
        "good": {"case": "good", "status": "ok"},
        "bad": {"case": "bad", "status": "error", "why": ""},
        "left": {"case": "left", "status": "not run", "why": ""},
    }
    pages.write(tmp_path, PLANTED, ORIGIN, rows, small=False)
    assert list(pages.load_rows(tmp_path, PLANTED, ORIGIN)) == ["good"]
    for other in (
        dataclasses.replace(ORIGIN, commit="def"),
        dataclasses.replace(ORIGIN, mode="rehearse"),
        dataclasses.replace(ORIGIN, machine=MACHINE | {"device_kind": "NVIDIA H100"}),
    ):
        assert pages.load_rows(tmp_path, PLANTED, other) == {}
    later = dataclasses.replace(ORIGIN, date="2026-01-02")
    assert list(pages.load_rows(tmp_path, PLANTED, later)) == ["good"]


def test_every_part_has_tables_of_no_rows_and_of_failed_ones():
    for part in PARTS.values():
        for small in (False, True):
            failed = {
                name: {"case": name, "status": "error", "why": "planted | fault"}
                for name in part.module.cases(small)
            }
            for rows in ({}, failed):
                tables = part.module.tables(rows, small)
                page = pages.markdown(part.title, ORIGIN, tables)
                widths = [
                    line.replace("\\|", "").count("|")
                    for table in page.split("\n\n")
                    if table.startswith("|")
                    for line in table.splitlines()
                ]
                assert widths
                for table in tables:
                    assert {len(row) for row in table.rows} <= {len(table.header)}
            assert "error: planted \\| fault" in page


# -------------------------------------------------------------------------- timing


class FakeDevice:
    """A device whose calls take a known time, and whose clock can be read."""

    def __init__(self, call_s: list[float]):
        self.call_s, self.now, self.calls = call_s, 0.0, []

    def call(self, i: int) -> int:
        self.now += self.call_s[len(self.calls) % len(self.call_s)]
        self.calls.append(i)
        return i


def test_the_time_of_a_call_is_the_median_over_batches_that_go_round_the_inputs():
    device = FakeDevice([0.002])
    found = timing.time_calls(device.call, lambda _: None, clock=lambda: device.now)
    assert found.median_ms == pytest.approx(2.0)
    assert found.spread == pytest.approx(0.0, abs=1e-9)
    per_batch = math.ceil(timing.BATCH_S / 0.002)
    assert found.calls == timing.ROUNDS * per_batch
    assert device.calls[-per_batch:] == [
        i % timing.INPUT_SETS for i in range(per_batch)
    ]


def test_one_slow_batch_moves_the_spread_and_not_the_median():
    device = FakeDevice([0.03])
    # Warm-up 2 calls, then 1, then 5; each batch is one call.
    device.call_s = [0.03] * 10 + [0.09] + [0.03] * 100
    found = timing.time_calls(device.call, lambda _: None, clock=lambda: device.now)
    assert found.median_ms == pytest.approx(30.0)
    assert found.spread == pytest.approx(2.0)


def test_slow_calls_are_timed_three_times_only():
    device = FakeDevice([2.0])
    found = timing.time_calls(device.call, lambda _: None, clock=lambda: device.now)
    assert (found.calls, found.median_ms) == (3, pytest.approx(2000.0))


def test_kernels_get_their_medians_in_the_order_of_the_run():
    runs = [[("a", 1.0), ("b", 9.0)], [("a", 3.0), ("b", 8.0)], [("a", 2.0), ("b", 7)]]
    assert kernel_times.medians(runs) == [("a", 2.0), ("b", 8.0)]
    with pytest.raises(ValueError, match="shorter"):
        kernel_times.medians([runs[0], runs[1][:1]])


def test_cupti_gets_the_program_and_its_kernels_become_the_row(monkeypatch):
    def measure(function, *, aggregate, iterations):
        def run(*args):
            gradients = function(*args)
            assert [x.shape for x in gradients] == [x.shape for x in args[:3]]
            assert not aggregate
            return gradients, [[("dq", 2.0), ("dkv", 3.0)]] * iterations

        return run

    monkeypatch.setattr(kernel_times.profiler, "measure", measure)
    case = next(c for n, c in kernel_times.cases(True).items() if "ours" in n)
    # Tiny shapes and blocked attention, but not skipped.
    setting = make_setting("rehearse")
    monkeypatch.setattr(type(setting), "small", False)
    row = kernel_times.measure(case, setting)
    assert row == {"kernels": [("dq", 2.0), ("dkv", 3.0)]}


# --------------------------------------------------------------------- correctness

CASE = correctness.Case(seq_len=150, window=64, head_dim=16)


@pytest.fixture(scope="module")
def results():
    """Return what blocked attention computes in bfloat16, and the truth."""
    setting = make_setting("rehearse")
    program = correctness.programs(CASE, setting)[""]
    inputs = program.inputs(0)
    got = tuple(np.asarray(x) for x in program.function(*inputs))
    wider = dataclasses.replace(CASE, window=65)
    return got, correctness.truth(CASE, inputs), correctness.truth(wider, inputs)


def test_right_results_pass_with_their_errors(results):
    got, want, _ = results
    row = correctness.judge(CASE, got, got, want)
    assert 1e-4 < row["errors"]["out"] < correctness.LIMITS["bfloat16"]
    assert row["worst"]["dk"] > row["errors"]["dk"]


def test_a_window_off_by_one_is_found(results):
    got, _, wider = results
    with pytest.raises(RuntimeError, match=r"out is wrong.*dq is wrong.*dk is wrong"):
        correctness.judge(CASE, got, got, wider)


def test_one_number_that_was_not_written_is_found(results):
    got, want, _ = results
    for name, index in (("out", 0), ("dv", 3)):
        spoilt = [x.copy() for x in got]
        spoilt[index][1, 149, 0, 15] = math.nan
        with pytest.raises(RuntimeError, match=f"^{name} is not finite"):
            correctness.judge(CASE, spoilt, spoilt, want)


def test_one_wrong_position_is_found_though_the_whole_is_close(results):
    got, want, _ = results
    spoilt = [x.copy() for x in got]
    spoilt[2][0, 149] = spoilt[2][0, 148]
    with pytest.raises(RuntimeError, match=r"^dk is wrong.*worst position"):
        correctness.judge(CASE, spoilt, spoilt, want)


def test_two_runs_that_differ_in_one_bit_are_found(results):
    got, want, _ = results
    other = [x.copy() for x in got]
    bits = other[1].view(np.uint16)
    bits[0, 100, 0, 0] ^= 1
    with pytest.raises(RuntimeError, match=r"^dq differs between two runs$"):
        correctness.judge(CASE, got, other, want)


def test_the_cases_have_every_window_width_dtype_and_kind():
    cases = correctness.cases(False).values()
    for head_dim in (64, 128):
        for dtype in ("bfloat16", "float16"):
            some = [c for c in cases if (c.head_dim, c.dtype) == (head_dim, dtype)]
            windows = {c.window for c in some}
            assert windows >= {1, 64, 129, None}
        windows = {c.window for c in cases if c.head_dim == head_dim}
        assert windows >= {1, 2, 63, 64, 65, 127, 128, 129, 77, 400, None}
    assert {c.heads // c.kv_heads for c in cases} >= {1, 2, 4}
    assert any(c.documents and c.soft_cap and c.window for c in cases)
    assert all(any(c.seq_len == T for c in cases) for T in (*correctness.RAGGED, 8192))


# ----------------------------------------------------------------------- attention


def test_the_shapes_are_those_asked_for_and_of_equal_cost():
    shapes = attention.shapes(False)
    assert len({shape.name for shape in shapes}) == len(shapes) == 4 * 11
    for shape in shapes:
        assert shape.batch * shape.seq_len == attention.TOKENS
        assert shape.heads * shape.head_dim == attention.WIDTH
    # T=2048 W=4096 is the full window.
    by_length = {T: [s for s in shapes if s.seq_len == T] for T in (2048, 8192, 32_768)}
    assert [len(found) for found in by_length.values()] == [12, 16, 16]
    assert shapes[0].name == "T=8192 W=1024 D=128 GQA=1"


def test_useful_flops_are_fourteen_a_pair_and_width():
    shape = attention.shapes(True)[0]
    i, j = np.indices((shape.seq_len, shape.seq_len))
    pairs = int(((j <= i) & (i - j < 40)).sum()) * shape.batch * shape.heads
    assert shape.flops("forward") == 4 * shape.head_dim * pairs
    assert shape.flops("both") == 14 * shape.head_dim * pairs


def test_ratios_and_their_mean_are_those_of_the_rows():
    names = [shape.name for shape in attention.shapes(False)[:3]]
    rows = {"GEMM": {"case": "GEMM", "status": "ok", "tflops": 800.0, "median_ms": 1.0}}

    def add(name: str, contender: str, ms: float) -> None:
        case = f"{name} | {contender} | both"
        row = {"case": case, "status": "ok", "median_ms": ms, "spread": 0.02}
        rows[case] = row | {"tflops": 400.0}

    add(names[0], "ours", 2.0)
    add(names[0], "cudnn", 1.0)
    add(names[1], "ours", 1.0)
    add(names[1], "cudnn", 8.0)
    add(names[2], "ours", 5.0)
    failed = f"{names[2]} | cudnn | both"
    rows[failed] = {"case": failed, "status": "error", "why": "no plan"}
    tokamax = "T=32768 W=1024 D=128 GQA=1"
    add(tokamax, "tokamax", 30.0)
    add(tokamax, "ours", 4.0)
    forward, both, others = attention.tables(rows, False)
    assert "cuDNN's: -, over 0 of 44 shapes" in forward.text
    # The square root of 2 x 1/8.
    assert "cuDNN's: 0.500, over 2 of 44 shapes" in both.text
    lines = {line[0]: line for line in both.rows}
    assert lines[names[0]][1:6] == ["2.000", "1.000", "2.000", "400", "50.0"]
    assert lines[names[2]][2:4] == ["error: no plan", "-"]
    assert "tokamax / ours at T=32768 W=1024 D=128, both: 7.5" in others.text


@pytest.mark.plan
def test_what_the_gpu_will_run_compiles_for_it_without_one():
    every = attention.cases(False)
    picked = [n for n in every if n.startswith("T=8192 W=1024 D=128 GQA=1 | ")]
    rows = []
    supervise.run_cases(
        PARTS["attention"],
        {name: every[name] for name in picked[:4]},
        "compile",
        deadline=time.time() + 600,
        on_row=rows.append,
    )
    ours, cudnn = (
        [row["status"] for row in rows if name in row["case"]]
        for name in ("ours", "cudnn")
    )
    assert ours == ["skipped", "ok"]
    assert cudnn == ["skipped", "skipped"]
    # q, k, v and d_out, out and three gradients, of 128 MiB each.
    assert rows[1]["bytes"][""] >= 7 * 2**27


# ------------------------------------------------------------- layers and training


def test_the_least_bytes_are_arguments_and_results_once():
    case = layers.Case(operator="GELU", contender="formula", direction="forward")
    array = layers.operators(False)["GELU"].args[0].size * 2
    assert layers.least_bytes(case, False) == 2 * array
    both = dataclasses.replace(case, direction="both")
    assert layers.least_bytes(both, False) == 3 * array


@pytest.mark.parametrize("operator", layers.operators(True))
def test_the_contenders_of_an_operator_compute_the_same(operator):
    setting = make_setting("rehearse")
    contenders = layers.operators(True)[operator].contenders
    found = []
    for contender in contenders:
        case = layers.Case(operator=operator, contender=contender, direction="both")
        program = layers.programs(case, setting)[""]
        inputs = list(program.inputs(0))
        if operator == "cross-entropy":
            inputs[2] = inputs[2] % inputs[1].shape[-1]
        found.append([np.asarray(x, np.float32) for x in program.function(*inputs)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            # bfloat16 at every step of the formula, at the end only in ours.
            np.testing.assert_allclose(a, b, atol=0.05, rtol=0.05)


def test_the_model_that_is_timed_is_the_recipe():
    recipe = gpt_1b3()
    assert recipe.model == training.GPT_1B3
    assert recipe.optim == training.ADAMW
    assert recipe.steps == training.NUM_STEPS


def test_each_step_has_one_change_against_the_base():
    def flat(case: training.Case) -> dict:
        fields = dataclasses.asdict(case)
        return fields | fields.pop("model")

    cases = training.cases(False)
    base = flat(cases["base"])
    changed = {
        name: {k for k, v in flat(case).items() if v != base[k]}
        for name, case in cases.items()
    }
    assert changed.pop("base") == set()
    # cuDNN has no segments: its base is the row above it.
    assert changed.pop("one document a row, cudnn") == {
        "isolate_documents",
        "attention",
    }
    assert {len(fields) for fields in changed.values()} == {1}
    assert len(cases) <= 10


def test_a_random_batch_has_two_documents_a_row():
    case = training.cases(True)["base"]
    program = training.programs(case, make_setting("rehearse"))["step"].program
    batch = training.random_batch(program, case.model.vocab_size, 0)
    tokens, positions = batch["tokens"], np.asarray(batch["positions"])
    assert tokens.shape == (case.tokens // case.seq_len, case.seq_len)
    assert int(jnp.max(tokens)) < case.model.vocab_size
    np.testing.assert_array_equal(batch["targets"][:, :-1], tokens[:, 1:])
    for segments, place in zip(np.asarray(batch["segments"]), positions, strict=True):
        assert set(segments) == {0, 1}
        np.testing.assert_array_equal(
            np.where(np.diff(segments))[0] + 1, np.where(place == 0)[0][1:]
        )


def test_the_pages_are_named_in_the_docs():
    text = (Path(gpu_report.BENCHMARKS_DIR) / "gpu.md").read_text()
    for name in PARTS:
        assert f"gpu_{name}.md" in text

"""Tuning the attention kernels: what is done without a GPU, and what is written."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest

from mjax.kernels.attention import tuning
from mjax.kernels.attention.tuning import MOSAIC_H200, MosaicKernel
from scripts.gpu import candidates, gate, pages, tuning_times
from scripts.gpu.candidates import FULL, Candidate
from scripts.gpu.setting import make_setting
from scripts.kernels import tune_attention
from scripts.kernels.compiled_kernels import CaseReport, CompiledKernel

SHIPPED = MOSAIC_H200[128].forward
FASTER = MosaicKernel(warpgroups=3, block=64, stages=3)
OTHER = MosaicKernel(warpgroups=2, block=64, stages=3)


def row(kernel: str, head_dim: int, config: MosaicKernel, ms: float) -> dict:
    name = Candidate(kernel=kernel, head_dim=head_dim, config=config).name
    return {"case": name, "status": "ok", "median_ms": ms}


# --------------------------------------------------------------------- candidates


def test_the_name_of_a_candidate_is_read_back():
    listed = candidates.first_round(candidates.KERNELS, candidates.HEAD_DIMS)
    assert [candidates.parse(c.name) for c in listed] == listed
    assert len({c.name for c in listed}) == len(listed) == 3 * 2 * 2 * 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "backward D=64 warpgroups=2 block=64 stages=2",
            "with one of forward, dq, dkv",
        ),
        ("dq D=64 block=64", "a candidate is named like"),
        ("dq D=64 warpgroups=1 block=64 stages=2", "warpgroups must be one of"),
        ("dq D=64 warpgroups=2 block=96 stages=2", "32 or a multiple of 64"),
    ],
)
def test_what_is_no_candidate_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        candidates.parse(name)


def test_the_gate_sees_each_candidate_with_its_own_sizes(monkeypatch):
    """Traced on a CPU: the kernel's grid is made of the candidate's tile."""
    names = [f"{k} D=64 warpgroups=3 block=64 stages=3" for k in candidates.KERNELS]
    listed = [*names, names[2] + FULL]
    monkeypatch.setenv(candidates.LISTED_VARIABLE, json.dumps(listed))
    cases = candidates.listed_cases()
    assert list(cases) == listed
    lengths = [len(case.args) for case in cases.values()]
    assert lengths == [3, 6, 6, 7]
    # P is whole tiles of 192 rows and whole blocks.
    assert cases[names[1]].args[4].shape == (1, 8, 43 * 192)
    assert cases[names[2] + FULL].args[1].shape[2] == 1


# --------------------------------------------------------------------------- gate


def compiler(bad: dict[str, str]):
    """Return a compiler for which the named candidates have faults."""
    asked = []

    def compile_listed(names: list[str]) -> list[CaseReport]:
        asked.append(names)
        kernel = CompiledKernel(
            name="op",
            registers=168,
            set_registers=(),
            stack_bytes=0,
            spill_store_bytes=0,
            spill_load_bytes=0,
            shared_memory_bytes=1000,
            serialised=(),
            instructions={},
            loops=(),
        )
        return [
            CaseReport(
                case=name,
                compile_s=1.0,
                kernels=(kernel,),
                faults=tuple(f for part, f in bad.items() if part in name),
            )
            for name in names
        ]

    return compile_listed, asked


def test_what_spills_plain_is_not_compiled_again_and_both_faults_are_kept():
    compile_listed, asked = compiler(
        {
            "block=256": "op spills\nmore",
            f"warpgroups=3 block=64 stages=4{FULL}": "late",
        }
    )
    found = gate.prune(["dq"], [64], lambda _: None, compile_listed)
    faults = {v.name: v.fault for v in found}
    assert len(asked[0]) == 8
    assert not any(FULL in name for name in asked[0])
    # 2 numbers of warpgroups x 3 blocks are left, each with 3 and 4 stages: dq would
    # wait for ever with 2.
    assert len(asked[1]) == 12
    assert all(name.endswith(FULL) for name in asked[1])
    assert len(faults) == 2 + 12
    assert faults["dq D=64 warpgroups=2 block=256 stages=3"] == "op spills"
    assert faults["dq D=64 warpgroups=3 block=64 stages=4"] == "late"
    assert sum(fault is None for fault in faults.values()) == 11


def test_a_kernel_of_which_nothing_is_left_is_not_compiled_again():
    compile_listed, asked = compiler({"": "op spills"})
    found = gate.prune(["dkv"], [128], lambda _: None, compile_listed)
    assert len(asked) == 1
    assert len(found) == 8
    assert all(v.fault for v in found)


def test_pruning_keeps_the_verdicts_on_other_kernels(tmp_path, monkeypatch, capsys):
    path = tmp_path / "candidates.json"
    monkeypatch.setattr(tuning_times, "CANDIDATES_PATH", path)
    compile_listed, _ = compiler({"block=256": "op spills"})
    monkeypatch.setattr(gate, "_compile_listed", compile_listed)
    for kernel in ("dq", "forward", "dq"):
        flags = ["--prune-only", "--kernel", kernel, "--head-dim", "64"]
        assert tune_attention.main(flags) == 0
    assert "30 of 34 candidates are left" in capsys.readouterr().out
    names = [v["name"] for v in json.loads(path.read_text())["verdicts"]]
    assert len(set(names)) == len(names) == 34
    assert names[0] == "forward D=64 warpgroups=2 block=64 stages=2"
    listed = tuning_times.read_candidates(path)
    assert len(listed) == 30
    assert not any(c.config.block == 256 for c in listed)


def test_the_list_that_is_stored_has_what_is_shipped():
    """A kernel that was changed so that its own sizes spill is to be pruned anew."""
    listed = tuning_times.read_candidates()
    for head_dim in candidates.HEAD_DIMS:
        for kernel in candidates.KERNELS:
            config = getattr(MOSAIC_H200[head_dim], kernel)
            shipped = Candidate(kernel=kernel, head_dim=head_dim, config=config)
            assert shipped in listed


# ------------------------------------------------------------------------- timing


@pytest.fixture
def pretended_kernels(monkeypatch):
    """Replace the kernels, which no CPU runs, by functions that note their inputs."""
    seen = []

    def forward(q, k, v, segments, *, problem, tuning):
        rows = (q.shape[0], problem.heads, problem.padded_len)
        return q, jnp.full(rows, 2.0)

    def program(candidate, problem):
        def call(*arrays):
            shapes = candidates.abstract_arguments(candidate, problem, batch=1)
            assert [(x.shape, x.dtype) for x in arrays] == [
                (x.shape, x.dtype) for x in shapes
            ]
            return arrays[0]

        seen.append((candidate, problem))
        return call

    monkeypatch.setattr(tuning_times, "forward", forward)
    monkeypatch.setattr(tuning_times, "program", program)
    for name, value in (("SEQ_LEN", 256), ("BATCH", 1), ("WIDTH", 128)):
        monkeypatch.setattr(tuning_times, name, value)
    tuning_times._shared.cache_clear()
    yield seen
    tuning_times._shared.cache_clear()


@pytest.mark.parametrize("kernel", candidates.KERNELS)
def test_a_kernel_is_timed_with_arrays_of_its_own_padding(kernel, pretended_kernels):
    candidate = Candidate(kernel=kernel, head_dim=64, config=FASTER)
    device = dataclasses.replace(make_setting("rehearse"), mode="gpu")
    found = tuning_times.measure(candidate, device)
    # 256 in whole tiles of 192.
    assert [(p.window, p.padded_len) for _, p in pretended_kernels] == [
        (1024, 384),
        (None, 384),
    ]
    assert list(found["ms"]) == ["1024", "full"]
    assert found["median_ms"] == pytest.approx(
        math.sqrt(found["ms"]["1024"] * found["ms"]["full"])
    )


def test_the_fastest_candidate_stands_first_in_its_table(monkeypatch):
    names = [
        Candidate(kernel="dq", head_dim=64, config=config).name
        for config in (MOSAIC_H200[64].dq, FASTER)
    ]
    monkeypatch.setattr(
        tuning_times, "read_candidates", lambda: [candidates.parse(n) for n in names]
    )
    timed = {"ms": {"1024": 1.0, "full": 4.0}, "median_ms": 2.0, "spread": 0.01}
    rows = {names[1]: {"case": names[1], "status": "ok", **timed}}
    (table,) = tuning_times.tables(rows, False)
    assert [line[0] for line in table.rows] == names[::-1]
    assert table.rows[0][1:] == ["2.0000", "1.0000", "4.0000", "1.0"]


# ------------------------------------------------------------------------- choice


def test_the_fastest_is_chosen_for_each_kernel_and_width():
    rows = [
        row("forward", 128, SHIPPED, 2.0),
        row("forward", 128, FASTER, 1.5),
        row("dq", 64, MOSAIC_H200[64].dq, 1.0),
        row("dq", 64, OTHER, 0.5),
        {"case": "dq D=64 warpgroups=2 block=64 stages=2", "status": "error"},
    ]
    assert tune_attention.choose(rows, MOSAIC_H200) == {
        ("forward", 128): FASTER,
        ("dq", 64): OTHER,
    }


def test_without_a_time_of_the_shipped_sizes_they_stay():
    """Of a call that was ended, half the candidates have a time."""
    rows = [row("forward", 128, FASTER, 0.1), row("dq", 64, OTHER, 0.1)]
    assert tune_attention.choose(rows, MOSAIC_H200) == {}


def test_the_shipped_sizes_are_timed_before_others_and_the_wide_heads_first():
    listed = list(tuning_times.cases(False).values())
    shipped = [c.config == getattr(MOSAIC_H200[c.head_dim], c.kernel) for c in listed]
    assert shipped == sorted(shipped, reverse=True)
    assert [c.head_dim for c in listed[:6]] == [128] * 3 + [64] * 3
    rest = [c.head_dim for c in listed[6:]]
    assert rest == sorted(rest, reverse=True)


@pytest.mark.parametrize(("ms", "winner"), [(1.99, SHIPPED), (1.97, FASTER)])
def test_within_the_noise_the_shipped_sizes_stay(ms, winner):
    rows = [row("forward", 128, FASTER, ms), row("forward", 128, SHIPPED, 2.0)]
    assert tune_attention.choose(rows, MOSAIC_H200) == {("forward", 128): winner}


def test_blocks_of_dkv_are_those_that_the_chosen_forward_kernel_allows():
    slow, fast = MOSAIC_H200[128].dkv, MosaicKernel(block=128)
    rows = [row("dkv", 128, slow, 2.0), row("dkv", 128, fast, 1.0)]
    assert tune_attention.choose(rows, MOSAIC_H200) == {("dkv", 128): fast}
    # A tile of 192 rows is no whole number of blocks of 128.
    rows += [row("forward", 128, FASTER, 1.0), row("forward", 128, SHIPPED, 2.0)]
    assert tune_attention.choose(rows, MOSAIC_H200) == {
        ("forward", 128): FASTER,
        ("dkv", 128): slow,
    }


# ------------------------------------------------------------------------ writing


def evaluate(source: str):
    """Return the table of a module's text."""
    namespace: dict = {"__name__": "written"}
    exec(compile(source, "tuning.py", "exec"), namespace)
    return namespace["MOSAIC_H200"]


@pytest.fixture
def copy(tmp_path):
    path = tmp_path / "tuning.py"
    shutil.copy(tuning.__file__, path)
    return path


def test_writing_changes_the_winners_in_the_table_and_nothing_else(copy):
    before = copy.read_text()
    winners = {("forward", 128): FASTER, ("dkv", 64): FASTER, ("dq", 64): FASTER}
    after = tune_attention.rewrite(before, winners, "NVIDIA H200, 2026-12-01, jax 1.2")
    table = evaluate(after)
    assert list(table) == list(MOSAIC_H200)
    for head_dim, old in MOSAIC_H200.items():
        for kernel in candidates.KERNELS:
            now = dataclasses.asdict(getattr(table[head_dim], kernel))
            shipped: MosaicKernel = getattr(old, kernel)
            wanted = winners.get((kernel, head_dim), shipped)
            assert now == dataclasses.asdict(wanted), (head_dim, kernel)
    words = " ".join(after.split())
    assert (
        "Tuned on NVIDIA H200, 2026-12-01, jax 1.2 (64: dkv, dq; 128: forward" in words
    )
    begin = before.index("MOSAIC_H200 =")
    assert after[:begin] == before[:begin]
    assert after.count("MOSAIC_H200") == before.count("MOSAIC_H200")


def test_what_is_written_is_formatted_and_can_be_written_again(copy):
    winners = {("forward", 64): FASTER}
    for date in ("2026-12-01", "2026-12-02"):
        where = f"NVIDIA H200, {date}, jax 1.2"
        copy.write_text(tune_attention.rewrite(copy.read_text(), winners, where))
        for check in (["format", "--check"], ["check", "--select", "E,F,W"]):
            subprocess.run(
                [sys.executable, "-m", "ruff", *check, "--isolated", str(copy)],
                check=True,
                capture_output=True,
            )
    assert "2026-12-01" not in copy.read_text()
    assert copy.read_text().count("Tuned on") == 1


@pytest.mark.parametrize(
    ("source", "winners", "message"),
    [
        ("MOSAIC_H200 = 1\n'''doc'''\n", {}, "nothing was timed"),
        ("OTHER = 1\n", {("dq", 64): FASTER}, "the module has no MOSAIC_H200"),
        ("MOSAIC_H200 = 1\n", {("dq", 64): FASTER}, "with a docstring below"),
    ],
)
def test_what_cannot_be_written_is_refused(source, winners, message):
    with pytest.raises(ValueError, match=message):
        tune_attention.rewrite(source, winners, "")


def test_winners_of_a_gpu_are_written_here_from_its_file(copy, tmp_path, capsys):
    machine = {"device_kind": "NVIDIA H200", "driver": "1", "versions": {"jax": "1.2"}}
    origin = pages.Origin(
        mode="gpu", commit="abc", date="2026-12-01", command="tune", machine=machine
    )
    shipped = row("dq", 128, MOSAIC_H200[128].dq, 2.0)
    rows = {"a": row("dq", 128, FASTER, 1.0), "b": shipped}
    pages.write_rows(tmp_path, tuning_times.PART, origin, rows)
    flags = ["--write-only", "--out", str(tmp_path), "--tuning-file", str(copy)]
    assert tune_attention.main(flags) == 0
    assert evaluate(copy.read_text())[128].dq.block == FASTER.block
    assert "Tuned on NVIDIA H200, 2026-12-01, jax 1.2 (128: dq" in copy.read_text()
    assert f"dq D=128: {FASTER}" in capsys.readouterr().out


# --------------------------------------------------------------------- bad input


def test_without_a_gpu_nothing_is_timed_or_written(copy, tmp_path, capsys):
    before = copy.read_text()
    out = tmp_path / "out"
    flags = ["--out", str(out), "--tuning-file", str(copy), "--commit", "abc"]
    assert tune_attention.main(flags) == 2
    assert "an NVIDIA GPU that jax can use is needed" in capsys.readouterr().err
    assert copy.read_text() == before
    assert not out.exists()


def test_without_times_nothing_is_written(copy, tmp_path, capsys):
    flags = ["--write-only", "--out", str(tmp_path), "--tuning-file", str(copy)]
    assert tune_attention.main(flags) == 2
    assert "time the candidates on a GPU first" in capsys.readouterr().err


def test_without_candidates_nothing_is_timed(tmp_path):
    with pytest.raises(ValueError, match="--prune-only, which needs no GPU"):
        tuning_times.read_candidates(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prune-only", "--write-only"], "not allowed with argument"),
        (["--prune-only", "--kernel", "forwards"], "invalid choice"),
        (["--prune-only", "--head-dim", "80"], "invalid choice: 80"),
        (["--kernel", "dq"], "choose what --prune-only compiles"),
        (["--budget-s", "-1"], "must be positive and finite"),
    ],
)
def test_bad_arguments_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        tune_attention.main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err

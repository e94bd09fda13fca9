"""The comparison of two runs: planted differences, noise, missing and bad records."""

import copy
import json

import numpy as np
import pytest

from mjax.observe import compared_times, diff, records, run_differences
from mjax.observe.spans import Line
from tests.observe.span_files import Process, span, write

CONFIG = {
    "work_dir": "runs/a",
    "seed": 0,
    "optim": {"lr": 0.1},
    "ckpt": {"every": 10, "dir": None},
    "distributed": {"coordinator": "a:1"},
}
START = {
    "run": "a1",
    "mjax": "0.1.0",
    "commit": "c0",
    "code": "d0",
    "facts": {"jax": "0.11", "NCCL_ALGO": None, "jax_enable_x64": False},
    "environment": {"XLA_FLAGS": "", "MJAX_GENERATION": "1"},
    "mesh": {"pp": 1, "tp": 2},
    "device": "cpu",
    "processes": [{"host": "n1", "pid": 1}, {"host": "n2", "pid": 2}],
}
SUMMARY = {"steps": 4, "exit": 0, "tokens_per_s": 100.0, "corpus_hash": "abc"}
ROWS = [{"step": n, "loss": 5.0 - n / 8, "step_s": 1.0} for n in range(1, 5)]


def make_run(folder, *, config=CONFIG, starts=(START,), summary=SUMMARY, rows=ROWS):
    """Write the records of a run; None leaves one out."""
    (folder / "starts").mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for number, start in enumerate(starts, start=1):
        (folder / "starts" / f"{number:04d}.json").write_text(json.dumps(start))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if rows is not None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(text)
    return folder


def changed(nested, path, value):
    """Return a copy with another value at a path."""
    result = copy.deepcopy(nested)
    inner = result
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return result


def compared(tmp_path, **of_b) -> diff.Diff:
    return diff.diff(make_run(tmp_path / "a"), make_run(tmp_path / "b", **of_b))


def by_name(found):
    return {group.name: group for group in found.groups}


@pytest.mark.parametrize(
    ("group", "part", "path", "value", "name"),
    [
        ("flags", "config", ("optim", "lr"), 0.2, "--optim.lr"),
        ("seed", "config", ("seed",), 1, "seed"),
        ("code", "start", ("commit",), "c1", "commit"),
        ("code", "start", ("code",), "d1", "code"),
        ("versions", "start", ("facts", "jax"), "0.12", "jax"),
        ("environment", "start", ("facts", "NCCL_ALGO"), "Tree", "NCCL_ALGO"),
        ("environment", "start", ("facts", "jax_enable_x64"), True, "jax_enable_x64"),
        ("environment", "start", ("environment", "XLA_FLAGS"), "--x", "XLA_FLAGS"),
        ("hosts", "start", ("device",), "H100", "device"),
        ("mesh", "start", ("mesh", "pp"), 2, "pp"),
        ("data", "summary", ("corpus_hash",), "abd", "corpus"),
    ],
)
def test_a_difference_is_in_its_group_and_in_no_other(
    tmp_path, group, part, path, value, name
):
    config, start, summary = CONFIG, START, SUMMARY
    if part == "config":
        config = changed(config, path, value)
    elif part == "start":
        start = changed(start, path, value)
    else:
        summary = changed(summary, path, value)
    found = compared(tmp_path, config=config, starts=(start,), summary=summary)
    assert {g.name for g in found.groups if g.differing} == {group}
    assert list(by_name(found)[group].differing) == [name]
    assert f"{group} no" in dict(diff.questions(found))["Is everything else the same?"]


def test_the_same_hosts_in_another_order_differ_in_the_order_only(tmp_path):
    start = changed(START, ("processes",), START["processes"][::-1])
    found = compared(tmp_path, starts=(start,))
    assert {g.name for g in found.groups if g.differing} == {"order of ranks"}


def test_where_a_run_is_and_how_it_was_started_is_no_difference(tmp_path):
    config = changed(CONFIG, ("work_dir",), "runs/b")
    config = changed(config, ("distributed", "coordinator"), "b:2")
    start = changed(START, ("environment", "MJAX_GENERATION"), "2")
    found = compared(tmp_path, config=config, starts=(start,))
    assert not any(group.differing for group in found.groups)
    answers = dict(diff.questions(found))
    assert answers["What has changed since?"] == "nothing that is recorded"


def test_what_a_later_start_changed_is_said(tmp_path):
    found = compared(tmp_path, starts=(START, changed(START, ("commit",), "c1")))
    said = dict(diff.questions(found))["What has changed since?"]
    assert said == "code (commit); B: start 2 changed code"


def test_the_fingerprint_of_the_newest_checkpoint_counts(tmp_path):
    for name, value in (("a", "x"), ("b", "y")):
        make_run(tmp_path / name)
        for step, own in ((9, "same"), (10, value)):
            folder = tmp_path / name / "checkpoints" / str(step)
            folder.mkdir(parents=True)
            text = json.dumps({"run": {"data_fingerprint": own}})
            (folder / "checkpoint.json").write_text('{"crc32c": 1}\n' + text)
    found = diff.diff(tmp_path / "a", tmp_path / "b")
    assert by_name(found)["data"].differing == {"samples": ("x", "y")}


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("config", "config.json of"),
        ("summary", "summary.json is missing"),
        ("rows", "metrics.jsonl of B is missing"),
        ("starts", "starts/NNNN.json of"),
    ],
)
def test_a_record_that_is_missing_is_named(tmp_path, left_out, named):
    value = () if left_out == "starts" else None
    found = compared(tmp_path, **{left_out: value})
    assert named in " ".join(answer for _, answer in diff.questions(found))


def test_the_first_step_whose_loss_differs_is_found(tmp_path):
    rows = [dict(row) for row in ROWS]
    rows[2]["loss"] = np.nextafter(rows[2]["loss"], 9)
    found = compared(tmp_path, rows=rows)
    assert (found.losses.first_step, found.losses.num_shared) == (3, 4)


def test_a_loss_that_is_not_finite_in_both_is_the_same(tmp_path):
    bad = {"step": 3, "loss": None, "nonfinite": {"loss": "nan"}}
    rows = [*ROWS[:2], bad]
    found = diff.diff(
        make_run(tmp_path / "a", rows=rows), make_run(tmp_path / "b", rows=rows)
    )
    assert found.losses == run_differences.Losses(
        num_shared=3, first_step=None, values=None
    )


def test_runs_without_a_common_step_are_not_called_the_same(tmp_path):
    found = compared(tmp_path, rows=[{**row, "step": row["step"] + 9} for row in ROWS])
    assert "no step in common" in dict(diff.questions(found))["Can it be reproduced?"]


# ------------------------------------------------------------------------------- times


def noise(seed, num=400, memory=0.8, scale=1.0):
    """Return autocorrelated times of steps with outliers."""
    rng = np.random.default_rng(seed)
    fresh, state = rng.standard_normal(num), np.zeros(num)
    for n in range(1, num):
        state[n] = memory * state[n - 1] + np.sqrt(1 - memory**2) * fresh[n]
    outliers = (rng.random(num) < 0.02) * rng.uniform(0.3, 1, num)
    return scale * 0.1 * np.exp(0.05 * state + outliers)


def test_equal_runs_with_memory_seldom_differ_and_single_steps_would(monkeypatch):
    monkeypatch.setattr(compared_times, "_PERMUTATIONS", 499)
    rng = np.random.default_rng(0)
    blocks = single = 0
    for seed in range(40):
        a, b = noise(2 * seed), noise(2 * seed + 1)
        found = compared_times.compare({"x": a}, {"x": b})[0]
        blocks += found.median in ("slower", "faster")
        single += compared_times._rank_sum(a, b, rng) < compared_times.ALPHA
    assert blocks <= 2  # 0.4 expected; 3 or more have a probability below 1%
    assert single >= 8


def test_a_longer_phase_is_found_and_the_others_are_not():
    a = {"data": noise(1), "device": noise(2)}
    b = {"data": noise(3), "device": noise(4, scale=1.15)}
    found = {one.name: one for one in compared_times.compare(a, b)}
    assert (found["data"].median, found["device"].median) == ("within noise", "slower")
    assert (
        found["device"].block > compared_times._SHORTEST
    )  # memory makes blocks longer


def test_rare_slow_steps_are_found_in_the_tail_and_not_in_the_median():
    a, b = noise(1, memory=0.0), noise(2, memory=0.0)
    b[::10] *= 2
    found = compared_times.compare({"x": a}, {"x": b})[0]
    assert (found.median, found.tail) == ("within noise", "slower")


def test_few_steps_decide_nothing():
    found = compared_times.compare({"x": noise(1, num=20)}, {"x": 9 * noise(2)})[0]
    assert (found.median, found.p_median) == ("too few steps", None)


def test_the_memory_of_a_series_is_measured():
    long = noise(5, num=20000, memory=0.9)
    # 1 + 2 (0.9 + 0.81 + ...) = 19; outliers have none. 25%: of one series.
    assert compared_times.autocorrelation_time(long) == pytest.approx(19, rel=0.25)
    assert compared_times.autocorrelation_time(noise(6, num=20000, memory=0.0)) < 1.3
    assert compared_times.autocorrelation_time(np.ones(50)) == 1.0


def test_ranks_of_equal_values_are_shared():
    assert compared_times._ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [
        3.5,
        1,
        3.5,
        2,
    ]


def steps(process, first, last, spent_s):
    """Return the lines of steps whose data phase takes spent_s."""
    return [
        Line(
            n=0,
            step=step,
            spans=(
                span(process, "data", "data", "host", step, step + spent_s),
                span(process, "step", "compute", "step", step, step + 0.5),
            ),
        )
        for step in range(first, last + 1)
    ]


def test_steps_count_as_they_were_kept_and_the_first_of_a_start_do_not(tmp_path):
    make_run(tmp_path, rows=None)
    first, second = Process(), Process(generation=2)
    write(tmp_path, first, steps(first, 1, 20, 0.25))
    write(tmp_path, second, steps(second, 11, 30, 0.5))
    found = compared_times.phases(records.read(tmp_path, "RUN_A"))
    assert set(found) == {"data"}
    assert found["data"] == pytest.approx([0.25] * 7 + [0.5] * 17)


def test_ranks_of_one_step_count_in_the_mean(tmp_path):
    make_run(tmp_path, rows=None)
    for rank, spent_s in ((0, 0.25), (1, 0.75)):
        process = Process(rank=rank)
        write(tmp_path, process, steps(process, 1, 5, spent_s))
    found = compared_times.phases(records.read(tmp_path, "RUN_A"))
    assert found["data"] == pytest.approx([0.5, 0.5])


def test_clocks_of_rows_and_spans_that_do_not_agree_are_said(tmp_path):
    process = Process()
    run = make_run(tmp_path / "b")  # its rows say 1 s a step
    write(run, process, steps(process, 1, 4, 0.25))
    found = diff.diff(make_run(tmp_path / "a"), run)
    said = dict(diff.questions(found))["Is it measured correctly?"]
    assert "B: metrics.jsonl and spans DO NOT agree (100.00%)" in said


# --------------------------------------------------------------------------- bad input


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    run, empty = make_run(tmp_path / "a"), tmp_path / "empty"
    empty.mkdir()
    for paths, says in (
        ((run, tmp_path / "none"), "RUN_B"),
        ((empty, run), "has neither config.json, starts nor metrics.jsonl"),
        ((run, run), "RUN_A and RUN_B are both"),
    ):
        assert diff.main([*map(str, paths)]) == 2
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1)
        assert says in error


def test_damaged_records_are_said_and_left_out(tmp_path, capsys):
    run, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    (other / "starts" / "0001.json").write_text("[" * 100_000)
    (other / "config.json").write_text("[]")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 1}\n{"step": 5, "lo')
    (other / "events.jsonl").write_text('{"time_ns": "soon"}\n')
    (other / "spans").mkdir()
    (other / "spans" / "x.jsonl").write_text("no\n")
    assert diff.main([str(run), str(other)]) == 0
    _, error = capsys.readouterr()
    for name in ("0001.json", "config.json", "metrics.jsonl, line 5", "events.jsonl"):
        assert name in error
    assert "x.jsonl" in error


def test_values_of_any_type_in_a_start_are_no_error(tmp_path):
    start = {"facts": 3, "environment": [], "processes": {"host": 1}, "mesh": None}
    found = compared(tmp_path, starts=(start,))
    assert by_name(found)["mesh"].differing["pp"] == (1, "(absent)")


def test_the_command_prints_one_object_and_writes_it(tmp_path, capsys):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", config=changed(CONFIG, ("optim", "lr"), 0.2))
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert diff.main([*paths, "--json", "--out", str(tmp_path / "out")]) == 0
    out, _ = capsys.readouterr()
    assert (tmp_path / "out").read_text() == out
    found = json.loads(out)
    assert len(found["questions"]) == 8
    assert [group["name"] for group in found["groups"]] == [*run_differences.GROUPS]
    assert diff.main(paths) == 0
    shown, _ = capsys.readouterr()
    assert "8. Does it remain" in shown
    assert "--optim.lr" in shown

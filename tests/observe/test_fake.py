"""The short runs: what each removes, what is named, what is refused."""

import dataclasses
import json
import shlex
import socket
from pathlib import Path

import numpy as np
import pytest

from mjax.config.command_line import parse
from mjax.config.train import TrainConfig, flattened, to_json
from mjax.mesh.axes import MeshConfig
from mjax.observe import fake, fake_runs, records, rung_times, rungs
from mjax.observe.records import Record
from mjax.observe.rungs import FIRST, LAST, NAMES, Origin, Rung
from mjax.observe.spans import Header, Line, SpanFile
from mjax.recipes import RECIPES
from tests.observe.span_files import Process, span

STEPS = 120
HERE = socket.gethostname()
BASE = dataclasses.replace(
    RECIPES["demo"](),
    ckpt=dataclasses.replace(
        RECIPES["demo"]().ckpt, every=8, local_dir="/dev/shm/x", local_every=4
    ),
    eval=dataclasses.replace(RECIPES["demo"]().eval, every=5),
)


def origin(config=BASE, *, processes=1, hosts=1, dp=1, pp=1) -> Origin:
    return Origin(config=config, processes=processes, hosts=hosts, dp=dp, pp=pp)


def ladder(of: Origin, steps=STEPS) -> dict[str, Rung]:
    return {r.name: r for r in rungs.ladder(of, Path("out"), steps, NAMES)}


def differing(a: TrainConfig, b: TrainConfig) -> set[str]:
    both = [flattened(json.loads(to_json(config))) for config in (a, b)]
    return {name for name in both[0] if both[0][name] != both[1][name]}


# -------------------------------------------------------------------------------- rungs

_OF_ITS_OWN = {"work_dir", "ckpt.local_dir"}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("fake-data", {"data.one_batch"}),
        ("no-saves", {"ckpt.every"}),
        ("no-evals", {"eval.every", "eval.batches"}),
        ("smaller-model", {"model.layers"}),
        ("one-host", {"batch.size"}),
        (
            "no-spans",
            {"observe.spans", "observe.stamps", "observe.slow_step_factor"},
        ),
        (LAST, set()),
    ],
)
def test_a_rung_lacks_one_thing_and_is_else_the_run_as_it_is(name, fields):
    config = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, layers=8))
    found = ladder(origin(config, processes=2, hosts=2, dp=2))
    one, whole = found[name].config, found[FIRST].config
    assert one is not None
    assert whole is not None
    assert differing(one, whole) - _OF_ITS_OWN == fields


def test_the_run_as_it_is_does_what_the_run_does_but_for_its_length_and_folders():
    config = ladder(origin())[FIRST].config
    assert config is not None
    assert differing(config, BASE) == {
        *("work_dir", "steps", "optim.schedule", "optim.warmup_steps"),
        *("ckpt.local_dir", "ckpt.keep", "log.sample_tokens"),
    }
    assert config.eval.every == 5


def test_nothing_is_written_where_the_run_writes():
    own = dataclasses.replace(BASE.ckpt, dir="gs://b/run/", local_dir="/dev/shm/a")
    config = dataclasses.replace(BASE, ckpt=own, work_dir="runs/a")
    for rung in ladder(origin(config)).values():
        if rung.config is None:
            continue
        assert rung.config.ckpt.dir == f"gs://b/run-fake-{rung.name}"
        assert rung.config.ckpt.local_dir in (None, f"/dev/shm/a-fake-{rung.name}")
        assert rung.config.work_dir == f"out/{rung.name}"


def test_nothing_is_sent_where_the_run_sends():
    """A short run with the run's own address would take over its checkpoints there."""
    config = dataclasses.replace(
        BASE,
        ckpt=dataclasses.replace(BASE.ckpt, remote="s3://bucket/run"),
        track=("wandb",),
    )
    for rung in ladder(origin(config)).values():
        if rung.config is not None:
            assert rung.config.ckpt.remote == f"s3://bucket/run-fake-{rung.name}"
            assert rung.config.track == ()


def test_one_host_keeps_the_rows_of_a_device():
    mesh = MeshConfig(dp=8, dp_shard=8)
    config = dataclasses.replace(BASE, mesh=mesh)
    rung = ladder(origin(config, processes=4, hosts=2, dp=8))["one-host"]
    assert rung.config is not None
    assert (rung.config.mesh.dp, rung.config.mesh.dp_shard) == (4, 4)
    assert rung.config.batch.size * 2 == BASE.batch.size
    assert (rung.processes, rung.hosts) == (2, 1)


@pytest.mark.parametrize(
    ("name", "of", "reason"),
    [
        ("one-host", origin(), "one host"),
        (
            "one-host",
            origin(processes=3, hosts=3, dp=2),
            "cannot run on one of 3 hosts",
        ),
        ("smaller-model", origin(), "cannot be halved"),
        ("no-saves", origin(RECIPES["demo"]()), "500 steps apart"),
        ("no-evals", origin(RECIPES["demo"]()), "750 steps apart"),
    ],
)
def test_what_cannot_be_taken_away_is_said(name, of, reason):
    rung = ladder(of)[name]
    assert rung.config is None
    assert reason in rung.reason


def test_saves_and_copies_repeat_together():
    own = dataclasses.replace(BASE.ckpt, every=6, local_every=4)
    rung = ladder(origin(dataclasses.replace(BASE, ckpt=own)))["no-saves"]
    assert rung.period == 12


# -------------------------------------------------------------------------------- times


def spans_of(lines) -> SpanFile:
    header = Header(
        **{"run": "a", "host": "n", "rank": 0, "generation": 1, "pid": 1},
        **{"wall_ns": 0, "monotonic_ns": 0, "devices": (0,), "mesh": {"tp": 1}},
    )
    return SpanFile(path=Path("x"), header=header, lines=tuple(lines), problems=())


def record(
    *, seed=0, step_s=0.1, save_s=0.0, every=8, noise=0.05, data_s=0.0, steps=STEPS
) -> Record:
    """Make a short run: noise of a twentieth, a save that blocks every few steps."""
    rng = np.random.default_rng(seed)
    rows, lines = {}, []
    for step in range(1, steps + 1):
        own_s = (step_s + data_s) * float(np.exp(noise * rng.normal()))
        rows[step] = {
            **{"step": step, "step_s": own_s, "data_wait_s": data_s},
            **{"tokens": 1000, "mfu": None},
        }
        if step % every == 0 and save_s:
            saving = span(Process(), "save", "ckpt", "host", 0, save_s)
            lines.append(Line(n=len(lines), step=step, spans=(saving,)))
    return Record(
        path=Path("x"),
        config=None,
        starts=(),
        rows=rows,
        summary=None,
        files=(spans_of(lines),) if lines else (),
        events=None,
        data=None,
        problems=(),
    )


def judged(changes=None, *, names=("fake-data", "no-saves", "no-spans"), **options):
    """Compare rungs that are like the run, but for some."""
    found = [rung for rung in ladder(origin()).values() if rung.config is not None]
    found = [rung for rung in found if rung.name in (FIRST, LAST, *names)]
    whole = options.pop("whole", {})
    seeds = np.random.SeedSequence(options.pop("seed", 0)).generate_state(len(found))
    made = {
        rung.name: record(
            seed=int(seed), **{**whole, **(changes or {}).get(rung.name, {})}
        )
        for rung, seed in zip(found, seeds, strict=True)
    }
    return rung_times.compare(found, made, {}, **options)


def verdicts(found):
    return {one.name: one.verdict for one in found.rungs}


def test_a_slow_loader_is_explained_by_fake_data_alone():
    found = judged({"fake-data": {"data_s": 0.0}}, whole={"data_s": 0.1})
    assert found.explains == "fake-data"
    assert verdicts(found)["no-saves"] == "within noise"
    one = next(one for one in found.rungs if one.name == "fake-data")
    assert one.gain == pytest.approx(0.5, abs=0.03)
    assert (one.gain_low or 1) < 0.5 < (one.gain_high or 0)


def test_saves_between_steps_are_explained_by_no_saves_alone():
    """Pauses are in no step_s and in one of eight steps, so no median shows them."""
    found = judged({"no-saves": {"save_s": 0.0}}, whole={"save_s": 0.4})
    assert found.explains == "no-saves"
    one = next(one for one in found.rungs if one.name == "no-saves")
    assert one.gain == pytest.approx(0.05 / 0.15, abs=0.03)
    assert one.block is not None
    assert one.block % 8 == 0
    assert verdicts(found)["fake-data"] == "within noise"


def test_of_two_causes_the_larger_one_is_named():
    whole = {"data_s": 0.05, "save_s": 1.6}
    found = judged(
        {"no-saves": {"save_s": 0.0}, "fake-data": {"data_s": 0.0}}, whole=whole
    )
    assert found.explains == "no-saves"
    assert verdicts(found)["fake-data"] == "gains"


def test_a_healthy_run_is_explained_by_nothing():
    whole = {"save_s": 0.01}
    explained = [judged(seed=seed, whole=whole).explains for seed in range(20)]
    assert explained == [None] * 20


def test_drift_is_no_explanation():
    """The machine was slower for the first run: all later ones seem to gain."""
    found = judged({FIRST: {"step_s": 0.13}})
    assert found.drift == pytest.approx(-0.23, abs=0.03)
    assert found.explains is None


def test_a_gain_below_the_limit_is_real_and_explains_nothing():
    found = judged({"fake-data": {"step_s": 0.096}}, whole={"noise": 0.01})
    assert verdicts(found)["fake-data"] == "gains little"
    assert found.explains is None
    least = judged({"fake-data": {"step_s": 0.096}}, whole={"noise": 0.01}, least=0.02)
    assert least.explains == "fake-data"


def test_a_rung_that_is_slower_explains_nothing():
    found = judged({"no-spans": {"step_s": 0.2}})
    assert verdicts(found)["no-spans"] == "within noise"


def test_few_steps_are_no_answer():
    found = judged({"fake-data": {"step_s": 0.05}}, whole={"steps": 20})
    assert verdicts(found)["fake-data"] == "too few steps"
    assert {one.measured and one.measured.median_low_s for one in found.rungs} == {None}
    assert {one.gain_low for one in found.rungs} == {None}
    longest = max(one.block or 0 for one in found.rungs)
    # 7 blocks, the first steps and the last one.
    assert f"give --steps {7 * longest + 4}" in fake.summary(found, 0.05)


def test_half_of_the_layers_tell_what_does_not_depend_on_them():
    config = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, layers=8))
    found = [
        rung
        for rung in ladder(origin(config)).values()
        if rung.name in (FIRST, LAST, "smaller-model")
    ]
    made = {rung.name: record(noise=0.01, step_s=0.1) for rung in found}
    made["smaller-model"] = record(noise=0.01, step_s=0.06)
    result = rung_times.compare(found, made, {})
    one = next(one for one in result.rungs if one.name == "smaller-model")
    assert one.outside_layers == pytest.approx(0.2, abs=0.02)
    assert result.explains is None


def test_a_rung_that_failed_is_no_gain():
    found = [rung for rung in ladder(origin()).values() if rung.name in (FIRST, LAST)]
    found.insert(1, ladder(origin())["fake-data"])
    made = {FIRST: record(), LAST: record(seed=1)}
    result = rung_times.compare(found, made, {"fake-data": "exit code 1"})
    assert verdicts(result)["fake-data"] == "not run"
    assert "exit code 1" in fake.page(result, 0.05, STEPS)


# ------------------------------------------------------------------------------ command


def make_run(folder, config=BASE, *, hosts=(HERE,), **start):
    (folder / "starts").mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    facts = {
        "processes": [{"host": host, "pid": 1} for host in hosts],
        "mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": len(hosts), "tp": 1},
        "environment": {},
        **start,
    }
    (folder / "starts" / "0001.json").write_text(json.dumps(facts))
    return folder


def commands(capsys, *words):
    assert fake.main([*words]) == 0
    out = capsys.readouterr().out.splitlines()
    return [shlex.split(line) for line in out if line.startswith("python")]


def test_the_commands_have_the_flags_of_their_rungs(tmp_path, capsys):
    path = make_run(tmp_path / "a")
    found = commands(capsys, "--work-dir", str(path), "--dry-run")
    expected = rungs.ladder(origin(), tmp_path / "a-fake", fake.STEPS, NAMES)
    expected = [rung.config for rung in expected if rung.config is not None]
    assert [words[:3] for words in found] == [["python", "-m", "mjax.train"]] * len(
        expected
    )
    assert [parse(words[3:], RECIPES, "x")[0] for words in found] == expected
    assert not (tmp_path / "a-fake").exists()


def test_several_processes_of_this_machine_are_launched(tmp_path, capsys):
    path = make_run(tmp_path / "a", hosts=(HERE, HERE))
    words = commands(capsys, "--work-dir", str(path), "--dry-run")[0]
    assert words[1:8] == [
        *("-m", "mjax.launch", "--hosts", "1", "--ranks-per-host", "2", "--")
    ]


@pytest.mark.parametrize(
    ("launch", "begins"),
    [
        ("x", ["-m", "mjax.launch", "slurm", "--hosts", "2"]),
        ("", ["-m", "mjax.train", "--recipe", "demo"]),
    ],
)
def test_other_machines_get_commands_and_no_process(tmp_path, capsys, launch, begins):
    facts = {"environment": {"SLURM_JOB_ID": "7"}, "launch": launch}
    path = make_run(tmp_path / "a", hosts=("n1", "n2"), **facts)
    found = commands(capsys, "--work-dir", str(path))
    assert found[0][1:][: len(begins)] == begins
    assert not (tmp_path / "a-fake").exists()


def test_short_runs_on_another_device_are_said_to_differ(tmp_path):
    a = make_run(tmp_path / "a", device="H100")
    b = make_run(tmp_path / "b", device="cpu")
    both = [records.read(path, "--work-dir") for path in (a, b)]
    (said,) = fake._unlike(both[0], both[1])
    assert "differ from the run in hosts (device)" in said
    assert fake._unlike(both[0], both[0]) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rungs", "no-save"), "--rungs must be some of"),
        (("--steps", "3"), "--steps must be at least 5, got 3"),
        (("--least", "0"), "--least must be above 0"),
        (("--limit-s", "nan"), "--limit-s must be positive"),
        (("--out-dir", "{run}/x"), "is in the work dir"),
        (("--out-dir", "{run}/../full"), "is not empty"),
        (("--compare-only",), "is not a folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, words, said):
    path = make_run(tmp_path / "a")
    (tmp_path / "full" / "x").mkdir(parents=True)
    words = [word.format(run=path) for word in words]
    assert fake.main(["--work-dir", str(path), *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_folder_without_a_run_and_a_config_of_another_version_are_refused(
    tmp_path, capsys
):
    path = make_run(tmp_path / "a")
    (path / "config.json").write_text('{"no_such_field": 1}')
    assert fake.main(["--work-dir", str(path)]) == 2
    assert "use the version that wrote it" in capsys.readouterr().err
    (path / "starts" / "0001.json").unlink()
    assert fake.main(["--work-dir", str(path)]) == 2
    assert "has no readable starts/" in capsys.readouterr().err


def plan_of(*commands):
    return fake_runs.Plan(
        ladder=[
            rung for rung in ladder(origin()).values() if rung.name in dict(commands)
        ],
        commands=dict(commands),
        elsewhere="",
        record=record(),
    )


def test_a_run_that_fails_or_takes_too_long_is_said_with_its_log(tmp_path):
    bad = ["-c", "import sys; print('OSError: no room'); sys.exit(3)"]
    long = ["-c", "import time; time.sleep(60)"]
    found = plan_of((FIRST, ["-c", ""]), ("fake-data", bad), ("no-saves", long))
    failed = fake_runs.run_all(found, tmp_path / "out", 1.0)
    assert failed.keys() == {"fake-data", "no-saves"}
    assert failed["fake-data"].startswith("exit code 3, OSError: no room; see ")
    assert "--limit-s 1" in failed["no-saves"]


def test_nothing_is_run_after_the_run_as_it_is_has_failed(tmp_path):
    ran = tmp_path / "ran"
    other = ["-c", f"open({str(ran)!r}, 'w')"]
    found = plan_of((FIRST, ["-c", "raise SystemExit(2)"]), ("fake-data", other))
    with pytest.raises(ValueError, match="the unchanged run failed: exit code 2"):
        fake_runs.run_all(found, tmp_path / "out", 30.0)
    assert not ran.exists()

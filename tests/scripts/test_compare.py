"""Arms are ranked only on evidence, and a grid that is killed loses one run."""

import dataclasses
import math
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mjax.config.command_line import parse
from mjax.recipes import RECIPES
from scripts import evidence, evidence_index
from scripts.compare import __main__ as command
from scripts.compare import grid, page, studies, verdict
from scripts.compare.grid import Result, Results
from scripts.compare.studies import STUDIES, Arm, Comparison, Run, Size, Study
from scripts.compare.verdict import Tuned

SIZE = Size(name="tiny", flags=(), seq_len=8, rows=2, tokens=160, about="tiny")
MADE = "At `0123abc`, 2026-11-26, jax 0.11.2, 2 cores of a processor, 24 GiB"


ARM = Arm(name="a", label="a", flags=(), rates=(1.0,))


def tuned(*losses, edge=None):
    return Tuned(rate=1.0, losses=losses, edge=edge)


def test_arms_are_separated_if_bands_are_apart_and_the_interval_excludes_0():
    found = verdict.compare(tuned(3.0, 3.1, 3.05), tuned(3.5, 3.6, 3.56))
    assert found.verdict == "separated"
    assert found.mean == pytest.approx(-0.5033, abs=1e-4)
    # The mean of (-0.5, -0.5, -0.51) plus and minus 4.3027 x 0.005774 / sqrt(3).
    assert (found.low, found.high) == pytest.approx((-0.5177, -0.4890), abs=1e-4)


@pytest.mark.parametrize(
    ("losses", "others", "overlap"),
    [
        # The interval is -0.1 on the spot, but seeds differ more than the arms do.
        ((3.0, 3.2, 3.4), (3.1, 3.3, 3.5), True),
        # The bands are apart, but the differences are 0.01, 0.5 and 1.
        ((3.0, 3.0, 3.0), (3.01, 3.5, 4.0), False),
    ],
)
def test_one_of_both_signs_does_not_separate_arms(losses, others, overlap):
    found = verdict.compare(tuned(*losses), tuned(*others))
    assert (found.verdict, found.bands_overlap) == ("not separated", overlap)


def test_an_arm_is_not_separated_from_itself():
    found = verdict.compare(tuned(3.0, 3.1, 3.2), tuned(3.0, 3.1, 3.2))
    assert (found.verdict, found.low, found.high) == ("not separated", 0, 0)


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_identical_arms_are_rarely_separated(shared):
    """The page says 2.6% of independent losses; a shared seed makes it fewer."""
    draws = np.random.default_rng(5)
    count = 1000
    noise = math.sqrt(shared) * draws.standard_normal((count, 1, 3))
    noise = noise + math.sqrt(1 - shared) * draws.standard_normal((count, 2, 3))
    verdicts = [verdict.compare(tuned(*a), tuned(*b)).verdict for a, b in noise]
    # 2.6% of 1000 and four standard deviations of a count.
    assert verdicts.count("separated") <= 26 + 4 * math.sqrt(26)


@pytest.mark.parametrize("edge", ["lowest", "highest", "only"])
def test_a_worse_arm_with_its_best_rate_at_an_edge_is_not_ranked(edge):
    good, bad = tuned(1.0, 1.1, 1.2), tuned(2.0, 2.1, 2.21, edge=edge)
    assert verdict.compare(good, bad).verdict == "open: rate at an edge"
    assert verdict.compare(bad, good).verdict == "open: rate at an edge"
    # The better one could only become better still.
    better = dataclasses.replace(good, edge=edge)
    assert verdict.compare(better, tuned(2.0, 2.1, 2.21)).verdict == "separated"


def test_an_arm_that_diverged_is_not_ranked():
    found = verdict.compare(tuned(1.0, 1.1, 1.2), tuned(math.inf, 2.0, 2.0))
    assert found.verdict == "open: diverged"


@pytest.mark.parametrize("losses", [(1.0,), (1.0, 2.0, 3.0)])
def test_arms_without_pairs_are_refused(losses):
    with pytest.raises(ValueError, match="as many seeds, at least 2, got"):
        verdict.compare(tuned(*losses), tuned(1.0))


def test_the_best_rate_has_the_least_mean_and_says_if_it_is_at_an_edge():
    by_rate = {1.0: (3.0, 3.2), 2.0: (2.0, 2.2), 4.0: (2.1, math.inf)}
    assert verdict.tune(by_rate) == Tuned(rate=2.0, losses=(2.0, 2.2), edge=None)
    assert verdict.tune({1.0: (1, 1), 2.0: (2, 2)}).edge == "lowest"
    assert verdict.tune({1.0: (2, 2), 2.0: (1, 1)}).edge == "highest"
    assert verdict.tune({1.0: (2, 2)}).edge == "only"
    diverged = {2.0: (math.inf, 1.0), 1.0: (math.inf, 1.0)}
    assert verdict.tune(diverged).rate == 1.0
    with pytest.raises(ValueError, match="at least one learning rate"):
        verdict.tune({})


def test_a_rate_beyond_an_edge_keeps_the_ratio_of_the_grid():
    assert verdict.rate_beyond((1e-3, 3e-3, 1.2e-2), "lowest") == pytest.approx(3.3e-4)
    assert verdict.rate_beyond((1e-3, 3e-3, 1.2e-2), "highest") == pytest.approx(4.8e-2)


def study(**offsets):
    """A study of arms whose loss is least at rate `best` and moved by an offset."""
    arms = tuple(
        Arm(
            name=name,
            label=name,
            flags=(f"--{name}",),
            rates=(1.0, 2.0, 4.0),
            seeds=studies.OTHER_SEEDS if name == "null" else studies.SEEDS,
        )
        for name in offsets
    )
    comparisons = tuple(
        Comparison(title=name, arm=name, against="base", is_null=name == "null")
        for name in offsets
        if name != "base"
    )
    return Study(
        name="planted",
        title="Planted",
        text="Planted losses.",
        arms=arms,
        comparisons=comparisons,
        sizes=(SIZE,),
    )


class Planted:
    """Stands for the trainer: losses by a formula; counts what it is asked for."""

    def __init__(self, best=2.0, **offsets):
        self.best, self.offsets, self.asked = best, offsets, []

    def __call__(self, run: Run) -> Result:
        self.asked.append(run.key)
        loss = 3 + abs(math.log2(run.rate / self.best)) + 0.01 * (run.seed % 3)
        loss += self.offsets[run.arm.name]
        curve = tuple((tokens, loss + 1 - tokens / 160) for tokens in (80, 160))
        return Result(curve=curve, bits_per_byte=loss / 2, wall_s=1.0, made=MADE)


OFFSETS = {"base": 0.0, "better": -0.5, "close": 0.001, "null": 0.0}


@pytest.fixture
def finished(tmp_path):
    results = Results(tmp_path / "planted.json")
    planted = study(**OFFSETS)
    assert grid.run_grid(planted, SIZE, results, trainer=Planted(**OFFSETS))
    return planted, results


def test_planted_differences_are_told_and_nothing_else(finished):
    compared = page.differences(finished[0], SIZE, finished[1])
    verdicts = {one.title: found.verdict for one, found in compared}
    assert verdicts == {
        "better": "separated",
        "close": "not separated",
        "null": "not separated",
    }


def test_the_page_has_arms_verdicts_and_a_figure(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "BENCHMARKS_DIR", tmp_path)
    monkeypatch.setattr("scripts.evidence.BENCHMARKS_DIR", tmp_path)
    assert page.write(finished[0], SIZE, finished[1]) == []
    text = (tmp_path / "planted.md").read_text()
    # The page is as old as its runs.
    assert evidence_index.made(text) == ("0123abc", "2026-11-26")
    assert "| better | -0.5000 | -0.5000 to -0.5000 | apart | **separated** |" in text
    assert "| 2 | inside | 2.5100 | 2.5000 to 2.5200 |" in text
    assert (tmp_path / "planted.png").stat().st_size > 10_000


def test_a_page_of_unfinished_arms_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "BENCHMARKS_DIR", tmp_path)
    monkeypatch.setattr("scripts.evidence.BENCHMARKS_DIR", tmp_path)
    results, planted = Results(tmp_path / "r.json"), study(base=0.0, a=0.1, b=0.2)
    trainer = Planted(base=0.0, a=0.1, b=0.2)
    with pytest.raises(ValueError, match="no comparison of planted has both"):
        page.write(planted, SIZE, results)
    for run in [run for arm in planted.arms for run in grid.runs_at(arm, SIZE, 2.0)]:
        results.add(run, trainer(run))
    for name in ("base", "a"):
        for run in grid.unfinished(planted.arm(name), SIZE, results):
            results.add(run, trainer(run))
    page.write(planted, SIZE, results)
    text = (tmp_path / "planted.md").read_text()
    assert "Not finished, and left out: b." in text
    assert "| a | +0.1000" in text
    assert "| b |" not in text


def test_a_separated_null_comparison_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "BENCHMARKS_DIR", tmp_path)
    monkeypatch.setattr("scripts.evidence.BENCHMARKS_DIR", tmp_path)
    results, planted = Results(tmp_path / "r.json"), study(base=0.0, null=0.5)
    grid.run_grid(planted, SIZE, results, trainer=Planted(base=0.0, null=0.5))
    wrong = page.write(planted, SIZE, results)
    assert wrong == ["null: separated, so the other verdicts cannot be trusted"]


def test_a_grid_is_extended_while_the_best_rate_is_at_an_edge(tmp_path):
    results, planted = Results(tmp_path / "r.json"), study(base=0.0)
    grid.run_grid(planted, SIZE, results, trainer=Planted(best=8.0, base=0.0))
    arm = planted.arms[0]
    assert list(grid.losses(arm, SIZE, results)) == [1.0, 2.0, 4.0, 8.0, 16.0]
    best = grid.tuned(arm, SIZE, results)
    assert best is not None
    assert (best.rate, best.edge) == (8.0, None)


def test_a_grid_is_extended_by_two_rates_at_most_and_says_so(tmp_path):
    results, planted = Results(tmp_path / "r.json"), study(base=0.0)
    trainer = Planted(best=2**-9, base=0.0)
    assert grid.run_grid(planted, SIZE, results, trainer=trainer)
    best = grid.tuned(planted.arms[0], SIZE, results)
    assert best is not None
    assert (best.rate, best.edge, len(trainer.asked)) == (0.25, "lowest", 15)


def test_a_grid_goes_on_where_its_budget_ended(tmp_path):
    path, planted = tmp_path / "r.json", study(base=0.0)
    said = []
    trainer = Planted(base=0.0)
    options = {"trainer": trainer, "say": said.append}
    # After the first run, a second one of 1 s would end too late.
    assert not grid.run_grid(planted, SIZE, Results(path), for_s=0.9, **options)
    assert len(trainer.asked) == 1
    assert said[0].endswith("8 runs left, about 0 min")
    assert said[1].startswith("stopped after")
    assert grid.run_grid(planted, SIZE, Results(path), **options)
    assert len(trainer.asked) == len(set(trainer.asked)) == 9


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, "tests/scripts")
    from test_compare import SIZE, Planted, Results, grid, study
    trainer = Planted(base=0.0)
    def killed(run):
        if len(trainer.asked) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return trainer(run)
    results = Results(Path(sys.argv[1]))
    grid.run_grid(study(base=0.0), SIZE, results, trainer=killed)
"""


def test_a_killed_grid_repeats_no_finished_run(tmp_path):
    path = tmp_path / "r.json"
    code = textwrap.dedent(KILLED)
    done = subprocess.run([sys.executable, "-c", code, str(path)])
    assert done.returncode == -9
    results = Results(path)
    assert len(results) == 4
    trainer = Planted(base=0.0)
    assert grid.run_grid(study(base=0.0), SIZE, results, trainer=trainer)
    assert len(trainer.asked) == 5


TRAINER = """
    import json, pathlib, sys
    work_dir = pathlib.Path(sys.argv[2])
    work_dir.mkdir(parents=True)
    rows = [{"step": step, "eval_loss": None} for step in range(1, 11)]
    for step in (5, 10):
        value = {"eval_loss": 4 - step / 10, "eval_bits_per_byte": 2.0}
        rows[step - 1] = {"step": step} | value
    text = "".join(json.dumps(row) + chr(10) for row in rows)
    (work_dir / "metrics.jsonl").write_text(text)
    print("the reason")
    sys.exit(int(sys.argv[3]))
"""


def one_run(tmp_path, monkeypatch, code):
    """Train one run with a trainer that writes ten rows and ends with a code."""
    script = textwrap.dedent(TRAINER)
    words = [sys.executable, "-c", script]
    monkeypatch.setattr(grid, "train_command", lambda *flags: [*words, *flags])
    size = dataclasses.replace(SIZE, flags=(code,))
    run = Run(arm=ARM, size=size, rate=1.0, seed=0)
    # What a killed grid has left is no part of the run.
    (tmp_path / run.folder).mkdir()
    (tmp_path / run.folder / "metrics.jsonl").write_text("left")
    return grid.train(run, tmp_path)


def test_a_run_is_its_evaluations_over_tokens(tmp_path, monkeypatch):
    result = one_run(tmp_path, monkeypatch, "0")
    assert result.curve == ((80, 3.5), (160, 3.0))
    assert (result.loss, result.bits_per_byte) == (3.0, 2.0)
    assert re.match(evidence.MADE, result.made)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_diverged_has_an_infinite_loss_that_is_kept(tmp_path, monkeypatch):
    result = one_run(tmp_path, monkeypatch, "93")
    assert result.loss == math.inf
    results, run = Results(tmp_path / "r.json"), grid.runs_at(ARM, SIZE, 1.0)[0]
    results.add(run, result)
    assert Results(tmp_path / "r.json").get(run) == result


def test_a_run_that_failed_stops_the_grid_with_its_output(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"ended with 2:\nthe reason"):
        one_run(tmp_path, monkeypatch, "2")


def test_runs_of_other_commits_can_be_forgotten(finished):
    _, results = finished
    results.drop_other_commits("0123abc")
    assert len(results) == 36
    results.drop_other_commits("fffffff")
    assert len(results) == 0


def test_a_second_grid_is_refused_while_one_runs(tmp_path):
    with (
        grid.locked(tmp_path / "lock"),
        pytest.raises(RuntimeError, match="another process runs this grid"),
        grid.locked(tmp_path / "lock"),
    ):
        pass
    with grid.locked(tmp_path / "lock"):
        pass


def test_an_unknown_size_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["convergence", "--size", "week"])
    assert "--size must be one of hour, night, got week" in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDIES)
def test_the_runs_of_a_study_are_accepted_and_differ_as_they_should(name):
    """The trainer's own parser reads each arm; tokens and held-out text agree."""
    asked = STUDIES[name]
    for size in asked.sizes:
        for arm in asked.arms:
            run = Run(arm=arm, size=size, rate=arm.rates[0], seed=arm.seeds[0])
            config, _ = parse(run.flags, RECIPES, "train")
            rows = config.batch.size
            assert rows * config.eval.batches == studies.HELD_OUT_ROWS
            # All arms are evaluated after the same tokens.
            assert config.steps == config.eval.every * studies.NUM_EVALS
            tokens = config.steps * rows * config.data.seq_len
            assert tokens == size.tokens * arm.token_share
    keys = [
        Run(arm=arm, size=asked.sizes[0], rate=rate, seed=seed).key
        for arm in asked.arms
        for rate in arm.rates
        for seed in arm.seeds
    ]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("arm", studies.CONVERGENCE.arms, ids=lambda arm: arm.name)
def test_the_commands_for_gpus_are_accepted_and_see_the_same_tokens(arm):
    for rate in arm.large_rates:
        config, _ = parse(page.large_command(arm, rate, 1), RECIPES, "train")
        assert (config.optim.lr, config.seed) == (rate, 1)
        assert config.batch.size * config.steps == 512 * 26_000

"""Recipes have the layout that the search finds for their GPUs, and fit."""

import dataclasses
import re
import subprocess
import sys

import pytest

from mjax.model.counts import flops_per_token
from mjax.plan.options import Topology
from mjax.recipes import RECIPES, TUNED_FOR
from scripts.plan import tune_recipes
from scripts.plan.tune_recipes import COMPILED, MARGIN

FIGURES = re.compile(
    r"Layout: .*for (?P<gpus>[\d,]+) (?P<gpu>\w+)[^;]*; (?P<step_s>[\d.]+) s a step, "
    r"MFU (?P<mfu>[\d.]+)%, [\d.]+ GiB, modelled by replay of the compiled step "
    r"\(\d{4}-\d\d\), not measured\."
)


def test_no_layout_is_faster_than_a_recipe_by_more_than_the_margin_and_all_fit():
    """In a process of its own: checks of array types make the search slow."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.plan.tune_recipes"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for recipe in TUNED_FOR:
        assert f"{recipe}, " in done.stdout


def test_a_recipe_that_is_too_slow_is_told(monkeypatch, capsys):
    run = RECIPES["gpt-125m"]()
    slow = dataclasses.replace(run.batch, microbatches=32)
    monkeypatch.setattr(tune_recipes, "TUNED_FOR", {"gpt-125m": ("h100", 1)})
    monkeypatch.setitem(
        tune_recipes.RECIPES, "gpt-125m", lambda: dataclasses.replace(run, batch=slow)
    )
    assert tune_recipes.main() == 1
    assert "--batch.microbatches 1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    "recipe", ["gpt-1b3", "gpt-13b", "llama3-8b", "megascale-175b", "megascale-530b"]
)
def test_a_docstring_has_the_modelled_step_of_the_gpus_that_the_search_used(
    recipe: str,
):
    text = " ".join((RECIPES[recipe].__doc__ or "").split())
    found = FIGURES.search(text)
    assert found is not None, text
    gpu, nodes = TUNED_FOR[recipe]
    topology = Topology(gpu=gpu, nodes=nodes)
    assert found["gpu"].lower() == gpu
    assert int(found["gpus"].replace(",", "")) == topology.num_gpus
    config = RECIPES[recipe]()
    tokens = config.batch.size * config.data.seq_len
    flops = tokens * flops_per_token(config.model, config.data.seq_len)
    peak = topology.num_gpus * topology.description.peak_bf16_flops_per_s
    # Three digits of a step, and tenths of a percent.
    step_s = float(found["step_s"])
    assert flops / (peak * step_s) == pytest.approx(float(found["mfu"]) / 100, rel=0.01)
    for compiled in COMPILED.get(recipe, {}).values():
        assert compiled.step_s > (1 - MARGIN) * step_s, compiled.flags

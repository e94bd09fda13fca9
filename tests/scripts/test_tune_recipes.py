"""Recipes that were tuned have the layout that the search finds, and fit."""

import pytest

from scripts.plan.tune_recipes import MARGIN, compare, describe


@pytest.mark.parametrize("recipe", ["gpt-125m", "gpt-350m", "gpt-1b3"])
def test_no_layout_is_faster_than_the_recipe_by_more_than_the_margin(recipe: str):
    tuned = compare(recipe)
    assert tuned.gain <= MARGIN, describe(tuned)
    assert tuned.memory_bytes <= tuned.usable_bytes, describe(tuned)

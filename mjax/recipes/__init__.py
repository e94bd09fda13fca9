"""Starting points: functions that return a TrainConfig.

A recipe's docstring gives the command, the hardware, the time and the expected result.
A recipe without an expected result has not been trained: it fixes a published shape for
planning, counting and measuring.
"""

from collections.abc import Callable

from mjax.config.train import TrainConfig
from mjax.recipes.gpt import gpt_1b3, gpt_13b, gpt_125m, gpt_350m
from mjax.recipes.llama import llama3_8b
from mjax.recipes.megascale import megascale_175b, megascale_530b
from mjax.recipes.small import debug, demo

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "debug": debug,
    "demo": demo,
    "gpt-125m": gpt_125m,
    "gpt-350m": gpt_350m,
    "gpt-1b3": gpt_1b3,
    "gpt-13b": gpt_13b,
    "llama3-8b": llama3_8b,
    "megascale-175b": megascale_175b,
    "megascale-530b": megascale_530b,
}
"""Values of `--recipe`."""

TUNED_FOR: dict[str, tuple[str, int]] = {
    "gpt-125m": ("h100", 1),
    "gpt-350m": ("h100", 1),
    "gpt-1b3": ("h100", 1),
    "gpt-13b": ("h100", 8),
    "llama3-8b": ("h100", 16),
    "megascale-175b": ("h200", 32),
    "megascale-530b": ("h200", 280),
}
"""The cluster for which each recipe is tuned: GPU, as `python -m mjax.plan` names it,
and number of nodes with 8 GPUs. `python -m scripts.plan.tune_recipes` searches for
faster layouts."""

"""User-defined recipes: `--recipe FILE.py:NAME`.

Input: the path of a Python file and the name of a function in it. Output: the config
that the function returns.
"""

from mjax.config import own_code
from mjax.config.train import TrainConfig


def short_name(recipe: str) -> str:
    """Return the name of a recipe without its file."""
    return recipe.rpartition(":")[2] if own_code.is_own(recipe) else recipe


def load(recipe: str) -> TrainConfig:
    """Call a function of a file, and return its config.

    Args:
      recipe: FILE.py:NAME.
    Raises:
      ValueError: the file or function does not exist, or the function raises or does
        not return a config.
    """
    config = own_code.load("--recipe", recipe, kind="recipe", returns="TrainConfig")()
    if not isinstance(config, TrainConfig):
        where, _, name = recipe.rpartition(":")
        raise ValueError(
            f"{where}: {name}() must return a TrainConfig, got "
            f"{type(config).__name__}; end it with return TrainConfig(...)"
        )
    return config

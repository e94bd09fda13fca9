"""Recipes of one's own: `--recipe FILE.py:NAME`.

Enters: the path of a Python file and the name of a function in it. Leaves: the config
that the function returns. Whatever goes wrong in the file is told with its line.
"""

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from mjax import flags
from mjax.config.train import TrainConfig

_MODULE = "mjax_own_recipes"
"""Name of the file as a module; no other module may have it."""


def is_own(recipe: str) -> bool:
    """Say whether a recipe is named by its file."""
    return ".py:" in recipe or recipe.endswith(".py")


def short_name(recipe: str) -> str:
    """Return the name of a recipe without the file that it is in."""
    return recipe.rpartition(":")[2] if is_own(recipe) else recipe


def load(recipe: str) -> TrainConfig:
    """Call a function of a file, and return its config.

    Args:
      recipe: FILE.py:NAME.
    Raises:
      ValueError: there is no such file or function, it raises, or it returns something
        else.
    """
    where, colon, name = recipe.rpartition(":")
    path = Path(where if colon else recipe)
    module = _module(path, recipe)
    names = _functions(module)
    if not colon or not name:
        raise ValueError(
            f"--recipe {recipe} names a file and no function; write --recipe "
            f"{path}:{names[0] if names else 'NAME'}"
        )
    function = getattr(module, name, None)
    if function is None:
        known = f" (of {', '.join(names)})" if names else ""
        near = f"; the nearest is {flags.nearest(name, names)}{known}" if names else ""
        raise ValueError(f"{path} has no function {name}{near}")
    if not callable(function):
        raise ValueError(
            f"{path}: {name} is of type {type(function).__name__}, not a function that "
            "returns a TrainConfig"
        )
    config = _guarded(function, path, f"{name}()")
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"{path}: {name}() must return a TrainConfig, got {type(config).__name__}; "
            "end it with return TrainConfig(...)"
        )
    return config


def _module(path: Path, recipe: str) -> ModuleType:
    """Run the file."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        looked = "" if path.is_absolute() else f", relative to {Path.cwd()}"
        raise ValueError(
            f"--recipe {recipe}: {path} {what}; give FILE.py:NAME{looked}, or the name "
            "of a recipe"
        )
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--recipe {recipe}: {path} must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look their module up
    loader = spec.loader
    _guarded(lambda: loader.exec_module(module), path, "reading it")
    return module


def _guarded(call: Any, path: Path, what: str) -> Any:
    """Call a person's code; its errors become ours, with the line in the file."""
    try:
        return call()
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (Exception, SystemExit) as error:  # of any kind: the code is not ours
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename) == path.absolute()]
        lines = lines or [f.lineno for f in frames if f.filename == str(path)]
        at = f", line {lines[-1]}" if lines else ""
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"{path}{at}: {what} failed with {said}") from error


def _functions(module: ModuleType) -> list[str]:
    """Return the names of the functions that the file itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]

"""User-defined functions: a flag whose value is FILE.py:NAME.

Input: the flag, the path of a Python file and the name of a function or class in it.
Output: that function or class. Errors in the file are reported with their line.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mjax.cli import flags


def is_own(value: str) -> bool:
    """Return whether the value of a flag names a file."""
    return ".py:" in value or value.endswith(".py")


def load(flag: str, value: str, *, kind: str, returns: str) -> Callable[[], Any]:
    """Run a file, and return one of its functions, wrapped to report errors by line.

    Args:
      flag: as typed, for messages.
      value: FILE.py:NAME.
      kind: kind of the function, for messages, such as "recipe".
      returns: the required type of its result, for messages.
    Returns:
      The function, which takes no arguments. Its exceptions become ValueErrors.
    Raises:
      ValueError: the file or function does not exist, or the file cannot be run.
    """
    where, colon, name = value.rpartition(":")
    path = Path(where if colon else value)
    module = _module(path, flag, value, kind)
    names = _functions(module)
    if not colon or not name:
        raise ValueError(
            f"{flag} {value} names a file but no function; write {flag} "
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
            f"returns a {returns}"
        )
    return lambda: _guarded(function, path, f"{name}()")


def _module(path: Path, flag: str, value: str, kind: str) -> ModuleType:
    """Run the file, and return it as a module."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        looked = "" if path.is_absolute() else f", relative to {Path.cwd()}"
        raise ValueError(
            f"{flag} {value}: {path} {what}; give FILE.py:NAME{looked}, or the name "
            f"of a {kind}"
        )
    name = f"mjax_own_{flag.strip('-')}"  # no other module may have this name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{flag} {value}: {path} must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    loader = spec.loader
    _guarded(lambda: loader.exec_module(module), path, "reading it")
    return module


def _guarded(call: Any, path: Path, what: str) -> Any:
    """Return the result of user code; its errors become ValueErrors with a line."""
    try:
        return call()
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (
        Exception,
        SystemExit,
    ) as error:  # any exception: user code may raise all of them
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename) == path.absolute()]
        lines = lines or [f.lineno for f in frames if f.filename == str(path)]
        at = f", line {lines[-1]}" if lines else ""
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"{path}{at}: {what} failed with {said}") from error


def _functions(module: ModuleType) -> list[str]:
    """Return the names of the functions and classes that the file itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]

"""Config files: `--config FILE`, TOML or JSON.

Input: a file with nested tables or dotted keys, whole or partial, and the flags that
exist. Output: values by flag, each with its line in the file. The string "None" is the
null of an optional field, as on the command line, because TOML has no null.
"""

import dataclasses
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax import checked_json
from mjax.cli import flags
from mjax.cli.flags.convert import choices_of, kind_of
from mjax.cli.flags.fields import Flag, alternatives
from mjax.records import config_json

_MAX_BYTES = 1 << 20
"""Maximum size of a config file in bytes. It is 100 times the size of the longest
config."""

_OF_ONE_START = ("--config", "--restart-from-scratch", "--distributed.process-id")
"""Flags that a file must not set, because all processes and later starts of a run may
use the same file."""

_KEY = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_KEYS = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_TABLE = re.compile(rf"\s*\[\[?\s*({_KEYS})\s*\]")
_VALUE = re.compile(rf"\s*({_KEYS})\s*=")
_SPACE = re.compile(r"[ \t\r\n]*")

Keys = tuple[str, ...]


class _PlacedError(Exception):
    """An error whose message begins with the line number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A value in a file."""

    value: Any
    line: int


def read(
    path: Path, known: Sequence[Flag], meanings: Mapping[str, str]
) -> dict[str, Setting]:
    """Read a config file.

    Args:
      path: path of the file. Its suffix (.toml, .json) or else its first character
        decides the format.
      known: flags that the file may set.
      meanings: names of flags in other programs, for messages.
    Returns:
      Flag -> its setting.
    Raises:
      ValueError: the file cannot be read, is neither TOML nor JSON, or has an unknown
        key, a duplicate key or a value of the wrong type. The message has file and
        line.
    """
    text = _text(path)
    is_json = path.suffix == ".json" or (
        path.suffix != ".toml" and text.lstrip().startswith("{")
    )
    try:
        pairs = [*(_json_pairs(text) if is_json else _toml_pairs(text))]
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except _PlacedError as error:
        raise ValueError(f"{path}, {error}") from None
    except ValueError as error:
        kind = "JSON" if is_json else "TOML"
        raise ValueError(f"{path} is not {kind}: {_placed(error)}") from error
    by_name = {flag.name: flag for flag in known if flag.positional is None}
    found: dict[str, Setting] = {}
    for keys, value, line in pairs:
        name = "--" + ".".join(keys).replace("_", "-")
        try:
            if name not in by_name and _is_of_a_run(keys, value):
                continue
            if name not in by_name:
                _refuse_key(keys, value, by_name, meanings)
                continue
            if name in found:
                before = found[name].line
                raise ValueError(
                    f"{_field(name)} is given twice, in line {before} too; leave one "
                    "out"
                )
            value = _value(value, by_name[name])
            if name in _OF_ONE_START and value is not None and value is not False:
                raise ValueError(
                    f"{_field(name)} applies to a single start; leave it out, and give "
                    f"{name} on the command line"
                )
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
        found[name] = Setting(value=value, line=line)
    return found


def _is_of_a_run(keys: Keys, value: Any) -> bool:
    """Return whether a key is one that config.json of a run has besides the flags.

    Raises:
      ValueError: it is, and its value is refused.
    """
    if keys == (config_json.KEY,):
        config_json.checked_format(value)
        return True
    field = ".".join(keys).replace("-", "_")
    for change in config_json.CHANGES:
        if change.field == field:
            if refusal := change.refusal(value):
                raise ValueError(refusal)
            return True
    return False


def _text(path: Path) -> str:
    """Return the text of a file."""
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(f"--config {path}: YAML is not supported; write TOML or JSON")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        looked = "" if path.is_absolute() else f" (looked from {Path.cwd()})"
        raise ValueError(f"--config {path} does not exist{looked}") from None
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ValueError(f"--config {path} is larger than 1 MiB, so it is not a config")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--config {path} is not UTF-8 text (byte {error.start})"
        ) from None
    if not text.strip():
        raise ValueError(f"--config {path} is empty; add values, or leave the flag out")
    return text


def _placed(error: ValueError) -> str:
    """Return a parser's message, in JSON with its line and column in front."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    return str(error)


def _refuse_key(
    keys: Keys, value: Any, by_name: Mapping[str, Flag], meanings: Mapping[str, str]
) -> None:
    """Raise the error for a key that is not a flag; accept an empty group of flags."""
    field = ".".join(keys)
    groups = {flag.group for flag in by_name.values()} - {""}
    first, *below = keys
    if not below and first.replace("-", "_") in groups:
        if value == {}:
            return
        raise ValueError(
            f"{field} must be a table of fields, got {flags.shown(repr(value))}"
        )
    above = "--" + ".".join(keys[:-1]).replace("_", "-")
    if above in by_name:
        kind = kind_of(by_name[above].hint)
        raise ValueError(f"{_field(above)} must be {kind}, got a table")
    name = field.replace("_", "-")
    near = flags.unknown_name(name, by_name.keys(), meanings, "")
    if near is None and first not in groups and (below or value == {}):
        near = f"the nearest is {flags.nearest(first, groups)}"
    said = f"unknown field {flags.shown(field)}"
    raise ValueError(f"{said}; {near or '--print-config prints all fields'}")


def _value(value: Any, flag: Flag) -> Any:
    """Return a value as the type of its field.

    Raises:
      ValueError: it has the wrong type.
    """
    kinds, name = alternatives(flag.hint), _field(flag.name)
    if type(None) in kinds and value == "None":
        return None
    if isinstance(value, list):
        value = [_absent(item, flag.hint) for item in value]
    choices = [str(choice) for choice in choices_of(flag.hint)]
    if choices and isinstance(value, str) and value not in choices:
        near = flags.nearest(value.lower(), choices)
        raise ValueError(
            f"unknown {name} {flags.shown(value)}; the nearest is {near} (of "
            f"{', '.join(choices)})"
        )
    if Path in kinds and isinstance(value, str):
        return Path(value)
    try:
        return checked_json.check(value, flag.hint, name)
    except ValueError as error:
        is_list = any(getattr(kind, "__origin__", None) is tuple for kind in kinds)
        if is_list and not isinstance(value, list | dict):
            raise ValueError(f"{error}; write [{json.dumps(value)}]") from None
        if isinstance(value, str) and kinds != (str,):
            raise ValueError(f"{error}; write it without quotes") from None
        raise


def _absent(item: Any, hint: Any) -> Any:
    """Return None for the string "None" in a list of optional values."""
    inner = [i for kind in alternatives(hint) for i in getattr(kind, "__args__", ())]
    may_be_absent = any(type(None) in alternatives(i) for i in inner)
    return None if item == "None" and may_be_absent else item


def _field(flag: str) -> str:
    """Return the name of a field in a file."""
    return flag.removeprefix("--").replace("-", "_")


def _split(key: str) -> Keys:
    return tuple(key.split("."))


# ------------------------------------------------------------------------------- JSON


def _json_pairs(text: str) -> Iterator[tuple[Keys, Any, int]]:
    """Yield keys, value and line of each field of a JSON object."""
    whole = json.loads(text)
    if not isinstance(whole, dict):
        got = flags.shown(repr(whole))
        raise _PlacedError(f"line 1: a config must be an object of fields, got {got}")
    # The text is valid JSON; the rest finds the lines of its keys.
    yield from _object_pairs(text, text.index("{"), ())[0]


def _object_pairs(
    text: str, start: int, above: Keys
) -> tuple[list[tuple[Keys, Any, int]], int]:
    """Return the fields of the JSON object at `start`, and the position after it."""
    decoder, found, seen = json.JSONDecoder(), [], dict[str, int]()
    here = _skip(text, start + 1)
    while text[here] != "}":
        line = text.count("\n", 0, here) + 1
        key, here = decoder.raw_decode(text, here)
        if key in seen:
            raise _PlacedError(
                f"line {line}: {flags.shown(key)} is given twice, in line {seen[key]} "
                "too; leave one out"
            )
        seen[key] = line
        here = _skip(text, _skip(text, here) + 1)
        keys = (*above, *_split(key))
        if text[here] == "{" and text[_skip(text, here + 1)] != "}":
            inner, here = _object_pairs(text, here, keys)
            found += inner
        else:
            value, here = decoder.raw_decode(text, here)
            found.append((keys, value, line))
        here = _skip(text, here)
        here = _skip(text, here + 1) if text[here] == "," else here
    return found, here + 1


def _skip(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


# ------------------------------------------------------------------------------- TOML


def _toml_pairs(text: str) -> Iterator[tuple[Keys, Any, int]]:
    """Yield keys, value and line of each field of a TOML document."""
    lines = _toml_lines(text)
    for keys, value in _leaves(tomllib.loads(text), ()):
        some = [keys[:count] for count in range(len(keys), 0, -1)]
        yield keys, value, next((lines[k] for k in some if k in lines), 1)


def _leaves(values: Mapping[str, Any], above: Keys) -> Iterator[tuple[Keys, Any]]:
    for key, value in values.items():
        keys = (*above, *_split(key))
        if isinstance(value, dict) and value:
            yield from _leaves(value, keys)
        else:
            yield keys, value


def _toml_lines(text: str) -> dict[Keys, int]:
    """Return the line number of each key; skip the lines of multi-line strings."""
    found: dict[Keys, int] = {}
    table: Keys = ()
    is_inside = False
    for number, line in enumerate(text.splitlines(), 1):
        marks = line.count('"""') + line.count("'''")
        if is_inside:
            is_inside = marks % 2 == 0
            continue
        is_inside = marks % 2 == 1
        if header := _TABLE.match(line):
            table = _keys(header[1])
            found.setdefault(table, number)
        elif pair := _VALUE.match(line):
            found.setdefault((*table, *_keys(pair[1])), number)
    return found


def _keys(written: str) -> Keys:
    """Return the parts of a TOML key, without quotes."""
    parts = re.findall(_KEY, written)
    return tuple(one for part in parts for one in _split(part.strip("\"'")))


def names_in(found: Collection[str], message: str) -> list[str]:
    """Return the flags that a message names and the file sets."""
    return [
        flag for flag in re.findall(r"--[a-z][\w.-]*[\w]", message) if flag in found
    ]

"""From the command line to a config: a recipe, and flags over it."""

import dataclasses
import json
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from mjax import flags
from mjax.config.train import TrainConfig, _flatten, to_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What a command line asks for beside the config."""

    recipe: str = "demo"
    """Starting point; every other flag overrides it."""
    print_config: bool = False
    """Print the config as JSON and leave."""
    print_mesh: bool = False
    """Print which device sits where in the mesh and leave."""
    dry_run: bool = False
    """Build, check and compile everything, then leave."""
    restart_from_scratch: bool = False
    """Move an old run in the work dir aside (nothing is deleted) and begin anew."""


_OF_ONE_PROCESS = (
    *("distributed.coordinator", "distributed.process_id", "distributed.timeout_s"),
    *("data.cache_dir", "observe.spans_dir"),
)


def shared_facts(config: TrainConfig, command: Command) -> dict[str, Any]:
    """Return what the processes of a run must have in common, by flag.

    What belongs to one process or its host is left out. Relative folders that all
    processes share are made absolute.
    """
    fields = dataclasses.asdict(command) | _flatten(json.loads(to_json(config)))
    for name in _OF_ONE_PROCESS:
        del fields[name]
    # The folder is of one host; whether there is one is of all.
    fields["ckpt.local_dir"] = None if fields["ckpt.local_dir"] is None else "given"
    for name in ("work_dir", "ckpt.dir"):
        if fields[name] is not None and "://" not in fields[name]:
            fields[name] = str(Path(fields[name]).absolute())
    return {f"--{name.replace('_', '-')}": value for name, value in fields.items()}


def to_flags(config: TrainConfig, base: TrainConfig) -> list[str]:
    """Return the flags that make one config of another; `parse` reads them back.

    Args:
      config: what the flags are to give.
      base: what they are given over, as of a recipe.
    Raises:
      ValueError: a value cannot be written as a flag, such as the text "None".
    """
    words = _differing(config, base, "")
    found, _ = parse(words, {Command.recipe: lambda: base}, "mjax")
    if found != config:
        raise ValueError(
            f"the flags {' '.join(words)} do not give the config back; a text is "
            "written like another value"
        )
    return words


def _differing(config: Any, base: Any, prefix: str) -> list[str]:
    words: list[str] = []
    for name, hint in typing.get_type_hints(type(config)).items():
        value, before = getattr(config, name), getattr(base, name)
        flag = f"{prefix}{name}".replace("_", "-")
        if dataclasses.is_dataclass(hint):
            words += _differing(value, before, f"{prefix}{name}.")
        elif value == before:
            continue
        elif hint is bool:
            group, dot, last = flag.rpartition(".")
            words.append(f"--{flag}" if value else f"--{group}{dot}no-{last}")
        elif isinstance(value, tuple):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nothing:
    """No flags of a program's own."""


def parse(
    argv: Sequence[str],
    recipes: Mapping[str, Callable[[], TrainConfig]],
    prog: str,
    *,
    base: TrainConfig | None = None,
) -> tuple[TrainConfig, Command]:
    """Turn command-line arguments into a config; bad ones end the program.

    Args:
      argv: arguments, without the program's name.
      recipes: what `--recipe` may name; its config gives the other flags' defaults.
      prog: how the program was called, for its messages.
      base: gives the defaults instead of a recipe.
    Raises:
      SystemExit: with code 2 after one message on stderr that names the nearest flag,
        choice or recipe; with code 0 after the help of `-h`.
    """
    config, command, _ = parse_with(Nothing(), argv, recipes, prog, base=base)
    return config, command


def parse_with[Own](
    own: Own,
    argv: Sequence[str],
    recipes: Mapping[str, Callable[[], TrainConfig]],
    prog: str,
    *,
    base: TrainConfig | None = None,
) -> tuple[TrainConfig, Command, Own]:
    """Do what `parse` does, for a program that has flags of its own beside these.

    Args:
      own: dataclass of these flags, with their defaults.
      argv: as for `parse`; so are the rest.
    """
    name = flags.given(argv, "--recipe") or Command.recipe
    if name not in recipes:
        nearest = flags.nearest(name, recipes)
        names = ", ".join(recipes)
        _refuse(prog, f"unknown recipe {name}; the nearest is {nearest} (of {names})")
    # The empty names keep "own.", "command." and "config." out of the flags.
    unnamed = tyro.conf.arg(name="")
    fields = {
        "own": Annotated[type(own), unnamed, tyro.conf.FlagCreatePairsOff],
        "command": Annotated[Command, unnamed, tyro.conf.FlagCreatePairsOff],
        "config": Annotated[TrainConfig, unnamed],
    }
    line_type = dataclasses.make_dataclass(
        "CommandLine", fields.items(), frozen=True, kw_only=True
    )
    try:
        line = flags.read(
            line_type,
            argv,
            prog=prog,
            named_by=(type(own), Command, TrainConfig),
            default=line_type(
                own=own,
                command=Command(recipe=name),
                config=base or recipes[name](),
            ),
            description=f"Recipes: {', '.join(recipes)}. Defaults below: "
            f"{name if base is None else 'of the run in the work dir'}.",
        )
    except ValueError as error:
        _refuse(prog, str(error))
    return line.config, line.command, line.own


def _refuse(prog: str, message: str) -> NoReturn:
    print(f"{prog}: error: {message}", file=sys.stderr)
    raise SystemExit(2)

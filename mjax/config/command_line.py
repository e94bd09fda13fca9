"""Make a config: a recipe, the fields that a file overrides, and then the flags."""

import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mjax.cli import flags
from mjax.config import files, own_code, own_recipe
from mjax.config.other_names import OTHER_NAMES
from mjax.config.train import TrainConfig, flattened, to_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Command-line options that are not part of the config."""

    recipe: str = "demo"
    """Base configuration: a name, or FILE.py:NAME for your own function that returns a
    TrainConfig. Every other flag overrides it."""
    config: str | None = None
    """TOML or JSON file whose values override the recipe; flags override the file."""
    print_config: bool = False
    """Print the config as JSON and exit."""
    print_mesh: bool = False
    """Print the position of each device in the mesh and exit."""
    dry_run: bool = False
    """Build, check and compile everything, then exit."""
    restart_from_scratch: bool = False
    """Move a run in the work dir aside (nothing is deleted) and start a new one."""
    verbose: bool = False
    """Print every startup detail in a terminal, like -v; logs always contain them."""

    def __post_init__(self) -> None:
        if not self.recipe:
            raise ValueError("--recipe is empty; name one, or leave it out")


_OF_ONE_PROCESS = (
    *("distributed.coordinator", "distributed.process_id", "distributed.timeout_s"),
    *("data.cache_dir", "observe.spans_dir"),
)


def shared_facts(config: TrainConfig, command: Command) -> dict[str, Any]:
    """Return the settings that all processes of a run must share, by flag.

    Settings of a single process or host are left out. Relative paths of shared folders
    are made absolute.
    """
    fields = dataclasses.asdict(command) | flattened(to_fields(config))
    # Hosts may keep the files of --recipe and --config in different folders, so their
    # settings are compared, not their paths.
    fields["recipe"] = own_recipe.short_name(command.recipe)
    for name in ("config", "verbose", *_OF_ONE_PROCESS):
        del fields[name]
    # Hosts may have different paths, but a path must be set on all hosts or on none.
    for name in ("ckpt.local_dir", "data.cache.mirror_dir"):
        fields[name] = None if fields[name] is None else "given"
    for name in ("work_dir", "ckpt.dir"):
        if fields[name] is not None and "://" not in fields[name]:
            fields[name] = str(Path(fields[name]).absolute())
    return {f"--{name.replace('_', '-')}": value for name, value in fields.items()}


def to_flags(config: TrainConfig, base: TrainConfig) -> list[str]:
    """Return the flags that turn one config into another; `parse` reads them back.

    Args:
      config: the target.
      base: the config that the flags override, such as a recipe's.
    Raises:
      ValueError: a value cannot be written as a flag, such as the text "None".
    """
    words = _differing(config, base, "")
    found, _ = parse(words, {Command.recipe: lambda: base}, "mjax")
    if found != config:
        raise ValueError(
            f"the flags {' '.join(words)} do not reproduce the config; a string looks "
            "like a value of another type"
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
    """Flags of a program that has none of its own."""


_TRAIN_EXAMPLES = (
    "{prog} --recipe debug --simulate-devices 8",
    "{prog} --recipe gpt-125m --data.path corpus/ --mesh.tp 2 --work-dir runs/a",
    "{prog} --work-dir runs/a                  (resume; other flags override)",
    "{prog} --config my.toml --optim.lr 3e-4   (docs/configuration.md)",
    "{prog} --recipe debug --print-config      (all values, as a config file)",
)


def parse(
    argv: Sequence[str],
    recipes: Mapping[str, Callable[[], TrainConfig]],
    prog: str,
    *,
    base: TrainConfig | None = None,
) -> tuple[TrainConfig, Command]:
    """Return the config of a command line, and the options outside it.

    Args:
      argv: arguments, without the program's name.
      recipes: values of `--recipe`; the named recipe gives the defaults of other flags.
      prog: the command as typed, for the help.
      base: gives the defaults if no recipe is named.
    Raises:
      SystemExit: code 2 after one message on stderr that names the nearest flag, choice
        or recipe; code 0 after the help of `-h`.
    """
    config, command, _ = parse_with(
        *(Nothing(), argv, recipes, prog),
        base=base,
        examples=_TRAIN_EXAMPLES,
        path="to start or resume a run there: --work-dir {path}",
    )
    return config, command


def parse_with[Own](
    own: Own,
    argv: Sequence[str],
    recipes: Mapping[str, Callable[[], TrainConfig]],
    prog: str,
    *,
    base: TrainConfig | None = None,
    examples: Sequence[str] = (),
    meanings: Mapping[str, str] = OTHER_NAMES,
    path: str = "",
) -> tuple[TrainConfig, Command, Own]:
    """Return the results of `parse`, and the additional flags of a program.

    Args:
      own: dataclass of the additional flags, with their defaults.
      argv: as in `parse`.
      recipes: as in `parse`.
      prog: as in `parse`.
      base: as in `parse`.
      examples: commands for the help, with {prog} for the program.
      meanings: flags by their names in other programs.
      path: what to do with a path without a flag, as in `flags.Guide`.
    """
    argv = ["--verbose" if word == "-v" else word for word in argv]
    settings: dict[str, files.Setting] = {}
    try:
        settings = _settings(type(own), argv)
        recipe = _recipe_of(argv, settings)
        is_based = base is not None and recipe is None
        command = Command(recipe=recipe or Command.recipe)
        start = base if is_based else _made(command.recipe, recipes)
        where = "of the run in the work dir" if is_based else f"recipe {command.recipe}"
        guide = flags.Guide(
            description=f"Recipes: {', '.join(recipes)}.\n\nDefaults below: {where}.",
            examples=[example.format(prog=prog) for example in examples],
            meanings=meanings,
            path=path,
        )
        own, command, config = flags.read_parts(
            {type(own): own, Command: command, TrainConfig: start},
            argv,
            prog=prog,
            guide=guide,
            overrides={name: setting.value for name, setting in settings.items()},
        )
    except ValueError as error:
        _refuse(_with_lines(str(error), argv, settings))
    if recipe is None and not is_based:
        _tell_lacking(settings, command.config)
    return config, command, own


def _tell_lacking(settings: Mapping[str, files.Setting], path: str | None) -> None:
    """Report the missing fields of a config file that has most of the fields.

    Such a file usually comes from an older run. Fields added since then have the values
    of the recipe.
    """
    names = [flag.name for flag in flags.flags_of(TrainConfig)]
    lacking = [name for name in names if name not in settings]
    if 0 < len(lacking) < len(names) - len(lacking):
        print(
            f"note: {path} names no recipe; missing fields ({len(lacking)}) are taken "
            f"from --recipe {Command.recipe}: {', '.join(lacking)}",
            file=sys.stderr,
        )


def names_recipe(argv: Sequence[str]) -> bool:
    """Return whether a command line, or its config file, names a recipe.

    Raises:
      ValueError: the file cannot be used.
    """
    return _recipe_of(argv, _settings(Nothing, argv)) is not None


def _settings(own: type, argv: Sequence[str]) -> dict[str, files.Setting]:
    """Read the config file of a command line, if there is one."""
    path = flags.given(argv, "--config")
    if path is None or path.startswith("--"):  # the parser reports the missing value
        return {}
    if not path:
        raise ValueError("--config needs a value, a TOML or JSON file")
    known = [
        flag for part in (own, Command, TrainConfig) for flag in flags.flags_of(part)
    ]
    return files.read(Path(path), known, OTHER_NAMES)


def _recipe_of(
    argv: Sequence[str], settings: Mapping[str, files.Setting]
) -> str | None:
    """Return the recipe named by the flags, or else by the file."""
    given = flags.given(argv, "--recipe")
    if given is None and "--recipe" in settings:
        return settings["--recipe"].value
    # The parser refuses a missing value.
    return None if not given or given.startswith("--") else given


def _made(recipe: str, recipes: Mapping[str, Callable[[], TrainConfig]]) -> TrainConfig:
    """Return the config of a recipe.

    Raises:
      ValueError: no recipe has this name, or the user's own recipe is wrong.
    """
    if own_code.is_own(recipe):
        return own_recipe.load(recipe)
    if recipe not in recipes:
        nearest = flags.nearest(recipe, recipes)
        names = ", ".join(recipes)
        raise ValueError(
            f"unknown recipe {flags.shown(recipe)}; the nearest is {nearest} (of "
            f"{names}; or FILE.py:NAME for your own)"
        )
    return recipes[recipe]()


def _with_lines(
    message: str, argv: Sequence[str], settings: Mapping[str, files.Setting]
) -> str:
    """Add to a message the lines of the config file that set the flags it names."""
    named = [
        f"{flag} is given in line {settings[flag].line}"
        for flag in dict.fromkeys(files.names_in(settings, message))
        if flags.given(argv, flag) is None
    ]
    path = flags.given(argv, "--config")
    return f"{message} ({path}: {', '.join(named)})" if named else message


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)

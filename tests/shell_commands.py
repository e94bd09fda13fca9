"""What a shell makes of a command, and whether our programs take it.

Bash expands quotes, braces, globs, variables, `!` and redirections as it does for a
user, but each program that it starts only reports its words. Then our programs read
these words with their own parsers, and stop before they act.
"""

import argparse
import ast
import contextlib
import functools
import io
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from mjax import train
from mjax.__main__ import PROGRAMS
from mjax.cli import completion, flags
from mjax.config import command_line
from mjax.config.fixes import Devices, sizes_of
from mjax.config.train import TrainConfig, from_json
from mjax.launch.__main__ import COMMANDS as LAUNCH_COMMANDS
from mjax.plan.options import Options
from mjax.recipes import RECIPES

ROOT = Path(__file__).parents[1]
OURS = r"(?:\.venv/bin/)?python -m (?:mjax|scripts)\.|mjax [a-z]"
"""How a command of ours begins."""
_PREAMBLE = r"""
command_not_found_handle() { printf '%s\0' "$#" "$@" >&9; }
function .venv/bin/python { python "$@"; }
function .venv-stores/bin/python { python "$@"; }
exec() { "$@"; }
env() { while [[ $1 == *=* ]]; do shift; done; "$@"; }
cd() { :; }
source() { [[ $1 == .venv/bin/activate ]] || builtin source "$ROOT/$1"; }
shopt -s failglob
set -o history -H -u
"""
_PLACEHOLDER = re.compile(r"<[a-z' ]+>|\.\.\.|\bFLAGS\b")


@functools.cache
def expanded(script: str, **variables: str) -> list[list[str]]:
    """Return the words of every program that bash would start, in order.

    Args:
      script: lines as typed in a terminal.
      variables: the environment of the shell.
    Raises:
      ValueError: bash reports an error, such as a glob that matches nothing.
    """
    with tempfile.TemporaryFile() as reported, tempfile.TemporaryDirectory() as folder:
        for name in ("other/b.json", "text", "FILE"):  # what commands read
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).touch()
        done = subprocess.run(
            ["/bin/bash", "--norc"],
            input=f"exec 9>&{reported.fileno()}\n{_PREAMBLE}{script}\n",
            pass_fds=[reported.fileno()],
            cwd=folder,
            env={"PATH": "/nowhere", "ROOT": str(ROOT)} | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        reported.seek(0)
        words = iter(reported.read().decode().split("\0")[:-1])
    if "bash: " in done.stderr:  # it also prints the lines that `!` has changed
        raise ValueError(done.stderr.strip())
    return [[next(words) for _ in range(int(count))] for count in words]


def programs(script: str, **variables: str) -> list[tuple[str, list[str]]]:
    """Return (module, its words) of each program of ours that a script starts.

    Placeholders are left out or 1, and what is in brackets is given.

    Raises:
      ValueError: bash reports an error.
    """
    script = re.sub(r"\[([A-Z-][^]]*)\]", r"\1", _PLACEHOLDER.sub("", script))
    script = re.sub(r"(?<= )N\b", "1", script)
    started = expanded(script, **variables)
    return [program for words in started for program in _ours(words)]


def _ours(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield our programs in a command, also behind others, such as srun and kubectl."""
    if words[:2] == ["make", "train"]:
        given = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        yield "mjax.train", shlex.split(given.get("ARGS", ""))
    for index, word in enumerate(words):
        before, rest = words[index - 1] if index else "--", [*words[index + 1 :]]
        if (
            word == "-m"
            and before == "python"
            and rest[0].startswith(("mjax.", "scripts."))
        ):
            yield rest[0], rest[1:]
        elif word == "mjax" and before == "--" and rest and rest[0].isalpha():
            yield f"mjax.{rest[0]}", rest[1:]
        elif "python -m mjax." in word:  # a shell will expand it again
            yield from programs(word)


class _Read(BaseException):
    """The parser of a program has taken its words."""


def refusal(module: str, words: Sequence[str]) -> str | None:
    """Return the message with which a program refuses its words, or None.

    Files that do not exist are no reason: the names on a page are examples. A run that
    begins is recorded in its work dir, in the current folder, so that a later command
    resumes it.
    """
    if module == "mjax.cli.completion":
        return None if words[0] in completion.SCRIPTS else f"no shell {words[0]}"
    if not _exists(module):
        return f"there is no module {module}"
    if module == "mjax.evaluate.tasks":  # lm-eval's own flags; tests/evaluate
        return None
    if module.startswith("scripts."):
        return _of_script(module, words)
    words = [*words]
    try:
        if module == "mjax.train":
            config = configured(words)
            if config.work_dir and not config.work_dir.isupper():
                Path(config.work_dir).mkdir(parents=True, exist_ok=True)
                (Path(config.work_dir) / "config.json").write_text(_printed(words))
            return None
        if module == "mjax.launch" and "--" in words:
            cut = words.index("--")
            if words[0] != "update" and (no := refusal("mjax.train", words[cut + 1 :])):
                return no
        _dry_run(module, words)
    except ValueError as error:
        is_file = re.search(r"does not exist|there is no folder", str(error))
        return "\n".join(unknown(module, words)) or None if is_file else str(error)
    return None


def configured(words: Sequence[str]) -> TrainConfig:
    """Return the config of the trainer's flags.

    Raises:
      ValueError: the trainer refuses them.
    """
    return from_json(_printed(words))


def _printed(words: Sequence[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = train.main([*words, "--print-config"])
        except SystemExit as ended:
            code = ended.code
    if code:
        raise ValueError(printed.getvalue().strip())
    return printed.getvalue()


def check_fits(config: TrainConfig, nodes: int, gpus_per_node: int) -> None:
    """Raise ValueError if a run does not fit a cluster."""
    count = nodes * gpus_per_node
    sizes_of(config, Devices(count=count, per_host=gpus_per_node))


def planned(words: Sequence[str]) -> tuple[TrainConfig, Options]:
    """Return the config and the cluster of the planner's flags."""
    config, _, options = command_line.parse_with(Options(), words, RECIPES, "mjax plan")
    return config, options


def _dry_run(module: str, words: Sequence[str]) -> None:
    """Start a program in this process; stop it when it has read its flags.

    Raises:
      ValueError: it refuses them.
    """

    def stopping(read):
        @functools.wraps(read)
        def reads(*args, **kwargs):
            read(*args, **kwargs)
            raise _Read

        return reads

    printed = io.StringIO()
    parser = argparse.ArgumentParser
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        mock.patch.object(flags, "read", stopping(flags.read)),
        mock.patch.object(parser, "parse_args", stopping(parser.parse_args)),
        mock.patch.object(sys, "argv", [module, *words]),
        mock.patch.dict(os.environ),
        warnings.catch_warnings(),
    ):
        # runpy warns about a module that was imported before.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            if module == "mjax.plan":
                planned(words)
                return
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except _Read:
            return
        except SystemExit as ended:
            if ended.code:
                raise ValueError(printed.getvalue().strip()) from None
    raise AssertionError(f"{module} has read no flags")


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


def _of_script(module: str, words: Sequence[str]) -> str | None:
    """Return which flags the source of a script does not add, or adds as required.

    Scripts import jax, plots and more; starting all of them would take minutes.
    """
    path = ROOT / module.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not any(ast.unparse(call.func).endswith("parse_args") for call in calls):
        return None
    added = {
        name.value: {key.arg: ast.unparse(key.value) for key in call.keywords}
        for call in calls
        for name in call.args[:1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str)
    }
    given = itertools.takewhile(lambda word: word != "--", words)
    given = {word.partition("=")[0] for word in given if word.startswith("--")}
    needed = {name for name, keys in added.items() if keys.get("required") == "True"}
    wrong = sorted(given - added.keys())
    wrong += [f"{name} is missing" for name in sorted(needed - given)]
    return ", ".join(wrong) or None


@functools.cache
def _help_of(*names: str) -> str:
    return completion.help_of(*names)


def unknown(module: str, words: Sequence[str]) -> list[str]:
    """Return what the help of a program does not list: commands, flags, choices.

    Unlike `refusal` it does not need all flags of the command.
    """
    program = module.removeprefix("mjax.")
    if program not in PROGRAMS:
        return [] if _exists(module) else [f"there is no module {module}"]
    given = [*words[: words.index("--")]] if "--" in words else [*words]
    behind = words[len(given) + 1 :]
    found = unknown("mjax.train", behind) if program == "launch" and behind else []
    names = [program]
    commands = completion.commands_in(_help_of(program))
    if program == "launch":
        commands = [*LAUNCH_COMMANDS]
    if given and given[0] in commands:
        names.append(given.pop(0))
        inner = re.search(r"\[-h\]\s+\{([a-z,-]+)\}\s+\.\.\.", _help_of(*names))
        if inner and given:
            if given[0] not in inner[1].split(","):
                return [f"{' '.join(names)} has no command {given[0]}"]
            names.append(given.pop(0))
    text = _help_of(*names)
    known = completion.flags_in(text)
    for index, word in enumerate(given):
        flag = word.partition("=")[0]
        if not flag.startswith("--"):
            continue
        if flag not in known and not re.search(rf"{re.escape(flag)}[\s,\]]", text):
            found.append(f"{' '.join(names)} has no flag {flag}")
        value = given[index + 1] if index + 1 < len(given) else ""
        choices = [*RECIPES] if flag == "--recipe" else known.get(flag)
        if choices and value not in choices and ".py:" not in value:
            found.append(f"{flag} is one of {choices}, not {value}")
    return found

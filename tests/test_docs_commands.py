"""The commands on the pages are ones that the programs take.

Every command of ours is read against the program's own help: the program, the command
and each flag must exist, with a choice that is listed. The trainer's flags without
files are parsed as the trainer does, also those of `make train` in the Makefile's help.
What starts in a second is run. Pages whose commands are run as they stand:
docs/fine_tuning.md (tests/tune), docs/start.md here (slow: it trains three times).
"""

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from mjax import completion
from mjax.__main__ import PROGRAMS
from mjax.config import command_line
from mjax.config.train import TrainConfig
from mjax.launch.__main__ import COMMANDS as LAUNCH_COMMANDS
from mjax.recipes import RECIPES

ROOT = Path(__file__).parents[1]
MAKEFILE = ROOT / "Makefile"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
# Shows what the trainer answers to flags that do not exist.
WRONG_ON_PURPOSE = ROOT / "docs" / "configuration.md"
# The other rows name programs of other frameworks.
TASKS = ROOT / "docs" / "tasks.md"
_START = re.compile(
    r"^(?:\$ )?(?:\.venv/bin/)?(?:python -m mjax\.|mjax )([a-z][a-z.]*)(.*)$"
)
_MAKE_TRAIN = re.compile(r"make train ARGS='([^']*)'")
_PLACEHOLDER = re.compile(r"<[^>]*>|\.\.\.|\bFLAGS\b")


def code_lines(page: Path) -> list[str]:
    """The lines of a page's code blocks, joined where one goes on in the next."""
    lines, is_fenced = [], False
    for line in page.read_text().splitlines():
        if line.strip().startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            lines.append(line.strip())
    return re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()


def commands(page: Path) -> list[list[str]]:
    """The words of each command of ours, the name of the program first."""
    found = []
    for line in code_lines(page):
        match = _START.match(line)
        if match:
            rest = re.split(r"\s#\s|\s[|>]\s|\s&&\s", match[2])[0]
            rest = _PLACEHOLDER.sub(" ", rest).translate({91: " ", 93: " "})
            found.append([match[1], *shlex.split(rest)])
    return found + make_train_commands(page)


def make_train_commands(page: Path) -> list[list[str]]:
    """The words of the trainer in each `make train ARGS='...'`, the program first."""
    found = []
    for flags in map(shlex.split, _MAKE_TRAIN.findall(page.read_text())):
        recipe = (
            [] if "--recipe" in flags else ["--recipe", command_line.Command.recipe]
        )
        found.append(["train", *recipe, *flags])
    return found


def configured(words: list[str], base: TrainConfig | None = None) -> TrainConfig:
    """The config of a trainer's flags."""
    config, _ = command_line.parse(words, RECIPES, prog="mjax train", base=base)
    return config


def all_commands() -> list[tuple[str, list[str]]]:
    return [
        (page.name, words)
        for page in sorted([*PAGES, MAKEFILE])
        if page not in (WRONG_ON_PURPOSE, TASKS)
        for words in commands(page)
    ]


@functools.cache
def help_of(*names: str) -> str:
    return completion.help_of(*names)


def problems(words: list[str]) -> list[str]:
    """What a program does not know of a command line."""
    program, *rest = words
    if program == "evaluate.tasks":  # lm-eval's own flags; tests/evaluate
        return []
    if program not in PROGRAMS:
        return [f"no program {program}"]
    given = rest[: rest.index("--")] if "--" in rest else rest
    behind = rest[len(given) + 1 :]
    found = problems(["train", *behind]) if program == "launch" and behind else []
    names = [program]
    known = (
        list(LAUNCH_COMMANDS)
        if program == "launch"
        else completion.commands_in(help_of(program))
    )
    given = [*given]
    if given and given[0] in known:
        names.append(given.pop(0))
        inner = re.search(r"\[-h\]\s+\{([a-z,-]+)\}\s+\.\.\.", help_of(*names))
        if inner:
            if given[0] not in inner[1].split(","):
                return [f"{' '.join(names)} has no command {given[0]}"]
            names.append(given.pop(0))
    flags = completion.flags_in(help_of(*names))
    text = help_of(*names)
    for index, word in enumerate(given):
        flag = word.partition("=")[0]
        if not flag.startswith("--"):
            continue
        if flag not in flags and not re.search(rf"{re.escape(flag)}[\s,\]]", text):
            found.append(f"{' '.join(names)} has no flag {flag}")
        choices = flags.get(flag)
        value = given[index + 1] if index + 1 < len(given) else ""
        is_file = ".py:" in value  # a recipe of one's own
        if flag == "--recipe" and value not in RECIPES and not is_file:
            found.append(f"there is no recipe {value}")
        if choices and flag != "--recipe" and value not in choices:
            found.append(f"{flag} is one of {choices}, not {value}")
    return found


def test_commands_are_found_and_a_wrong_one_is_noticed():
    assert len(all_commands()) > 100
    assert problems(["train", "--mesh.tq", "2"]) == ["train has no flag --mesh.tq"]
    assert problems(["launch", "--", "--spares", "1"]) != []
    assert problems(["launch", "--", "--recipe", "gpt-175b"]) == [
        "there is no recipe gpt-175b"
    ]
    assert problems(["health", "cluster", "look"]) == [
        "health cluster has no command look"
    ]
    assert problems(["train", "--model.remat", "some"]) != []


def test_every_command_of_a_page_is_one_that_its_program_takes():
    wrong = [
        f"{page}: {' '.join(words)}: {problem}"
        for page, words in all_commands()
        for problem in problems(words)
    ]
    assert wrong == []


def test_the_trainers_flags_on_the_pages_are_a_run_that_can_be_configured():
    parsed = 0
    for _, words in all_commands():
        program, *rest = words
        needs_files = {"--config", "--init-from"} & {*rest} or "--recipe" not in rest
        if (
            program != "train"
            or needs_files
            or rest[rest.index("--recipe") + 1 :][0] not in RECIPES
        ):
            continue
        configured(rest)
        parsed += 1
    assert parsed > 8


@pytest.mark.parametrize("name", ["Makefile", "README.md", "docs/start.md"])
def test_a_short_demo_is_shown(name: str):
    assert [
        words
        for words in make_train_commands(ROOT / name)
        if configured(words[1:]).steps <= 50
    ]


def test_no_pipeline_of_the_start_page_has_fewer_microbatches_than_stages():
    config, stages = None, []
    for program, *rest in commands(ROOT / "docs" / "start.md"):
        if program == "train" and "--work-dir" in rest:
            config = configured(rest, base=config)  # the one before is resumed
            stages.append(config.mesh.pp)
            assert config.batch.microbatches >= config.mesh.pp, rest
    assert max(stages) > 1


def test_targets_of_make_on_the_pages_exist():
    makefile = MAKEFILE.read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {
        match[1]
        for page in PAGES
        for line in code_lines(page)
        if (match := re.match(r"make ([a-z-]+)", line))
    }
    assert named
    assert named - targets == set()


def written(words: list[str]) -> list[str]:
    """The files and folders of the current folder that a command writes."""
    paths = [
        path
        for flag, path in itertools.pairwise(words)
        if flag in ("--html", "--out", "--state", "--history")
    ]
    if words[1:2] in (["export"], ["fetch"]):
        paths.append(words[3])
    # OUT and FILE are placeholders.
    return [path for path in paths if "/" not in path and not path.isupper()]


def test_git_ignores_what_the_commands_of_the_pages_write_in_the_clone():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    paths = {path for _, words in all_commands() for path in written(words)}
    assert {"plan.html", "out"} <= paths
    assert {
        path
        for path in paths
        if not any(fnmatch(f"/{path}", line.rstrip("/")) for line in ignored)
    } == set()


@pytest.mark.parametrize("name", ["README.md", "docs/start.md", "docs/planning.md"])
def test_a_page_installs_before_its_first_command(name: str):
    lines = code_lines(ROOT / name)
    make = next(i for i, line in enumerate(lines) if line.startswith("make env"))
    first = next(i for i, line in enumerate(lines) if _START.match(line))
    assert lines[make + 1] == "source .venv/bin/activate"
    assert make + 1 < first


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_commands_of_the_start_page_run_one_after_the_other(tmp_path):
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    lines = [
        line
        for line in code_lines(ROOT / "docs" / "start.md")
        if line.startswith("python -m")
    ]
    assert len(lines) == 6
    for line in lines:
        done = run(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "warning:" not in done.stdout + done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()

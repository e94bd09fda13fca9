"""Tasks 1 to 6: install, ask, configure."""

import json
import shutil
import sys
from pathlib import Path

from scripts.tasks.place import REPOSITORY, Place, Task, TaskFailedError, losses

SMALL = ("--recipe", "debug", "--steps", "10")
SETTINGS = """recipe = "debug"
steps = 10
simulate_devices = 2

[optim]
lr = 2e-3

[mesh]
tp = 2
"""
AS_FLAGS = (
    *("--recipe", "debug", "--steps", "10", "--simulate-devices", "2"),
    *("--optim.lr", "2e-3", "--mesh.tp", "2"),
)
RECIPE = '''import dataclasses

from mjax.recipes import RECIPES


def narrow():
    """The debug recipe with a width of 32."""
    base = RECIPES["debug"]()
    model = dataclasses.replace(base.model, d_model=32, heads=4, d_ff=64)
    return dataclasses.replace(base, model=model)
'''
# Emulate pressing Tab in bash and zsh, without a terminal.
IN_BASH = """eval "$(mjax completion bash)"
COMP_WORDS=(mjax train --mesh.tp-o); COMP_CWORD=2
_mjax; echo "${COMPREPLY[@]}" """
IN_ZSH = """compdef() { : }; compadd() { shift; print -r -- "$@" }; _files() { : }
eval "$(mjax completion zsh)"
words=(mjax train --mesh.tp-o); CURRENT=3
_mjax"""


def install(place: Place) -> None:
    """Task 1: install the wheel into a fresh environment and train away from here."""
    found = sorted((REPOSITORY / "dist").glob("mjax-*.whl"))
    if len(found) != 1:
        raise TaskFailedError(f"make dist builds the one wheel that is needed: {found}")
    wheel = shutil.copy(found[0], place.folder)
    place.run([sys.executable, "-m", "venv", "env"], shown="python3.12 -m venv env")
    python, name = str(place.folder / "env/bin/python"), Path(wheel).name
    place.run(
        [python, "-m", "pip", "install", "--quiet", f"{wheel}[data]"],
        shown=f"env/bin/pip install '{name}[data]'",
    )
    words = ["train", *SMALL, "--work-dir", "run"]
    place.run(
        [str(place.folder / "env/bin/mjax"), *words],
        shown=" ".join(["env/bin/mjax", *words]),
    )
    where = place.ask(python, "import json, mjax; print(json.dumps(mjax.__file__))")
    place.need(
        where.startswith(str(place.folder)),
        "the package is imported from the new environment",
    )
    place.need(len(losses(place.folder / "run")) == 10, "10 steps are trained")


def ask(place: Place) -> None:
    """Task 2: version, help, completion."""
    place.need("mjax 0." in place.mjax("--version").out, "the version is printed")
    place.need("train" in place.mjax("-h").out, "the programs are listed")
    shown = place.mjax("train", "-h").out
    place.need("--mesh.tp" in shown and "example" in shown, "flags, with examples")
    place.mjax("completion", "bash")
    command = place.write(
        "bin/mjax", f'#!/bin/sh\nexec {sys.executable} -m mjax "$@"\n'
    )
    command.chmod(0o755)
    for shell, script in (("bash", IN_BASH), ("zsh", IN_ZSH)):
        if shutil.which(shell) is None:
            raise TaskFailedError(f"{shell} is not installed, so Tab cannot be tried")
        path = f'PATH="{command.parent}:$PATH"\n'
        said = place.run([shell, "-c", path + script], shown=None).out.split()
        place.need(said == ["--mesh.tp-overlap"], f"Tab in {shell}", said[0])


def config_file(place: Place) -> None:
    """Task 3: the same run from a file and from flags."""
    place.write("run.toml", SETTINGS)
    place.mjax("train", "--config", "run.toml", "--work-dir", "file")
    python = [sys.executable, "-m", "mjax", "train"]
    place.run([*python, *AS_FLAGS, "--work-dir", "flags"], shown=None)
    configs = [
        json.loads((place.folder / name / "config.json").read_text())
        for name in ("file", "flags")
    ]
    for config in configs:
        del config["work_dir"]
    place.need(configs[0] == configs[1], "both runs have the same config")
    pair = [losses(place.folder / name) for name in ("file", "flags")]
    place.need(
        pair[0] == pair[1] and len(pair[0]) == 10, "both runs have the same 10 losses"
    )
    place.write("wrong.toml", SETTINGS.replace("lr =", "learning_rate ="))
    said = place.run([*python, "--config", "wrong.toml"], shown=None, code=2).err
    place.need(
        "learning_rate" in said and "line 6" in said and "lr" in said,
        "an unknown key is refused",
        said.strip().splitlines()[-1],
    )


def print_config(place: Place) -> None:
    """Task 4: the whole config, read back."""
    printed = place.mjax("train", *AS_FLAGS, "--print-config").out
    place.write("config.json", printed)
    place.shown[-1] += " > config.json"
    again = place.mjax("train", "--config", "config.json", "--print-config").out
    place.need(again == printed, "the printed config, read back, prints itself")
    place.need(json.loads(printed)["optim"]["lr"] == 2e-3, "flags are in it")


def override(place: Place) -> None:
    """Task 5: one value changes for one run."""
    place.write("run.toml", SETTINGS)
    over = place.mjax("train", "--config", "run.toml", "--steps", "7", "--print-config")
    config = json.loads(over.out)
    place.need(config["steps"] == 7, "the flag wins over the file")
    place.need(config["optim"]["lr"] == 2e-3, "the rest comes from the file")
    wrong = ("train", "--config", "run.toml", "--learning-rate", "1e-3")
    said = place.run([sys.executable, "-m", "mjax", *wrong], shown=None, code=2).err
    place.need("--optim.lr" in said, "an unknown name is refused", said.strip())


def own_recipe(place: Place) -> None:
    """Task 6: a recipe in a file outside the package."""
    place.write("my_recipes.py", RECIPE)
    flags = ("--recipe", "my_recipes.py:narrow", "--steps", "8", "--work-dir", "run")
    place.mjax("train", *flags)
    config = json.loads((place.folder / "run" / "config.json").read_text())
    place.need(config["model"]["d_model"] == 32, "the recipe is used")
    place.need(config["steps"] == 8, "a flag wins over it")
    (start,) = (place.folder / "run" / "starts").glob("*.json")
    place.need("my_recipes.py:narrow" in start.read_text(), "the run records the name")
    (place.folder / "my_recipes.py").unlink()
    resumed = ("train", "--work-dir", "run", "--steps", "10")
    place.run([sys.executable, "-m", "mjax", *resumed], shown=None)
    place.need(
        len(losses(place.folder / "run")) == 10, "the run resumes without the file"
    )


TASKS = (
    Task(number=1, do=install),
    Task(number=2, do=ask),
    Task(number=3, do=config_file),
    Task(number=4, do=print_config),
    Task(number=5, do=override),
    Task(number=6, do=own_recipe),
)

"""Help and mistakes are answered before anything heavy is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "matplotlib", "tensorstore"}
WITHOUT_NUMPY = ("train", "generate", "evaluate", "plan", "mesh", "launch")
OTHERS = ("ckpt", "tune", "pipeline", "data", "health", "observe")
RUN = r"""
import runpy, sys
module, *words = sys.argv[1:]
sys.argv = [module, *words]
code = 0
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as left:
    code = left.code
print("\nEXIT", code, *sys.modules)
"""


def answered(module: str, *words: str) -> tuple[int, set[str], str]:
    """Return exit code, imported packages and the errors of a command."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, f"mjax.{module}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    _, _, said = done.stdout.rpartition("\nEXIT ")
    code, *modules = said.split()
    return int(code), {name.partition(".")[0] for name in modules}, done.stderr


@pytest.mark.parametrize("module", [*WITHOUT_NUMPY, *OTHERS])
def test_help_imports_nothing_heavy(module):
    code, packages, _ = answered(module, "-h")
    assert code == 0
    assert packages & HEAVY == set()
    assert module in OTHERS or "numpy" not in packages


@pytest.mark.parametrize("module", [*WITHOUT_NUMPY, *OTHERS])
def test_a_wrong_flag_imports_nothing_heavy(module):
    code, packages, said = answered(module, "--no-such-flag-at-all")
    assert code == 2
    assert said.startswith("error: ")
    assert packages & HEAVY == set()
    assert module in OTHERS or "numpy" not in packages


def test_the_trainer_refuses_values_and_prints_its_config_as_fast():
    for words, wanted in (
        (["--recipe", "debug", "--steps", "0"], 2),
        (["--recipe", "debug", "--print-config"], 0),
        (["--config", "absent.toml"], 2),
    ):
        code, packages, _ = answered("train", *words)
        assert code == wanted
        assert packages & {*HEAVY, "numpy"} == set()


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("train", "--data.path absent", "--data.path 'absent' does not exist"),
        ("train", "--work-dir README.md", "the work dir README.md is a file"),
        ("train", "--work-dir README.md/run", "README.md is a file; choose another"),
        ("train", "--init-from absent", "absent does not exist; give a work dir"),
        ("train", "--init-from hf://org/model@main", "is on a hub, where"),
        ("train", "--simulate-devices 2 --batch.size 7", "= 2, got 7; nearest that"),
        (
            "train",
            "--steps 110 --optim.schedule wsd",
            "--optim.warmup-steps must be at most 88, got 100, because --optim.sched",
        ),
        ("train", "--steps 20", "got 100; give --optim.warmup-steps 2 or --steps 1000"),
        ("generate", "absent --prompt x", "absent does not exist; give a work dir"),
        ("evaluate", "absent --held-out", "absent does not exist; give a work dir"),
    ],
)
def test_a_wrong_path_is_refused_before_jax_is_imported(module, words, message):
    code, packages, said = answered(module, *words.split())
    assert code == 2
    assert said.startswith("error: ")
    assert message in said
    assert "jax" not in packages


def test_a_module_that_is_imported_would_be_seen():
    _, packages, _ = answered("trainer")
    assert {"jax", "numpy"} <= packages

"""Imports of the trainer: libraries that few runs need are loaded later."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LATER = {
    "orbax.checkpoint": "mjax.ckpt.saving.Writer imports it when a run opens its store",
    "jax.experimental.mosaic.gpu": "for kernels that are chosen on GPUs",
    "jax.experimental.pallas": "likewise",
    "matplotlib": "draws at the end of a run",
    "rich.progress": "draws in a terminal",
    "tensorboardX": "--track tensorboard",
    "wandb": "--track wandb",
    "mlflow": "--track mlflow",
    "tokenizers": "--data.tokenizer",
    "pyarrow": "parquet in --data.path",
    "jinja2": "templates of chats",
    "starlette": "servers",
    "torch": "nothing",
    "transformers": "nothing",
    "pandas": "nothing",
}


def loaded_by(code: str) -> set[str]:
    """Return the modules of LATER that a new interpreter has after running code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules, sep='\\n')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return LATER.keys() & set(done.stdout.splitlines())


def test_importing_the_trainer_loads_no_library_that_comes_later():
    assert loaded_by("import mjax.trainer") == set()


def test_the_modules_that_come_later_have_the_names_that_are_looked_for():
    """The test above would not detect a renamed module."""
    code = "import mjax.ckpt.orbax_save, mjax.kernels.stamp.mosaic_gpu, rich.progress"
    found = loaded_by(code)
    assert {"orbax.checkpoint", "jax.experimental.pallas", "rich.progress"} <= found
    assert "jax.experimental.mosaic.gpu" in found

"""Open a model for scoring: choose mesh, precision and length.

Input: a path and flags. Output: an `Opened`, and the metadata of its run.
"""

import json
from typing import Any, Literal, NamedTuple

import jax

from mjax.ckpt import places
from mjax.ckpt.store import manifest_in
from mjax.config.train import TrainConfig, from_json
from mjax.generate.opened import Opened, open_model
from mjax.mesh.axes import MeshConfig, resolve
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import (
    keep_compiled_programs,
    load_plugin_without_gpu,
    simulate_devices,
)

MAX_LENGTH = 4096
"""Default maximum number of tokens in a window of a Hugging Face model. Not
measured."""

Precision = Literal["float32", "bfloat16"]


class Run(NamedTuple):
    """The run that made a model."""

    config: TrainConfig | None
    """Config of the run; None for a Hugging Face folder."""
    facts: dict[str, Any]

    def precision(self, asked: Precision | None) -> Precision:
        """Return the dtype of the computation."""
        own = "float32" if self.config is None else self.config.precision.compute
        return asked or own


def run_of(path: str, step: int | None) -> Run:
    """Read the metadata of the run of a model; touch no device.

    Raises:
      ValueError: there is no model.
      RuntimeError: files are damaged.
    """
    if places.is_hugging_face(path):
        return Run(None, {})
    folder = places.choose(places.find(path), step)
    facts = dict(manifest_in(folder).run)
    return Run(from_json(json.dumps(facts["config"])), facts)


def open_on_mesh(
    path: str,
    *,
    precision: Precision,
    step: int | None,
    tokenizer: str | None,
    mesh: MeshConfig,
    simulated: int | None,
) -> Opened:
    """Start the devices and open a model.

    Args:
      path: path of the model, as for `open_model`.
      precision: dtype of the parameters and of the computation.
      step: step, as for `open_model`.
      tokenizer: tokenizer, as for `open_model`.
      mesh: sizes of the mesh.
      simulated: number of CPU devices to simulate; None for the real devices.
    Raises:
      ValueError: bad input.
      RuntimeError: files are missing or damaged.
    """
    load_plugin_without_gpu()
    keep_compiled_programs()
    if simulated is not None:
        simulate_devices(simulated)
    return open_model(
        path,
        build_mesh(resolve(mesh, jax.device_count())),
        dtype=precision,
        step=step,
        tokenizer=tokenizer,
    )


def length_of(run: Run, opened: Opened, asked: int | None, *, flag: str) -> int:
    """Return the length of the longest window.

    Raises:
      ValueError: the length is too large for the model; the message names the flag.
    """
    most = opened.seq_len if run.config else min(opened.seq_len, MAX_LENGTH)
    length = asked or most
    if length > opened.seq_len:
        raise ValueError(
            f"{flag} must be at most {opened.seq_len}, the longest sequence of the "
            f"model, got {length}"
        )
    return length

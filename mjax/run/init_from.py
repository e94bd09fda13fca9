"""Begin a new run from the parameters of another one, or of a Hugging Face model.

Enters: a path. Leaves: parameters on the mesh of this run, whatever wrote them; each
box is read by one process and goes straight to its devices. Optimizer, step and data
begin anew.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jaxtyping import PyTree

from mjax.ckpt import places, placing
from mjax.ckpt.boxes import Box, slices
from mjax.ckpt.recovery import by_path
from mjax.ckpt.saved_step import SavedStep
from mjax.config.train import from_json
from mjax.hugging_face import families
from mjax.hugging_face.params import open_params
from mjax.hugging_face.source import TensorSource
from mjax.model.config import ModelConfig
from mjax.processes.agreement import Agreement

_NAMED_DIFFERENCES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameters that were found and fit; nothing of them is read yet."""

    described: str
    """Where they come from, and in what that model differs, for people."""
    read_boxes: Callable[[str, list[Box]], list[np.ndarray]]
    """Name of a leaf ("params...") and boxes to their values."""


def open_weights(
    path: str, model: ModelConfig, abstract_params: PyTree, agreement: Agreement
) -> Weights:
    """Open what --init-from names, and check that this run can begin from it.

    Every process calls it, and all open the step that process 0 has chosen: another
    run may be writing there.

    Args:
      path: a folder in the form of Hugging Face; or a work dir, a folder of
        checkpoints (their newest is taken) or one checkpoint.
      model: of this run.
      abstract_params: shapes of the parameters in canonical form.
      agreement: of all processes.
    Raises:
      ValueError: there is no model, or it does not fit.
      RuntimeError: files are missing or damaged.
    """
    wanted = by_path({"params": abstract_params})
    chosen = agreement.decide(lambda: _choose(path))
    return agreement.together(lambda: _open(chosen, model, wanted))


def _choose(path: str) -> str:
    """Return the folder of the model, or of the newest step."""
    if places.is_hugging_face(path):
        return path
    return str(places.choose(places.find(path), None))


def _open(path: str, model: ModelConfig, wanted: Mapping[str, Any]) -> Weights:
    if places.is_hugging_face(path):
        source = open_params(path, model)
        _check_fits(source, wanted, path)
        return Weights(
            described=f"parameters from {path}",
            read_boxes=lambda name, boxes: [
                source.read(name, slices(b)) for b in boxes
            ],
        )
    saved = SavedStep(epath.Path(path))
    _check_fits(saved, wanted, path)
    theirs = from_json(saved.config()).model
    differing = [
        f"\n  there {families.flag(name, held)}, in this run "
        f"{families.flag(name, ours)}"
        for name, (held, ours) in families.differences(theirs, model).items()
    ]
    warning = "; warning: it was trained otherwise:" if differing else ""
    return Weights(
        described=f"parameters from {saved.path}{warning}{''.join(differing)}",
        read_boxes=saved.read_boxes,
    )


def initial_params(
    weights: Weights, abstract_params: PyTree, agreement: Agreement
) -> PyTree:
    """Put the parameters on the mesh; every process calls it.

    Args:
      weights: that fit.
      abstract_params: in canonical form, with NamedShardings.
      agreement: of all processes.
    Returns:
      the same tree of arrays, in the dtypes that it asks for.
    Raises:
      RuntimeError: files are damaged, or do not answer.
    """
    wanted = by_path({"params": abstract_params})

    def read_boxes(name: str, boxes: list[Box]) -> list[np.ndarray]:
        dtype = wanted[name].dtype
        return [x.astype(dtype) for x in weights.read_boxes(name, boxes)]

    host = agreement.together(lambda: placing.read(read_boxes, wanted))
    placed = placing.place(host, wanted)
    structure = jax.tree.structure(abstract_params)
    return jax.tree.unflatten(structure, [placed[name] for name in wanted])


def _check_fits(source: TensorSource, wanted: Mapping[str, Any], path: str) -> None:
    """Refuse a source that lacks a parameter of this run or has one more."""
    held = {n: source.shape(n) for n in source.names() if n.startswith("params.")}
    ours = {name: tuple(leaf.shape) for name, leaf in wanted.items()}
    differing = [
        f"  {name}: there {held.get(name, 'absent')}, this run "
        f"{ours.get(name, 'absent')}"
        for name in [*ours, *(name for name in held if name not in ours)]
        if held.get(name) != ours.get(name)
    ]
    if differing:
        more = len(differing) - _NAMED_DIFFERENCES
        rest = [f"  and {more} more"] if more > 0 else []
        raise ValueError(
            f"--init-from {path} holds another model than this run's:\n"
            + "\n".join(differing[:_NAMED_DIFFERENCES] + rest)
            + "\nGive the --model flags of that model (python -m mjax.ckpt show)"
        )

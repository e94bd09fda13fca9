"""Initialise a new run with the parameters of another run or a Hugging Face model.

Input: a path. Output: parameters on the mesh of this run, independent of the mesh that
wrote them. Each part of an array is read by only one process, which puts it directly on
its own devices; other processes that need the same part get it from that process.
Optimizer, step and data start afresh.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jaxtyping import PyTree

from mjax.ckpt import places, placing
from mjax.ckpt.boxes import Box, slices
from mjax.ckpt.recovery import by_path
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import located
from mjax.config.train import from_json
from mjax.hugging_face import families
from mjax.hugging_face.params import ADAPTERS, open_params, read_config
from mjax.hugging_face.source import TensorSource
from mjax.layers.config import AdapterConfig
from mjax.model.config import ModelConfig
from mjax.processes.agreement import Agreement
from mjax.tune.merged import Merged, is_adapter
from mjax.tune.peft_files import PeftAdapters

_NAMED_DIFFERENCES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameters that were found and fit the model; no values are read yet."""

    described: str
    """Human-readable description of the source and how its model differs."""
    read_boxes: Callable[[str, list[Box]], list[np.ndarray]]
    """Returns the values of any part of a leaf, given the name of the leaf
    ("params...") and the slices."""
    names: frozenset[str]
    """Names of the leaves to read; other leaves keep their random initial values."""


def open_weights(
    path: str,
    model: ModelConfig,
    abstract_params: PyTree,
    agreement: Agreement,
    *,
    adapters: AdapterConfig | None = None,
    adapters_from: str | None = None,
) -> Weights:
    """Open the source of --init-from and check that it fits this run.

    Every process calls it. All open the step that process 0 chose, because another run
    may be writing there.

    Args:
      path: a Hugging Face folder, a work dir or folder of checkpoints (the newest
        checkpoint is used), or one checkpoint.
      model: model of this run.
      abstract_params: shapes of the parameters in canonical form.
      agreement: agreement of all processes.
      adapters: adapters of this run. Adapters in the source are merged into its
        weights.
      adapters_from: folder in PEFT format with initial adapters.
    Raises:
      ValueError: `path` holds no model, or a model that does not fit this run.
      RuntimeError: files are missing or damaged.
    """
    wanted = by_path({"params": abstract_params})
    chosen = agreement.decide(lambda: choose(path))
    base = {name: leaf for name, leaf in wanted.items() if not is_adapter(name)}
    weights = agreement.together(lambda: _open(chosen, model, base))
    if adapters is None or adapters_from is None:
        return weights
    return agreement.together(
        lambda: _with_adapters(weights, adapters_from, chosen, model, adapters)
    )


def choose(path: str) -> str:
    """Return the folder of the Hugging Face model or of the newest step.

    Raises:
      ValueError: `path` holds no model.
    """
    if places.is_hugging_face(path):
        return path
    try:
        return str(places.choose(places.find(path), None))
    except ValueError as error:
        if "://" not in path and (Path(path) / ADAPTERS).is_file():
            raise ValueError(
                f"--init-from {path} holds PEFT adapters but no model; give their base "
                f"model as --init-from and this folder as --lora.init-from {path}"
            ) from None
        raise ValueError(
            f"--init-from {path} cannot be used: {error}; a Hugging Face folder "
            "(config.json and safetensors) is also accepted"
        ) from None


def _open(path: str, model: ModelConfig, wanted: Mapping[str, Any]) -> Weights:
    if places.is_hugging_face(path):
        source = open_params(path, model)
        _check_fits(source, wanted, path)
        return Weights(
            described=f"parameters from {path}",
            read_boxes=_boxes_of(source),
            names=frozenset(wanted),
        )
    saved = SavedStep(epath.Path(path))
    config = from_json(saved.config())
    merged = config.adapters and Merged(saved, config.adapters)
    _check_fits(merged or saved, wanted, path)
    theirs = config.model
    differing = [
        f"\n  there {families.flag(name, held)}, in this run "
        f"{families.flag(name, ours)}"
        for name, (held, ours) in families.differences(theirs, model).items()
    ]
    warning = "; warning: it was trained with other settings:" if differing else ""
    return Weights(
        described=f"parameters from {saved.path}"
        f"{', adapters merged' if merged else ''}{warning}{''.join(differing)}",
        read_boxes=_boxes_of(merged) if merged else saved.read_boxes,
        names=frozenset(wanted),
    )


def _with_adapters(
    base: Weights,
    folder: str,
    base_path: str,
    model: ModelConfig,
    adapters: AdapterConfig,
) -> Weights:
    """Add adapters in PEFT format, whose names are those of the base model's family.

    Raises:
      ValueError: the adapters do not fit `adapters` or the model.
    """
    if places.is_hugging_face(base_path):
        family, _ = read_config(base_path)
    else:
        family, _ = families.hf_config(model, seq_len=1)
    located(folder)  # refuses URLs
    source = PeftAdapters(folder, model, adapters, family)
    read_adapters = _boxes_of(source)

    def read_boxes(name: str, boxes: list[Box]) -> list[np.ndarray]:
        return (read_adapters if is_adapter(name) else base.read_boxes)(name, boxes)

    return Weights(
        described=f"{base.described}; adapters from {folder}",
        read_boxes=read_boxes,
        names=base.names | frozenset(source.names()),
    )


def _boxes_of(
    source: TensorSource,
) -> Callable[[str, list[Box]], list[np.ndarray]]:
    return lambda name, boxes: [source.read(name, slices(box)) for box in boxes]


def initial_params(
    weights: Weights, abstract_params: PyTree, drawn: PyTree, agreement: Agreement
) -> PyTree:
    """Put the parameters on the mesh; every process calls it.

    Args:
      weights: the weights to read.
      abstract_params: shapes in canonical form, with NamedShardings.
      drawn: parameters of a new state in canonical form, used where `weights` has
        none.
      agreement: agreement of all processes.
    Returns:
      a tree of arrays with the structure and dtypes of `abstract_params`.
    Raises:
      RuntimeError: files are damaged or cannot be read.
    """
    every = by_path({"params": abstract_params})
    wanted = {name: leaf for name, leaf in every.items() if name in weights.names}

    def read_boxes(name: str, boxes: list[Box]) -> list[np.ndarray]:
        dtype = wanted[name].dtype
        return [x.astype(dtype) for x in weights.read_boxes(name, boxes)]

    host = agreement.together(lambda: placing.read(read_boxes, wanted))
    placed = placing.place(host, wanted)
    structure = jax.tree.structure(abstract_params)
    placed = by_path({"params": drawn}) | placed
    return jax.tree.unflatten(structure, [placed[name] for name in every])


def _check_fits(source: TensorSource, wanted: Mapping[str, Any], path: str) -> None:
    """Refuse a source with missing or additional parameters or other shapes."""
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
            f"--init-from {path} holds a different model from this run's:\n"
            + "\n".join(differing[:_NAMED_DIFFERENCES] + rest)
            + "\nGive the --model flags of that model (python -m mjax.ckpt show)"
        )

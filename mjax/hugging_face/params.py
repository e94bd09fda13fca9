"""Read parameters from a Hugging Face folder, part by part.

Input: a folder with config.json and safetensors files. Output: a source of float32
tensors with mjax names in canonical form, with the vocabulary padded with zeros. Rows
are read only on request, so each process of a run reads the part of its devices.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mjax import checked_json
from mjax.hugging_face import families
from mjax.hugging_face.safetensors import Files
from mjax.hugging_face.source import Index
from mjax.hugging_face.tensors import (
    NO_PARAMETERS,
    Tensors,
    is_stacked,
    our_shapes,
    their_shapes,
)
from mjax.model.config import ModelConfig

PREFIX = "params."
"""Prefix of the parameters in checkpoints, beside other state."""

CONFIG = "config.json"
ADAPTERS = "adapter_config.json"
"""Configuration of adapters in PEFT's format."""
LENGTHS = ("max_position_embeddings", "n_positions")
"""Keys of config.json for the longest sequence; GPT-2 and GPT-J have the second."""
_NAMED = 5


class HuggingFaceParams:
    """The parameters of one folder: a `hugging_face.source.TensorSource`."""

    def __init__(self, files: Files, model: ModelConfig, tensors: Tensors) -> None:
        """Check that the files hold exactly the model's tensors.

        Args:
          files: the opened files.
          model: the architecture.
          tensors: tensors of its family.
        Raises:
          ValueError: tensors are absent, unknown or of another shape.
        """
        tensors = _as_stored(files, tensors)
        wanted = their_shapes(model, tensors)
        held = {
            name: files.shape(name)
            for name in files.names()
            if not any(re.fullmatch(pattern, name) for pattern in NO_PARAMETERS)
        }
        wrong = [
            f"  {name}: stored {_shown(held.get(name))}, expected by config.json "
            f"{_shown(wanted.get(name))}"
            for name in [*wanted, *(name for name in held if name not in wanted)]
            if held.get(name) != wanted.get(name)
        ]
        if wrong:
            more = [f"  and {len(wrong) - _NAMED} more"] * (len(wrong) > _NAMED)
            raise ValueError(
                f"the tensors of {files.folder} are not those of its {CONFIG}:\n"
                + "\n".join(wrong[:_NAMED] + more)
            )
        self._files = files
        self._tensors = tensors
        self._shapes = our_shapes(model)

    def names(self) -> Iterator[str]:
        """Return the names of all parameters, as in checkpoints."""
        return (PREFIX + path for path in self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter, with all layers and padded vocabulary."""
        return self._shapes[name.removeprefix(PREFIX)]

    def dtype(self, name: str) -> np.dtype:
        """Return float32, which no dtype of the files exceeds."""
        return np.dtype(np.float32)

    def read(self, name: str, index: Index = ...) -> np.ndarray:
        """Return one box of a parameter, float32.

        Args:
          name: name of the parameter.
          index: one slice of step 1 per dim; ... for the complete parameter.
        """
        path, shape = name.removeprefix(PREFIX), self.shape(name)
        slices = (slice(None),) * len(shape) if index is ... else index
        bounds = [s.indices(n)[:2] for s, n in zip(slices, shape, strict=True)]
        # Zeros for the rows beyond the vocabulary of the files.
        box = np.zeros([max(stop - start, 0) for start, stop in bounds], np.float32)
        tensor = self._tensors[path]
        if not is_stacked(path):
            held = tensor.to_ours(self._files.view(tensor.name), shape)
            part = held[tuple(slice(*b) for b in bounds)]
            box[tuple(slice(n) for n in part.shape)] = part
            return box
        inner = tuple(slice(*b) for b in bounds[1:])
        for place, layer in enumerate(range(*bounds[0])):
            theirs = self._files.view(tensor.name.format(layer))
            box[place] = tensor.to_ours(theirs, shape[1:])[inner]
        return box


def open_params(
    folder: str | os.PathLike[str], model: ModelConfig
) -> HuggingFaceParams:
    """Open a folder for a run with this model; read only config and headers.

    Args:
      folder: a Hugging Face folder.
      model: model of the run. It may differ from the folder's in fields that change
        neither parameters nor maths (attention backend, remat, dropout, initialisation,
        padding of the vocabulary).
    Raises:
      ValueError: it is not a Hugging Face folder, mjax lacks the model, or the run's
        model differs.
      RuntimeError: a file is absent or damaged.
    """
    family, theirs = read_config(folder)
    if (Path(folder) / ADAPTERS).is_file():
        raise ValueError(
            f"{folder} holds {ADAPTERS} beside the model, and transformers would load "
            "those adapters; move them to another folder, and give it as "
            "--lora.init-from to use them"
        )
    differing = [
        f"  {families.flag(name, held)}; this run has {families.flag(name, ours)}"
        for name, (held, ours) in families.differences(theirs, model).items()
    ]
    if differing:
        raise ValueError(
            f"{folder} ({family.name}) holds a different model from this run's:\n"
            + "\n".join(differing)
            + "\nGive these flags; --data.vocab model keeps a --model.vocab-size that "
            "is not the tokenizer's"
        )
    return HuggingFaceParams(Files(folder), model, family.tensors)


def read_config(
    folder: str | os.PathLike[str],
) -> tuple[families.Family, ModelConfig]:
    """Return the family and the architecture of a folder.

    Raises:
      ValueError: there is no config.json, or mjax lacks the model.
      RuntimeError: the file is damaged.
    """
    config = _contents(folder)
    try:
        return families.family_of(config), families.model_config(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def read_positions(folder: str | os.PathLike[str]) -> int | None:
    """Return the longest sequence of a folder's model; None if not given.

    Raises:
      ValueError: the folder has no config.json, or the length is invalid.
      RuntimeError: the file is damaged.
    """
    config = _contents(folder)
    found = [(key, config[key]) for key in LENGTHS if config.get(key) is not None]
    if not found:
        return None
    key, value = found[0]
    try:
        length = checked_json.check(value, int, key)
    except ValueError as error:
        raise ValueError(f"{folder}: config.json: {error}") from None
    if length < 1:
        raise ValueError(
            f"{folder}: config.json: {key} must be at least 1, got {length}"
        )
    return length


def _contents(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of the config.json of a folder."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: give a folder written by save_pretrained of "
            "transformers"
        )
    try:
        return checked_json.read(path.read_bytes(), dict[str, Any])
    except OSError as error:
        raise RuntimeError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RuntimeError(f"{path} is damaged: {error}") from error


def flags_of(folder: str | os.PathLike[str]) -> str:
    """Return the flags that give a run the model of a folder, on one line.

    Raises:
      ValueError: as `read_config`.
      RuntimeError: as `read_config`.
    """
    _, model = read_config(folder)
    flags = [families.flag(name, v) for name, v in families.essence(model).items()]
    if model.learned_positions is not None or LENGTHS[1] in _contents(folder):
        # The sequences of a recipe may be longer than the positions of GPT-2, or of
        # GPT-J in transformers.
        longest = read_positions(folder) or model.learned_positions
        flags.append(f"--data.seq-len {longest}")
    return " ".join(["--data.vocab model", *flags])


def _as_stored(files: Files, tensors: Tensors) -> Tensors:
    """Drop the first part of all names if the files lack it, as OpenAI's GPT-2 does."""
    table = tensors["embed.table"].name
    prefix = table.split(".")[0] + "."
    held = set(files.names())
    if table in held or table.removeprefix(prefix) not in held:
        return tensors
    return {
        path: dataclasses.replace(tensor, name=tensor.name.removeprefix(prefix))
        for path, tensor in tensors.items()
    }


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))

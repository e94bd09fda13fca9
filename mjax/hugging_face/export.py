"""Write a model as a folder that `transformers` loads.

Input: a source of tensors with mjax names in canonical form, and the architecture.
Output: config.json, generation_config.json, safetensors files, and given files such as
those of the tokenizer. One slab of layers or rows is in memory at a time.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from mjax.hugging_face import families
from mjax.hugging_face.new_folder import new_folder
from mjax.hugging_face.params import CONFIG, PREFIX
from mjax.hugging_face.safetensors import Writer
from mjax.hugging_face.source import TensorSource
from mjax.hugging_face.tensors import is_stacked, our_shapes, their_shapes
from mjax.model.config import ModelConfig

GENERATION_CONFIG = "generation_config.json"

_SLAB_BYTES = 2**30


def write(
    source: TensorSource,
    model: ModelConfig,
    out_dir: str | os.PathLike[str],
    *,
    seq_len: int,
    family: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    end_ids: Sequence[int] = (),
    files: Mapping[str, bytes] | None = None,
    file_bytes: int = 5_000_000_000,
) -> str:
    """Write a folder that transformers loads, atomically.

    Args:
      source: source of the tensors; only those below "params." are read.
      model: the architecture.
      out_dir: absent, or an empty folder.
      seq_len: longest sequence of the model in tokens; in transformers only GPT-J is
        limited to it.
      family: one of `families.FAMILIES`; None for the first that can express the model.
      dtype: dtype of the stored tensors.
      end_ids: tokens at which generation ends, that of a document first.
      files: further files of the folder, by name.
      file_bytes: maximum bytes of a file; a larger tensor gets its own file.
    Returns:
      the name of the family.
    Raises:
      ValueError: no family can express the model, the source holds another model, or
        out_dir is not empty.
      RuntimeError: the disk failed.
    """
    chosen, config = families.hf_config(model, seq_len=seq_len, family=family)
    _check_source(source, model)
    shapes = their_shapes(model, chosen.tensors)
    # Null, because absent keys mean the family's own tokens.
    ends = [*end_ids] if len(end_ids) > 1 else end_ids[0] if end_ids else None
    tokens = {"bos_token_id": None, "eos_token_id": ends, "pad_token_id": None}
    # Both transformers 4 and 5 read this name of the dtype.
    config |= tokens | {"torch_dtype": dtype}
    stored = np.dtype(jnp.dtype(dtype))
    with new_folder(out_dir) as folder:
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
        (folder / CONFIG).write_bytes(_as_json(config))
        (folder / GENERATION_CONFIG).write_bytes(_as_json(tokens))
        with Writer(folder, shapes, stored, file_bytes=file_bytes) as writer:
            for path, shape in our_shapes(model).items():
                tensor = chosen.tensors[path]
                rows = shape[0] if is_stacked(path) else shapes[tensor.name][0]
                for first, slab in _slabs(source, PREFIX + path, rows):
                    if not is_stacked(path):
                        writer.write(tensor.name, slab, first)
                        continue
                    for layer, ours in enumerate(slab, first):
                        name = tensor.name.format(layer)
                        corner = tensor.corner(ours.shape)
                        writer.write(name, tensor.to_theirs(ours), *corner)
    return chosen.name


def _as_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _slabs(
    source: TensorSource, name: str, rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield pairs of (index of the first row, rows), as many rows at once as fit.

    A row is an entry of the first dim, such as a layer or a token.
    """
    shape = source.shape(name)
    row_bytes = math.prod(shape[1:]) * source.dtype(name).itemsize
    step = max(_SLAB_BYTES // row_bytes, 1)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        yield first, source.read(name, (part, *(slice(None),) * (len(shape) - 1)))


def _check_source(source: TensorSource, model: ModelConfig) -> None:
    """Refuse a source whose parameters are not those of the model."""
    held: dict[str, Any] = {
        name: source.shape(name) for name in source.names() if name.startswith(PREFIX)
    }
    wanted = {PREFIX + path: shape for path, shape in our_shapes(model).items()}
    wrong = [
        f"  {name}: there {held.get(name)}, the model has {wanted.get(name)}"
        for name in sorted(wanted | held)
        if held.get(name) != wanted.get(name)
    ]
    if wrong:
        raise ValueError(
            "the tensors to write are not those of the model:\n" + "\n".join(wrong)
        )

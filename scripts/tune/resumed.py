"""The trainer's own LoRA run: merged, and resumed in the middle.

Input: flags and chats. Output: the largest difference of logits between separate and
merged adapters, and whether a resumed run ends with the same bits.
"""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from mjax.ckpt import places
from mjax.ckpt.saved_step import SavedStep
from mjax.config.lora import LoraConfig
from mjax.config.train import from_json, with_tokenizer
from mjax.data.dataset import open_dataset
from mjax.hugging_face.source import TensorSource
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.step.traced import program_of
from mjax.tune.merged import Merged, is_adapter
from scripts.evidence import run_training
from scripts.tune.docstrings import TEMPLATE

STEPS, HALF = 60, 30
_LENGTH = 100


def read_params(source: TensorSource, like: Any) -> Any:
    """Read parameters in the structure of others; missing ones are kept."""
    names = set(source.names())

    def read(path: Any, leaf: Any) -> Any:
        name = "params." + jax.tree_util.keystr(path, simple=True, separator=".")
        if is_adapter(name) and name not in names:
            return leaf
        return jnp.asarray(source.read(name), leaf.dtype)

    return jax.tree_util.tree_map_with_path(read, like)


def compare(folder: Path, chats: Sequence[Any], flags: Sequence[str]) -> dict[str, Any]:
    """Train, resume a copy at half, and merge.

    Args:
      folder: for the runs.
      chats: to train on.
      flags: of the trainer.
    Returns:
      "difference" of logits, and whether all tensors of the state are the "same".
    """
    path, template = folder / "chats.jsonl", folder / "chat.jinja"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    template.write_text(TEMPLATE)
    whole, again = folder / "whole", folder / "again"
    for run in (whole, again):
        shutil.rmtree(run, ignore_errors=True)
    shared = [*flags, "--steps", str(STEPS), "--ckpt.every", str(HALF)]
    shared += ["--eval.every", str(STEPS), "--eval.batches", "2"]
    shared += ["--data.format", "chat", "--data.chat-template", str(template)]
    shared += ["--data.path", str(path)]
    run_training(*shared, "--work-dir", str(whole))
    shutil.copytree(whole, again)
    shutil.rmtree(places.find(str(again)).store.path(STEPS))
    run_training(*shared, "--work-dir", str(again))
    first, second = _saved(whole), _saved(again)
    names = sorted(first.names())
    is_same = names == sorted(second.names()) and all(
        np.array_equal(first.read(name), second.read(name)) for name in names
    )
    return {
        "same": is_same,
        "tensors": len(names),
        "difference": _difference(first),
    }


def _saved(work_dir: Path) -> SavedStep:
    return SavedStep(epath.Path(places.choose(places.find(str(work_dir)), None)))


def _difference(saved: SavedStep) -> float:
    """Return the largest difference of logits, adapters merged and not."""
    config = from_json(saved.config())
    dataset = open_dataset(config.data, seed=config.seed)
    config = with_tokenizer(config, dataset.tokenizer.vocab_size)
    assert config.adapters is not None
    mesh = build_mesh(AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1))
    tuned = program_of(config, mesh)
    plain = program_of(dataclasses.replace(config, lora=LoraConfig()), mesh)
    merged = Merged(saved, config.adapters)
    tokens = np.stack([dataset.held_out[i]["tokens"] for i in range(4)])
    size = dataset.tokenizer.vocab_size  # the rest is padding
    logits = [
        np.asarray(program.next_token_logits(params, tokens, _LENGTH))[:, :size]
        for program, params in (
            (tuned, read_params(saved, tuned.abstract_state.params)),
            (plain, read_params(merged, plain.abstract_state.params)),
        )
    ]
    return float(np.abs(logits[0] - logits[1]).max())

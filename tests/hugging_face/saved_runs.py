"""Work dirs with one saved step, of random parameters, as a run leaves them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.config.step import BatchConfig
from mjax.config.train import TrainConfig, to_json
from mjax.data.config import DataConfig
from mjax.data.tokenizer_files import TokenizerFiles
from mjax.model.config import ModelConfig
from mjax.run import work_dir
from tests.ckpt.states import saved, sharding
from tests.hugging_face.small import random_params

STEP = 30


def reduced(config: TrainConfig) -> TrainConfig:
    """Shrink width, depth and vocabulary of a recipe; keep its structure."""
    model = config.model
    layers = max(len(model.window), len(model.rope), 2)
    heads = 4
    kv_heads = None if model.kv_heads is None else 2
    ratio = model.ffn_width / model.d_model
    small = dataclasses.replace(
        model,
        layers=layers,
        d_model=32,
        heads=heads,
        kv_heads=kv_heads,
        d_ff=round(32 * ratio / 8) * 8,
        # Small enough that windows exclude keys in a test.
        window=tuple(None if w is None else 5 for w in model.window),
        vocab_size=257,
    )
    data = dataclasses.replace(config.data, seq_len=64)
    return dataclasses.replace(config, model=small, data=data)


def make_run(
    path: Path, config: TrainConfig, tokenizer: TokenizerFiles | None, **facts: Any
) -> Path:
    """Write a work dir.

    Args:
      path: path of the work dir.
      config: config of the run.
      tokenizer: files of the tokenizer; None for a run of a version that did not keep
        them.
      facts: more metadata of the saved step.
    """
    work_dir.make(path)
    work_dir.write_config(path, json.loads(to_json(config)))
    if tokenizer is not None:
        work_dir.keep_tokenizer(path, tokenizer.contents)
        facts = {"tokenizer_digest": tokenizer.digest} | facts
    flat = random_params(config.model)
    state = traverse_util.unflatten_dict(flat, sep=".")
    state = jax.tree.map(lambda x: jax.device_put(x, sharding(1, 1)), state)
    manager = Checkpoints(path, CkptConfig())
    whole = {"config": json.loads(to_json(config)), "eval_loss": 1.25} | facts
    saved(manager, state, STEP, **whole)
    manager.attempts()
    manager.close()
    return path


def small_config(tokenizer: str = "bytes", vocab_size: int = 257) -> TrainConfig:
    """Return the config of a small Llama."""
    model = ModelConfig(
        layers=2,
        d_model=32,
        heads=4,
        d_ff=48,
        vocab_size=vocab_size,
        block="serial",
        norm="rmsnorm",
        activation="swiglu",
    )
    data = DataConfig(path=("/home/me/secret/corpus",), tokenizer=tokenizer, seq_len=64)
    return TrainConfig(model=model, data=data, batch=BatchConfig(size=32))

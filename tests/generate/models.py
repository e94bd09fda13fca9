"""Models with random parameters, saved and opened, for the tests of generation."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.config.train import TrainConfig, to_json
from mjax.data.config import DataConfig
from mjax.data.tokenizers import BytesTokenizer
from mjax.generate.opened import Opened
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.model.transformer import Params, Transformer, abstract_params
from mjax.step.state import param_specs
from tests.training import make_mesh

SMALL = ModelConfig(
    layers=3,
    d_model=32,
    heads=4,
    kv_heads=2,
    d_ff=48,
    vocab_multiple=32,
    window=(5, None),
    rope=(True, False),
    norm_bias=True,
    attn_bias=True,
)


def random_params(model: ModelConfig, seed: int = 0) -> Params:
    """Return random float32 parameters on the host, none of them 0 or 1."""
    rng = np.random.default_rng(seed)
    drawn = Transformer(model, rngs=nnx.Rngs(seed))
    params = nnx.to_pure_dict(nnx.state(drawn))
    return jax.tree.map(
        lambda x: np.asarray(x) + 0.05 * rng.normal(size=x.shape).astype(np.float32),
        params,
    )


def opened(
    model: ModelConfig = SMALL,
    mesh: tuple[int, int, int, int] = (1, 1, 1, 1),
    *,
    seq_len: int = 64,
    seed: int = 0,
    dtype: str = "float32",
    params: Params | None = None,
) -> Opened:
    """Open random parameters of a byte-level model."""
    made = make_mesh(mesh)
    sizes = AxisSizes(**made.shape)
    specs = param_specs(abstract_params(model)[1], sizes, shard_over_dp=False)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(
            jnp.asarray(x, dtype), NamedSharding(made, spec)
        ),
        random_params(model, seed) if params is None else params,
        specs,
    )
    tokenizer = BytesTokenizer()
    return Opened(
        name="random",
        model=model,
        params=placed,
        mesh=made,
        tokenizer=tokenizer,
        chat_template=None,
        seq_len=seq_len,
        end_ids=(tokenizer.eos_id,),
    )


def save_run(
    work_dir: Path,
    params: Params,
    config: TrainConfig | None = None,
    *,
    steps: tuple[int, ...] = (3,),
    **facts: Any,
) -> TrainConfig:
    """Save parameters as a run saves its state; the config is that of SMALL."""
    config = config or TrainConfig(model=SMALL, data=DataConfig(seq_len=64))
    work_dir.mkdir(parents=True, exist_ok=True)
    (work_dir / "config.json").write_text(to_json(config))
    manager = Checkpoints(work_dir, CkptConfig())
    for step in steps:
        state = {"params": jax.tree.map(functools.partial(_plus, step), params)}
        facts = {"config": json.loads(to_json(config)), **facts}
        manager.save(step, functools.partial(dict, state), facts)
        assert manager.wait()
    manager.close()
    return config


def _plus(step: int, x: np.ndarray) -> jax.Array:
    return jnp.asarray(x) + step


def with_options(**fields: Any) -> ModelConfig:
    """Return SMALL with changed fields."""
    return dataclasses.replace(SMALL, **fields)

"""An imported model of each family has the same logits on a mesh as on one device.

Layers, heads and vocabulary are split; what is new in a family (learned positions,
norms of heads, soft caps, a second rotary base, biases of some projections) must be
split with them, or be whole on every device.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mjax.hugging_face.export import write
from mjax.hugging_face.families import model_config
from mjax.hugging_face.params import open_params
from mjax.hugging_face.source import TensorSource
from mjax.model.config import ModelConfig
from tests.hugging_face.small import (
    CONFIGS,
    LLAMA3,
    VOCAB,
    Arrays,
    random_params,
    small_model,
)
from tests.training import LENGTH, Layout, make_program

ROWS = 4
ONE = Layout((1, 1, 1, 1), zero=0)
TP = Layout((1, 1, 1, 2), zero=0)
PP_TP = Layout((2, 1, 1, 2), zero=0, microbatches=2)
# One family per special feature; the others combine the same parts.
QUICK = ("gemma3_text", "gpt2", "qwen2")


def logits(layout: Layout, model: ModelConfig, source: TensorSource) -> np.ndarray:
    """Put the folder's tensors onto the mesh; return the logits after each sequence."""
    tokens = np.random.default_rng(7).integers(0, VOCAB, (ROWS, LENGTH), np.int32)
    program = make_program(layout, model, rows=ROWS)
    state = program.to_saved(program.init())
    flat, structure = jax.tree_util.tree_flatten_with_path(
        program.abstract_saved.params
    )
    leaves = []
    for path, leaf in flat:
        name = "params." + jax.tree_util.keystr(path, simple=True, separator=".")

        def read(index: Any, name: str = name) -> np.ndarray:
            return source.read(name, index)

        leaves.append(jax.make_array_from_callback(leaf.shape, leaf.sharding, read))
    params = jax.tree.unflatten(structure, leaves)
    params = program.from_saved(dataclasses.replace(state, params=params)).params
    return np.asarray(program.next_token_logits(params, tokens, LENGTH))[:, :VOCAB]


def models() -> dict[str, ModelConfig]:
    """One model of each family, with layers that divide among two stages."""
    found = {name: small_model(name) for name in CONFIGS}
    found["llama3"] = model_config(LLAMA3)
    found["qwen2"] = dataclasses.replace(found["qwen2"], window=(None, 5))
    return {
        name: dataclasses.replace(
            model,
            attention="reference",
            layers=2 * math.lcm(len(model.window), len(model.rope)),
        )
        for name, model in found.items()
    }


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        pytest.param(
            layout,
            name,
            marks=[pytest.mark.slow] * (layout is TP or name not in QUICK),
            id=f"{described}-{name}",
        )
        for layout, described in ((TP, "tp2"), (PP_TP, "pp2-tp2"))
        for name in models()
    ],
)
def test_an_imported_model_has_the_same_logits_on_a_mesh(
    layout: Layout, family: str, tmp_path: Path
) -> None:
    model = models()[family]
    write(Arrays(random_params(model)), model, tmp_path / "out", seq_len=64)
    source = open_params(tmp_path / "out", model)
    want = logits(ONE, model, source)
    assert want.std() > 0.1  # otherwise any logits would agree
    # float32 sums of up to 48 terms in another order, through up to eight layers
    np.testing.assert_allclose(logits(layout, model, source), want, rtol=0, atol=2e-5)

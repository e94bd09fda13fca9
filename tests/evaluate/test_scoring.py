"""Scores equal those of the trainer's program, on every mesh and with any packing."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mjax.evaluate.scoring import Scorer
from mjax.evaluate.windows import Window
from mjax.mesh.axes import AXES, AxisSizes
from mjax.model.transformer import abstract_params
from mjax.step.state import param_specs
from tests.training import EVERY_OPTION, ONE_DEVICE, VOCAB, make_mesh, make_program

MODEL = dataclasses.replace(EVERY_OPTION, dropout=0.0)


def some_windows() -> list[Window]:
    rng = np.random.default_rng(0)
    found = []
    for size in rng.integers(1, 17, 12):
        ids = rng.integers(0, VOCAB, size + 1).astype(np.int32)
        found.append(Window(tokens=ids[:-1], targets=ids[1:]))
    return found


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 2, 2)])
def test_each_window_has_the_log_probabilities_of_the_logits_of_training(shape):
    program = make_program(ONE_DEVICE, MODEL, rows=1)
    params = program.init().params
    mesh = make_mesh(shape)
    sizes = AxisSizes(**{axis: mesh.shape[axis] for axis in AXES})
    specs = param_specs(abstract_params(MODEL)[1], sizes, shard_over_dp=False)
    placed = jax.tree.map(
        lambda x, s: jax.device_put(np.asarray(x), NamedSharding(mesh, s)),
        params,
        specs,
    )
    scorer = Scorer(MODEL, placed, mesh, row_len=32, num_rows=2)
    cut = some_windows()
    for window, scores in zip(cut, scorer(cut), strict=True):
        size = len(window.tokens)
        for place in {0, size - 1}:
            tokens = np.zeros((1, 16), np.int32)
            tokens[0, :size] = window.tokens
            logits = np.asarray(
                program.next_token_logits(params, tokens, place + 1), np.float64
            )[0]
            total = np.log(np.exp(logits[:VOCAB]).sum())
            # float32 sums over 97 tokens and 3 layers
            assert scores.nll[place] == pytest.approx(
                total - logits[window.targets[place]], abs=5e-6
            )
            assert scores.best[place] == logits[:VOCAB].argmax()

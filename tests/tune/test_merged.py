"""Adapters added to their weights, and written and read in PEFT's form."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.lora import linears
from mjax.hugging_face import families
from mjax.layers.config import AdapterConfig
from mjax.model.config import ModelConfig
from mjax.step.program import Program
from mjax.tune import peft_files
from mjax.tune.merged import Merged, is_adapter
from mjax.tune.peft_files import PeftAdapters
from tests.training import ONE_DEVICE, make_batch, make_program

MODEL = ModelConfig(
    layers=2,
    d_model=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    d_ff=48,
    vocab_size=97,
    vocab_multiple=8,
    block="serial",
    norm="rmsnorm",
    activation="swiglu",
)
ADAPTERS = AdapterConfig(rank=3, scale=2.0, targets=linears(MODEL))


class Source:
    """Tensors in memory, as a checkpoint names them."""

    def __init__(self, params) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self.tensors = {
            "params." + jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(
                x
            )
            for p, x in leaves
        }

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        return self.tensors[name][index]


def random_params(program: Program):
    """Every leaf random, B too."""
    keys = iter(jax.random.split(jax.random.key(5), 99))
    return jax.tree.map(
        lambda x: 0.2 * jax.random.normal(next(keys), x.shape), program.init().params
    )


@pytest.fixture(scope="module")
def tuned() -> tuple[Program, dict]:
    program = make_program(ONE_DEVICE, MODEL, adapters=ADAPTERS)
    return program, random_params(program)


def test_merged_weights_compute_what_weights_and_adapters_do(tuned):
    program, params = tuned
    plain = make_program(ONE_DEVICE, MODEL)
    merged = Merged(Source(params), ADAPTERS)
    names = Source(plain.init().params).names()
    assert sorted(merged.names()) == sorted(names)
    structure = jax.tree.structure(plain.init().params)
    read = jax.tree.unflatten(structure, [jnp.asarray(merged.read(n)) for n in names])
    tokens = make_batch(program, 0)["tokens"]
    want = program.next_token_logits(params, tokens, 12)
    got = plain.next_token_logits(read, tokens, 12)
    # float32, sums of 48 products in another order
    np.testing.assert_allclose(
        np.asarray(got)[:, :97], np.asarray(want)[:, :97], atol=1e-5
    )
    base = Source(params)
    assert not np.allclose(merged.read(names[2]), base.read(names[2]))


def test_a_box_of_a_merged_weight_is_that_part_of_the_whole(tuned):
    merged = Merged(Source(tuned[1]), ADAPTERS)
    rng = np.random.default_rng(0)
    for name in merged.names():
        whole = merged.read(name)
        for _ in range(5):
            box = []
            for size in whole.shape:
                start, stop = sorted(rng.integers(0, size + 1, 2).tolist())
                box.append(slice(start, stop))
            part = merged.read(name, tuple(box))
            np.testing.assert_allclose(part, whole[tuple(box)], rtol=1e-5, atol=1e-6)


def test_weights_in_bfloat16_are_merged_in_float32(tuned):
    """A sum in bfloat16 would lose most of what the adapter adds."""
    source = Source(tuned[1])
    name = "params.blocks.attention.wq"
    exact = Merged(source, ADAPTERS).read(name) - source.read(name)
    rounded = np.asarray(jnp.asarray(source.read(name), jnp.bfloat16))
    source.tensors[name] = rounded
    merged = Merged(source, ADAPTERS)
    assert merged.dtype(name) == merged.read(name).dtype == np.float32
    np.testing.assert_allclose(
        merged.read(name) - rounded.astype(np.float32), exact, atol=1e-6
    )


def exported(tuned, folder):
    family, _ = families.hf_config(MODEL, seq_len=16)
    peft_files.write(
        *(Source(tuned[1]), MODEL, ADAPTERS, family, folder), alpha=6.0, base="there"
    )
    return family


def test_adapters_come_back_from_peft_files_with_the_same_bits(tuned, tmp_path):
    family = exported(tuned, tmp_path / "out")
    back = PeftAdapters(tmp_path / "out", MODEL, ADAPTERS, family)
    source = Source(tuned[1])
    names = [name for name in source.names() if is_adapter(name)]
    assert sorted(back.names()) == sorted(names)
    for name in names:
        assert back.shape(name) == source.shape(name)
        np.testing.assert_array_equal(back.read(name), source.read(name))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)
    assert set(config["target_modules"]) == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")
    }


def test_peft_files_of_other_adapters_are_refused(tuned, tmp_path):
    family = exported(tuned, tmp_path / "out")

    def refused(adapters: AdapterConfig) -> str:
        with pytest.raises(ValueError, match=r".") as caught:
            PeftAdapters(tmp_path / "out", MODEL, adapters, family)
        return str(caught.value)

    assert "give --lora.rank 3" in refused(AdapterConfig(rank=4, scale=1.5, targets=()))
    assert "give --lora.alpha 6" in refused(
        AdapterConfig(rank=3, scale=1.0, targets=())
    )
    fewer = AdapterConfig(rank=3, scale=2.0, targets=ADAPTERS.targets[:2])
    assert "lora_A.weight: not in this run" in refused(fewer)
    with pytest.raises(ValueError, match=r"--lora.init-from .*no adapter_config.json"):
        PeftAdapters(tmp_path, MODEL, ADAPTERS, family)
    path = tmp_path / "out" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    assert "use_dora=True is not supported" in refused(ADAPTERS)

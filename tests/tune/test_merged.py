"""Adapters added to their weights, and written and read in PEFT's form."""

import dataclasses
import json
import re
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.lora import linears
from mjax.hugging_face import export, families
from mjax.hugging_face.params import open_params
from mjax.hugging_face.tensors import our_shapes
from mjax.layers.config import Activation, AdapterConfig
from mjax.model.config import ModelConfig
from mjax.step.program import Program
from mjax.tune import peft_files
from mjax.tune.merged import Merged, is_adapter
from mjax.tune.peft_files import PeftAdapters
from tests.hugging_face.small import small_model
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


# The file of PEFT 0.21.2 for LoraConfig(r=3, lora_alpha=6, target_modules=...).
SAVED_BY_PEFT = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "x"},
    "base_model_name_or_path": "base",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 6,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 3,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


@pytest.fixture(scope="module")
def written(tuned, tmp_path_factory):
    """Adapters in PEFT's form."""
    folder = tmp_path_factory.mktemp("written") / "out"
    return folder, exported(tuned, folder)


def read_with(folder, family, adapters=ADAPTERS, **changed: Any) -> PeftAdapters:
    config = {k: v for k, v in (SAVED_BY_PEFT | changed).items() if v != "absent"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return PeftAdapters(folder, MODEL, adapters, family)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("init_lora_weights", start) for start in ("pissa", "pissa_niter_4")),
        *(("init_lora_weights", start) for start in ("OLoRA", "corda", "loftq")),
        *(("init_lora_weights", start) for start in ("lora_ga", "future", [1])),
        *(("peft_type", kind) for kind in ("ADALORA", "LOHA", "nonsense", 3)),
        ("task_type", "SEQ_CLS"),
        ("bias", "lora_only"),
        ("use_dora", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("lora_bias", True),
        ("alora_invocation_tokens", [5, 6]),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1e-4}),
        ("monteclora_config", {"num_samples": 2}),
        ("velora_config", {"num_groups": 2}),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"corda_method": "ipm"}),
        ("lora_ga_config", {"direction": "x"}),
        ("megatron_config", {"x": 1}),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["x"]),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("layers_to_transform", 0),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("enable_lora", [True, False]),
        ("alora_invocation_string", "x"),
        ("nonsense", 1),
    ],
)
def test_a_key_that_makes_other_adapters_is_refused_by_its_name(written, key, value):
    with pytest.raises(ValueError, match=rf"{key}={re.escape(repr(value))} is not su"):
        read_with(*written, **{key: value})


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {key: "absent" for key in SAVED_BY_PEFT if key not in ("r", "lora_alpha")},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"modules_to_save": [], "rank_pattern": None, "loftq_config": None},
        {"runtime_config": {"ephemeral_gpu_offload": False}, "merge_weights": False},
        {"fan_in_fan_out": True, "ensure_weight_tying": True, "use_dora": None},
    ],
)
def test_keys_without_effect_on_saved_adapters_are_read(written, changed):
    assert read_with(*written, **changed).names()


def test_a_stabilised_rank_scales_by_its_square_root(written):
    # 6 / sqrt(3) = 3.46..., which is alpha 10.39... over the rank
    with pytest.raises(
        ValueError, match=r"with use_rslora, .*--lora.alpha 10\.39\d+"
    ) as e:
        read_with(*written, use_rslora=True)
    alpha = float(str(e.value).rpartition(" ")[2])
    scaled = dataclasses.replace(ADAPTERS, scale=alpha / ADAPTERS.rank)
    assert scaled.scale == pytest.approx(6 / 3**0.5, rel=1e-12)
    assert read_with(*written, adapters=scaled, use_rslora=True).names()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"r": "absent"}, "has no r, which"),
        ({"r": "3"}, "r must be"),
        ({"lora_alpha": None}, "lora_alpha must be"),
        ({"lora_alpha": float("inf")}, "finite"),
        ({"use_rslora": "yes"}, "use_rslora must be"),
    ],
)
def test_a_value_of_another_type_is_refused_with_file_and_key(
    written, changed, message
):
    with pytest.raises(ValueError, match=rf"adapter_config.json.* {message}"):
        read_with(*written, **changed)


ACTIVATIONS: dict[Activation, ModelConfig] = {
    "gelu": dataclasses.replace(small_model("gptj"), activation="gelu"),
    "gelu_tanh": small_model("gptj"),
    "swiglu": small_model("llama"),
    "geglu_tanh": small_model("gemma2"),
}


@pytest.mark.parametrize("activation", typing.get_args(Activation))
def test_the_matrices_of_each_activation_have_adapters_that_are_exported(
    tmp_path, activation
):
    model = ACTIVATIONS[activation]
    assert model.activation == activation
    held = [p.removeprefix("blocks.") for p in our_shapes(model)]
    weights = {p for p in held if p.partition(".")[2].startswith("w")}
    assert set(linears(model)) == weights
    adapters = AdapterConfig(rank=2, scale=1.5, targets=linears(model))
    params = random_params(make_program(ONE_DEVICE, model, adapters=adapters))
    source, family = Source(params), families.hf_config(model, seq_len=16)[0]
    out = tmp_path / "adapters"
    peft_files.write(source, model, adapters, family, out, alpha=3.0, base=None)
    back = PeftAdapters(out, model, adapters, family)
    for name in back.names():
        np.testing.assert_array_equal(back.read(name), source.read(name))
    merged = Merged(source, adapters)
    export.write(merged, model, tmp_path / "merged", seq_len=16)
    there = open_params(tmp_path / "merged", model)
    for name in there.names():
        is_padded = name.endswith(("embed.table", "head.table", "head.bias"))
        rows = slice(model.vocab_size if is_padded else None)
        np.testing.assert_array_equal(there.read(name)[rows], merged.read(name)[rows])


def test_the_target_modules_of_peft_are_only_those_with_adapters(tmp_path):
    """In GPT-2 two modules of a block are called c_proj."""
    model = small_model("gpt2")
    adapters = AdapterConfig(rank=2, scale=1.5, targets=("mlp.w_in", "mlp.w_out"))
    params = random_params(make_program(ONE_DEVICE, model, adapters=adapters))
    family = families.hf_config(model, seq_len=16)[0]
    out = tmp_path / "adapters"
    peft_files.write(Source(params), model, adapters, family, out, alpha=3.0, base=None)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["target_modules"] == ["c_fc", "mlp.c_proj"]

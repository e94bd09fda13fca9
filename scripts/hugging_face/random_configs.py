"""Random configs of the model families that transformers and mjax share.

Input: a random generator. Output: a config.json of a family, as transformers reads it.
"""

import random
from collections.abc import Callable
from typing import Any

SHAPE = (2, 24)
"""Of the tokens: sequences, and positions of each."""
Json = dict[str, Any]
Draw = Callable[[random.Random], Json]


def _sizes(rng: random.Random, *, head_dim: bool = True) -> Json:
    """Draw the sizes of a family of Llama's kind.

    The width is at least 24: norms of fewer random entries come near zero, and then
    rounding grows with their inverse.
    """
    heads, width = rng.choice([(2, 12), (2, 16), (4, 8), (4, 12), (6, 4), (6, 8)])
    sizes = {
        "vocab_size": rng.randint(40, 150),
        "hidden_size": heads * width,
        "intermediate_size": rng.randint(20, 100),
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 3, 6) if heads % n == 0]),
        "max_position_embeddings": rng.choice([24, 64]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if head_dim:
        sizes["head_dim"] = rng.choice([width, 6, 10, 20])
    return sizes


def _rotary(rng: random.Random) -> Json:
    """Draw a base, and in half of the cases a linear scaling."""
    base = rng.choice([50.0, 10_000.0, 500_000.0, 1e6])
    factor = rng.choice([1.5, 2.0, 8.0])
    linear = {"rope_type": "linear", "factor": factor}
    return {"rope_theta": base, "rope_scaling": rng.choice([None, linear])}


def _rms(rng: random.Random) -> Json:
    return {"rms_norm_eps": rng.choice([1e-6, 1e-5, 0.02])}


def _window(rng: random.Random) -> int:
    return rng.randint(1, SHAPE[1])


def _kinds(rng: random.Random, layers: int) -> list[str]:
    names = ["sliding_attention", "full_attention"]
    return [rng.choice(names) for _ in range(layers)]


def draw_gptj(rng: random.Random) -> Json:
    heads, width = rng.choice([(1, 24), (2, 12), (2, 16), (4, 8), (4, 12)])
    inner = rng.choice([None, rng.randint(20, 100)])
    return {
        "model_type": "gptj",
        "vocab_size": rng.randint(40, 150),
        "n_embd": heads * width,
        "n_layer": rng.randint(1, 4),
        "n_head": heads,
        "n_positions": rng.choice([24, 64]),
        "rotary_dim": rng.choice(range(2, width + 1, 2)),
        "activation_function": rng.choice(["gelu_new", "gelu"]),
        "layer_norm_epsilon": rng.choice([1e-5, 0.01]),
        **({} if inner is None else {"n_inner": inner}),
    }


def draw_cohere2(rng: random.Random) -> Json:
    sizes = _sizes(rng, head_dim=False)
    tied = sizes["tie_word_embeddings"]
    return {
        "model_type": "cohere2",
        **sizes,
        **_rotary(rng),
        "use_embedding_sharing": tied,
        "sliding_window": _window(rng),
        "layer_types": _kinds(rng, sizes["num_hidden_layers"]),
        "attention_bias": rng.random() < 0.5,
        "logit_scale": rng.choice([0.0625, 0.5, 1.0]),
        "layer_norm_eps": rng.choice([1e-5, 0.01]),
    }


def draw_llama(rng: random.Random) -> Json:
    biases = {name: rng.random() < 0.5 for name in ("attention_bias", "mlp_bias")}
    return {
        "model_type": "llama",
        **_sizes(rng),
        **_rotary(rng),
        **_rms(rng),
        **biases,
    }


def draw_llama3(rng: random.Random) -> Json:
    slow = rng.choice([0.25, 0.5, 1.0])
    scaling = {
        "rope_type": "llama3",
        "factor": rng.choice([2.0, 8.0, 32.0]),
        "low_freq_factor": slow,
        "high_freq_factor": slow * rng.choice([1.5, 4.0]),
        "original_max_position_embeddings": rng.choice([8, 12, 16]),
    }
    base = rng.choice([10.0, 500.0, 500_000.0])
    return draw_llama(rng) | {"rope_theta": base, "rope_scaling": scaling}


def draw_yarn(rng: random.Random) -> Json:
    """Draw one of the three families with yarn, which is the same code in all."""
    scaling = {
        "rope_type": "yarn",
        "factor": rng.choice([2.0, 4.0, 16.0]),
        "original_max_position_embeddings": rng.choice([8, 12, 16]),
        "beta_fast": rng.choice([1.0, 2.0, 32.0]),
        "beta_slow": rng.choice([0.1, 0.25]),
        "truncate": rng.random() < 0.5,
    }
    scaling |= rng.choice(
        [{}, {"attention_factor": 1.3}, {"mscale": 0.8, "mscale_all_dim": 1.1}]
    )
    base = rng.choice([10.0, 500.0, 10_000.0])
    family = rng.choice([draw_llama, draw_qwen2, draw_qwen3])
    return family(rng) | {"rope_theta": base, "rope_scaling": scaling}


def draw_mistral(rng: random.Random) -> Json:
    window = rng.choice([None, _window(rng), _window(rng)])
    shared = {**_sizes(rng), **_rotary(rng), **_rms(rng)}
    return {"model_type": "mistral", **shared, "sliding_window": window}


def _qwen(rng: random.Random, sizes: Json) -> Json:
    windows = rng.choice(
        [
            {"use_sliding_window": False},
            {
                "use_sliding_window": True,
                "sliding_window": _window(rng),
                "max_window_layers": rng.randint(0, 3),
            },
            {
                "use_sliding_window": True,
                "sliding_window": _window(rng),
                "layer_types": _kinds(rng, sizes["num_hidden_layers"]),
            },
        ]
    )
    return {**sizes, **_rotary(rng), **_rms(rng), **windows}


def draw_qwen2(rng: random.Random) -> Json:
    return {"model_type": "qwen2", **_qwen(rng, _sizes(rng, head_dim=False))}


def draw_qwen3(rng: random.Random) -> Json:
    bias = {"attention_bias": rng.random() < 0.5}
    return {"model_type": "qwen3", **_qwen(rng, _sizes(rng)), **bias}


def _gemma(rng: random.Random) -> Json:
    sizes = _sizes(rng)
    return {
        **sizes,
        **_rms(rng),
        "attention_bias": rng.random() < 0.5,
        "sliding_window": _window(rng),
        "layer_types": _kinds(rng, sizes["num_hidden_layers"]),
        "query_pre_attn_scalar": rng.choice([4, 9, sizes["head_dim"], 64]),
        # A cap far below the logits would make the largest of them small.
        "final_logit_softcapping": rng.choice([None, 3.0, 30.0]),
    }


def draw_gemma2(rng: random.Random) -> Json:
    cap = rng.choice([None, 0.7, 50.0])
    own = {"attn_logit_softcapping": cap, "rope_theta": rng.choice([50.0, 10_000.0])}
    return {"model_type": "gemma2", **_gemma(rng), **own}


def draw_gemma3(rng: random.Random) -> Json:
    local = {"rope_local_base_freq": rng.choice([10.0, 10_000.0])}
    return {"model_type": "gemma3_text", **_gemma(rng), **_rotary(rng), **local}


def draw_gpt2(rng: random.Random) -> Json:
    heads, width = rng.choice([(1, 24), (2, 12), (2, 16), (4, 8), (4, 12)])
    inner = rng.choice([None, rng.randint(20, 100)])
    return {
        "model_type": "gpt2",
        "vocab_size": rng.randint(40, 150),
        "n_embd": heads * width,
        "n_layer": rng.randint(1, 4),
        "n_head": heads,
        "n_inner": inner,
        "n_positions": rng.choice([24, 64]),
        "activation_function": rng.choice(["gelu_new", "gelu"]),
        "layer_norm_epsilon": rng.choice([1e-5, 0.01]),
        "tie_word_embeddings": rng.random() < 0.5,
    }


DRAWS: dict[str, Draw] = {
    "gptj": draw_gptj,
    "cohere2": draw_cohere2,
    "llama": draw_llama,
    "llama3": draw_llama3,
    "yarn": draw_yarn,
    "mistral": draw_mistral,
    "qwen2": draw_qwen2,
    "qwen3": draw_qwen3,
    "gemma2": draw_gemma2,
    "gemma3_text": draw_gemma3,
    "gpt2": draw_gpt2,
}
"""A kind of models -> how one is drawn."""

"""config.json and numbers of parameters of published models.

Keys and values are those of the models. Most token ids, versions and other keys without
effect are left out. The numbers of parameters are
those of the published weights, tied tables counted once.
"""

from typing import Any

Json = dict[str, Any]

_LLAMA: Json = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_LLAMA3: Json = _LLAMA | {
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
_SCALED: Json = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_MISTRAL: Json = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
_QWEN: Json = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}
_QWEN2: Json = _QWEN | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
}
_QWEN3: Json = _QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}
_GEMMA: Json = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "cache_implementation": "hybrid",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-06,
    "query_pre_attn_scalar": 256,
}
_GEMMA2: Json = _GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
_GEMMA3: Json = _GEMMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "vocab_size": 262144,
}
_GPT2: Json = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "vocab_size": 50257,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Json:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


CONFIGS: dict[str, Json] = {
    "gpt-j-6b": {
        "activation_function": "gelu_new",
        "architectures": ["GPTJForCausalLM"],
        "gradient_checkpointing": False,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gptj",
        "n_embd": 4096,
        "n_head": 16,
        "n_inner": None,
        "n_layer": 28,
        "n_positions": 2048,
        "rotary": True,
        "rotary_dim": 64,
        "scale_attn_weights": True,
        "tie_word_embeddings": False,
        "vocab_size": 50400,
    },
    "command-r7b": {
        **_sizes(4096, 14336, 32, 32, 8),
        "architectures": ["Cohere2ForCausalLM"],
        "attention_bias": False,
        "cache_implementation": "hybrid",
        "head_dim": 128,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-05,
        "layer_switch": 4,
        "logit_scale": 0.25,
        "max_position_embeddings": 132096,
        "model_type": "cohere2",
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rope_theta": 50000,
        "rotary_pct": 1.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
        "vocab_size": 256000,
    },
    "llama-2-7b": {
        **_LLAMA,
        **_sizes(4096, 11008, 32, 32, 32),
        "max_position_embeddings": 4096,
        "rope_scaling": None,
        "vocab_size": 32000,
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        **_sizes(4096, 14336, 32, 32, 8),
        "rope_scaling": _SCALED | {"factor": 8.0},
    },
    "llama-3.1-70b": {
        **_LLAMA3,
        **_sizes(8192, 28672, 80, 64, 8),
        "rope_scaling": _SCALED | {"factor": 8.0},
    },
    "llama-3.2-1b": {
        **_LLAMA3,
        **_sizes(2048, 8192, 16, 32, 8),
        "head_dim": 64,
        "rope_scaling": _SCALED | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "mistral-7b-v0.1": {
        **_MISTRAL,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "mistral-7b-v0.3": {
        **_MISTRAL,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "qwen2.5-0.5b": {
        **_QWEN2,
        **_sizes(896, 4864, 24, 14, 2),
        "max_window_layers": 24,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "vocab_size": 151936,
    },
    "qwen2.5-7b": {
        **_QWEN2,
        **_sizes(3584, 18944, 28, 28, 4),
        "max_window_layers": 28,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    # From its page, for texts beyond 32,768 tokens.
    "qwen2.5-7b, long": {
        **_QWEN2,
        **_sizes(3584, 18944, 28, 28, 4),
        "max_window_layers": 28,
        "sliding_window": 131072,
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "type": "yarn",
        },
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        **_sizes(1024, 3072, 28, 16, 8),
        "max_window_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        **_sizes(4096, 12288, 36, 32, 8),
        "max_window_layers": 36,
        "tie_word_embeddings": False,
    },
    "gemma-2-2b": {**_GEMMA2, **_sizes(2304, 9216, 26, 8, 4)},
    "gemma-2-9b": {**_GEMMA2, **_sizes(3584, 14336, 42, 16, 8)},
    "gemma-2-27b": {
        **_GEMMA2,
        **_sizes(4608, 36864, 46, 32, 16),
        "head_dim": 128,
        "query_pre_attn_scalar": 144,
    },
    "gemma-3-1b": {
        **_GEMMA3,
        **_sizes(1152, 6912, 26, 4, 1),
        "sliding_window_pattern": 6,
    },
    "gemma-3-270m": {
        **_GEMMA3,
        **_sizes(640, 2048, 18, 4, 1),
        "_sliding_window_pattern": 6,
        "layer_types": ([*["sliding_attention"] * 5, "full_attention"] * 3),
        "use_bidirectional_attention": False,
    },
    "gpt2": {**_GPT2, "n_embd": 768, "n_head": 12, "n_layer": 12},
    "gpt2-xl": {**_GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48},
}

NUM_PARAMS = {
    "gpt-j-6b": 6_050_882_784,
    "command-r7b": 8_028_033_024,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-7b, long": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}

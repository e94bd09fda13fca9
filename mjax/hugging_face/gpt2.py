"""GPT-2: keys to fields, and back.

Source: transformers 5.23, `configuration_gpt2.py` and `modeling_gpt2.py`.
"""

from mjax.hugging_face.configs import MOST_LAYERS, Json, gelu_of
from mjax.hugging_face.keys import Keys
from mjax.model.config import ModelConfig


def read_gpt2(keys: Keys) -> ModelConfig:
    """Translate the keys of a GPT-2 model."""
    keys.expect("scale_attn_weights", True)
    keys.expect("scale_attn_by_inverse_layer_idx", False)
    keys.expect("add_cross_attention", False)
    return ModelConfig(
        layers=keys.size("n_layer", most=MOST_LAYERS),
        d_model=keys.size("n_embd"),
        heads=keys.size("n_head"),
        d_ff=keys.size("n_inner", None, or_null=True),
        vocab_size=keys.size("vocab_size"),
        learned_positions=keys.size("n_positions", 1024),
        block="serial",
        norm="layernorm",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=gelu_of(keys),
        rope=(False,),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        attn_bias=True,
        mlp_bias=True,
        norm_bias=True,
    )


def write_gpt2(model: ModelConfig, seq_len: int) -> Json:
    """Return the GPT-2 keys of a model, with its number of learned positions.

    Raises:
      ValueError: seq_len exceeds the learned positions.
    """
    rows = model.learned_positions
    if rows is not None and seq_len > rows:
        raise ValueError(
            f"--positions must be at most {rows}, the learned positions, got {seq_len}"
        )
    return {
        "n_layer": model.layers,
        "n_embd": model.d_model,
        "n_head": model.heads,
        "n_inner": model.ffn_width,
        "n_positions": seq_len if rows is None else rows,
        "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }

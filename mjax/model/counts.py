"""Counts of a model: parameters, visible pairs, FLOPs. No array is made."""

import functools

import jax

from mjax.model.config import ModelConfig
from mjax.model.transformer import abstract_params


@functools.cache
def num_params(config: ModelConfig) -> int:
    """Count stored parameters, padding of the vocabulary included."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)[1]))


def visible_pairs(seq_len: int, window: int | None) -> int:
    """Count the (query, key) pairs that a causal window lets through."""
    w = seq_len if window is None else min(window, seq_len)
    return w * (w + 1) // 2 + (seq_len - w) * w


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Count the model's FLOPs per token of a training step: forward plus backward.

    3 x [2 x (weights of the projections and of the output head) + 4 N H x (visible
    keys per query, mean over the sequence, summed over layers)]: a multiply-add is two
    FLOPs, a backward pass two forward passes. Padding, recomputation, masked scores and
    elementwise work are not counted.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1; differs: attention is
    counted over visible pairs only, not over the full square.
    """
    d, heads, h = config.d_model, config.heads, config.head_width
    attention = d * h * (2 * heads + 2 * config.num_kv_heads)
    ffn = d * config.ffn_width * (3 if config.is_gated else 2)
    weights = config.layers * (attention + ffn) + config.vocab_size * d
    pairs = sum(visible_pairs(seq_len, kind.window) for kind in config.kinds)
    return 3.0 * (2 * weights + 4 * heads * h * pairs / seq_len)

"""Count a model's parameters, visible pairs and FLOPs, without creating arrays."""

import functools

import jax

from mjax.layers.adapters import ADAPTERS
from mjax.layers.config import AdapterConfig
from mjax.model.config import ModelConfig
from mjax.model.transformer import abstract_params


@functools.cache
def num_params(config: ModelConfig) -> int:
    """Count stored parameters, including the padding of the vocabulary."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)[1]))


@functools.cache
def num_adapter_params(config: ModelConfig, adapters: AdapterConfig) -> int:
    """Count the parameters of all adapters: the only trained parameters."""
    params = abstract_params(config, adapters=adapters)[1]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(
        leaf.size for path, leaf in leaves if ADAPTERS in jax.tree_util.keystr(path)
    )


def visible_pairs(seq_len: int, window: int | None) -> int:
    """Count the (query, key) pairs that are visible in a causal window."""
    w = seq_len if window is None else min(window, seq_len)
    return w * (w + 1) // 2 + (seq_len - w) * w


def row_pairs(config: ModelConfig, seq_len: int) -> int:
    """Count the visible pairs of a row of one document, summed over the layers."""
    return sum(visible_pairs(seq_len, kind.window) for kind in config.kinds)


def flops_per_pair(config: ModelConfig) -> float:
    """Count the FLOPs of a visible pair in one layer: forward plus backward, 12 N H."""
    return 12.0 * config.heads * config.head_width


def flops_per_token(
    config: ModelConfig, seq_len: int, adapters: AdapterConfig | None = None
) -> float:
    """Count the model's FLOPs per token of a training step: forward plus backward.

    3 x [2 x (weights of the projections and of the output head) + 4 N H x (visible keys
    per query, averaged over the sequence, summed over layers)]. The sequence counts as
    one document: shorter ones see fewer keys (`Utilization.mfu_visible`). A
    multiply-add is two FLOPs, and a backward pass counts as two forward passes.
    Padding, recomputation, masked scores and elementwise work are not counted.

    With adapters the weights are frozen and have no gradient. They count 2 x instead of
    3 x (forward, and gradient of the inputs); attention and the adapters count 3 x. The
    unused gradient of the first layer's input is counted, because the layers run in a
    loop with one program for all.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1. Differs: attention
    counts only visible pairs, not the full square.
    """
    d, h = config.d_model, config.head_width
    attention = d * h * (2 * config.heads + 2 * config.num_kv_heads)
    ffn = d * config.ffn_width * (3 if config.is_gated else 2)
    weights = config.layers * (attention + ffn) + config.vocab_size * d
    scores = flops_per_pair(config) * row_pairs(config, seq_len) / seq_len
    if adapters is None:
        return 3.0 * 2 * weights + scores
    added = 2 * num_adapter_params(config, adapters)
    return 2.0 * 2 * weights + 3.0 * added + scores

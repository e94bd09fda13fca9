"""How the tensors of each family are named, and laid out as ours are not.

Our parameters are named by their path, `blocks.attention.wq`, and stacked over the
layers, `[L, D, N, H]`. Theirs are one tensor a layer, with at most two dims: a
projection is a matrix `[outputs, inputs]`, as torch multiplies it.

Source: the modules of transformers 5.23 (`modeling_gptj.py`, `modeling_cohere2.py`,
`modeling_llama.py`, `modeling_mistral.py`), whose attributes give the names.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np

from mjax.model.config import ModelConfig
from mjax.model.transformer import abstract_params, map_params

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a family, of every layer if the name has a place for its number."""

    name: str
    """{} stands for the layer."""
    inputs: int = 0
    """Leading dims of ours that a projection sums over; they come last in theirs."""
    is_table: bool = False
    """A row for each token; both have the same form, ours with padding."""

    def their_shape(self, ours: Shape) -> Shape:
        """Return the shape of theirs, of one layer.

        Args:
          ours: shape of ours, without the dim of layers.
        """
        if self.is_table:
            return ours
        read, made = ours[: self.inputs], ours[self.inputs :]
        return (math.prod(made), *([math.prod(read)] if read else []))

    def to_theirs(self, ours: np.ndarray) -> np.ndarray:
        """Lay out one layer of ours as theirs."""
        dims = [*range(self.inputs, ours.ndim), *range(self.inputs)]
        return ours.transpose(dims).reshape(self.their_shape(ours.shape))

    def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
        """Lay out theirs as one layer of ours: a view, nothing is read or copied.

        Args:
          theirs: row-major.
          ours: shape of ours, without the dim of layers.
        """
        if self.is_table:
            return theirs
        made = len(ours) - self.inputs
        split = theirs.reshape((*ours[self.inputs :], *ours[: self.inputs]))
        return split.transpose([*range(made, len(ours)), *range(made)])


Tensors = Mapping[str, Tensor]
"""Path of our parameter -> theirs."""


def _projection(prefix: str, inputs: int = 1) -> Tensor:
    return Tensor(f"{prefix}.weight", inputs)


def _bias(prefix: str) -> Tensor:
    return Tensor(f"{prefix}.bias")


def _scale(prefix: str) -> Tensor:
    return Tensor(f"{prefix}.weight")


def _table(prefix: str) -> Tensor:
    return Tensor(f"{prefix}.weight", is_table=True)


_HEAD = {
    "head.table": _table("lm_head"),
    "head.bias": Tensor("lm_head.bias", is_table=True),
}

GPTJ: Tensors = {
    "embed.table": _table("transformer.wte"),
    "blocks.norm.scale": _scale("transformer.h.{}.ln_1"),
    "blocks.norm.bias": _bias("transformer.h.{}.ln_1"),
    "blocks.attention.wq": _projection("transformer.h.{}.attn.q_proj"),
    "blocks.attention.wk": _projection("transformer.h.{}.attn.k_proj"),
    "blocks.attention.wv": _projection("transformer.h.{}.attn.v_proj"),
    "blocks.attention.wo": _projection("transformer.h.{}.attn.out_proj", inputs=2),
    "blocks.mlp.w_in": _projection("transformer.h.{}.mlp.fc_in"),
    "blocks.mlp.b_in": _bias("transformer.h.{}.mlp.fc_in"),
    "blocks.mlp.w_out": _projection("transformer.h.{}.mlp.fc_out"),
    "blocks.mlp.b_out": _bias("transformer.h.{}.mlp.fc_out"),
    "final_norm.scale": _scale("transformer.ln_f"),
    "final_norm.bias": _bias("transformer.ln_f"),
    **_HEAD,
}

_LLAMA_SHARED = {
    "embed.table": _table("model.embed_tokens"),
    "blocks.attention.wq": _projection("model.layers.{}.self_attn.q_proj"),
    "blocks.attention.wk": _projection("model.layers.{}.self_attn.k_proj"),
    "blocks.attention.wv": _projection("model.layers.{}.self_attn.v_proj"),
    "blocks.attention.wo": _projection("model.layers.{}.self_attn.o_proj", inputs=2),
    "blocks.attention.bq": _bias("model.layers.{}.self_attn.q_proj"),
    "blocks.attention.bk": _bias("model.layers.{}.self_attn.k_proj"),
    "blocks.attention.bv": _bias("model.layers.{}.self_attn.v_proj"),
    "blocks.attention.bo": _bias("model.layers.{}.self_attn.o_proj"),
    "blocks.mlp.w_in": _projection("model.layers.{}.mlp.up_proj"),
    "blocks.mlp.w_gate": _projection("model.layers.{}.mlp.gate_proj"),
    "blocks.mlp.w_out": _projection("model.layers.{}.mlp.down_proj"),
    "blocks.mlp.b_in": _bias("model.layers.{}.mlp.up_proj"),
    "blocks.mlp.b_gate": _bias("model.layers.{}.mlp.gate_proj"),
    "blocks.mlp.b_out": _bias("model.layers.{}.mlp.down_proj"),
    "final_norm.scale": _scale("model.norm"),
    **_HEAD,
}

LLAMA: Tensors = {
    **_LLAMA_SHARED,
    "blocks.norm_attention.scale": _scale("model.layers.{}.input_layernorm"),
    "blocks.norm_mlp.scale": _scale("model.layers.{}.post_attention_layernorm"),
}

COHERE2: Tensors = {
    **_LLAMA_SHARED,
    "blocks.norm.scale": _scale("model.layers.{}.input_layernorm"),
}

NO_PARAMETERS = (
    # Masks and frequencies that older releases of transformers saved with the weights.
    r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
"""Patterns of names of stored tensors that are computed, not trained."""


def our_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the path and shape of every parameter; those of blocks are [L, ...]."""
    _, abstract = abstract_params(model)
    shapes = map_params(
        lambda leaf, _: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }


def is_stacked(path: str) -> bool:
    """Say whether a parameter has a leading dim of layers."""
    return path.startswith("blocks.")


def their_shapes(model: ModelConfig, tensors: Tensors) -> dict[str, Shape]:
    """Return the name and shape of every tensor of theirs, in the order of ours.

    Args:
      model: the architecture; its family has all its parameters.
      tensors: of that family.
    """
    shapes = {}
    for path, ours in our_shapes(model).items():
        tensor = tensors[path]
        if is_stacked(path):
            theirs = tensor.their_shape(ours[1:])
            shapes |= {tensor.name.format(i): theirs for i in range(model.layers)}
        elif tensor.is_table:
            shapes[tensor.name] = (model.vocab_size, *ours[1:])
        else:
            shapes[tensor.name] = tensor.their_shape(ours)
    return shapes

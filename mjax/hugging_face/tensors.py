"""Names and layouts of the tensors of each family, compared with mjax.

mjax names parameters by their path, `blocks.attention.wq`, and stacks them over the
layers, `[L, D, N, H]`. transformers has one tensor per layer with at most two dims: a
projection is a matrix `[outputs, inputs]`, as torch multiplies it. Below, "ours" is
mjax and "theirs" transformers.

Source: the modules of transformers 5.23 (`modeling_gptj.py` and so on for each family),
whose attributes give the names.
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
    """A tensor of a family, or one tensor per layer if the name has a placeholder."""

    name: str
    """{} stands for the index of the layer."""
    inputs: int = 0
    """Number of leading dims of ours that a projection sums over; in theirs they are
    last."""
    is_table: bool = False
    """Whether it is a table with one row per token or position, as ours is."""
    is_whole: bool = False
    """Whether the table has one row per position. A table of tokens is padded in ours
    only."""
    inputs_first: bool = False
    """Whether theirs is [inputs, outputs], as in GPT-2's Conv1D."""
    part: int = 0
    """Index of ours among the joined parts."""
    num_parts: int = 1
    """Number of our tensors that theirs joins along its outputs."""

    def their_shape(self, ours: Shape) -> Shape:
        """Return the shape of theirs for one layer.

        Args:
          ours: shape of ours, without the dim of layers.
        """
        if self.is_table:
            return ours
        rows, columns = self._sizes(ours)
        outputs = self.num_parts * columns
        if not self.inputs:
            return (outputs,)
        return (rows, outputs) if self.inputs_first else (outputs, rows)

    def _sizes(self, ours: Shape) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of ours."""
        return math.prod(ours[: self.inputs]), math.prod(ours[self.inputs :])

    def corner(self, ours: Shape) -> tuple[int, int]:
        """Return the row and the column of theirs at which ours begins."""
        first = self.part * self._sizes(ours)[1]
        is_columns = self.inputs and self.inputs_first
        return (0, first) if is_columns else (first, 0)

    def to_theirs(self, ours: np.ndarray) -> np.ndarray:
        """Convert one layer of ours to its part of theirs."""
        if self.inputs_first:
            rows, columns = self._sizes(ours.shape)
            return ours.reshape((rows, columns) if self.inputs else (columns,))
        dims = [*range(self.inputs, ours.ndim), *range(self.inputs)]
        return ours.transpose(dims).reshape(self.their_shape(ours.shape))

    def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
        """Convert theirs to one layer of ours, as a view without reading or copying.

        Args:
          theirs: row-major.
          ours: shape of ours, without the dim of layers.
        """
        if self.is_table:
            return theirs
        if self.inputs_first:
            first = self.part * self._sizes(ours)[1]
            return theirs[..., first : first + self._sizes(ours)[1]].reshape(ours)
        made = len(ours) - self.inputs
        split = theirs.reshape((*ours[self.inputs :], *ours[: self.inputs]))
        return split.transpose([*range(made, len(ours)), *range(made)])


Tensors = Mapping[str, Tensor]
"""Maps the path of each of our parameters to the tensor of theirs."""


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

QWEN3: Tensors = {
    **LLAMA,
    "blocks.attention.q_norm.scale": _scale("model.layers.{}.self_attn.q_norm"),
    "blocks.attention.k_norm.scale": _scale("model.layers.{}.self_attn.k_norm"),
}

GEMMA: Tensors = {
    **QWEN3,
    "blocks.norm_mlp.scale": _scale("model.layers.{}.pre_feedforward_layernorm"),
    "blocks.post_norm_attention.scale": _scale(
        "model.layers.{}.post_attention_layernorm"
    ),
    "blocks.post_norm_mlp.scale": _scale("model.layers.{}.post_feedforward_layernorm"),
}


def _conv(
    path: str, bias: str, prefix: str, inputs: int = 1, part: int = 0, of: int = 1
) -> dict[str, Tensor]:
    """Return the weight and the bias of a Conv1D, or of a part of one."""
    options = {"inputs_first": True, "part": part, "num_parts": of}
    return {
        f"blocks.{path}": Tensor(f"{prefix}.weight", inputs, **options),
        f"blocks.{bias}": Tensor(f"{prefix}.bias", **options),
    }


_C_ATTN = "transformer.h.{}.attn.c_attn"

GPT2: Tensors = {
    "embed.table": _table("transformer.wte"),
    "embed.positions": Tensor("transformer.wpe.weight", is_table=True, is_whole=True),
    "blocks.norm_attention.scale": _scale("transformer.h.{}.ln_1"),
    "blocks.norm_attention.bias": _bias("transformer.h.{}.ln_1"),
    "blocks.norm_mlp.scale": _scale("transformer.h.{}.ln_2"),
    "blocks.norm_mlp.bias": _bias("transformer.h.{}.ln_2"),
    **_conv("attention.wq", "attention.bq", _C_ATTN, part=0, of=3),
    **_conv("attention.wk", "attention.bk", _C_ATTN, part=1, of=3),
    **_conv("attention.wv", "attention.bv", _C_ATTN, part=2, of=3),
    **_conv("attention.wo", "attention.bo", "transformer.h.{}.attn.c_proj", inputs=2),
    **_conv("mlp.w_in", "mlp.b_in", "transformer.h.{}.mlp.c_fc"),
    **_conv("mlp.w_out", "mlp.b_out", "transformer.h.{}.mlp.c_proj"),
    "final_norm.scale": _scale("transformer.ln_f"),
    "final_norm.bias": _bias("transformer.ln_f"),
    "head.table": _table("lm_head"),
}

NO_PARAMETERS = (
    # Masks and frequencies that older releases of transformers saved with the weights.
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
"""Name patterns of stored tensors that are computed, not trained."""


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
    """Return whether a parameter has a leading dim of layers."""
    return path.startswith("blocks.")


def their_shapes(model: ModelConfig, tensors: Tensors) -> dict[str, Shape]:
    """Return the name and shape of every tensor of theirs, in the order of ours.

    Args:
      model: the architecture; its family has all its parameters.
      tensors: tensors of that family.
    """
    shapes = {}
    for path, ours in our_shapes(model).items():
        tensor = tensors[path]
        if is_stacked(path):
            theirs = tensor.their_shape(ours[1:])
            shapes |= {tensor.name.format(i): theirs for i in range(model.layers)}
        elif tensor.is_table and not tensor.is_whole:
            shapes[tensor.name] = (model.vocab_size, *ours[1:])
        else:
            shapes[tensor.name] = tensor.their_shape(ours)
    return shapes

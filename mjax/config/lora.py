"""Low-rank adapters: the flags, and the weights that they select.

Input: the flags `--lora.*` and the architecture. Output: the weights by name, as
`layers.adapters` takes them.
"""

import dataclasses
import difflib
import fnmatch
import math
from typing import Literal

from mjax.layers.config import AdapterConfig
from mjax.model.config import ModelConfig

ALIASES = {
    "attention.wq": ("q_proj",),
    "attention.wk": ("k_proj",),
    "attention.wv": ("v_proj",),
    "attention.wo": ("o_proj", "out_proj"),
    "mlp.w_in": ("up_proj", "fc_in"),
    "mlp.w_gate": ("gate_proj",),
    "mlp.w_out": ("down_proj", "fc_out"),
}
"""Linear layers of a block, and their names in families of Hugging Face."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters. Only they are trained; all other weights are frozen."""

    rank: int | None = None
    """Rank of each adapter; None trains all parameters, without adapters."""
    alpha: float = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*",)
    """Linear layers that get adapters, such as attention.wq or *_proj; *: all."""
    init_from: str | None = None
    """Initialise the adapters from this folder in the format of PEFT."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the frozen weights."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
          ValueError: a value is refused.
        """
        if self.rank is not None and self.rank < 1:
            raise ValueError(
                f"--lora.rank must be at least 1, got {self.rank}; leave it out to "
                "train all parameters"
            )
        if not 0 < self.alpha < math.inf:
            raise ValueError(
                f"--lora.alpha must be positive and finite, got {self.alpha}"
            )
        if not self.targets or not all(self.targets):
            raise ValueError(
                "--lora.targets must name linear layers, got "
                f"{' '.join(map(repr, self.targets)) or 'nothing'}; * is all of them"
            )
        if self.init_from == "":
            raise ValueError(
                "--lora.init-from is empty; name a folder, or leave it out"
            )
        if self.rank is None:
            for name, default in _DEFAULTS.items():
                if getattr(self, name) != default:
                    flag = f"--lora.{name.replace('_', '-')}"
                    raise ValueError(
                        f"{flag} needs --lora.rank, which is absent; give a rank, for "
                        "example --lora.rank 16"
                    )


_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(LoraConfig)
    if field.name != "rank"
}


def adapters(lora: LoraConfig, model: ModelConfig) -> AdapterConfig | None:
    """Return the weights that get an adapter; None without a rank.

    Args:
      lora: the flags.
      model: the architecture.
    Raises:
      ValueError: a target matches nothing, or a weight is smaller than the rank.
    """
    if lora.rank is None:
        return None
    names = linears(model)
    matched = {name for target in lora.targets for name in _matches(target, names)}
    _check_rank(lora.rank, model, [name for name in names if name in matched])
    return AdapterConfig(
        rank=lora.rank,
        scale=lora.alpha / lora.rank,
        targets=tuple(name for name in names if name in matched),
    )


def _check_rank(rank: int, model: ModelConfig, names: list[str]) -> None:
    """Refuse a rank above the rank of the smallest weight.

    Raises:
      ValueError: the rank is too large.
    """
    heads, kv_heads = model.heads, model.num_kv_heads
    sides = {
        "attention.wq": heads * model.head_width,
        "attention.wk": kv_heads * model.head_width,
        "attention.wv": kv_heads * model.head_width,
        "attention.wo": heads * model.head_width,
    }
    name = min(names, key=lambda name: sides.get(name, model.ffn_width))
    side = sides.get(name, model.ffn_width)
    most = min(side, model.d_model)
    if rank > most:
        raise ValueError(
            f"--lora.rank must be at most {most}, got {rank}: {name} has sides "
            f"{model.d_model} and {side}, so its rank is at most {most}; give a usual "
            "rank, 4 to 64, or leave --lora.rank out to train all parameters"
        )


def linears(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the linear layers of a block."""
    return tuple(n for n in ALIASES if model.is_gated or n != "mlp.w_gate")


def _matches(target: str, names: tuple[str, ...]) -> list[str]:
    found = [
        name
        for name in names
        if any(
            fnmatch.fnmatchcase(word, target)
            for word in (name, name.rpartition(".")[2], *ALIASES[name])
        )
    ]
    if found:
        return found
    words = [w for name in names for w in (name, *ALIASES[name])]
    near = difflib.get_close_matches(target, words, n=3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    listed = ", ".join(f"{name} ({', '.join(ALIASES[name])})" for name in names)
    raise ValueError(
        f"--lora.targets {target} matches no linear layer of this model.{hint} Every "
        f"block has {listed}; the embedding and the head have no adapters"
    )

"""A config.json whose keys are taken one by one; what is left over is refused.

A key that is not understood may change the computation, and then the weights would
silently be those of another model. So every key is taken, or known not to matter.
"""

import math
from collections.abc import Mapping
from typing import Any

from mjax import checked_json
from mjax.model.config import yarn_magnitude

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MOST = 2**31 - 1
"""No model has larger sizes; arithmetic on them would raise other errors."""
_REQUIRED = object()

_WITHOUT_EFFECT = frozenset(
    (
        # What the folder is and who wrote it.
        *("architectures", "model_type", "transformers_version", "_name_or_path"),
        *("dtype", "torch_dtype", "task_specific_params"),
        # Lengths: rotary positions have no end here.
        *("max_position_embeddings", "n_positions", "model_max_length", "n_ctx"),
        # Tokens and generation.
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class"),
        *("use_cache", "cache_implementation", "_attn_implementation"),
        *("do_sample", "max_length", "temperature", "top_k", "top_p"),
        # Training, and how products and tables were divided.
        *("initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop"),
        *("resid_pdrop", "gradient_checkpointing", "pretraining_tp"),
        *("use_parallel_embedding", "reorder_and_upcast_attn"),
        # Heads that are no language models.
        *("id2label", "label2id", "num_labels", "summary_activation", "summary_type"),
        *("summary_first_dropout", "summary_proj_to_labels", "summary_use_proj"),
    )
)


class Keys:
    """The keys of one config.json."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Start with all keys left; null is the same as absent, but where taken."""
        self._left = dict(config)

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """Take any value, null too.

        Raises:
          ValueError: the key is absent and has no default.
        """
        if key not in self._left and default is _REQUIRED:
            raise ValueError(f"config.json has no {key}, which this format requires")
        return self._left.pop(key, default)

    def size(
        self,
        key: str,
        default: Any = _REQUIRED,
        *,
        or_null: bool = False,
        most: int = _MOST,
    ) -> Any:
        """Take a whole number, or null where that is allowed."""
        value = self._typed(key, default, int | None if or_null else int)
        if value is not None and abs(value) > most:
            raise ValueError(f"config.json: {key} must be at most {most}, got {value}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """Take a finite number."""
        value = self._typed(key, default, float)
        if not math.isfinite(value):
            raise ValueError(f"config.json: {key} must be finite, got {value}")
        return value

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """Take true or false."""
        return self._typed(key, default, bool)

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Take a text."""
        return self._typed(key, default, str)

    def _typed(self, key: str, default: Any, kind: Any) -> Any:
        try:
            return checked_json.check(self.take(key, default), kind, key)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from None

    def expect(self, key: str, only: Any) -> None:
        """Take a key for which there is one value that mjax computes; may be absent."""
        value = self.take(key, None)
        if value is not None and value != only:
            raise ValueError(
                f"config.json: mjax has no model with {key}={value!r} in this format, "
                f"only {only!r}"
            )

    def rotary(self, base: float = 10_000.0) -> dict[str, Any]:
        """Take the options of the rotary frequencies, in the old form or the new.

        Args:
          base: what an absent rope_theta means.
        Returns:
          fields of a ModelConfig.
        """
        base = self.number("rope_theta", base)
        old, new = self.take("rope_scaling", None), self.take("rope_parameters", None)
        self.expect("partial_rotary_factor", 1.0)
        inner = old or new or {}
        if not isinstance(inner, dict):
            raise ValueError(
                f"config.json: rotary options must be a mapping, got {inner!r}"
            )
        return self.scaled(inner, base)

    def scaled(self, options: dict[str, Any], base: float) -> dict[str, Any]:
        """Translate one mapping of rotary options; `base` is that of an absent one."""
        inner = Keys(options)
        fields: dict[str, Any] = {"rope_base": inner.number("rope_theta", base)}
        kind = inner.text("type", "default")
        kind = inner.text("rope_type", kind)
        inner.expect("partial_rotary_factor", 1.0)
        if kind not in _ROPE_TYPES:
            raise ValueError(
                f"config.json: mjax has no rotary scaling of type {kind!r}, only "
                + ", ".join(_ROPE_TYPES)
            )
        if kind != "default":
            fields["rope_scaling"] = inner.number("factor")
        if kind in ("llama3", "yarn"):
            # Without one transformers takes the length that the model is meant for.
            longest = self.size("max_position_embeddings", None, or_null=True)
            trained = inner.size("original_max_position_embeddings", longest)
            fields |= {"rope_type": kind, "rope_original_len": trained}
        if kind == "llama3":
            fields["rope_slow_turns"] = inner.number("low_freq_factor")
            fields["rope_fast_turns"] = inner.number("high_freq_factor")
        if kind == "yarn":
            fields |= inner.yarn(fields["rope_scaling"])
        inner.check_empty()
        return fields

    def yarn(self, scaling: float) -> dict[str, Any]:
        """Take the options of yarn; null is the same as absent."""
        wide, all_dims = self.optional("mscale"), self.optional("mscale_all_dim")
        magnitude = self.optional("attention_factor")
        if magnitude is None and wide and all_dims:
            magnitude = yarn_magnitude(scaling, wide) / yarn_magnitude(
                scaling, all_dims
            )
        return {
            "rope_slow_turns": self.optional("beta_slow") or 1.0,
            "rope_fast_turns": self.optional("beta_fast") or 32.0,
            "rope_truncate": self.flag("truncate", True),
            "rope_magnitude": magnitude,
        }

    def optional(self, key: str, default: float | None = None) -> float | None:
        """Take a finite number, or null; `default` is what an absent key means."""
        value = self.take(key, default)
        if value is None:
            return None
        return Keys({key: value}).number(key)

    def check_empty(self) -> None:
        """Refuse the first key that is left and may matter."""
        for key, value in self._left.items():
            if key not in _WITHOUT_EFFECT and value is not None:
                raise ValueError(
                    f"config.json: {key}={value!r} is not known here, and may change "
                    "what the model computes"
                )

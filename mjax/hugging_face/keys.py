"""A config.json whose keys are taken one by one; what is left over is refused.

A key that is not understood may change the computation, and then the weights would
silently be those of another model. So every key is taken, or known not to matter.
"""

import math
from collections.abc import Mapping
from typing import Any

from mjax import checked_json

_MOST = 2**31 - 1
"""Larger sizes are no model's; arithmetic on them would end in other errors."""
_REQUIRED = object()

_WITHOUT_EFFECT = frozenset(
    (
        # What the folder is and who wrote it.
        *("architectures", "model_type", "transformers_version", "_name_or_path"),
        *("dtype", "torch_dtype", "task_specific_params"),
        # Lengths: rotary positions have no end here.
        *("max_position_embeddings", "n_positions", "model_max_length"),
        # Tokens and generation.
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class"),
        *("use_cache", "cache_implementation", "_attn_implementation"),
        *("do_sample", "max_length", "temperature", "top_k", "top_p"),
        # Training, and how products and tables were divided.
        *("initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop"),
        *("resid_pdrop", "gradient_checkpointing", "pretraining_tp"),
        "use_parallel_embedding",
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

    def rotary(self) -> dict[str, float]:
        """Take what is said of the rotary frequencies, in the old form or the new.

        Returns:
          the fields rope_base and rope_scaling.
        """
        base = self.number("rope_theta", 10_000.0)
        old, new = self.take("rope_scaling", None), self.take("rope_parameters", None)
        self.expect("partial_rotary_factor", 1.0)
        inner = old or new or {}
        if not isinstance(inner, dict):
            raise ValueError(
                f"config.json: rotary options must be a mapping, got {inner!r}"
            )
        inner = Keys(inner)
        base = inner.number("rope_theta", base)
        kind = inner.text("type", "default")
        kind = inner.text("rope_type", kind)
        inner.expect("partial_rotary_factor", 1.0)
        if kind not in ("default", "linear"):
            raise ValueError(
                f"config.json: mjax has no rotary scaling of type {kind!r}, only linear"
            )
        scaling = inner.number("factor") if kind == "linear" else 1.0
        inner.check_empty()
        return {"rope_base": base, "rope_scaling": scaling}

    def check_empty(self) -> None:
        """Refuse the first key that is left and may matter."""
        for key, value in self._left.items():
            if key not in _WITHOUT_EFFECT and value is not None:
                raise ValueError(
                    f"config.json: {key}={value!r} is not known here, and may change "
                    "what the model computes"
                )

"""Read the keys of a configuration one by one, and refuse unread keys.

An unknown key may change the computation, so that the weights would silently be used in
another model. So every key is read, or known to have no effect.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from mjax import checked_json
from mjax.model.config import yarn_magnitude

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MOST = 2**31 - 1
"""Maximum value of a whole number: above all real sizes; arithmetic on larger numbers
would raise other errors."""
_REQUIRED = object()

_WITHOUT_EFFECT = frozenset(
    (
        # Metadata of the folder and its writer.
        *("architectures", "model_type", "transformers_version", "_name_or_path"),
        *("dtype", "torch_dtype", "task_specific_params"),
        # Lengths: rotary positions are unlimited here.
        *("max_position_embeddings", "n_positions", "model_max_length", "n_ctx"),
        # Tokens and generation.
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class"),
        *("use_cache", "cache_implementation", "_attn_implementation"),
        *("do_sample", "max_length", "temperature", "top_k", "top_p"),
        # Training, and how matmuls and tables were sharded.
        *("initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop"),
        *("resid_pdrop", "gradient_checkpointing", "pretraining_tp"),
        *("use_parallel_embedding", "reorder_and_upcast_attn"),
        # Heads other than language models.
        *("id2label", "label2id", "num_labels", "summary_activation", "summary_type"),
        *("summary_first_dropout", "summary_proj_to_labels", "summary_use_proj"),
    )
)


class Keys:
    """Keys of one config.json, or of another configuration."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        file: str = "config.json",
        without_effect: Collection[str] = _WITHOUT_EFFECT,
    ) -> None:
        """Start with all keys unread; an unread null counts as absent.

        Args:
          config: the content of the file.
          file: name of the file, for messages.
          without_effect: keys that need not be read.
        """
        self._left = dict(config)
        self._file = file
        self._without_effect = without_effect

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """Read any value, including null.

        Raises:
          ValueError: the key is absent and has no default.
        """
        if key not in self._left and default is _REQUIRED:
            raise ValueError(f"{self._file} has no {key}, which this format requires")
        return self._left.pop(key, default)

    def size(
        self,
        key: str,
        default: Any = _REQUIRED,
        *,
        or_null: bool = False,
        most: int = _MOST,
    ) -> Any:
        """Read a whole number, or null if allowed."""
        value = self._typed(key, default, int | None if or_null else int)
        if value is not None and abs(value) > most:
            raise ValueError(f"{self._file}: {key} must be at most {most}, got {value}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """Read a finite number."""
        value = self._typed(key, default, float)
        if not math.isfinite(value):
            raise ValueError(f"{self._file}: {key} must be finite, got {value}")
        return value

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """Read true or false."""
        return self._typed(key, default, bool)

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Read a text."""
        return self._typed(key, default, str)

    def _typed(self, key: str, default: Any, kind: Any) -> Any:
        try:
            return checked_json.check(self.take(key, default), kind, key)
        except ValueError as error:
            raise ValueError(f"{self._file}: {error}") from None

    def expect(self, key: str, only: Any) -> None:
        """Read an optional key; refuse any value but null and the supported one."""
        value = self.take(key, None)
        if value is not None and value != only:
            raise ValueError(
                f"{self._file}: {key}={value!r} is not supported in this format, only "
                f"{only!r}"
            )

    def expect_empty(self, key: str) -> None:
        """Read an optional key; refuse any value but null, false, [] and {}."""
        value = self.take(key, None)
        if not any(value is none for none in (None, False)) and value not in ([], {}):
            raise ValueError(
                f"{self._file}: {key}={value!r} is not supported, only null"
            )

    def rotary(self, base: float = 10_000.0) -> dict[str, Any]:
        """Read the options of the rotary frequencies, in the old or new form.

        Args:
          base: default of rope_theta.
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
        """Translate one mapping of rotary options to fields of a ModelConfig.

        `base` is used if the mapping has no rope_theta.
        """
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
            # By default transformers uses the length of the model.
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
        """Translate the options of yarn to fields; null counts as absent."""
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
        """Read a finite number or null; `default` is used for an absent key."""
        value = self.take(key, default)
        if value is None:
            return None
        return Keys({key: value}).number(key)

    def check_empty(self) -> None:
        """Refuse the first unread key that may have an effect."""
        for key, value in self._left.items():
            if key not in self._without_effect and value is not None:
                raise ValueError(
                    f"{self._file}: {key}={value!r} is not supported and may change "
                    "the computation"
                )

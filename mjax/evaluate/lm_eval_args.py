"""Check `--model_args` of lm-eval. Imports neither JAX nor lm-eval.

Input: names and values parsed by lm-eval, and the options of a generation. Output:
`Args`, `Sampling`s and their seeds.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from mjax import checked_json
from mjax.cli import flags
from mjax.generate.requests import Sampling

NAME = "mjax"
"""Name of the model in lm-eval: `--model mjax`."""
AUTO = "auto"
_DEFAULT_DEVICE = "cuda:0"
"""lm-eval's default of `--device`."""


class BadArgsError(ValueError):
    """Bad input: in --model_args, or a task that this model cannot do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args:
    """The fields of `--model_args`, and other flags of lm-eval."""

    model: str
    """Work dir, folder of checkpoints, one checkpoint, or a Hugging Face folder."""
    step: int | None = None
    """Step of the checkpoint; None: the newest."""
    tokenizer: str | None = None
    """bytes, a tokenizer.json or hf://NAME@REVISION; None: the model's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the computation; None: the run's; float32 for a Hugging Face folder."""
    max_length: int | None = None
    """Maximum tokens of a sequence; None: the model's, at most 4096 for a Hugging Face
    folder."""
    max_gen_toks: int = 256
    """Maximum tokens of an answer if the task gives no number; lm-eval's default."""
    seed: int = 0
    """Base seed of sampled answers, see `seeds_of`."""
    tp: int = 1
    """Tensor-parallel size."""
    dp: int = -1
    """Data-parallel size; -1 uses the devices that tp leaves."""
    simulate_devices: int | None = None
    """Use this many simulated CPU devices."""
    batch_size: int | None = None
    """Sequences per batch, and number of concurrent answers; None (`--batch_size
    auto`): about 8192 tokens per device, and 8 answers."""

    def __post_init__(self) -> None:
        for name in ("max_length", "max_gen_toks", "batch_size", "simulate_devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadArgsError(f"{name} must be at least 1, got {value}")


def read_args(words: Mapping[str, Any]) -> Args:
    """Check the fields of `--model_args`, joined with lm-eval's own flags.

    Raises:
      BadArgsError: a name is unknown, or a value is invalid.
    """
    given = {name: value for name, value in words.items() if value is not None}
    if "pretrained" in given:
        raise BadArgsError(
            f"--model mjax takes model=PATH, got pretrained={given['pretrained']}; "
            "write model= instead"
        )
    given.pop("max_batch_size", None)  # limits lm-eval's search for a batch size
    device = given.pop("device", None)
    if device not in (None, _DEFAULT_DEVICE):
        raise BadArgsError(
            f"--device {device}: --model mjax uses all devices that JAX sees; set "
            "JAX_PLATFORMS or CUDA_VISIBLE_DEVICES instead and omit --device"
        )
    given["batch_size"] = _batch_size(given.get("batch_size", AUTO))
    known = [field.name for field in dataclasses.fields(Args)]
    for name in given:
        if name not in known:
            raise BadArgsError(
                f"--model_args has no {name}; did you mean "
                f"{flags.nearest(name, known)}? Known names: {', '.join(known)}"
            )
    if "model" not in given:
        raise BadArgsError(
            "--model_args has no model; give model=PATH, a run, a checkpoint or a "
            "Hugging Face folder"
        )
    # lm-eval parses a path of digits as a number.
    given |= {k: str(given[k]) for k in ("model", "tokenizer") if k in given}
    try:
        return checked_json.check(given, Args, "--model_args")
    except BadArgsError:
        raise
    except ValueError as error:
        raise BadArgsError(str(error)) from None


def _batch_size(value: Any) -> int | None:
    """Parse --batch_size, which is a number, or a text with a number or `auto`."""
    if value == AUTO:
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, int):
        return value
    raise BadArgsError(
        f"--batch_size must be a whole number or {AUTO} with --model mjax, got {value}"
    )


def read_sampling(
    options: Mapping[str, Any], *, max_tokens: int
) -> tuple[Sampling, list[str]]:
    """Translate the generation options of a task.

    Args:
      options: until, do_sample, temperature, top_k, top_p, seed, the number of tokens
        under any of lm-eval's names, and options of `_NEUTRAL` without an effect.
      max_tokens: number of tokens if the task gives none.
    Returns:
      the sampling, and a message for each option that it does not follow literally.
    Raises:
      BadArgsError: an option is unknown or out of range.
    """
    left = {name: value for name, value in options.items() if value is not None}
    until = left.pop("until", [])
    stop = [until] if isinstance(until, str) else list(until)
    for name in _MAX_TOKENS:
        max_tokens = left.pop(name, max_tokens)
    try:
        temperature, notes = _temperature(left)
        given = {
            "max_tokens": max_tokens,
            "top_k": left.pop("top_k", None),
            "top_p": left.pop("top_p", 1.0),
            "seed": left.pop("seed", 0),
        }
        given |= {"temperature": temperature, "stop": [text for text in stop if text]}
        sampling = checked_json.check(given, Sampling, "options")
    except ValueError as error:
        raise BadArgsError(f"generation options of the task: {error}") from None
    if temperature == 0 and (sampling.top_k is not None or sampling.top_p < 1):
        notes.append("top_k and top_p have no effect on greedy answers")
    unknown = [n for n, v in left.items() if n not in _NEUTRAL or v != _NEUTRAL[n]]
    if unknown:
        values = ", ".join(f"{name} {left[name]}" for name in unknown)
        raise BadArgsError(
            f"generation options of the task: --model mjax has no {values}; it has "
            "until, do_sample, temperature, top_k, top_p, seed and max_gen_toks"
        )
    return sampling, notes


def _temperature(left: dict[str, Any]) -> tuple[float, list[str]]:
    """Take do_sample and temperature out of options; return the temperature, and a
    message if the two disagree.

    Source: lm-eval 0.4.13, `normalize_gen_kwargs`. Differs: with do_sample and no
    temperature, lm-eval sets 0, which transformers refuses.
    """
    temperature = checked_json.check(
        left.pop("temperature", None), float | None, "temperature"
    )
    samples = checked_json.check(left.pop("do_sample", None), bool | None, "do_sample")
    if samples and temperature is None:
        return 1.0, ["do_sample without a temperature samples at temperature 1"]
    if samples and temperature == 0:
        return 0.0, ["do_sample with temperature 0 gives the greedy answer"]
    if samples is False and temperature:
        return 0.0, [
            f"temperature {temperature:g} has no effect on do_sample: false, which "
            "gives the greedy answer"
        ]
    return temperature or 0.0, []


def seeds_of(
    requests: Iterable[tuple[str, Mapping[str, Any]]], base: int
) -> Iterator[int]:
    """Yield a seed for each request: another for each text, and for each copy of it.

    A seed depends on nothing else, so an answer does not change with the tasks and
    documents that are asked beside it.

    Args:
      requests: text and generation options of each request; `repeats` of a task gives
        equal ones.
      base: base seed.
    """
    copies: collections.Counter[str] = collections.Counter()
    for context, options in requests:
        key = f"{sorted(options.items())}\0{context}"
        words = f"{base}\0{copies[key]}\0{key}"
        copies[key] += 1
        yield int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big")


_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "max_gen_toks")
"""lm-eval's names for the number of tokens; the last one that is given counts."""
_NEUTRAL: Mapping[str, float] = {
    "frequency_penalty": 0,
    "min_p": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "typical_p": 1,
}
"""Options without an equivalent here, with the values at which they do not change an
answer (transformers' and vLLM's defaults)."""

"""Flags of `python -m mjax.generate`. No JAX, so mistakes are reported at once."""

import dataclasses
from typing import Annotated, Literal

from mjax.cli import flags
from mjax.generate.requests import NUM_SEEDS, Sampling

DEFAULT_TOKENS = 128
OTHER_NAMES = {
    "max-new-tokens": "--tokens",
    "max-tokens": "--tokens",
    "num-tokens": "--tokens",
    "n-predict": "--tokens",
    "num-samples": "give each text as a --prompt; --seed changes the draws",
    "input-text": "--prompt",
    "text": "--prompt",
    "temp": "--temperature",
    "checkpoint-dir": "the model is given without a flag: python -m mjax.generate RUN",
    "model": "the model is given without a flag: python -m mjax.generate RUN",
    "tensor-parallel-size": "--mesh.tp",
    "tp": "--mesh.tp",
    "dtype": "--precision",
    "max-model-len": "--max-len",
    "max-seq-len": "--max-len",
    "max-length": "--max-len",
    "greedy": "--temperature 0 takes the likeliest token",
    "do-sample": "--temperature 0 takes the likeliest token; other values draw",
    "port": "--serve PORT answers requests over HTTP",
}
"""Names of these flags in other programs; see `mjax.cli.flags.Guide`."""
EXAMPLES = (
    'python -m mjax.generate runs/a --prompt "def main("',
    "python -m mjax.generate runs/a --prompt - --tokens 200 --temperature 0 < text",
    "python -m mjax.generate runs/a --serve 8000",
)
STDIN = "-"
"""Prompt that stands for standard input."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFlags:
    """Mesh of the devices."""

    dp: int = 1
    """Replicas; each continues its share of the prompts."""
    tp: int = 1
    """Devices over which each layer is split."""

    def __post_init__(self) -> None:
        """Refuse sizes below 1."""
        for name in ("dp", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--mesh.{name} must be at least 1, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """Continue prompts with a trained model.

    With --serve PORT it answers requests over HTTP instead; --serve PORT -h has the
    flags.
    """

    model: Annotated[str, flags.Positional("MODEL")]
    """Work dir, folder of checkpoints, one checkpoint, or a Hugging Face folder."""
    prompt: tuple[str, ...] = ()
    """Texts to continue; - reads one from standard input."""
    prompt_file: str | None = None
    """File whose text is an additional prompt."""
    chat: bool = False
    """Chat in the terminal with the model's chat template."""
    system: str | None = None
    """With --chat: system message before the first turn."""
    tokens: int | None = None
    """Maximum number of tokens to draw per prompt; None: 128, or
    fewer if fewer fit; with --chat as many as fit."""
    temperature: float = 0.8
    """Logits are divided by this; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens; None: all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens with at least this total probability."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the text that ends it is not printed."""
    seed: int = 0
    """Seed of the draws; prompt i has seed + i, modulo 2^32."""
    step: int | None = None
    """Step of the checkpoint; None: the newest."""
    tokenizer: str | None = None
    """bytes, a tokenizer.json or hf://NAME@REVISION; None: the model's own."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Dtype of parameters and caches; None: float32 on CPUs, bfloat16 on GPUs."""
    max_len: int | None = None
    """Maximum number of tokens of prompt and answer; None: the training length."""
    slots: int = 8
    """Maximum number of prompts continued concurrently."""
    echo: bool = True
    """Print each prompt before its continuation."""
    json: bool = False
    """Print one JSON object."""
    simulate_devices: int | None = None
    """Run on this many simulated CPU devices."""
    mesh: MeshFlags = MeshFlags()

    def __post_init__(self) -> None:
        """Refuse values that no model accepts.

        Raises:
          ValueError: a value is out of range, or there is no prompt.
        """
        has_prompt = bool(self.prompt) or self.prompt_file is not None
        if not has_prompt and not self.chat:
            raise ValueError(
                "no prompt; give --prompt TEXT, --prompt-file FILE, --prompt - to read "
                "standard input, or --chat"
            )
        if self.chat and (has_prompt or self.json or not self.echo):
            raise ValueError(
                "--chat reads messages from standard input and prints answers; leave "
                "out --prompt, --prompt-file, --json and --no-echo"
            )
        if self.system is not None and not self.chat:
            raise ValueError(
                f"--system {self.system!r} begins a conversation; add --chat"
            )
        if self.prompt.count(STDIN) > 1:
            raise ValueError("--prompt - reads all of standard input; give it once")
        for name in ("slots", "max_len", "simulate_devices"):
            number = getattr(self, name)
            if number is not None and number < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be at least 1, got {number}")
        self.sampling(0, room=DEFAULT_TOKENS)

    def sampling(self, index: int, *, room: int) -> Sampling:
        """Return the sampling options of a prompt.

        Args:
          index: index of the prompt.
          room: tokens that fit after the prompt; used without --tokens.
        Raises:
          ValueError: a flag is out of range.
        """
        try:
            return Sampling(
                max_tokens=max(min(DEFAULT_TOKENS, room), 1)
                if self.tokens is None
                else self.tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=(self.seed + index) % NUM_SEEDS if index else self.seed,
                stop=self.stop,
            )
        except ValueError as error:
            raise ValueError(_as_flags(str(error))) from None

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self.mesh.dp * self.mesh.tp


def _as_flags(message: str) -> str:
    """Return the text of an error with flags instead of names of `Sampling` fields."""
    names = {
        "max_tokens": "--tokens",
        "temperature": "--temperature",
        "top_k": "--top-k",
        "top_p": "--top-p",
        "seed": "--seed",
        "a stop text": "--stop",
    }
    for name, flag in names.items():
        if message.startswith(name):
            return flag + message.removeprefix(name)
    return message

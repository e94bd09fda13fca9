"""Flags of `python -m mjax.evaluate`. No JAX, so mistakes are reported at once."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from mjax.cli import flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFlags:
    """Sizes of the mesh."""

    tp: int = 1
    """Tensor-parallel size."""
    dp: int = -1
    """Data-parallel size; -1 uses the devices that tp leaves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFlags:
    """The scored text."""

    path: tuple[str, ...] = ()
    """stdlib, or files and folders of text, JSONL or parquet."""
    text_field: str = "text"
    """Field or column with the text in JSONL and parquet."""
    cache_dir: str | None = None
    """With --held-out: folder of token files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure loss and bits per byte of a text."""

    model: Annotated[str, flags.Positional("MODEL")]
    """Work dir, folder of checkpoints, one checkpoint, or a Hugging Face folder."""
    held_out: bool = False
    """Score the held-out batches of the run's own evaluation."""
    step: int | None = None
    """Step of the checkpoint; None: the newest."""
    tokenizer: str | None = None
    """bytes, a tokenizer.json or hf://NAME@REVISION; None: the model's."""
    seq_len: int | None = None
    """Maximum tokens of a window; None: the model's, at most 4096 for a Hugging Face
    folder."""
    stride: int | None = None
    """Tokens between the starts of windows; None: --seq-len, the cheapest value."""
    start_token: Literal["none", "eos", "bos"] | None = None
    """Token before each document; with none, the document's first token is not scored.
    None: the one that a run was trained with or that the tokenizer of a Hugging Face
    folder adds. Otherwise eos for a run that does not isolate documents, else none."""
    end_token: bool | None = None
    """Score the end-of-document token. None: yes for a run, no for a Hugging Face
    folder."""
    batch_size: int | None = None
    """Sequences per batch, each of --seq-len tokens; None: about 8192 tokens per
    device."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Dtype of the computation; None: the run's; float32 for a Hugging Face folder."""
    simulate_devices: int | None = None
    """Use this many simulated CPU devices."""
    json: bool = False
    """Print one JSON object."""
    out: str | None = None
    """File for the JSON object."""
    data: DataFlags = DataFlags()
    mesh: MeshFlags = MeshFlags()

    def __post_init__(self) -> None:
        if self.held_out == bool(self.data.path):
            raise ValueError(
                "give either --data.path, the text to score, or --held-out, the "
                f"run's own, got {'both' if self.data.path else 'neither'}"
            )
        for name in ("seq_len", "stride", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be at least 1, got {value}")
        if self.out is not None and not Path(self.out).absolute().parent.is_dir():
            raise ValueError(
                f"--out {self.out}: the folder {Path(self.out).parent} does not exist; "
                "create it, or name another file"
            )
        if self.out is not None and Path(self.out).is_dir():
            raise ValueError(f"--out {self.out} is a folder; name a file in it")

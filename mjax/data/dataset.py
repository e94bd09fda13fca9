"""A configuration in, a corpus out: its training and held-out samples."""

import dataclasses
import hashlib
import pathlib
from typing import Literal

import numpy as np
from jaxtyping import Int

from mjax.data import corpora, synthetic
from mjax.data.samples import NO_TARGET, PackedSamples, Samples
from mjax.data.stream import HeldOut, Stream
from mjax.data.token_files import Settings, default_cache_dir, open_token_files
from mjax.data.tokenizers import BytesTokenizer, Tokenizer, trained_vocab_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how it becomes samples."""

    path: tuple[str, ...] = (corpora.STDLIB,)
    """stdlib, synthetic, or files and folders of text, JSONL or parquet."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer.json, or train:N (byte-level BPE of N tokens)."""
    eos_token: str | None = None
    """Token of a tokenizer.json that ends a document; None looks for a usual one."""
    seq_len: int = 256
    """Tokens per sequence."""
    held_out_fraction: float = 0.05
    """Share of the documents kept for evaluation."""
    isolate_documents: bool = True
    """No attention across documents of one sequence; positions restart."""
    text_field: str = "text"
    """Field or column that holds the text in JSONL and parquet."""
    vocab: Literal["tokenizer", "model"] = "tokenizer"
    """Whose vocabulary size counts: tokenizer, or model (--model.vocab-size)."""
    cache_dir: str | None = None
    """Folder of token files; None is the user's cache folder."""

    def __post_init__(self):
        if not self.path or not all(self.path):
            raise ValueError(
                f"data.path {self.path!r} names nothing; give stdlib, synthetic, or "
                "files and folders"
            )
        if self.seq_len < 1:
            raise ValueError(f"data.seq_len must be at least 1, got {self.seq_len}")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                "data.held_out_fraction must lie between 0 and 1, got "
                f"{self.held_out_fraction}; 0.05 keeps a twentieth"
            )
        trained_vocab_size(self.tokenizer)  # refuses a bad N


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training and held-out samples, and what is known about their text."""

    tokenizer: Tokenizer
    train: Stream
    held_out: Samples
    """In the one order in which every run reads them."""
    corpus_hash: str
    """SHA-256 over the names and contents of the documents."""
    fingerprint: str
    """Hash of everything that decides the samples: equal data, equal fingerprint."""
    split: Literal["document", "position", "synthetic"]
    """By what held-out text was told from training text."""
    num_documents: int
    num_bytes: int
    num_held_out_documents: int
    num_held_out_bytes: int
    max_token_id: int
    """Largest id in the corpus."""
    bytes_per_token: float
    """Bytes of text per token of the training stream."""
    unigram_bits_per_byte: float
    """Entropy of single bytes in the held-out text."""

    def check_vocab_size(self, vocab_size: int) -> None:
        """Refuse a model whose vocabulary lacks tokens that the corpus holds.

        Raises:
          ValueError: some token id of the corpus is >= vocab_size.
        """
        if self.max_token_id >= vocab_size:
            raise ValueError(
                f"token id {self.max_token_id} >= vocabulary: the corpus holds this "
                f"token, the model has {vocab_size}; set --data.vocab tokenizer, or "
                f"--model.vocab-size {self.tokenizer.vocab_size}"
            )

    def count_target_bytes(self, targets: Int[np.ndarray, "B T"]) -> int:
        """Return how many bytes of text the targets stand for; NO_TARGET counts 0."""
        return int(self.tokenizer.token_num_bytes[targets[targets != NO_TARGET]].sum())


def open_dataset(config: DataConfig, *, seed: int) -> Dataset:
    """Open a corpus, tokenizing it into the cache if this was not done before.

    Args:
      config: what to read.
      seed: of the run; decides the order of the training samples, and what the
        synthetic corpus is.
    Raises:
      ValueError: missing, empty or unreadable data, an unknown tokenizer, or a corpus
        shorter than one sequence.
    """
    if config.path == (corpora.SYNTHETIC,):
        return _open_synthetic(config, seed)
    cache_dir = pathlib.Path(config.cache_dir or default_cache_dir()).expanduser()
    settings = Settings(
        text_field=config.text_field,
        tokenizer=config.tokenizer,
        eos_token=config.eos_token,
        held_out_fraction=config.held_out_fraction,
    )
    files = open_token_files(corpora.find_sources(config.path), settings, cache_dir)
    samples = {
        side: PackedSamples(
            tokens, config.seq_len, files.tokenizer.eos_id, config.isolate_documents
        )
        for side, tokens in files.tokens.items()
    }
    train, held_out = files.streams["train"], files.streams["held_out"]
    survey = files.survey
    for side, windows in samples.items():
        if len(windows) == 0:
            num_tokens = len(windows.stream)
            raise ValueError(_too_short(config, side, num_tokens, survey.num_bytes))
    return Dataset(
        tokenizer=files.tokenizer,
        train=Stream((samples["train"],), (1.0,), seed),
        held_out=HeldOut((samples["held_out"],), (1.0,)),
        corpus_hash=survey.corpus_hash,
        fingerprint=_hash(
            survey.corpus_hash, files.tokenizer.digest, _settings(config)
        ),
        split=survey.split,
        num_documents=survey.num_documents,
        num_bytes=survey.num_bytes,
        num_held_out_documents=held_out.num_documents,
        num_held_out_bytes=held_out.num_bytes,
        max_token_id=max(train.max_token_id, held_out.max_token_id),
        bytes_per_token=train.num_bytes / train.num_tokens,
        unigram_bits_per_byte=held_out.unigram_bits_per_byte,
    )


def _open_synthetic(config: DataConfig, seed: int) -> Dataset:
    if config.tokenizer != "bytes":
        raise ValueError(
            f"data.path synthetic is made of bytes; got data.tokenizer "
            f"{config.tokenizer!r}, leave it at bytes"
        )
    num_train, num_held_out = synthetic.NUM_TRAIN, synthetic.NUM_HELD_OUT
    make = synthetic.SyntheticSamples
    return Dataset(
        tokenizer=BytesTokenizer(),
        train=Stream((make(num_train, config.seq_len, seed, stream=0),), (1.0,), seed),
        held_out=HeldOut((make(num_held_out, config.seq_len, seed, stream=1),), (1.0,)),
        corpus_hash=_hash(corpora.SYNTHETIC, str(seed)),
        fingerprint=_hash(corpora.SYNTHETIC, str(seed), _settings(config)),
        split="synthetic",
        num_documents=num_train + num_held_out,
        num_bytes=(num_train + num_held_out) * config.seq_len,
        num_held_out_documents=num_held_out,
        num_held_out_bytes=num_held_out * config.seq_len,
        max_token_id=255,
        bytes_per_token=1.0,
        unigram_bits_per_byte=8.0,
    )


def _settings(config: DataConfig) -> str:
    return f"{config.seq_len} {config.held_out_fraction} {config.isolate_documents}"


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _too_short(config: DataConfig, side: str, num_tokens: int, num_bytes: int) -> str:
    fixes = ["more text", "a shorter --data.seq-len"]
    if side == "held_out":
        fixes.append("a larger --data.held-out-fraction")
    return (
        f"data.path {' '.join(config.path)} ({num_bytes} bytes) has {num_tokens} "
        f"{side.replace('_', '-')} tokens, but one sequence takes data.seq_len + 1 = "
        f"{config.seq_len + 1}: give {' or '.join(fixes)}"
    )

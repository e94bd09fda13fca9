"""Data of a run, and how it is cut into samples."""

import dataclasses
import fractions
import math
from collections.abc import Sequence
from typing import Literal

from mjax.data import skips
from mjax.data.names import BYTES, STDLIB, SYNTHETIC, trained_vocab_size
from mjax.stores import address

_BLOCK_GIB = 1 / 16
NEWEST = 2
"""Newest `DataConfig.version`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Blocks of remote files that the hosts of a run share."""

    mirror_dir: str | None = None
    """Folder for blocks on a disk of each host; None: the hosts share no blocks, each
    downloads all files."""
    replicas: int = 3
    """Number of hosts that keep each block of 64 MiB; at most all hosts."""
    limit_gib: float | None = None
    """Disk limit for blocks per host in GiB, by removing the least recently read ones;
    None: no limit."""
    mib_per_s: float | None = None
    """Limit in MiB per second on the remote reads of all hosts together."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
          ValueError: a value is refused.
        """
        if self.mirror_dir == "" or "://" in (self.mirror_dir or ""):
            raise ValueError(
                "--data.cache.mirror-dir must be a folder on a disk of each host, got "
                f"{self.mirror_dir!r}; for example /local/mjax-blocks"
            )
        if self.replicas < 1:
            raise ValueError(
                f"--data.cache.replicas must be at least 1, got {self.replicas}; 3 "
                "survives the loss of two hosts"
            )
        if self.limit_gib is not None and not _BLOCK_GIB <= self.limit_gib < math.inf:
            raise ValueError(
                f"--data.cache.limit-gib must be at least {_BLOCK_GIB} (one block), "
                f"got {self.limit_gib}; leave it out to keep all blocks"
            )
        if self.mib_per_s is not None and not 0 < self.mib_per_s < math.inf:
            raise ValueError(
                "--data.cache.mib-per-s must be above 0, got "
                f"{self.mib_per_s}; leave it out to set no limit"
            )
        if self.mirror_dir is None:
            self._check_unused()

    def _check_unused(self) -> None:
        """Refuse fields that have no effect without mirror_dir."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                flag = f"--data.cache.{field.name.replace('_', '-')}"
                raise ValueError(
                    f"{flag} {value} needs --data.cache.mirror-dir; add it, or leave "
                    f"{flag} out"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data of a run, and how it is cut into samples."""

    path: tuple[str, ...] = (STDLIB,)
    """Text of the run: stdlib (Python's own sources), synthetic, files, folders,
    hf://datasets/..., s3://... or gs://..."""
    mixture: tuple[str, ...] = ()
    """Corpora with weights, instead of --data.path: 0.7=stdlib 0.3=folder,file.txt."""
    tokenizer: str | None = None
    """Tokenizer: bytes, a tokenizer.json, hf://NAME@REVISION, or train:N, which trains
    a BPE of N tokens on the corpus. None: that of --init-from, otherwise bytes."""
    eos_token: str | None = None
    """Token that ends a document; None looks for a usual name in the tokenizer.json."""
    seq_len: int = 256
    """Tokens per sequence."""
    packing: Literal["windows", "documents"] = "windows"
    """windows: a sample is a window of the joined documents; documents: a sample is one
    document, or a piece of a long one, padded."""
    held_out_fraction: float = 0.05
    """Fraction of the documents held out for evaluation."""
    isolate_documents: bool = True
    """Block attention between the documents of a sequence, and count the positions of
    each document from 0."""
    format: Literal["text", "chat"] = "text"
    """Content of the files: text, or chats with loss on the answers only."""
    chat_template: str | None = None
    """Jinja file with the template of chats; None: the tokenizer's own."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of chat records and of their messages that are not part of the chat, such
    as id source; any other field that does not reach the text is refused."""
    long_chats: Literal["refuse", "skip"] = "refuse"
    """What to do with chats of more than --data.seq-len tokens: stop with an error, or
    skip them. Chats are never truncated."""
    text_field: str = "text"
    """Field or column with the text; a.b is the field b of the object a."""
    vocab: Literal["tokenizer", "model"] = "tokenizer"
    """Source of the vocabulary size: tokenizer, or model (--model.vocab-size)."""
    one_batch: bool = False
    """Use the batch of the first step in all steps, for measurements."""
    skip: tuple[str, ...] = ()
    """Batches to leave out: 40:12 leaves out the 12 batches after step 40."""
    version: int = NEWEST
    """Version of the rules by which files become samples, see docs/data.md. A resumed
    run keeps its version."""
    cache_dir: str | None = None
    """Folder of token files; None is the user's cache folder."""
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        """Check each field, and that path and mixture are not both given.

        Raises:
          ValueError: a value is refused.
        """
        if not self.path or not all(self.path):
            raise ValueError(
                "--data.path must name stdlib, synthetic, or files and folders, got "
                f"{' '.join(map(repr, self.path)) or 'nothing'}"
            )
        for path in (path for paths in self.paths for path in paths):
            if "://" in path and not path.startswith("hf://"):
                address.parse(path, "--data.path")  # refuses a bad URL
        for name in (
            "tokenizer",
            "eos_token",
            "text_field",
            "cache_dir",
            "chat_template",
        ):
            if getattr(self, name) == "":
                flag = f"--data.{name.replace('_', '-')}"
                raise ValueError(f"{flag} is empty; give it a value, or leave it out")
        if self.mixture:
            self._check_mixture()
        if self.seq_len < 1:
            raise ValueError(f"--data.seq-len must be at least 1, got {self.seq_len}")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                "--data.held-out-fraction must be above 0 and below 1, got "
                f"{self.held_out_fraction}; 0.05 keeps a twentieth"
            )
        if self.version not in range(1, NEWEST + 1):
            raise ValueError(
                f"--data.version must be from 1 to {NEWEST}, got {self.version}; leave "
                "it out, or give that of the run to repeat"
            )
        trained_vocab_size(self.tokenizer_name)  # refuses a bad N
        self._check_chats()
        skips.read(self.skip)  # refuses bad skips

    @property
    def has_starts(self) -> bool:
        """Whether a start token precedes each document, so all its tokens are learned.

        Chats begin as their template says, and synthetic data have no documents.
        """
        is_text = self.format == "text" and self.path != (SYNTHETIC,)
        return is_text and self.version >= 2

    def goes_on(self, skip: Sequence[str]) -> bool:
        """Return whether a run with this --data.skip may resume with this config.

        Args:
          skip: the --data.skip of the run.
        Raises:
          ValueError: a text does not have the format of the flag.
        """
        return skips.continues(skips.read(skip), skips.read(self.skip))

    def has_read(self, step: int, skip: Sequence[str]) -> bool:
        """Return whether a state was trained on the batches that this config selects.

        Args:
          step: number of optimizer steps of the state.
          skip: the `--data.skip` of the run that saved the state.
        Raises:
          ValueError: a text does not have the format of the flag.
        """
        before, now = skips.read(skip), skips.read(self.skip)
        return skips.seen(step, before) == skips.seen(step, now)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer; bytes if none is given."""
        return self.tokenizer or BYTES

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """Files and folders of each corpus."""
        if not self.mixture:
            return (self.path,)
        return tuple(_read_part(part)[1] for part in self.mixture)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each corpus, in any unit."""
        if not self.mixture:
            return (1.0,)
        return tuple(_read_part(part)[0] for part in self.mixture)

    def _check_chats(self) -> None:
        if self.format == "text":
            for name in ("chat_template", "ignored_fields", "long_chats"):
                value = getattr(self, name)
                if value not in (None, (), "refuse"):  # the defaults
                    flag = f"--data.{name.replace('_', '-')}"
                    shown = value if isinstance(value, str) else " ".join(value)
                    raise ValueError(
                        f"{flag} {shown} needs --data.format chat, got "
                        "text; add it, or leave the flag out"
                    )
            return
        if self.path == (SYNTHETIC,) or STDLIB in self.path:
            raise ValueError(
                f"--data.format chat reads JSONL or parquet files, got --data.path "
                f"{' '.join(self.path)}; name files or folders of chats"
            )

    def check_trained(self) -> None:
        """Refuse to train a tokenizer for data that need an existing one.

        Raises:
          ValueError: the data are chats, or a mixture.
        """
        if trained_vocab_size(self.tokenizer_name) is None:
            return
        if self.format == "chat":
            raise ValueError(
                f"--data.format chat needs an existing tokenizer, got --data."
                f"tokenizer {self.tokenizer}; give bytes or the tokenizer.json of the "
                "model to tune"
            )
        if self.mixture:
            paths = " ".join(path for paths in self.paths for path in paths)
            raise ValueError(
                f"--data.tokenizer {self.tokenizer} trains on one corpus, and all "
                "corpora of --data.mixture share one tokenizer; train it on all with "
                f"python -m mjax.data info --data.tokenizer {self.tokenizer} --data."
                f"path {paths}, and give the tokenizer.json that it prints"
            )

    def _check_mixture(self) -> None:
        from mjax.data import mixture  # imports numpy, which most flags do not need

        if self.path != (STDLIB,):
            raise ValueError(
                f"--data.path {' '.join(self.path)} and --data.mixture "
                f"{' '.join(self.mixture)} both set the data; leave one out "
                "(--data.path stdlib, the default, replaces a recipe's path)"
            )
        mixture.shares(self.weights)  # refuses bad weights
        for paths in self.paths:
            if self.paths.count(paths) > 1:
                raise ValueError(
                    f"--data.mixture {' '.join(self.mixture)} names {','.join(paths)} "
                    "more than once; give it once, with the sum of the weights"
                )


def _read_part(part: str) -> tuple[float, tuple[str, ...]]:
    """Parse weight=path,path into the weight and the paths."""
    text, equals, paths = part.partition("=")
    if not equals or not all(paths.split(",")):
        raise ValueError(
            "--data.mixture must be weight=path or weight=path,path for each corpus, "
            f"got {part!r}; for example 0.7=stdlib"
        )
    try:
        weight = float(text)
        is_kept = fractions.Fraction(text) == fractions.Fraction(repr(weight))
    except ValueError:
        weight, is_kept = math.nan, False
    if not is_kept or weight <= 0:
        raise ValueError(
            "a weight of --data.mixture must be a positive decimal number of at most "
            f"15 digits, got {text!r} in {part!r}; for example 0.7"
        )
    return weight, tuple(paths.split(","))

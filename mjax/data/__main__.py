"""Prepare and look at data: `python -m mjax.data show --work-dir DIR --step 12`."""

if __name__ == "__main__":
    from mjax.cli import environment

    environment.check()  # before the imports of packages

import dataclasses
import logging
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np

from mjax import printable
from mjax.ckpt import places
from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.store import manifest_in
from mjax.cli import flags, interrupts
from mjax.config.train import from_json
from mjax.data import cache_files, hub_tokenizers, left_over
from mjax.data.cache_files import DamagedFileError
from mjax.data.config import DataConfig
from mjax.data.dataset import Dataset, open_dataset, prepare_files
from mjax.data.mirror import blocks
from mjax.data.samples import NO_TARGET
from mjax.data.stream import read
from mjax.data.token_files import TokenFiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
    """Print the decoded batch of one training step."""

    step: int = 0
    """Steps before the batch: 0 is the first batch, whose loss is logged as step 1."""
    work_dir: str | None = None
    """Folder of a run; its config sets --batch-size, --seed and all --data flags
    except --data.cache-dir."""
    batch_size: int = 8
    """Sequences per step, as in --batch.size of the run."""
    seed: int = 0
    """Seed of the run."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"--step must be at least 0, got {self.step}")
        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {self.batch_size}")

    def of_run(self) -> "Show":
        """Return the command with the settings of work_dir's config.json.

        Raises:
          ValueError: the file cannot be read, or a flag sets one of its settings.
        """
        if self.work_dir is None:
            return self
        only = Show(
            step=self.step,
            work_dir=self.work_dir,
            data=DataConfig(cache_dir=self.data.cache_dir),
        )
        if self != only:
            raise ValueError(
                f"--work-dir {self.work_dir} sets the data of the run; leave out "
                "--batch-size, --seed and all --data flags but --data.cache-dir"
            )
        path = pathlib.Path(self.work_dir) / "config.json"
        try:
            run = from_json(path.read_text("utf-8"))
        except OSError as error:
            raise ValueError(
                f"--work-dir {self.work_dir} is not the folder of a run: {path} "
                f"cannot be read ({error.strerror})"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path} is not the config of a run: {error}") from None
        cache_dir = self.data.cache_dir or run.data.cache_dir
        name = run.data.tokenizer_name
        if hub_tokenizers.is_gone(name):
            name = str(path.with_name("tokenizer"))  # the run's own copy
        return dataclasses.replace(
            self,
            batch_size=run.batch.size,
            seed=run.seed,
            data=dataclasses.replace(run.data, cache_dir=cache_dir, tokenizer=name),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info:
    """Print the size, the split and the tokenizer of a corpus."""

    seed: int = 0
    """Seed of the run; only the synthetic corpus depends on it."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare:
    """Tokenize a corpus into the cache; the same command continues after a stop."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mirror:
    """Count the blocks in a folder of mirrored blocks (status), or empty it (purge)."""

    action: Annotated[Literal["status", "purge"], flags.Positional("ACTION")]
    """status or purge."""
    folder: Annotated[str, flags.Positional("FOLDER")]
    """Folder of one host, the --data.cache.mirror-dir of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfinished:
    """List unfinished preparations that no process is working on."""

    cache_dir: str | None = None
    """Folder of token files; None is the user's cache folder."""
    remove: bool = False
    """Remove the preparations of this host; those of other hosts are only listed."""


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns:
      The exit code: 0 success, 2 bad input, 42 Ctrl-C, 1 any other failure.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        words = sys.argv[1:] if argv is None else argv
        command: Show | Info | Prepare | Mirror | Unfinished = flags.read(
            Show | Info | Prepare | Mirror | Unfinished,
            words,
            prog="python -m mjax.data",
        )
        if isinstance(command, Mirror):
            print("\n".join(mirror_lines(command)), flush=True)
            return 0
        if isinstance(command, Unfinished):
            print("\n".join(unfinished_lines(command)), flush=True)
            return 0
        if isinstance(command, Prepare):
            print("\n".join(prepared_lines(prepare_files(command.data))), flush=True)
            return 0
        if isinstance(command, Show):
            command = command.of_run()
        dataset = open_dataset(command.data, seed=command.seed)
        match command:
            case Show():
                check_same_data(dataset, command.work_dir)
                lines = show_lines(dataset, command)
            case Info():
                lines = info_lines(dataset)
        print("\n".join(lines), flush=True)
    except (ValueError, DamagedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DamagedFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr)
        return 42
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def check_same_data(dataset: Dataset, work_dir: str | None) -> None:
    """Refuse data that have changed since a run saved its newest checkpoint.

    Raises:
      ValueError: the data differ from those that the run read.
    """
    if work_dir is None:
        return
    try:
        saved = places.choose(places.find(work_dir), None)
    except ValueError:  # no checkpoint yet to compare with
        return
    found = manifest_in(saved).run["data_fingerprint"]
    if found != dataset.fingerprint:
        raise ValueError(
            f"the data are not those that the run of {work_dir} has read: fingerprint "
            f"{found[:12]} in its checkpoint {saved.name}, {dataset.fingerprint[:12]} "
            "now; restore the same files"
        )


def prepared_lines(prepared: list[TokenFiles]) -> Iterator[str]:
    """Yield lines of `name value` that describe token files."""
    for files in prepared:
        yield f"folder                 {files.folder}"
        yield f"documents              {files.survey.num_documents}"
        yield f"bytes                  {files.survey.num_bytes}"
        yield f"training tokens        {files.counts['train'].num_tokens}"
        yield f"held-out tokens        {files.counts['held_out'].num_tokens}"
        yield f"corpus hash            {files.survey.corpus_hash}"
        trained = files.trained_tokenizer
        yield from [f"tokenizer              {trained}"] if trained else []


def mirror_lines(command: Mirror) -> Iterator[str]:
    """Run a command on a folder of blocks; yield lines of `name value`.

    Raises:
      ValueError: the folder has no blocks, or a live run uses the blocks to remove.
    """
    folder = pathlib.Path(command.folder)
    if command.action == "purge":
        yield f"removed bytes          {blocks.purge(folder)}"
        return
    kept = blocks.kept(folder)
    yield f"blocks                 {kept.num_blocks}"
    yield f"bytes                  {kept.num_bytes}"
    yield f"held by a live run     {'yes' if kept.is_held else 'no'}"


def unfinished_lines(command: Unfinished) -> Iterator[str]:
    """Yield lines about unfinished preparations; remove them with --remove.

    Raises:
      ValueError: the cache folder cannot be read or written.
    """
    cache_dir = cache_files.cache_dir(command.cache_dir)
    found = left_over.find(cache_dir)
    for left in found:
        is_removed = command.remove and left_over.remove(left)
        yield f"{'removed  ' if is_removed else ''}{left.line}"
    if not found:
        yield f"none in {cache_dir}"
    elif not command.remove:
        yield (
            "to continue one, repeat its `prepare` or `train` command; --remove "
            "deletes those of this host"
        )


def info_lines(dataset: Dataset) -> Iterator[str]:
    """Yield lines of `name value` that describe a dataset."""
    for index, corpus in enumerate(dataset.corpora):
        held_out = corpus.counts["held_out"]
        yield f"corpus {index}               {corpus.name}"
        if len(dataset.corpora) > 1:
            yield f"  weight               {dataset.train.weights[index]}"
        yield f"  documents            {corpus.num_documents}"
        is_cut = corpus.split == "position"
        whole = "the end of the text" if is_cut else held_out.num_documents
        yield f"    held out           {whole}"
        yield f"  bytes                {corpus.num_bytes}"
        share = held_out.num_bytes / corpus.num_bytes
        yield f"    held out           {held_out.num_bytes} ({share:.1%})"
        yield f"  split by             {corpus.split}"
        yield f"  training samples     {len(dataset.train.corpora[index])}"
        yield f"  held-out samples     {len(dataset.held_out.corpora[index])}"
        yield f"  corpus hash          {corpus.corpus_hash}"
        for origin in corpus.origins:
            yield f"  from                 {origin}"
    yield f"training samples       {dataset.train.num_samples}"
    yield f"held-out samples       {len(dataset.held_out)}"
    yield f"tokenizer              {dataset.tokenizer_path}"
    yield f"vocabulary             {dataset.tokenizer.vocab_size}"
    yield f"largest token id       {dataset.max_token_id}"
    yield f"bytes per token        {dataset.bytes_per_token:.4f}"
    yield f"unigram bits per byte  {dataset.unigram_bits_per_byte:.4f}"
    yield f"fingerprint            {dataset.fingerprint}"
    yield f"python                 {sys.version.split()[0]}"


def show_lines(dataset: Dataset, command: Show) -> Iterator[str]:
    """Yield the decoded batch; each text line begins with the row and the segment."""
    ids = dataset.train.ids(command.step, command.batch_size)
    batch = read(dataset.train.corpora, ids)
    num_rows, seq_len = batch["tokens"].shape
    yield (
        f"step {command.step}, seed {command.seed}: {num_rows} rows of {seq_len} "
        f"tokens, out of {dataset.train.num_samples} samples"
    )
    for index, corpus in enumerate(dataset.corpora):
        yield f"corpus {index}: {corpus.name}"
    is_padded = command.data.packing == "documents"
    for row, (corpus, sample) in enumerate(ids.tolist()):
        segments = batch["segments"][row]
        is_padding = segments > 0 if is_padded else np.zeros(seq_len, bool)
        num_segments = len(np.unique(segments[~is_padding]))
        num_targets = int((batch["targets"][row] != NO_TARGET).sum())
        yield (
            f"row {row}: corpus {corpus}, sample {sample}, {num_segments} segment(s), "
            f"{num_targets} targets, {is_padding.sum()} padding"
        )
        for segment in range(num_segments):
            text = dataset.tokenizer.decode(batch["tokens"][row][segments == segment])
            for line in text.split("\n"):
                yield f"{row}.{segment} | {printable(line)}"


if __name__ == "__main__":
    sys.exit(interrupts.with_cleanup(main))

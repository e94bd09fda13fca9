"""Look at the data of a run: `python -m mjax.data show --step 12`."""

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator

import numpy as np

from mjax import flags
from mjax.data.dataset import DataConfig, Dataset, open_dataset
from mjax.data.stream import read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
    """Print the decoded batch of one training step."""

    step: int = 0
    """Step whose batch is printed; 0 is the first."""
    batch_size: int = 8
    """Sequences per step, as in --batch.size of the run."""
    seed: int = 0
    """Seed of the run."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {self.batch_size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info:
    """Print what is known about a corpus."""

    seed: int = 0
    """Seed of the run; only the synthetic corpus depends on it."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, or 2 after bad input."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        words = sys.argv[1:] if argv is None else argv
        command: Show | Info = flags.read(
            Show | Info, words, prog="python -m mjax.data"
        )
        dataset = open_dataset(command.data, seed=command.seed)
        match command:
            case Show():
                lines = show_lines(dataset, command)
            case Info():
                lines = info_lines(dataset)
        print("\n".join(lines), flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def info_lines(dataset: Dataset) -> Iterator[str]:
    """Describe a dataset in lines of `name value`."""
    yield f"documents              {dataset.num_documents}"
    yield f"  held out             {dataset.num_held_out_documents}"
    yield f"bytes                  {dataset.num_bytes}"
    yield f"  held out             {dataset.num_held_out_bytes}"
    yield f"split by               {dataset.split}"
    yield f"training samples       {dataset.train.num_samples}"
    yield f"held-out samples       {len(dataset.held_out)}"
    yield f"vocabulary             {dataset.tokenizer.vocab_size}"
    yield f"largest token id       {dataset.max_token_id}"
    yield f"bytes per token        {dataset.bytes_per_token:.4f}"
    yield f"unigram bits per byte  {dataset.unigram_bits_per_byte:.4f}"
    yield f"corpus hash            {dataset.corpus_hash}"
    yield f"python                 {sys.version.split()[0]}"


def show_lines(dataset: Dataset, command: Show) -> Iterator[str]:
    """Decode a batch; each line of text carries its row and its segment."""
    ids = dataset.train.ids(command.step, command.batch_size)
    batch = read(dataset.train.corpora, ids)
    num_rows, seq_len = batch["tokens"].shape
    yield (
        f"step {command.step}, seed {command.seed}: {num_rows} rows of {seq_len} "
        f"tokens, out of {dataset.train.num_samples} samples"
    )
    for row, (corpus, index) in enumerate(ids.tolist()):
        segments = batch["segments"][row]
        num_targets = int((batch["targets"][row] >= 0).sum())
        yield (
            f"row {row}: corpus {corpus}, sample {index}, "
            f"{segments[-1] + 1} segment(s), {num_targets} targets"
        )
        for segment in np.unique(segments):
            text = dataset.tokenizer.decode(batch["tokens"][row][segments == segment])
            for line in text.split("\n"):
                yield f"{row}.{segment} | {_printable(line)}"


def _printable(line: str) -> str:
    """Escape what a terminal would act on."""
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode()
        for c in line
    )


if __name__ == "__main__":
    sys.exit(main())

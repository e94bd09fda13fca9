"""The samples of each step, from one corpus or a mixture of several.

Row r of step n is number p * batch_size + r of an endless stream of samples; p is n, or
more if batches are left out (`skips`). `mixture` decides the corpus of a number, and
`sampler` decides which sample of the corpus. All are pure functions, so nothing depends
on what was read before, on the number of processes, or on how rows are divided among
them. This module does not use JAX.
"""

import dataclasses

import numpy as np
from jaxtyping import Int, Int32, Int64

from mjax.data import mixture
from mjax.data.sampler import epoch_indices, held_out_indices
from mjax.data.samples import Samples, one_sample
from mjax.data.skips import Skip, place


@dataclasses.dataclass(frozen=True)
class Stream:
    """The training samples, without end.

    Pickling copies the tokens of samples that are mapped from files: another process
    should open the dataset itself.
    """

    corpora: tuple[Samples, ...]
    weights: tuple[float, ...]
    """Weights of the corpora, in any unit: see `mixture.shares`."""
    seed: int
    """Seed that decides the order within each epoch of each corpus."""
    skips: tuple[Skip, ...] = ()
    """Batches that are left out."""
    one_batch: bool = False
    """Whether all steps read the batch of the first step."""

    def __post_init__(self) -> None:
        """Check that corpora and weights fit each other.

        Raises:
          ValueError: not as many weights as corpora, a bad weight, a corpus without
            samples, or samples of different lengths.
        """
        _check(self.corpora, self.weights)

    @property
    def seq_len(self) -> int:
        """T, tokens per sample."""
        return self.corpora[0].seq_len

    @property
    def num_samples(self) -> int:
        """Number of different samples in all corpora."""
        return sum(map(len, self.corpora))

    def ids(
        self, step: int, batch_size: int, rows: slice = slice(None)
    ) -> Int64[np.ndarray, "n 2"]:
        """Return (corpus, sample) for rows of a step's global batch.

        An epoch of a corpus may end within a batch: each sample is read exactly once
        per epoch.

        Args:
          step: optimizer steps before this one.
          batch_size: rows of the global batch.
          rows: the wanted rows of the global batch.
        Raises:
          ValueError: the step is negative.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        first = place(0 if self.one_batch else step, self.skips) * batch_size
        numbers = np.arange(batch_size)[rows] + first
        corpora, places = mixture.places(numbers, self.weights)
        ids = np.stack([corpora, places], axis=1)
        for corpus in np.unique(corpora).tolist():
            ids[corpora == corpus, 1] = epoch_indices(
                places[corpora == corpus].tolist(),
                len(self.corpora[corpus]),
                seed=self.seed,
                corpus=corpus,
            )
        return ids

    def rows(
        self, step: int, batch_size: int, rows: slice = slice(None)
    ) -> dict[str, Int32[np.ndarray, "n T"]]:
        """Return rows of a step's global batch: tokens, targets, segments, positions.

        Args:
          step: optimizer steps before this one.
          batch_size: rows of the global batch.
          rows: the wanted rows of the global batch.
        Raises:
          ValueError: the step is negative.
        """
        return read(self.corpora, self.ids(step, batch_size, rows))


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out samples in the one order in which all runs read them.

    In a mixture, every prefix of the order contains each corpus in its share. The order
    ends when one corpus has no further sample.
    """

    corpora: tuple[Samples, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that corpora and weights fit each other; raises as `Stream` does."""
        _check(self.corpora, self.weights)

    @property
    def seq_len(self) -> int:
        """T, tokens per sample."""
        return self.corpora[0].seq_len

    def __len__(self) -> int:
        sizes = tuple(map(len, self.corpora))
        return mixture.first_without(sizes, self.weights)

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, "T"]]:
        """Return one sample."""
        return one_sample(self, index)

    def ids(self, numbers: Int[np.ndarray, "n"]) -> Int64[np.ndarray, "n 2"]:
        """Return (corpus, sample) for places of the order."""
        corpora, places = mixture.places(numbers, self.weights)
        ids = np.stack([corpora, places], axis=1)
        for corpus in np.unique(corpora).tolist():
            ids[corpora == corpus, 1] = held_out_indices(
                places[corpora == corpus].tolist(), len(self.corpora[corpus])
            )
        return ids

    def rows(
        self, indices: Int[np.ndarray, "B"]
    ) -> dict[str, Int32[np.ndarray, "B T"]]:
        """Return several samples: tokens, targets, segments, positions."""
        return read(self.corpora, self.ids(indices))


def read(
    corpora: tuple[Samples, ...], ids: Int64[np.ndarray, "n 2"]
) -> dict[str, Int32[np.ndarray, "n T"]]:
    """Read samples of several corpora, in the order of the ids (corpus, sample)."""
    parts = [
        (ids[:, 0] == corpus, corpora[corpus].rows(ids[ids[:, 0] == corpus, 1]))
        for corpus in np.unique(ids[:, 0]).tolist() or [0]
    ]
    if len(parts) == 1:
        return parts[0][1]
    rows = {
        name: np.empty((len(ids), *a.shape[1:]), a.dtype)
        for name, a in parts[0][1].items()
    }
    for chosen, part in parts:
        for name, array in part.items():
            rows[name][chosen] = array
    return rows


def _check(corpora: tuple[Samples, ...], weights: tuple[float, ...]) -> None:
    if len(corpora) != len(weights):
        raise ValueError(
            f"weights must have one number for each of {len(corpora)} corpora, got "
            f"{weights}"
        )
    mixture.shares(weights)  # refuses bad weights
    sizes, lengths = [len(c) for c in corpora], [c.seq_len for c in corpora]
    if min(sizes) < 1 or len(set(lengths)) > 1:
        raise ValueError(
            "every corpus must have samples, all of one length, got corpora of "
            f"{sizes} samples with {lengths} tokens"
        )

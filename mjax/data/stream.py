"""The samples of each step, from one corpus or a mixture of several.

Sequence r of step n is number p * batch_size + r of an endless stream of samples; p is
n, or more if batches are left out (`skips`). `mixture` determines the corpus of a
number, and `sampler` the sample of the corpus. All these choices are pure functions of
their arguments. So no batch depends on earlier reads, on the number of processes, or on
how sequences are divided among them. This module does not use JAX.
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
    """The endless stream of training samples.

    Do not pickle a Stream for another process: pickling copies the tokens of samples
    that are mapped from files. The other process should open the dataset on its own.
    """

    corpora: tuple[Samples, ...]
    weights: tuple[float, ...]
    """Weight of each corpus, in any unit; see `mixture.shares`."""
    seed: int
    """Seed that determines the order within each epoch of each corpus."""
    skips: tuple[Skip, ...] = ()
    """Batches that are left out."""
    one_batch: bool = False
    """Whether all steps read the batch of the first step."""

    def __post_init__(self) -> None:
        """Check that corpora and weights fit together.

        Raises:
          ValueError: the numbers of weights and corpora differ, a weight is bad, a
            corpus has no samples, or the samples differ in length.
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
        """Return (corpus, sample) for sequences of a step's global batch.

        Each sample is read exactly once per epoch of its corpus, so an epoch may end
        within a batch.

        Args:
          step: number of optimizer steps before this one.
          batch_size: B, global.
          rows: range of sequences of the global batch.
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
        """Return sequences of a step's global batch, as {field: [n, T]}.

        Args:
          step: number of optimizer steps before this one.
          batch_size: B, global.
          rows: range of sequences of the global batch.
        Raises:
          ValueError: the step is negative.
        """
        return read(self.corpora, self.ids(step, batch_size, rows))


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out samples, in an order that is the same for all runs.

    In a mixture, every prefix of the order contains each corpus in its share. The order
    ends when one corpus has no more samples.
    """

    corpora: tuple[Samples, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that corpora and weights fit together; errors as in `Stream`."""
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
        """Return (corpus, sample) for positions in the order."""
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
    """Return the samples that `ids` names as (corpus, sample), in the same order."""
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

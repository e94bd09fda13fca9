"""How many epochs of its data a run reads, as printed at its start."""

import pytest

from mjax.run.report import describe_epochs


@pytest.mark.parametrize(
    ("sizes", "weights", "said"),
    [
        ([2000], [1.0], "0.4 epochs"),
        ([100], [0.3], "8 epochs"),
        ([2000, 100], [3.0, 1.0], "0.3 and 2 epochs of its corpora"),
    ],
)
def test_epochs_are_samples_read_per_sample_of_a_corpus(sizes, weights, said):
    assert describe_epochs(800, sizes, weights) == said

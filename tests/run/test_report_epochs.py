"""How a run divides its steps: epochs of its data, and the warm-up."""

import pytest

from mjax.run.report import describe_epochs, describe_warmup


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


def test_a_warm_up_of_more_than_half_of_the_steps_is_named():
    (line,) = describe_warmup(100, 120)
    assert line.startswith("warm-up: 100 of 120 steps; ")
    assert describe_warmup(60, 120) == []

"""The GPU kernels compute hardly more than what is visible, as the docs say."""

import re
from pathlib import Path

import pytest

from mjax.kernels.attention.tuning import MOSAIC_H200
from scripts.kernels.attention_cost import num_visible
from scripts.kernels.visited_blocks import computed_pairs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("window", "bound"), [(512, 1.45), (1024, 1.3), (4096, 1.3)])
@pytest.mark.parametrize("head_dim", MOSAIC_H200)
def test_few_pairs_are_computed_that_are_not_visible(head_dim, window, bound):
    counts = computed_pairs(8192, window, MOSAIC_H200[head_dim])
    for count in counts.values():
        assert 1 <= count / num_visible(8192, window) <= bound


def test_the_table_of_the_documentation_is_the_count():
    text = (ROOT / "docs" / "kernels.md").read_text()
    rows = re.findall(
        r"^\| (64|128) \| (\d+|full) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        text,
        re.M,
    )
    windows = ("256", "512", "1024", "4096", "full")
    assert [tuple(row[:2]) for row in rows] == [
        (head_dim, window) for head_dim in ("64", "128") for window in windows
    ]
    for head_dim, name, *ratios in rows:
        window = None if name == "full" else int(name)
        counts = computed_pairs(8192, window, MOSAIC_H200[int(head_dim)])
        visible = num_visible(8192, window)
        assert ratios == [f"{count / visible:.3f}" for count in counts.values()]

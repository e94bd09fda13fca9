"""The curves of a run: what is drawn, and that odd rows do not stop it."""

import itertools
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from mjax.run import plots
from mjax.run.metrics import bits_per_byte


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            **{"step": step, "loss": 1 + 5 / step, "grad_norm": 0.5, "lr": 1e-3},
            "bits_per_byte": bits_per_byte(1 + 5 / step, 4.4),
            **{"tokens_per_s": 400.0, "mfu": None, "skipped": 0},
            **more,
        }
        for step in range(1, count + 1)
    ]


def drawn(found: list[dict[str, Any]], folder: Path) -> np.ndarray:
    path = folder / "plots" / "curves.png"
    plots.draw(found, path, unigram_bits=3.1)
    return matplotlib.image.imread(path)


def changed(a: np.ndarray, b: np.ndarray) -> list[bool]:
    """Return the quarters that differ in two pictures: loss, rate, norm, throughput."""
    differs = (a != b).any(axis=-1)
    height, width = differs.shape
    return [
        bool(differs[y : y + height // 2, x : x + width // 2].any())
        for y in (0, height // 2)
        for x in (0, width // 2)
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Forty usual rows."""
    return drawn(rows(40), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("names", "panel"),
    [
        (("bits_per_byte", "loss"), 0),
        (("lr",), 1),
        (("grad_norm",), 2),
        (("tokens_per_s",), 3),
    ],
)
def test_each_panel_shows_one_field(
    tmp_path: Path, plain: np.ndarray, names: tuple[str, ...], panel: int
) -> None:
    after = rows(40)
    for row in after[::2]:
        row |= {name: row[name] * (1 + 1 / 90) for name in names}
    where = changed(plain, drawn(after, tmp_path))
    assert where == [at == panel for at in range(4)]


@pytest.mark.parametrize("more", [{"eval_bits_per_byte": 2.0}, {"skipped": 1}])
def test_evaluations_and_skipped_steps_are_marked_in_the_loss(
    tmp_path: Path, plain: np.ndarray, more: dict[str, Any]
) -> None:
    found = rows(40)
    found[20] |= more
    assert changed(plain, drawn(found, tmp_path)) == [True, False, False, False]


@pytest.mark.parametrize(
    "found",
    [
        [],
        rows(1),
        rows(3, loss=None, bits_per_byte=None, grad_norm=None),
        rows(3, loss=0.0, bits_per_byte=0.0, grad_norm=0.0, lr=0.0),
        rows(30, mfu=0.4),
    ],
    ids=["no rows", "one row", "not finite", "zeros", "with MFU"],
)
def test_odd_rows_are_drawn_too(tmp_path: Path, found: list[dict[str, Any]]) -> None:
    height, width, _ = drawn(found, tmp_path).shape
    assert (height, width) == (702, 1040)


def points(panel: Any, line: int) -> list[tuple[float, float]]:
    """The points of a line of a panel, of which the first is the raw curve."""
    return [(x, y) for x, y in panel.lines[line].get_xydata()]


def test_curves_and_scales_are_the_values_of_the_rows() -> None:
    """Held-out text with other bytes per token than the training text, as with BPE."""
    found = rows(40)
    for row in found:
        step = row["step"]
        row |= {"grad_norm": step / 7, "lr": 1e-3 / step, "tokens_per_s": 400.0 + step}
        row["mfu"] = row["tokens_per_s"] / 2000
    for row in found[9::10]:
        row["eval_loss"] = 3.6 - row["step"] / 40
        row["eval_bits_per_byte"] = bits_per_byte(row["eval_loss"], 3.9)
    found[4] |= {"loss": None, "bits_per_byte": None, "skipped": 1}
    found[7]["profiled"] = True
    figure = plots.make_figure(found, 4.7)
    figure.draw_without_rendering()
    loss, rate, norm, speed = figure.axes
    evaluated = points(loss, 2)
    assert evaluated == [(r["step"], r["eval_bits_per_byte"]) for r in found[9::10]]
    assert loss.lines[2].get_label() == "held-out text"
    assert [y for _, y in points(loss, 3)] == [4.7, 4.7]
    for panel, name in ((rate, "lr"), (norm, "grad_norm")):
        assert points(panel, 0) == [(row["step"], row[name]) for row in found]
    known = [row for row in found if row["loss"]]
    assert points(loss, 0) == [(row["step"], row["bits_per_byte"]) for row in known]
    usual = [row for row in found if not row.get("profiled")]
    assert points(speed, 0) == [(row["step"], row["tokens_per_s"]) for row in usual]
    for panel, unit, right, name in (
        (loss, "bits per byte", "training, nats per token", "loss"),
        (speed, "tokens/s", "MFU, %", "mfu"),
    ):
        (scale,) = panel.child_axes
        assert (panel.get_ylabel(), scale.get_ylabel()) == (unit, right)
        ratio = scale.get_ylim()[1] / panel.get_ylim()[1]
        factor = 100 if name == "mfu" else 1
        values = {"loss": "bits_per_byte", "mfu": "tokens_per_s"}
        for row in known:
            assert row[values[name]] * ratio == pytest.approx(factor * row[name])


@pytest.mark.parametrize(
    ("name", "panel"), [("loss", 0), ("mfu", 3)], ids=["other data", "another mesh"]
)
def test_there_is_no_second_scale_that_is_wrong_for_a_part_of_the_run(
    name: str, panel: int
) -> None:
    found = rows(20, mfu=0.2) + [
        row | {name: row[name] / 2} for row in rows(20, mfu=0.2)
    ]
    panels = plots.make_figure(found, None).axes
    assert [len(each.child_axes) for each in panels] == [
        int(at in (0, 3) and at != panel) for at in range(4)
    ]


def test_a_mean_of_a_line_that_bends_stays_between_its_neighbours() -> None:
    values = [10.0] * 500 + [0.0] * 500
    means = plots.smoothed(values)
    assert means[:500] == pytest.approx([10.0] * 500)
    assert all(a > b > 0 for a, b in itertools.pairwise(means[499:]))
    assert means[-1] < 1e-3


def test_a_loss_that_falls_fast_at_first_is_followed() -> None:
    losses = [2 + 8 / (1 + step / 10) for step in range(5000)]
    means = plots.smoothed(losses)
    off = [abs(mean / loss - 1) for mean, loss in zip(means, losses, strict=True)]
    assert max(off) < 0.1


def test_a_long_curve_is_thinned_and_keeps_its_peaks() -> None:
    values = [0.0] * 100_000
    values[7_777], values[55_555] = 9.0, -9.0
    steps, kept = plots.thinned(range(100_000), values, 4000)
    assert len(steps) <= 4000
    assert [*steps] == sorted(steps)
    assert dict(zip(steps, kept, strict=True))[7_777] == max(kept) == 9.0
    assert min(kept) == -9.0
    assert plots.thinned([1, 2], [3.0, 4.0], 4000) == ([1, 2], [3.0, 4.0])


@pytest.mark.parametrize("count", [1, 20, 45, 1000])
@pytest.mark.parametrize("every", [2, 3, 20])
def test_steps_that_were_timed_with_others_do_not_set_the_scale(
    count: int, every: int
) -> None:
    """Every few steps, a step gets the time of the next one too; the first compiles."""
    took_s = [0.1] * count
    for at in range(every - 1, count, every):
        took_s[at] = 0.0004
        took_s[at - 1] = 0.1996
    took_s[0] += 20.0
    top = plots.usual_top([1024 / each for each in took_s])
    assert top is not None
    assert (top < 100) if count == 1 else (5_000 < top < 11_000)


def test_the_scale_shows_a_run_that_becomes_faster() -> None:
    assert plots.usual_top([100.0] * 90 + [200.0] * 10) == 200.0
    assert plots.usual_top([]) is None

"""The page of the step by source: both commits side by side, and cases that can be."""

import pytest

from mjax.config.command_line import parse_with
from mjax.plan.options import Options
from mjax.plan.planning import Schedule
from mjax.plan.result import Modelled, Source
from mjax.plan.topology import settle
from mjax.recipes import RECIPES
from scripts.plan.step_by_source import CASES, Read, rows, summary
from tests.plan.plans import SENT


def read(*sources: Source) -> Read:
    parts = {source.name: source.seconds for source in sources}
    modelled = Modelled(
        source="a test",
        parts_s=parts,
        exposed_s={},
        bubble=0.0,
        mfu=0.4,
        tokens_per_s=1.0,
    )
    schedule = Schedule(
        communication=SENT,
        modelled=modelled,
        sources=sources,
        pictures=(),
        timed_by_bytes=(),
    )
    return Read(schedule=schedule, total_bytes=2**31)


def source(name: str, seconds: float, **more: float | int | None) -> Source:
    fields = {"num_bytes": None, "floor_s": None} | more
    return Source(name=name, seconds=seconds, **fields)  # pyright: ignore[reportArgumentType]


BEFORE = read(
    source("sums of gradients", 1.0, num_bytes=3 * 10**9, floor_s=0.0),
    source("matmuls of the layers", 3.0, num_bytes=10**9, floor_s=2.0),
    source("other", 0.0, num_bytes=0),
)
NOW = read(
    source("matmuls of the layers", 2.5, num_bytes=10**9, floor_s=2.0),
    source("quantisation to 8 bits", 0.5, num_bytes=2 * 10**9),
    source("other", 0.03, num_bytes=0),
)


def test_each_source_of_either_commit_has_a_row_and_the_steps_are_the_last():
    found = rows(BEFORE, NOW)
    assert [row[0] for row in found] == [
        *(
            "matmuls of the layers",
            "sums of gradients",
            "quantisation to 8 bits",
            "other",
        ),
        "step",
    ]
    matmuls, sums, casts, _, step = found
    assert matmuls[1:] == ("3.000", "75.0%", "1", "2.500", "82.5%", "1", "2.000")
    assert sums[1:] == ("1.000", "25.0%", "3", "0", "0.0%", "", "")
    assert casts[1:4] == ("0", "0.0%", "")
    assert step[1:] == ("4.000", "100.0%", "4", "3.030", "100.0%", "3", "")


def test_a_step_is_summed_up_with_its_layout_and_what_is_not_placed():
    found = summary(CASES["175b-256"], "now", NOW)
    assert found[2:] == (
        *("--model.remat core", "3.030", "40.0%", "2.0"),
        *("25%", "67%", "", "0.99%"),
    )


@pytest.mark.parametrize("name", CASES)
def test_the_cases_divide_over_their_gpus(name: str):
    case = CASES[name]
    for rest in (case.before, case.now):
        words = f"{case.flags} {rest}".split()
        config, _, options = parse_with(Options(), words, RECIPES, "case")
        _, sizes = settle(config, options.topology)
        assert sizes.num_devices == int(name.rpartition("-")[2])

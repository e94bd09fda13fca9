"""The model separates growth on a cluster from growth on one host."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mjax.health.startup.laws import CONSTANT, LINEAR
from mjax.health.startup.model import (
    Phase,
    PhaseTimes,
    Starts,
    add,
    predict,
    read_phases,
)
from mjax.health.startup.report import Size, as_json, coordinator_rows, table, total

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
CLIENTS = (16, 32, 64, 128, 256, 512, 1024)
OWN_S, EACH_S, WAIT_S = 0.05, 0.001, 0.004
NAMES = ("spawn", "import", "barrier", "comparison", "compile", "collective", "end")


def one_start(size: int, names: Sequence[str] = NAMES) -> tuple[PhaseTimes, ...]:
    """Two cores shared by all: the wall grows, the CPU seconds of a process do not."""
    return tuple(
        PhaseTimes(
            name=name,
            wall_s=(size * OWN_S / 2 + WAIT_S,) * size,
            cpu_s=(OWN_S,) * size,
            coordinator_s=EACH_S * size,
        )
        for name in names
    )


def starts(sizes: Sequence[int] = SIZES, repeats: int = 3) -> Starts:
    return {size: [one_start(size)] * repeats for size in sizes}


def clients(each_s: float = EACH_S) -> Starts:
    return {
        size: [
            tuple(
                PhaseTimes(
                    name=name,
                    wall_s=(1.0,),
                    cpu_s=(1.0,),
                    coordinator_s=each_s * size,
                )
                for name in ("import", "barrier", "comparison", "end")
            )
        ]
        for size in CLIENTS
    }


def phase(name: str, of: Starts | None = None, light: Starts | None = None) -> Phase:
    phases = read_phases(of or starts(), light or {})
    (found,) = [phase for phase in phases if phase.name == name]
    return found


def test_wall_time_grows_here_and_own_work_stays():
    barrier = phase("barrier")
    assert barrier.wall.law == LINEAR
    assert barrier.others.law == CONSTANT
    assert barrier.coordinator.law == LINEAR


def test_the_model_multiplies_the_coordinator_alone():
    found = predict(phase("barrier"), 10_000, 0.0)
    assert found.own.value_s == pytest.approx(OWN_S, rel=0.01)
    assert found.coordinator.value_s == pytest.approx(EACH_S * 10_000, rel=0.02)
    assert found.total.value_s is not None
    assert found.total.value_s < 11.0  # the wall here would have become 250 s


def test_what_process_0_reads_one_by_one_takes_a_round_trip_each():
    near, far = (predict(phase("comparison"), 10_001, s) for s in (0.0, 1e-4))
    assert far.wait_s - near.wait_s == pytest.approx(1.0)
    near, far = (predict(phase("barrier"), 10_001, s) for s in (0.0, 1e-4))
    assert far.wait_s == near.wait_s


def test_the_wait_is_what_no_cpu_explains():
    # At 2 processes: 0.054 s of the slowest, 0.05 s of CPU, 2 ms of the coordinator.
    assert phase("barrier").wait_s == pytest.approx(WAIT_S - 2 * EACH_S)


def test_process_0_counts_where_it_does_more_than_the_others():
    def heavy(size: int) -> tuple[PhaseTimes, ...]:
        (times,) = one_start(size, ["comparison"])
        cpu_s = (OWN_S * size, *times.cpu_s[1:])
        return (
            PhaseTimes(
                name=times.name,
                wall_s=times.wall_s,
                cpu_s=cpu_s,
                coordinator_s=times.coordinator_s,
            ),
        )

    of = {size: [heavy(size)] for size in SIZES}
    found = predict(phase("comparison", of), 10_000, 0.0)
    assert found.own.value_s == pytest.approx(OWN_S * 10_000, rel=0.02)


def test_phases_without_messages_are_those_of_the_smallest_start():
    found = predict(phase("import"), 10_000, 1.0)
    assert (found.own.low_s, found.own.high_s) == (OWN_S, OWN_S)
    assert found.coordinator.high_s == 0.0
    assert predict(phase("compile"), 10_000, 1.0).coordinator.high_s == 0.0


def test_light_clients_say_how_the_coordinator_grows():
    light = clients(2 * EACH_S)
    assert phase("barrier", light=light).coordinator.largest == 1024
    found = predict(phase("barrier", light=light), 10_000, 0.0)
    assert found.coordinator.value_s == pytest.approx(2 * EACH_S * 10_000, rel=0.02)
    # A phase that they do not have keeps that of the processes.
    assert phase("collective", light=light).coordinator.largest == 32


def test_more_clients_make_the_range_narrower():
    """The work of the coordinator is constant, known to 5 percent."""

    def noisy(sizes: Sequence[int]) -> Starts:
        return {
            size: [
                (
                    PhaseTimes(
                        name="barrier",
                        wall_s=(1.0,) * size,
                        cpu_s=(OWN_S,) * size,
                        coordinator_s=EACH_S * (1.05 if place % 2 else 0.95),
                    ),
                )
            ]
            for place, size in enumerate(sizes)
        }

    few, many = (
        predict(phase("barrier", noisy(SIZES), light), 10_000, 0.0).coordinator
        for light in ({}, noisy(CLIENTS))
    )
    assert many.high_s < few.high_s / 100


def test_gloo_is_not_in_the_sum_of_a_run_on_gpus():
    size = Size(hosts=10_000, round_trip_s=0.0)
    without = tuple(p for p in read_phases(starts(), {}) if p.name != "collective")
    assert total(read_phases(starts(), {}), size) == total(without, size)


def test_the_repeats_count_by_their_median():
    wild = one_start(8, ["barrier"])
    slow = PhaseTimes(
        name="barrier", wall_s=(900.0,) * 8, cpu_s=(900.0,) * 8, coordinator_s=900.0
    )
    of = {8: [wild, (slow,), wild], 2: [one_start(2, ["barrier"])]}
    assert phase("barrier", of).slowest_s[8] == wild[0].wall_s[0]
    assert phase("barrier", of).coordinator_s[8] == wild[0].coordinator_s


def test_the_slowest_process_is_the_one_that_the_others_wait_for():
    times = PhaseTimes(
        name="barrier", wall_s=(1.0, 9.0, 2.0), cpu_s=(0.1,) * 3, coordinator_s=0.1
    )
    found = phase("barrier", {3: [(times,)]})
    assert found.slowest_s == {3: 9.0}
    assert found.median_s == {3: 2.0}


def test_starts_with_other_phases_are_refused():
    of = {2: [one_start(2)], 4: [one_start(4, NAMES[::-1])]}
    with pytest.raises(ValueError, match="must have the same phases"):
        read_phases(of, {})


def test_a_sum_without_one_value_has_none_but_has_bounds():
    one = predict(phase("barrier"), 100, 0.0).total
    few = {size: [one_start(size)] for size in (2, 4)}
    unknown = predict(phase("barrier", few), 100, 0.0).total
    assert unknown.value_s is None
    summed = add([one, unknown])
    assert summed.value_s is None
    assert summed.low_s == pytest.approx(one.low_s + unknown.low_s)


def test_the_tables_show_who_was_measured_and_the_papers_figures():
    phases = read_phases(starts(), clients())
    lines = table(phases, Size(hosts=10_000, round_trip_s=1e-4))
    text = "\n".join(lines)
    for word in ("1047 s", "361 s", "under 5 s", "under 30 s", "2402.15627"):
        assert word in text
    assert "(collective)" in text
    (row,) = [line for line in lines if line.split()[:2] == ["end", "linear"]]
    assert row.split() == ["end", "linear", "constant", "constant", "linear"]
    rows = [row[:2] for row in coordinator_rows(phases)[1:]]
    assert ["barrier", "processes"] in rows
    assert ["barrier", "clients"] in rows
    assert not [name for name, _ in rows if name in ("spawn", "import", "compile")]


def test_few_sizes_are_said_to_be_few():
    phases = read_phases(starts(sizes=(2, 4)), {})
    size = Size(hosts=10_000, round_trip_s=0.0)
    assert "fewer than 5 sizes" in "\n".join(table(phases, size))


def test_json_has_no_infinity_and_what_it_was_computed_from():
    def refuse(word: str) -> Any:
        raise AssertionError(word)

    of = starts(sizes=(2, 4), repeats=1)
    phases = read_phases(of, {})
    found = as_json(phases, Size(hosts=10_000, round_trip_s=1e-4), of, {})
    again = json.loads(json.dumps(found), parse_constant=refuse)
    assert again["total"]["high_s"] is None
    assert again["total"]["value_s"] is None
    assert again["starts"]["4"][0][2]["cpu_s"] == [OWN_S] * 4
    assert [row["time"] for row in again["megascale"]][:2] == ["1047 s", "361 s"]

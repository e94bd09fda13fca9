"""Windows are exact at their limits, separate for each device, and bounded."""

import random
import tracemalloc

import pytest

from mjax.health.events.engine import Engine
from mjax.health.events.logs import Line, Reader
from mjax.health.events.rules import EventText, Rule

NS = 10**9


def rule(**changes):
    fields = {
        "name": "flap",
        "pattern": r"(?P<switch>\w+)/(?P<port>\d+) down",
        "event": EventText(kind="flap", text="{port}"),
        "by": ("switch", "port"),
        "count": 3,
        "within_s": 10.0,
        "cool_down_s": 100.0,
    }
    return Rule(**fields | changes)


def line(at_s, text="a/1 down", **fields):
    at_ns = None if at_s is None else round(at_s * NS)
    return Line(**{"text": text, "kind": "other", "time_ns": at_ns} | fields)


def fired(lines, *rules, **settings):
    engine = Engine(rules or (rule(),), **settings)
    found = [one for each in lines for one in engine.feed(each)]
    return engine, [(one.rule.name, one.time_ns / NS) for one in found]


@pytest.mark.parametrize(
    ("last_s", "expected"),
    [(9.999999999, True), (10, True), (10.000000001, False)],
)
def test_a_window_holds_its_limit_to_the_nanosecond(last_s, expected):
    _, found = fired([line(0), line(5), line(last_s)])
    assert bool(found) == expected


@pytest.mark.parametrize("num", [2, 3])
def test_exactly_count_lines_make_an_event(num):
    _, found = fired([line(i) for i in range(num)])
    assert found == ([("flap", 2.0)] if num == 3 else [])


def test_a_window_slides():
    _, found = fired([line(t) for t in (0, 8, 11, 17)])
    assert found == [("flap", 17.0)]  # 8, 11, 17; 0 is 11 s from 11


def test_devices_are_counted_apart():
    ports = ("a/1 down", "a/2 down", "b/1 down")
    _, found = fired([line(i, port) for i in range(2) for port in ports])
    assert found == []
    _, found = fired([line(i, port) for i in range(3) for port in ports])
    assert found == [("flap", 2.0)] * 3


def test_hosts_are_counted_apart_and_those_of_ufm_are_not():
    apart = [line(i, host=f"h{i}") for i in range(3)]
    assert fired(apart)[1] == []
    together = [line(i, host=f"h{i}", kind="ufm") for i in range(3)]
    assert fired(together)[1] == [("flap", 2.0)]


def test_a_new_boot_begins_a_new_window():
    lines = [line(i, is_since_boot=True, boot=i // 2) for i in range(4)]
    assert fired(lines)[1] == []


def test_each_order_of_the_lines_fires_once():
    rng = random.Random(3)
    times = [0.0, 20.0, 40.0, 41.0, 42.0, 60.0]
    for _ in range(50):
        rng.shuffle(times)
        _, found = fired([line(t) for t in times])
        assert found == [("flap", 42.0)]


def test_a_line_with_a_wrong_time_does_not_blind_the_rule():
    _, found = fired([line(4e9), *(line(t) for t in (0, 1, 2))])
    assert found == [("flap", 2.0)]


def test_a_line_that_comes_twice_counts_once():
    engine, found = fired([line(0), line(0), line(1), line(1)])
    assert found == []
    assert engine.counts.duplicates == 2


def test_a_duplicate_of_the_line_that_fired_does_not_fire_again():
    once = rule(count=1, within_s=0.0, cool_down_s=0.0)
    assert fired([line(5), line(5)], once)[1] == [("flap", 5.0)]


@pytest.mark.parametrize(("again_s", "num"), [(99.9, 1), (100.0, 2)])
def test_a_cool_down_ends_to_the_limit(again_s, num):
    once = rule(count=1, within_s=0.0)
    engine, found = fired([line(0), line(again_s)], once)
    assert len(found) == num
    assert engine.counts.cooling == 2 - num


def test_a_late_line_before_the_event_is_in_its_cool_down():
    once = rule(count=1, within_s=0.0)
    assert fired([line(50), line(49)], once)[1] == [("flap", 50.0)]


def test_lines_of_the_cool_down_count_for_no_later_event():
    times = [0, 1, 2, 98, 99, 102]
    assert fired([line(t) for t in times])[1] == [("flap", 2.0)]


def test_a_line_without_any_time_fires_only_a_rule_of_one():
    one, many = rule(name="one", count=1, within_s=0.0), rule()
    engine, found = fired([line(None)] * 5, one, many)
    assert [name for name, _ in found] == ["one"]
    assert engine.counts.untimed == 5


def test_a_rule_reads_only_its_kind_of_lines():
    mine = rule(log="kernel", count=1, within_s=0.0)
    lines = [line(0, kind="syslog"), line(1, kind="other"), line(2, kind="kernel")]
    assert fired(lines, mine)[1] == [("flap", 2.0)]


def test_the_least_recent_device_is_forgotten_and_counted():
    lines = [line(0, "a/1 down"), line(1, "a/2 down"), line(2, "a/1 down")]
    lines += [line(3, "a/3 down"), line(4, "a/2 down"), line(5, "a/1 down")]
    engine, found = fired(lines, max_keys=2)
    # a/3 pushes out a/2, then a/2 pushes out a/1.
    assert found == []
    assert (engine.num_keys, engine.counts.dropped_keys) == (2, 3)
    engine, found = fired(lines, max_keys=3)
    assert (found, engine.counts.dropped_keys) == ([("flap", 5.0)], 0)


def test_memory_stays_bounded_with_a_new_device_on_each_line():
    engine = Engine([rule()], max_keys=500)

    def feed(begin, end):
        for i in range(begin, end):
            engine.feed(line(i, f"a/{i} down"))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early, late = feed(0, 1000), feed(1000, 5000)
    finally:
        tracemalloc.stop()
    assert engine.num_keys == 500
    assert engine.counts.dropped_keys == 4500
    assert late < early + 200_000


def test_many_lines_of_one_device_are_bounded():
    slow = rule(count=5, within_s=1.0)
    engine, found = fired([line(i) for i in range(1000)], slow)
    assert found == []
    (window,) = engine._windows.values()
    assert len(window.times_ns) <= 4 * 5
    assert len(window.seen) <= 4 * 5


def brute_force(times_ns, count, within_ns, cool_ns):
    """Apply the definition of an event to all lines, for lines in order."""
    fired_at, kept = [], []
    for t in times_ns:
        if fired_at and t - fired_at[-1] < cool_ns:
            continue
        kept.append(t)
        if sum(t - within_ns <= k for k in kept) >= count:
            fired_at.append(t)
            kept = []
    return fired_at


def test_the_windows_agree_with_the_definition_on_random_logs():
    rng = random.Random(4)
    for _ in range(200):
        count, within_s = rng.randint(2, 6), rng.choice([1.0, 5.0, 30.0])
        cool_s = rng.choice([0.0, 3.0, 50.0])
        one = rule(count=count, within_s=within_s, cool_down_s=cool_s)
        times = sorted({round(rng.uniform(0, 200) * 2) * NS // 2 for _ in range(80)})
        engine = Engine([one])
        found = [
            hit.time_ns
            for i, t in enumerate(times)
            for hit in engine.feed(line(t / NS, f"a/1 down {i}"))
        ]
        expected = brute_force(times, count, within_s * NS, cool_s * NS)
        assert found == expected


def test_truncated_lines_and_junk_fire_nothing():
    once = rule(count=1, within_s=0.0)
    whole = b"[    1.0] switch7/12 down"
    reader = Reader(year=2026)
    cut = b"\n".join(whole[:i] for i in range(len(whole)))
    junk = random.Random(5).randbytes(100_000)
    _, found = fired(list(reader.feed(cut + b"\n" + junk, is_over=True)), once)
    assert found == []
    _, found = fired(list(Reader(year=2026).feed(whole, is_over=True)), once)
    assert found == [("flap", 1.0)]

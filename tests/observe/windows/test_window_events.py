"""Events of hand-made windows: which count, where they belong, what is exposed."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.observe.windows.placed import Placed, place_events
from mjax.observe.windows.places import LoopPlace, Place, Table
from mjax.observe.windows.seconds import seconds_of
from mjax.observe.windows.trace import MARK, Event, read_file, read_planes

STEP = "jit_train_step"


def record(name, start_ns, duration_ns, **stats):
    return SimpleNamespace(
        name=name, start_ns=start_ns, duration_ns=duration_ns, stats=[*stats.items()]
    )


def line(name, *events):
    return SimpleNamespace(name=name, events=events)


def plane(name, *lines):
    return SimpleNamespace(name=name, lines=lines)


# --------------------------------------------------------------------------- the file


def test_on_a_cpu_threads_hold_the_events_of_devices_and_much_else():
    trace = read_planes(
        [
            plane("/host:metadata"),
            plane(
                "/host:CPU",
                line("python", record(MARK, 500.0, 10.0), record("PjitFunction", 1, 2)),
                line(
                    "tf_XLAEigen/1",
                    record("ThunkExecutor::Execute", 900.0, 500.0),
                    record(
                        *("dot.1", 1000.0, 200.0),
                        hlo_op="dot.1",
                        hlo_module=STEP,
                        device_ordinal=3,
                    ),
                ),
            ),
        ]
    )
    assert trace.events == (Event(3, "dot.1", STEP, 1000.0, 1200.0),)
    assert (trace.mark_ns, trace.is_gpu) == (500.0, False)


def test_on_a_gpu_streams_count_and_what_viewers_derive_from_them_does_not():
    kernel = record("wgmma_kernel", 20.0, 5.0, hlo_op="dot.1", hlo_module=STEP)
    trace = read_planes(
        [
            plane(
                "/device:GPU:1",
                line("Stream #13(Compute)", kernel),
                line("Stream #22(MemcpyD2D)", record("MemcpyD2D", 10.0, 2.0)),
                line("XLA Ops", record("dot.1", 20.0, 5.0, hlo_op="dot.1")),
                line("XLA Modules", record(STEP, 0.0, 50.0)),
            ),
            plane("/host:CPU", line("python", record(MARK, 1.0, 1.0))),
        ]
    )
    assert trace.events == (
        Event(1, "MemcpyD2D", "", 10.0, 12.0),
        Event(1, "dot.1", STEP, 20.0, 25.0),
    )
    assert (trace.mark_ns, trace.is_gpu) == (1.0, True)


def test_a_file_that_is_no_window_is_refused(tmp_path):
    path = tmp_path / "cut.xplane.pb"
    path.write_bytes(b"\x0a\xff\xff\xff\x0fno window")
    with pytest.raises(ValueError, match=r"cut\.xplane\.pb is not a window"):
        read_file(path)


# -------------------------------------------------------------------------- the places


def place(
    phase: Any = "forward",
    role: Any = "compute",
    *,
    loops: tuple[str, ...] = (),
    is_direct: bool = True,
    **fields: Any,
):
    return Place(
        phase=phase,
        role=role,
        loops=loops,
        is_direct=is_direct,
        is_recomputed=False,
        **{
            **dict.fromkeys(("is_container", "is_slot", "is_chosen"), False),
            **{"singles": {}, "place": 0, **fields},
        },
    )


def loop(unit, start, step, count):
    return LoopPlace(trip_count=count, unit=unit, start=start, step=step)


def run_of(*names, device=0):
    """Let a device run instructions one after the other, 10 ns each."""
    return [
        Event(device, name, STEP, 10.0 * at, 10.0 * at + 10)
        for at, name in enumerate(names)
    ]


def table_of(ops, loops=None):
    return Table(module=STEP, num_devices=1, ops=ops, loops=loops or {})


def test_events_without_a_place_are_unknown_and_none_is_dropped():
    events = [
        *run_of("known", "odd"),
        Event(0, "MemcpyD2D", "", 30.0, 31.0),
        Event(0, "known", "jit_other", 40.0, 41.0),
    ]
    placed = place_events(events, [table_of({"known": place()})], is_gpu=True)
    assert [p.phase for p in placed] == ["forward", "unknown", "unknown", "unknown"]
    assert seconds_of(placed).unknown == pytest.approx(
        {"odd": 10e-9, "MemcpyD2D": 1e-9, "known": 1e-9}
    )


def test_a_loop_has_an_event_on_a_cpu_that_wraps_those_inside_and_does_not_count():
    table = table_of({"while.1": place(is_container=True), "dot": place()})
    events = [Event(0, "while.1", STEP, 0.0, 20.0), *run_of("dot", "dot")]
    on_cpu = place_events(events, [table], is_gpu=False)
    assert [p.event.name for p in on_cpu] == ["dot", "dot"]
    # A GPU copies there what decides whether the loop goes on.
    assert len(place_events(events, [table], is_gpu=True)) == 3


def test_turns_of_a_loop_are_layers_in_the_order_that_the_loop_takes_them():
    ops = {
        "even": place("backward", loops=("body",)),
        "odd": place("backward", loops=("body",), place=1),
        "end": place("backward", singles={"layers": 6}),
    }
    table = table_of(ops, {"body": loop("layers", 4, -2, 3)})
    names = ("end", "odd", "even", "odd", "even", "odd", "even")
    placed = place_events(run_of(*names), [table], is_gpu=False)
    assert [p.layer for p in placed] == [6, 5, 4, 3, 2, 1, 0]


def test_devices_are_counted_apart():
    table = table_of({"dot": place(loops=("body",))}, {"body": loop("layers", 0, 1, 2)})
    events = run_of("dot", "dot") + run_of("dot", "dot", device=1)
    placed = place_events(events, [table], is_gpu=False)
    for device in (0, 1):
        layers = [p.layer for p in placed if p.event.device == device]
        assert layers == [0, 1]


def test_an_idle_tick_does_not_shift_those_that_follow():
    """Stage 1 has nothing to do in tick 0; what it runs first is of tick 1."""
    ops = {
        "send": place(role="pp", loops=("ticks",)),
        "chunk": place(loops=("ticks",), is_direct=False),
        "layer": place(loops=("ticks", "layers"), is_direct=True),
    }
    loops = {"ticks": loop("ticks", 0, 1, 3), "layers": loop("layers", 0, 1, 2)}
    names = ("send", "send", "chunk", "layer", "layer", "send", "chunk", "layer")
    names = (*names, "layer")
    placed = place_events(run_of(*names), [table_of(ops, loops)], is_gpu=False)
    assert [p.tick for p in placed] == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [p.layer for p in placed if p.event.name == "layer"] == [0, 1, 0, 1]


def test_layers_inside_microbatches_have_both_numbers():
    ops = {"dot": place(loops=("outer", "inner")), "add": place(loops=("outer",))}
    loops = {
        "outer": loop("microbatches", 1, 1, 2),
        "inner": loop("layers", 0, 1, 2),
    }
    names = ("add", "dot", "dot", "add", "dot", "dot")
    placed = place_events(run_of(*names), [table_of(ops, loops)], is_gpu=False)
    dots = [(p.microbatch, p.layer) for p in placed if p.event.name == "dot"]
    assert dots == [(1, 0), (1, 1), (2, 0), (2, 1)]


# ------------------------------------------------------------------------- the seconds


def placed(start_s, stop_s, role="compute", phase="forward", name="x"):
    return Placed(
        event=Event(0, name, STEP, start_s * 1e9, stop_s * 1e9),
        phase=phase,
        role=role,
        is_recomputed=False,
        layer=None,
        tick=None,
        microbatch=None,
        is_slot=False,
        is_chosen=False,
    )


def test_communication_beside_computation_is_overlapped_and_the_rest_is_exposed():
    found = seconds_of(
        [
            placed(0.0, 4.0),
            placed(1.0, 6.0, "dp", "backward"),
            placed(7.0, 8.0, "tp"),
        ]
    )
    dp, tp = found.parts["backward", "dp"], found.parts["forward", "tp"]
    assert (dp.total_s, dp.exposed_s, dp.overlapped_s) == pytest.approx((5, 2, 3))
    assert (tp.total_s, tp.exposed_s) == pytest.approx((1, 1))
    assert found.parts["forward", "compute"].exposed_s == pytest.approx(4)
    assert (found.span_s, found.idle_s) == pytest.approx((8, 1))


def test_computation_counts_also_if_communication_began_first():
    found = seconds_of([placed(0.0, 4.0, "dp"), placed(1.0, 3.0)])
    assert found.parts["forward", "dp"].exposed_s == pytest.approx(2)
    assert found.parts["forward", "compute"].exposed_s == pytest.approx(2)


def test_of_two_collectives_at_once_the_first_counts():
    found = seconds_of([placed(0.0, 3.0, "dp"), placed(1.0, 5.0, "tp")])
    assert found.parts["forward", "dp"].exposed_s == pytest.approx(3)
    assert found.parts["forward", "tp"].exposed_s == pytest.approx(2)


times = st.integers(0, 30)
some_events = st.lists(
    st.tuples(
        *(times, times, st.sampled_from(["compute", "tp", "dp"])),
        st.sampled_from(["forward", "backward", "unknown"]),
    ),
    max_size=12,
)


@given(some_events)
def test_exposed_and_idle_seconds_add_up_to_the_span(rows):
    events = [placed(a, a + b, role, phase) for a, b, role, phase in rows]
    found = seconds_of(events)
    exposed = sum(part.exposed_s for part in found.parts.values())
    assert exposed + found.idle_s == pytest.approx(found.span_s, abs=1e-9)
    for part in found.parts.values():
        assert part.exposed_s <= part.total_s + 1e-9
    # Second by second: computation hides all, and no second counts twice.
    for phase in ("forward", "backward", "unknown"):
        others = [e for e in events if e.role == "compute" and e.phase != phase]
        if not others:
            seconds = {
                s
                for a, b, role, p in rows
                if (role, p) == ("compute", phase)
                for s in range(a, a + b)
            }
            part = found.parts.get((phase, "compute"))
            assert (part.exposed_s if part else 0) == pytest.approx(len(seconds))


def test_no_events_take_no_time():
    found = seconds_of([])
    assert (found.span_s, found.idle_s, dict(found.parts)) == (0, 0, {})

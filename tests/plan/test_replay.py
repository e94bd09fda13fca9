"""Schedules replayed on four streams take the time that is worked out by hand."""

import itertools

import pytest

from mjax.hardware.gpus import GPUS
from mjax.plan.cost import CostModel
from mjax.plan.hlo.work import Work
from mjax.plan.replay import Replay, replay
from tests.plan.modules import MESHES, recorded, written

# One product takes 1 s (2 x 10^3 FLOPs), one permute inside a node 3 s (200 bytes), one
# between nodes 10 s, a sum over all four devices 7.5 s of the network and 4.5 s of the
# node links (300 bytes), a copy to the host 2 s (200 bytes), a kernel of 600 bytes or
# less nothing.
SECONDS = CostModel(
    peak_flops_per_s=2000.0,
    memory_bytes_per_s=1e30,
    node_link_bytes_per_s=200 / 3,
    network_bytes_per_s=20.0,
    host_link_bytes_per_s=100.0,
    host_link_efficiency=1.0,
    product_efficiency=1.0,
    kernel_efficiency=1.0,
    memory_efficiency=1.0,
    node_link_efficiency=1.0,
    network_efficiency=1.0,
    launch_s=0.0,
    collective_launch_s=0.0,
    node_hop_s=0.0,
    network_hop_s=0.0,
)


def play(
    entry: str, body: str = "", turns: int = 2, **kernel_flops: int | float
) -> Replay:
    module, analysis = written(entry, body, turns)
    return replay(module, analysis, SECONDS, kernel_flops=kernel_flops)


@pytest.mark.parametrize(
    ("entry", "body", "turns", "step_s", "exposed_s"),
    [
        ("product; product", "", 2, 2, 0),
        # What stands between start and done hides the transfer, no more.
        ("start a; product; done a", "", 2, 3, 2),
        ("start a; product; product; product; product; done a", "", 2, 4, 0),
        ("product; start a; done a; product", "", 2, 5, 3),
        # A synchronous one hides behind nothing.
        ("product; permute; product", "", 2, 5, 3),
        # Transfers queue for the link.
        ("start a; start b; product; done a; done b", "", 2, 6, 5),
        ("start a; start b; product; done a; product; done b", "", 2, 6, 4),
        ("start a; permute; done a", "", 2, 6, 6),
        # A loop, and one transfer across it.
        ("loop", "start a; product; done a", 4, 12, 8),
        ("start a; loop; done a", "product", 2, 3, 1),
        ("start a; loop; done a", "product", 5, 5, 0),
        # The first turn finds the link busy for 3 s, the others do not.
        ("start a; loop; done a", "start b; product; done b", 3, 12, 9),
        # It is busy for 3, then for 2, then for 1 second.
        ("start a; loop; permute; done a", "product", 2, 6, 4),
        # Of a choice, the two products of the other branch.
        ("either", "product", 2, 2, 0),
        ("call; call", "permute", 2, 6, 6),
    ],
)
def test_a_schedule_takes_the_time_worked_out_by_hand(
    entry: str, body: str, turns: int, step_s: int, exposed_s: int
):
    played = play(entry, body, turns)
    assert played.step_s == pytest.approx(step_s)
    assert played.exposed_s.get("tp", 0) == pytest.approx(exposed_s)
    assert played.compute_s == pytest.approx(step_s - exposed_s)


@pytest.mark.parametrize(
    ("entry", "body", "step_s", "exposed_s"),
    [
        # Node links and network carry data at once.
        ("start a dp; start b; product; done b; done a", "", 10, {"tp": 2, "dp": 7}),
        ("start a dp; permute; done a", "", 10, {"tp": 3, "dp": 7}),
        # A wait is booked to the earlier transfer until the awaited one starts.
        (
            "start a dp; start m all; product; done m all; done a",
            "",
            17.5,
            {"dp": 9, "mixed": 7.5},
        ),
        (
            "start a dp; start m all; done a; done m all",
            "",
            17.5,
            {"dp": 10, "mixed": 7.5},
        ),
        # A collective between nodes with members inside a node is on both.
        ("start m all; start b; done b; done m all", "", 7.5, {"mixed": 4.5, "tp": 3}),
        (
            "start a; start b; start m all; done m all; done a; done b",
            "",
            10.5,
            {"tp": 6, "mixed": 4.5},
        ),
        ("start m all; product; done m all", "", 7.5, {"mixed": 6.5}),
        # Across a loop of two turns.
        (
            "start a dp; loop; done a",
            "start b; product; done b",
            10,
            {"tp": 4, "dp": 4},
        ),
        ("start m all; loop; done m all", "permute", 10.5, {"mixed": 4.5, "tp": 6}),
        (
            "start a dp; loop; done a",
            "start m all; done m all",
            25,
            {"dp": 10, "mixed": 15},
        ),
    ],
)
def test_a_wait_belongs_to_what_occupies_the_link(
    entry: str, body: str, step_s: float, exposed_s: dict[str, float]
):
    played = play(entry, body)
    assert played.step_s == pytest.approx(step_s)
    assert dict(played.exposed_s) == pytest.approx(exposed_s)
    assert played.compute_s == pytest.approx(step_s - sum(exposed_s.values()))
    waits = [e for events in played.timeline.values() for e in events]
    assert {e.role for e in waits if e.stream == "wait"} == set(exposed_s)


@pytest.mark.parametrize(
    ("entry", "step_s", "exposed_s"),
    [
        ("store a; product; stored a", 2, {"host": 1}),
        ("store a; product; product; product; stored a", 3, {}),
        # The link to the host is one of its own, on which copies queue.
        ("store a; start b; product; done b; stored a", 3, {"tp": 2}),
        ("store a; store b; product; stored b; stored a", 4, {"host": 3}),
        ("loop", 4, {"host": 2}),
    ],
)
def test_a_copy_to_the_host_runs_beside_compute(entry: str, step_s: int, exposed_s):
    played = play(entry, body="store a; product; stored a")
    assert played.step_s == pytest.approx(step_s)
    assert played.exposed_s == pytest.approx(exposed_s)


def test_waits_are_kept_apart_by_the_computation_that_waits():
    # The first of three turns waits for the transfer from before the loop.
    played = play("start a; loop; done a", "start b; product; done b", turns=3)
    assert played.waits_s == pytest.approx({("body", "tp"): 9})
    played = play("start a dp; loop; done a", "permute", turns=3)
    assert played.waits_s == pytest.approx({("body", "tp"): 9, ("main", "dp"): 1})


def test_a_kernel_takes_its_bytes_or_the_flops_that_the_caller_gives():
    by_bytes = play("kernel")
    assert (by_bytes.step_s, by_bytes.timed_by_bytes) == (
        pytest.approx(0, abs=1e-20),
        ("f/attention/call",),
    )
    by_flops = play("kernel; kernel", attention=10_000)
    assert (by_flops.step_s, by_flops.timed_by_bytes) == (pytest.approx(10), ())


def test_a_kernel_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"names 'norm', and no .*\['f/attention/ca"):
        play("kernel", norm=1.0)
    with pytest.raises(ValueError, match=r"several names: \['attention', 'call'\]"):
        play("kernel", attention=1, call=2)


def test_flops_of_a_kernel_in_a_branch_that_is_not_taken_are_no_mistake():
    # Of the two branches the one with products counts.
    assert play("either", "kernel", attention=10_000).step_s == pytest.approx(2)


def test_the_timeline_is_of_one_pass_of_each_computation():
    played = play("start a; loop; done a", "product", turns=2)
    (product,) = played.timeline["body"]
    assert (product.stream, product.kind) == ("compute", "product")
    assert (product.start_s, product.stop_s) == (0, 1)
    sent, loop, wait = played.timeline["main"]
    assert (sent.stream, sent.role, sent.stop_s) == ("node", "tp", 3)
    assert (loop.kind, loop.start_s, loop.stop_s) == ("loop", 0, 2)
    assert (wait.stream, wait.name, wait.stop_s) == ("wait", "a", 3)


def test_the_timeline_shows_a_collective_on_each_link_that_it_uses():
    node, network, _ = play("start m all; done m all").timeline["main"]
    assert (node.stream, node.name, node.stop_s) == ("node", "m", 4.5)
    assert (network.stream, network.name, network.stop_s) == ("network", "m", 7.5)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("gpu", GPUS)
def test_a_recorded_step_adds_up_and_no_stream_does_two_things(name: str, gpu: str):
    played = replay(*recorded(name), CostModel.of(GPUS[gpu]))
    exposed, sent = sum(played.exposed_s.values()), sum(played.communication_s.values())
    assert played.step_s == pytest.approx(played.compute_s + exposed)
    assert exposed <= sent
    for events in played.timeline.values():
        for streams in (("compute", "wait"), ("node",), ("network",)):
            own = [event for event in events if event.stream in streams]
            for before, after in itertools.pairwise(own):
                assert before.start_s <= before.stop_s <= after.start_s + 1e-12


def test_products_are_bound_by_flops_or_by_bytes():
    cost = CostModel.of(GPUS["h200"], product_efficiency=0.5, launch_s=1e-6)
    peak, memory = 989.4e12, 4.8e12 * cost.memory_efficiency
    large = Work(flops=10**12, products=1, product_dtype="bf16")
    assert cost.product_s(large, 1) == pytest.approx(1e12 / (peak / 2) + 1e-6)
    assert cost.product_s(large, 10**12) == pytest.approx(1e12 / memory + 1e-6)
    wide = Work(flops=10**12, products=1, product_dtype="f32")
    assert cost.product_s(wide, 1) == pytest.approx(2e12 / (peak / 2) + 1e-6)
    narrow = Work(flops=10**12, products=1, product_dtype="f8e4m3fn")
    assert cost.product_s(narrow, 1) == pytest.approx(0.5e12 / (peak / 2) + 1e-6)
    with pytest.raises(ValueError, match="speed of matmuls in s32 is not known"):
        cost.product_s(Work(flops=1, products=1, product_dtype="s32"), 1)


def test_a_collective_takes_latency_and_the_slower_link():
    cost = CostModel.of(GPUS["h200"])
    found = {c.name: c for c in recorded("groups")[1].collectives}
    in_node, across, everywhere = (found[n] for n in ("iota", "pairs", "all"))
    link = 450e9 * cost.node_link_efficiency
    card = 50e9 * cost.network_efficiency
    launch = cost.collective_launch_s
    assert cost.collective_s(in_node) == pytest.approx(
        launch + 3 * cost.node_hop_s + 7168 / link
    )
    assert cost.collective_s(across) == pytest.approx(
        launch + cost.network_hop_s + 256 / card
    )
    # Eight members of the group on each node share the bytes between their cards.
    assert cost.collective_s(everywhere) == pytest.approx(
        launch + 4 * cost.network_hop_s + max(7680 / link, 7680 / (8 * card))
    )
    assert cost.links_s(in_node) == {"node": cost.collective_s(in_node)}
    assert cost.links_s(across) == {"network": cost.collective_s(across)}
    assert cost.links_s(everywhere) == {
        "node": pytest.approx(7680 / link),
        "network": cost.collective_s(everywhere),
    }


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("product_efficiency", 1.5, "product_efficiency must be above 0 .*, got 1.5"),
        ("memory_efficiency", 0.0, "memory_efficiency must be above 0 .*, got 0"),
        ("launch_s", -1.0, "launch_s must be at least 0, got -1"),
        ("network_bytes_per_s", 0.0, "network_bytes_per_s must be positive"),
    ],
)
def test_an_impossible_speed_is_refused(field: str, value: float, error: str):
    with pytest.raises(ValueError, match=error):
        CostModel.of(GPUS["h200"], **{field: value})

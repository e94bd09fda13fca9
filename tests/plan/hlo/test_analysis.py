"""What a schedule sends and computes is counted as it runs."""

import dataclasses

import pytest

from mjax.mesh.axes import AxisSizes
from mjax.plan.hlo.analysis import Collective, analyse
from mjax.plan.hlo.collectives import KINDS, wire_bytes
from mjax.plan.hlo.parse import parse
from tests.plan.modules import MESHES, recorded, text_of, written


def by_name(name: str) -> dict[str, Collective]:
    return {c.name: c for c in recorded(name)[1].collectives}


def test_collectives_of_a_scanned_layer_are_found_with_their_bytes_and_links():
    gather, scatter, reduce = recorded("layers")[1].collectives
    assert (gather.kind, gather.dtype, gather.axes) == ("all-gather", "bf16", ("tp",))
    assert (gather.role, gather.tier, gather.group_size) == ("tp", "node", 8)
    assert (gather.runs, gather.wire_bytes) == (4, 64 * 256 * 2 * 7)
    assert scatter.wire_bytes == 512 * 256 * 2 * 7 // 8
    assert (reduce.role, reduce.tier, reduce.runs) == ("dp", "network", 1)
    assert reduce.wire_bytes == 64 * 256 * 2
    assert reduce.axes == ("dp_shard",)  # dp_replicate is named too, of size 1
    assert gather.op_name.endswith("while/body/eval_jaxpr/all_gather")


def test_only_what_runs_between_start_and_done_hides_a_collective():
    module, analysis = recorded("layers")
    gather, scatter, reduce = analysis.collectives
    product = 2 * 512 * 256 * 128
    assert (gather.is_async, gather.products) == (True, 0)
    assert (scatter.is_async, scatter.products, scatter.flops) == (True, 1, product)
    assert (reduce.is_async, reduce.products) == (False, 0)
    assert analysis.overlapped_bytes_fraction("tp") == 0.5
    assert analysis.overlapped_bytes_fraction("dp") == 0.0
    assert analysis.overlapped_bytes_fraction("pp") is None
    sent = 4 * (gather.wire_bytes + scatter.wire_bytes) + reduce.wire_bytes
    assert analysis.wire_bytes() == sent
    assert analysis.overlapped_bytes_fraction() == 4 * scatter.wire_bytes / sent
    # XLA computes the first of the two products twice, once into the stacked result.
    assert (analysis.num_products, analysis.flops) == (12, 12 * product)
    assert module.num_partitions == 16


def test_groups_of_every_form_give_axes_roles_and_communicators():
    found = by_name("groups")
    dp = ("dp_replicate", "dp_shard")
    assert {name: c.axes for name, c in found.items()} == {
        "mesh": ("tp",),
        "two_axes": dp,
        "part_of_axis": ("dp_replicate",),
        "device_ids": ("tp",),
        "listed": ("pp",),
        "iota": (*dp, "tp"),
        "turned": ("dp_replicate",),
        "all": ("pp", *dp, "tp"),
        "pairs": ("pp",),
    }
    assert [c.role for c in found.values()] == (
        ["tp", "dp", "dp", "tp", "pp", "mixed", "dp", "mixed", "pp"]
    )
    across = {name for name, c in found.items() if c.tier == "network"}
    assert across == {"listed", "all", "pairs"}
    assert found["all"].group_size_in_node == 8
    # tp twice, pp twice, dp_replicate twice; dp; a node; all. `alone` has none.
    assert recorded("groups")[1].communicators == 6


def test_wrapped_starts_are_collectives_or_compute():
    _, analysis = recorded("async")
    scatter, gather = analysis.collectives
    assert (scatter.name, scatter.kind) == ("start", "reduce-scatter")
    assert (scatter.is_async, scatter.products) == (True, 2)
    assert scatter.flops == 2 * (2 * 64 * 32 * 16)
    assert scatter.wire_bytes == 64 * 32 * 2 // 2
    # A start that XLA made synchronous is not hidden by what follows it.
    assert (gather.kind, gather.is_async) == ("all-gather", False)
    assert not gather.is_overlapped
    assert (analysis.num_products, analysis.flops) == (3, 3 * (2 * 64 * 32 * 16))
    assert analysis.communicators == 1


def test_nested_loops_multiply_and_kernels_hide_too():
    send = by_name("pipeline")["send"]
    assert (send.kind, send.role, send.tier) == ("collective-permute", "pp", "network")
    assert (send.group_size, send.runs) == (2, 5)
    assert send.wire_bytes == 128 * 128 * 2
    assert (send.products, send.kernels, send.flops) == (3, 3, 3 * 2 * 128**3)
    _, analysis = recorded("pipeline")
    assert analysis.num_kernels == 5 * 3
    only_kernels = dataclasses.replace(send, products=0)
    assert only_kernels.is_overlapped


def test_the_heaviest_branch_counts_and_all_branches_give_communicators():
    _, analysis = recorded("pipeline")
    assert analysis.branches == {"choice": "loss", "two_ways": "norm"}
    assert [c.name for c in analysis.collectives] == ["send", "total", "over_dp"]
    assert analysis.num_products == 5 * (3 + 1)
    assert analysis.flops == 5 * (3 + 1) * 2 * 128**3
    without_norm = text_of("pipeline").replace("norm}", "idle}")
    without_norm = without_norm.replace("computation=%norm", "computation=%idle")
    fewer = analyse(parse(without_norm), *MESHES["pipeline"])
    assert (analysis.communicators, fewer.communicators) == (3, 2)


def test_work_of_each_computation_is_of_one_pass():
    _, analysis = recorded("pipeline")
    products = {name: work.products for name, work in analysis.work.items()}
    assert products["layer"] == 1
    assert products["tick"] == 4
    assert products["main"] == 20
    assert analysis.calls["main", "ticks"] == (("tick", 5),)


def test_a_call_is_followed():
    _, analysis = written("call; start a; call; done a", body="permute; product")
    inner, outer, other = analysis.collectives
    assert [c.computation for c in (inner, outer, other)] == ["body", "main", "body"]
    assert (outer.products, inner.products) == (1, 0)
    assert analysis.num_products == 2


def test_one_device_sends_nothing():
    text = text_of("groups").replace("num_partitions=16", "num_partitions=1")
    lines = [line for line in text.splitlines() if "use_global" not in line]
    lines = [line for line in lines if "%turned" not in line and "%pairs" not in line]
    one = "%all = f32[1024]{0} all-reduce(%x), replica_groups={}, to_apply=%sum"
    lines.insert(-2, f"  {one}")
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    analysis = analyse(parse("\n".join(lines)), sizes)
    assert (analysis.collectives, analysis.communicators) == ((), 0)
    assert analysis.overlapped_bytes_fraction() is None


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-gather", 300),
        ("reduce-scatter", 75),
        ("all-to-all", 75),
        ("all-reduce", 150),
        ("collective-permute", 100),
    ],
)
def test_bytes_on_the_wire_are_those_of_a_ring(kind: str, sent: int):
    assert wire_bytes(kind, 100, 4) == sent
    assert wire_bytes(kind, 1, 3) >= 1  # rounded up


def test_an_unknown_kind_has_no_bytes():
    with pytest.raises(ValueError, match="kind must be one of all-gather, "):
        wire_bytes("gather", 1, 2)
    assert len(KINDS) == 5


SIZES, GPUS_PER_NODE = MESHES["pipeline"]


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("num_partitions=8", "num_partitions=4", "for 4 devices, but the mesh.* has 8"),
        ('{"n":"3"}', '{"m":"3"}', "trip count of loop layers is unknown"),
        ("=[4,2]<=[8]", "=<8>", "replica_groups are not understood: '<8>'"),
        ("replica_groups=[4,2]<=[8], ", "", "total .*does not list its members"),
        ("{0,4},{4,0}", "{0,4,1}", "source_target_pairs are not understood"),
        ("all-reduce(%n)", "collective-broadcast(%n)", "over_dp is a collective-bro"),
        ('"mosaic_gpu_v2"', '"__onednn$matmul"', "matmul in attention"),
        ("convert(%dot)", "convolution(%dot, %dot)", "matmul in narrow"),
        ("lhs_contracting_dims={1}", "lhs_contracting_dims={2}", "dot contracts dims"),
    ],
)
def test_what_cannot_be_counted_is_refused(before: str, after: str, error: str):
    text = text_of("pipeline")
    assert before in text
    with pytest.raises(ValueError, match=error):
        analyse(parse(text.replace(before, after)), SIZES, GPUS_PER_NODE)


def test_a_caller_may_say_how_often_an_unknown_loop_runs():
    module = parse(text_of("pipeline").replace('{"n":"3"}', '{"m":"3"}'))
    analysis = analyse(module, SIZES, GPUS_PER_NODE, unknown_trip_count=7)
    assert analysis.num_products == 5 * (7 + 1)

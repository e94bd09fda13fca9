"""The search lists layouts that run, fit, and keep to the rules it says it keeps."""

import dataclasses

import pytest

from mjax.config.command_line import parse
from mjax.config.sizes import check_sizes
from mjax.config.train import TrainConfig
from mjax.hardware.described import NoPluginError
from mjax.mesh.axes import resolve
from mjax.plan import closed_form
from mjax.plan.options import Topology
from mjax.plan.search import (
    HIDDEN,
    Candidate,
    Row,
    as_json,
    compile_best,
    ranked,
    search,
    table,
)
from mjax.plan.topology import with_vocabulary
from mjax.run.ending import is_ours
from tests.plan.plans import GIB, RUNS, make_plan, memory, modelled

# Small enough to search in seconds, and too little memory for a layout without shards.
FLAGS = "--recipe gpt-tp8 --model.layers 6 --batch.size 32 --device-memory-gib 16"
TOPOLOGY = Topology(gpu="h100", nodes=2)
USABLE = TOPOLOGY.description.memory_bytes


def config_of(flags: str) -> TrainConfig:
    return with_vocabulary(parse(flags.split(), RUNS, "prog")[0])


@pytest.fixture(scope="module")
def found() -> list[Candidate]:
    return search(config_of(FLAGS), TOPOLOGY, windows=(512,))


def test_the_flags_of_a_row_are_the_run_of_the_row(found):
    for candidate in found:
        config = config_of(f"{FLAGS} {candidate.flags}")
        assert config == candidate.config
        assert resolve(config.mesh, TOPOLOGY.num_gpus) == candidate.sizes


def test_the_batch_stays_and_tp_stays_inside_a_node(found):
    for candidate in found:
        assert candidate.config.batch.size == 32
        assert candidate.sizes.num_devices == TOPOLOGY.num_gpus
        assert TOPOLOGY.gpus_per_node % candidate.sizes.tp == 0


def test_candidates_fit_and_the_fastest_comes_first(found):
    times = [candidate.step_s for candidate in found]
    assert times == sorted(times)
    assert all(c.memory_bytes <= c.usable_bytes < USABLE for c in found)


def test_dp_shard_is_the_smallest_that_fits(found):
    sharded = [c for c in found if c.sizes.dp_shard > 1]
    assert sharded
    for c in sharded:
        less = [d for d in range(1, c.sizes.dp_shard) if c.sizes.dp % d == 0]
        for shard in less:
            sizes = dataclasses.replace(
                c.sizes, dp_shard=shard, dp_replicate=c.sizes.dp // shard
            )
            needed = closed_form.estimate(c.config, sizes, TOPOLOGY).memory
            assert needed.total_bytes > c.usable_bytes


@pytest.mark.parametrize(
    ("num_chunks", "share"), [(1, 0), (2, 0.50), (4, 0.79), (8, 1)]
)
def test_chunks_hide_what_compiled_schedules_of_eight_devices_do(num_chunks, share):
    hidden = closed_form.hidden_by_chunks(num_chunks, 8)
    assert hidden == pytest.approx(share, abs=0.005)


def test_fewer_chunks_are_modelled_to_expose_more():
    topology = Topology(gpu="h100", nodes=1)
    run = "--recipe gpt-tp8 --batch.size 32 --mesh.tp 8 --mesh.tp-overlap chunks"

    def tp_s(flags: str) -> float:
        config = config_of(f"{run} {flags}")
        sizes = resolve(config.mesh, topology.num_gpus)
        return closed_form.estimate(config, sizes, topology).time.tp_s

    assert tp_s("") == 0
    assert 0 < tp_s("--mesh.tp-chunks 4") < tp_s("--mesh.tp-chunks 2")


def test_more_chunks_than_tp_are_set_back_and_no_mesh_is_lost():
    run = f"{FLAGS} --mesh.tp-overlap chunks"
    flags = f"{run} --mesh.tp-chunks 4"
    fixed = search(config_of(flags), TOPOLOGY)
    assert {c.sizes for c in fixed if c.sizes.tp == 2}
    for c in fixed:
        assert ("mesh.tp_chunks" in c.fields) == (c.sizes.tp == 2)
        assert config_of(f"{flags} {c.flags}") == c.config


def test_windows_are_tried_only_where_the_user_allows_them(found):
    assert {c.config.model.window for c in found} == {(None,), (512,)}
    plain = search(config_of(FLAGS), TOPOLOGY)
    assert {c.config.model.window for c in plain} == {(None,)}


def test_nothing_is_listed_where_nothing_fits():
    config = config_of(FLAGS.replace("memory-gib 16", "memory-gib 1"))
    assert search(config, TOPOLOGY) == []


def plan_in(step_s: float, total: int = 60 * GIB):
    now = modelled()
    scaled = {name: s * step_s for name, s in now.parts_s.items()}
    return make_plan(
        modelled=dataclasses.replace(now, parts_s=scaled), memory=memory(total)
    )


def test_the_first_that_fit_by_their_trace_are_compiled(found):
    compiled = []

    def plan_of(candidate):
        compiled.append(candidate)
        return plan_in(1.0 / len(compiled))

    def traced_bytes(candidate):
        return 2 * USABLE if candidate is found[0] else 1

    rows, no_compiler = compile_best(
        found, 2, plan_of=plan_of, traced_bytes=traced_bytes, is_ours=is_ours
    )
    assert compiled == found[1:3]
    assert no_compiler == ""
    assert [row.candidate for row in rows[:2]] == [found[2], found[1]]
    assert rows[-1].candidate is found[0]
    assert "from the trace it needs" in rows[-1].refused


def test_a_layout_that_cannot_be_built_is_kept_with_the_reason(found):
    def plan_of(candidate):
        Topology(gpu="h100", nodes=0)  # our own refusal
        return plan_in(1.0)

    rows, _ = compile_best(
        found[:2], 1, plan_of=plan_of, traced_bytes=lambda _: 1, is_ours=is_ours
    )
    reason = "--nodes must be at least 1, got 0"
    assert [row.refused for row in rows] == [reason] * 2
    assert reason in table(rows)


def test_an_error_that_is_not_ours_is_a_bug_and_no_row(found):
    def plan_of(candidate):
        raise ValueError("heads do not divide")

    with pytest.raises(ValueError, match="heads do not divide"):
        compile_best(
            found[:2], 1, plan_of=plan_of, traced_bytes=lambda _: 1, is_ours=is_ours
        )


def test_without_a_compiler_it_is_asked_once_and_nothing_counts_as_compiled(found):
    asked = []

    def plan_of(candidate):
        asked.append(candidate)
        raise NoPluginError("no compiler")

    rows, why = compile_best(
        found, 3, plan_of=plan_of, traced_bytes=lambda _: 1, is_ours=is_ours
    )
    assert (len(asked), why) == (1, "no compiler")
    assert [row.candidate for row in rows] == found
    for row in rows:
        assert as_json(row)["modelled"]["replay"] is None
        assert as_json(row)["memory_bytes"] is None


def test_what_was_compiled_and_fits_ranks_before_formulas_and_failures(found):
    slow, fast = plan_in(9.0), plan_in(2.0)
    large = plan_in(1.0, 140 * GIB)
    rows = [
        Row(candidate=found[0], refused="no"),
        Row(candidate=found[1], plan=large),
        Row(candidate=found[2]),
        Row(candidate=found[3], plan=slow),
        Row(candidate=found[4], plan=fast),
    ]
    order = [row.candidate for row in ranked(rows)]
    assert order[:3] == [found[4], found[3], found[2]]
    assert "(does not fit)" in table(rows)


def test_shards_over_nodes_take_two_steps_where_latency_decides():
    """A ring has 15 hops in one step, 1 + 7 in two; tp 8 leaves a node one shard."""
    slow = dataclasses.replace(HIDDEN, hop_s=1e-3)
    little = config_of(f"{FLAGS} --device-memory-gib 10")
    candidates = search(little, TOPOLOGY, constants=slow)
    across = [c for c in candidates if c.sizes.shards * c.sizes.tp > 8]
    assert {c.sizes.dp_node for c in across if c.sizes.tp < 8} == {2}
    assert {c.sizes.dp_node for c in candidates if c not in across} <= {1}
    for c in across:
        shards = c.sizes.dp_shard if c.sizes.dp_node > 1 else None
        assert c.config.mesh.dp_shard_per_node == shards
        assert resolve(c.config.mesh, TOPOLOGY.num_gpus) == c.sizes


def test_moments_on_the_host_are_shared_among_as_many_as_are_fastest():
    """Each GPU copies its part: few shards would fit, and copy for longer."""
    flags = f"{FLAGS} --device-memory-gib 64"
    on_device = search(config_of(flags), TOPOLOGY)
    on_host = search(config_of(f"{flags} --optim.state-memory host"), TOPOLOGY)
    assert min(c.sizes.shards for c in on_device) == 1
    assert all(c.sizes.shards == c.sizes.dp for c in on_host)
    assert on_host[0].step_s > on_device[0].step_s


def test_projections_in_8_bits_are_modelled_at_twice_the_rate():
    flags = f"{FLAGS} --precision.matmul"
    found = [
        closed_form.estimate(
            config := config_of(f"{flags} {matmul}"),
            resolve(config.mesh, TOPOLOGY.num_gpus),
            TOPOLOGY,
        )
        for matmul in ("compute", "fp8")
    ]
    assert found[1].time.products_s == pytest.approx(found[0].time.products_s / 2)


def test_the_flags_of_a_layout_in_one_step_take_back_two_steps():
    flags = f"{FLAGS} --mesh.tp 4 --mesh.dp-shard-per-node 2"
    one_step = [c for c in search(config_of(flags), TOPOLOGY) if c.sizes.dp_node == 1]
    assert one_step
    for candidate in one_step:
        config = config_of(f"{flags} {candidate.flags}")
        assert config == candidate.config


def test_inputs_of_layers_go_to_the_host_where_memory_is_short():
    """Only without a pipeline; where all fits, the inputs stay on the GPU."""
    node = Topology(gpu="h100", nodes=1)
    short, ample = (
        search(config_of(f"--recipe gpt-1b3 --device-memory-gib {gib}"), node)
        for gib in (13, 70)
    )
    offloaded = [c for c in short if c.config.model.remat == "offload"]
    assert [c.sizes.pp for c in offloaded] == [1]
    assert all(c.config.model.remat != "offload" for c in ample)


def test_weights_that_are_gathered_first_are_sharded():
    """All fits without shards; then there is nothing to gather, and train refuses."""
    flags = "--recipe gpt-tp8 --model.layers 6 --batch.size 32 --mesh.gather-first"
    node = Topology(gpu="h100", nodes=1)

    def keep(fields):
        return fields["pipeline.chunks"] == fields["batch.microbatches"] == 1

    found = search(config_of(flags), node, keep=keep)
    assert found
    for candidate in found:
        config = config_of(f"{flags} {candidate.flags}")
        check_sizes(config, resolve(config.mesh, node.num_gpus))
        assert candidate.sizes.shards == 2

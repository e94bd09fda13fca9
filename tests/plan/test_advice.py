"""Advice follows the numbers of the plan: what hurts is named, what helps fits."""

import dataclasses

import pytest

from mjax.config.command_line import parse
from mjax.config.sizes import smaller
from mjax.plan.advice import advise, bottleneck
from tests.plan.plans import GIB, RUNS, make_plan, memory, modelled

PIPELINE = "--recipe gpt-tp8 --mesh.pp 4 --batch.microbatches 16"
BUSY = f"{PIPELINE} --model.remat none"


def nobody_asks(_):
    raise AssertionError("a run that fits was traced again")


def flags_of(plan) -> str:
    return " ".join(advice.flags for advice in advise(plan, nobody_asks).advice)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"tp": 0.3, "dp": 0.1}, "waiting for tp, 30% of the step; 40.0 GiB over"),
        ({"tp": 0.1, "dp": 0.3}, "waiting for dp, 30% of the step; 3.0 GiB over dp"),
        ({"idle": 0.2}, "pipeline bubble, 20% of the step; stages wait before and"),
        ({"tp": 0.02}, "arithmetic: kernels run for 98%"),
    ],
)
def test_the_largest_loss_is_the_bottleneck(parts, words):
    assert words in bottleneck(make_plan(PIPELINE, modelled=modelled(**parts)))


def test_a_step_too_large_is_a_bottleneck_before_any_other():
    plan = make_plan(memory=memory(140 * GIB), modelled=modelled(tp=0.5))
    assert bottleneck(plan).startswith("memory: a step needs 140.0 GiB")


def test_waiting_for_tp_asks_for_chunks_and_nothing_else_does():
    assert "--mesh.tp-overlap chunks" in flags_of(make_plan(modelled=modelled(tp=0.1)))
    assert "tp-overlap" not in flags_of(make_plan(modelled=modelled(tp=0.01)))
    chunked = "--recipe gpt-tp8 --mesh.tp-overlap chunks"
    assert "tp-overlap" not in flags_of(make_plan(chunked, modelled=modelled(tp=0.1)))


def test_idle_stages_ask_for_chunks_or_microbatches():
    plan = advise(make_plan(BUSY, modelled=modelled(idle=0.15)), nobody_asks)
    chunks = next(a for a in plan.advice if "--pipeline.chunks" in a.flags)
    assert chunks.gain is not None
    assert chunks.gain > 0.02
    assert "bubble 17.6% of the ideal time, then" in chunks.why
    assert "--pipeline.chunks" not in flags_of(make_plan(BUSY))


def test_recomputing_with_room_to_spare_asks_for_less_of_it():
    flags = f"{PIPELINE} --batch.microbatches 64"
    assert "--model.remat none" in flags_of(make_plan(flags))
    tight = make_plan(flags, memory=memory(130 * GIB))
    assert "--model.remat" not in flags_of(tight)
    assert "--model.remat" not in flags_of(
        make_plan("--recipe gpt-tp8 --model.remat none")
    )


@pytest.mark.parametrize(("zero", "best"), [(2, "none"), (3, "core")])
def test_sharded_parameters_are_never_to_be_kept_gathered(zero, best):
    run = "--recipe gpt-tp8 --model.remat full --batch.microbatches 8"
    room = {"memory": memory(25 * GIB), "modelled": modelled()}
    plan = make_plan(f"{run} --zero {zero}", **room)
    assert f"--model.remat {best}" in flags_of(plan)


def test_advice_is_ranked_short_and_made_of_flags():
    plan = advise(
        make_plan(PIPELINE, modelled=modelled(tp=0.2, dp=0.1, idle=0.1)), nobody_asks
    )
    gains = [advice.gain or 0.0 for advice in plan.advice]
    assert len(gains) == 3
    assert gains == sorted(gains, reverse=True)
    for advice in plan.advice:
        parse([*PIPELINE.split(), *advice.flags.split()], RUNS, "prog")


def test_memory_of_a_change_is_said_to_be_estimated_before_compilation():
    """The closed form leaves out buffers of XLA, so the sign can be wrong."""
    plan = make_plan(PIPELINE, modelled=modelled(tp=0.2, dp=0.1, idle=0.1))
    assert plan.compile_s is not None
    for change in advise(plan, nobody_asks).advice:
        memory_words = change.why.split("; ")[-1]
        assert memory_words.startswith("memory ")
        assert memory_words.endswith(" a GPU, estimated before compilation")


def test_a_run_that_does_not_fit_gets_the_first_smaller_one_that_does():
    plan = make_plan("--recipe gpt-tp8 --model.remat none", memory=memory(140 * GIB))

    def traced_bytes(config):
        return 100 if config.batch.microbatches < 4 else 50

    (advice,) = advise(plan, traced_bytes).advice
    assert "--batch.microbatches 4" in advice.flags
    assert advice.gain is None
    assert "needs 70.0 GiB of 130.0 GiB" in advice.why


def test_the_smallest_run_is_tried_before_the_mesh_is_called_too_small():
    run = "--recipe gpt-1b3 --model.remat none --batch.microbatches 1"
    plan = make_plan(run, nodes=1, memory=memory(140 * GIB), modelled=modelled())
    *_, (words, smallest) = smaller(plan.config, plan.sizes)
    traced = []

    def traced_bytes(config):
        traced.append(config)
        return 50 if config == smallest else 100

    (advice,) = advise(plan, traced_bytes).advice
    assert advice.flags == words
    assert len(traced) == 10


def test_where_no_smaller_run_fits_the_model_must_be_split_further():
    plan = make_plan(memory=memory(140 * GIB))
    advice = advise(plan, lambda config: 100).advice
    assert "--mesh.pp" in advice[0].flags
    assert len(advice) == 2


def test_a_closed_form_plan_has_advice_too():
    plan = make_plan(modelled=modelled(tp=0.2))
    plan = dataclasses.replace(plan, communication=None, compile_s=None)
    assert "--mesh.tp-overlap chunks" in flags_of(plan)


@pytest.mark.parametrize(
    ("state", "is_advised"), [(2 * GIB, True), (60 * GIB, False)], ids=["pays", "slow"]
)
def test_moments_go_to_the_host_only_where_that_is_the_faster_remedy(state, is_advised):
    """Full remat fits too, and costs about a quarter of a step of one second."""

    def traced(config):
        is_smaller = config.optim.state_memory == "host" or config.model.remat == "full"
        return 100 * GIB if is_smaller else 140 * GIB

    parts = {"parameters": 20 * GIB, "optimizer state": state}
    plan = make_plan(BUSY, memory=memory(140 * GIB, parts=parts), modelled=modelled())
    first, *rest = advise(plan, traced).advice
    assert (first.flags == "--optim.state-memory host") == is_advised
    assert "--model.remat full" in [first.flags, *[advice.flags for advice in rest]]
    if is_advised:
        # 2 x 2 GiB over 64 GB/s, of which 85% are reached.
        assert "2.0 GiB of moments are on the host" in first.why
        assert "0.079 s per step, modelled (7.9% of it)" in first.why


@pytest.mark.parametrize("where", ["device", "host"])
def test_fewer_shards_are_not_advised_where_their_moments_cost_more_to_copy(where):
    """With moments on the host each GPU copies its part, which fewer shards enlarge."""
    run = f"--recipe llama3-8b --batch.microbatches 4 --optim.state-memory {where}"
    room = {"memory": memory(30 * GIB), "communication": None}
    plan = make_plan(run, modelled=modelled(dp=0.2), **room)
    assert ("--mesh.dp-shard" in flags_of(plan)) == (where == "device")


def test_inputs_of_layers_go_to_the_host_where_nothing_else_is_enough():
    plan = make_plan("--recipe gpt-13b", memory=memory(140 * GIB), modelled=modelled())

    def traced(config):
        return 100 if config.model.remat == "offload" else 140

    (advice,) = advise(plan, traced).advice
    assert advice.flags == "--model.remat offload"
    assert "layer inputs are on the host" in advice.why


def test_inputs_of_layers_go_to_the_host_to_run_fewer_microbatches():
    run = "--recipe gpt-1b3 --model.remat full --batch.microbatches 4"
    tight = make_plan(run, nodes=1, memory=memory(128 * GIB), modelled=modelled())
    assert "--model.remat offload --batch.microbatches 2" in flags_of(tight)

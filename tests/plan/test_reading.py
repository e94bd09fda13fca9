"""What a plan reads off a module: as much as the analysis, choices by the schedule."""

import pytest

from mjax.config.command_line import parse
from mjax.hardware.gpus import GPUS
from mjax.model.counts import flops_per_token, visible_pairs
from mjax.plan import reading
from mjax.plan.cost import CostModel
from mjax.plan.hlo.parse import parse as parse_module
from mjax.plan.options import Topology
from mjax.plan.replay import Replay, replay
from mjax.recipes import RECIPES
from tests.plan.modules import SCHEDULE, TICKS, recorded, text_of, with_choice

TOPOLOGY = Topology(gpu="h200", nodes=2, gpus_per_node=4)
FLAGS = "--recipe debug --model.layers 4 --batch.size 16 --batch.microbatches 4"
CONFIG = parse(FLAGS.split(), RECIPES, "prog")[0]
NO_SLOTS: reading.Slots = frozenset()


def played(module, analysis) -> Replay:
    return replay(module, analysis, CostModel.of(GPUS["h200"]))


@pytest.mark.parametrize("name", ["layers", "groups", "pipeline"])
def test_all_that_the_analysis_counts_is_in_the_table(name):
    module, analysis = recorded(name)
    runs = reading.count_runs(module, analysis)
    found = reading.communication(analysis, runs, runs)
    assert sum(row.num_bytes for row in found.traffic) == analysis.wire_bytes()
    assert sum(row.count for row in found.traffic) == sum(
        c.runs for c in analysis.collectives
    )
    assert found.communicators == analysis.communicators
    for role in ("tp", "dp", "pp", "mixed"):
        share = analysis.overlapped_bytes_fraction(role)
        assert found.overlapped_fraction(role) == share


def test_without_a_pipeline_the_parts_of_a_step_add_up_to_its_replay():
    module, analysis = recorded("layers")
    runs = reading.count_runs(module, analysis)
    found = played(module, analysis)
    model = reading.modelled(
        CONFIG, analysis.sizes, TOPOLOGY, found, runs, runs, NO_SLOTS
    )
    assert model.step_s == pytest.approx(found.step_s)
    assert sum(model.exposed_s.values()) == pytest.approx(sum(found.exposed_s.values()))
    tokens_per_s = 16 * 64 / found.step_s
    flops_per_s = tokens_per_s * flops_per_token(CONFIG.model, 64)
    peak = analysis.sizes.num_devices * GPUS["h200"].peak_bf16_flops_per_s
    assert model.tokens_per_s == pytest.approx(tokens_per_s)
    assert model.mfu == pytest.approx(flops_per_s / peak)


@pytest.mark.parametrize(
    ("op_name", "loss"),
    [
        (f"{TICKS}/phase.loss/cond", 2),
        (f"{TICKS}/eval_jaxpr/eval_jaxpr/phase.loss/cond", 2),
        # A tick embeds for the next one, the first microbatch before the first tick.
        (f"{TICKS}/eval_jaxpr/cond", 1),
        (f"{TICKS}/exchange/cond", 1),
        # Every tick takes those of a layer, and some stage that of a slot.
        (f"{TICKS}/while/body/cond", 5),
        (f"{TICKS}/skip/cond", 5),
        ("jit(train_step)/optimizer/cond", 5),
    ],
)
def test_only_choices_of_a_tick_are_taken_less_often_than_they_stand(op_name, loss):
    module, analysis = with_choice(op_name)
    every = reading.count_runs(module, analysis)
    taken = reading.count_runs(module, analysis, SCHEDULE)
    assert every["loss"] == every["tick"] == taken["tick"] == 5
    assert taken["layer"] == every["layer"] == 5 * 3
    assert taken["loss"] == pytest.approx(loss)
    rows = reading.communication(analysis, every, taken).traffic
    assert next(r.count for r in rows if r.role == "tp") == loss


def test_a_choice_taken_less_often_takes_less_time_and_sends_less():
    module, analysis = with_choice(f"{TICKS}/phase.loss/cond")
    every = reading.count_runs(module, analysis)
    taken = reading.count_runs(module, analysis, SCHEDULE)
    found = played(module, analysis)
    sizes = analysis.sizes
    all_taken = reading.modelled(CONFIG, sizes, TOPOLOGY, found, every, every, NO_SLOTS)
    model = reading.modelled(CONFIG, sizes, TOPOLOGY, found, every, taken, NO_SLOTS)
    loss_s = sum(
        e.stop_s - e.start_s
        for e in found.timeline["loss"]
        if e.stream in ("compute", "wait")
    )
    assert all_taken.step_s == pytest.approx(found.step_s)
    assert all_taken.step_s - model.step_s == pytest.approx(3 * loss_s)
    assert model.exposed_s["tp"] == pytest.approx(all_taken.exposed_s["tp"] * 2 / 5)


def test_the_largest_kernels_bound_by_memory_are_named_by_their_origin():
    module, analysis = recorded("layers")
    runs = reading.count_runs(module, analysis)
    found = played(module, analysis)
    model = reading.modelled(
        CONFIG, analysis.sizes, TOPOLOGY, found, runs, runs, NO_SLOTS
    )
    largest = reading.memory_bound(module, found, runs)
    assert 1 <= len(largest) <= 3
    times = list(largest.values())
    assert times == sorted(times, reverse=True)
    assert sum(times) <= model.parts_s["kernels bound by memory"] * (1 + 1e-9)
    assert not any("shard_map" in name for name in largest)


def test_attention_kernels_have_the_flops_of_the_pairs_that_are_seen():
    module, analysis = recorded("pipeline")
    sizes = analysis.sizes
    found = reading.kernel_flops(CONFIG, sizes, module)
    model = CONFIG.model
    rows = 16 // (sizes.dp * 4)
    pairs = (visible_pairs(64, 16) + visible_pairs(64, None)) / 2
    # Two products of 2 FLOPs a pair, head and entry, for the heads of one of tp.
    per_pair = 4 * model.head_width * model.heads / sizes.tp
    assert found == {"attention_forward": pytest.approx(rows * pairs * per_pair)}


@pytest.mark.parametrize(
    ("kernel", "products"),
    [("attention_dq", 3), ("attention_dkv", 4), ("attention_fused", 5)],
)
def test_backward_kernels_have_the_flops_of_their_products(kernel, products):
    module, analysis = recorded("pipeline")
    forward = reading.kernel_flops(CONFIG, analysis.sizes, module)
    text = text_of("pipeline").replace("attention_forward", kernel)
    found = reading.kernel_flops(CONFIG, analysis.sizes, parse_module(text))
    assert found == {kernel: pytest.approx(forward["attention_forward"] * products / 2)}

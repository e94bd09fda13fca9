"""The pictures of a plan: the whole step, as long as modelled, and its parts."""

import itertools

import pytest

from mjax.config.command_line import parse
from mjax.hardware.gpus import GPUS
from mjax.plan import reading
from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import analyse
from mjax.plan.hlo.parse import parse as parse_module
from mjax.plan.options import Topology
from mjax.plan.pictures import pictures
from mjax.plan.replay import Replay, replay
from mjax.plan.result import Picture, Span
from mjax.recipes import RECIPES
from tests.plan.modules import MESHES, SCHEDULE, TICKS, recorded, text_of, with_choice

CONFIG = parse(["--recipe", "debug", "--model.layers", "4"], RECIPES, "prog")[0]
TOPOLOGY = Topology(gpu="h200", nodes=2, gpus_per_node=4)


def played(module, analysis) -> Replay:
    return replay(module, analysis, CostModel.of(GPUS["h200"]))


def drawn(module, analysis, schedule=None) -> tuple[Picture, ...]:
    return pictures(
        module,
        analysis,
        played(module, analysis),
        every=reading.count_runs(module, analysis),
        taken=reading.count_runs(module, analysis, schedule),
        schedule=schedule,
    )


def test_the_whole_step_comes_first_then_what_takes_the_time():
    whole, *others = drawn(*recorded("pipeline"))
    assert (whole.where, whole.runs) == ("the whole step", 1)
    assert {p.name: p.runs for p in others}["layer"] == 15
    assert {p.where for p in others} == {
        "one iteration of a loop",
        "one run of a branch",
    }
    times = [
        p.runs
        * sum(s.stop_s - s.start_s for s in p.spans if s.kind not in ("loop", "branch"))
        for p in others
    ]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("unit", "where"),
    [
        ("ticks", "one tick of the loop over ticks"),
        ("microbatches", "one microbatch of the loop over microbatches"),
        ("layers", "one iteration of the loop over layers"),
    ],
)
def test_a_picture_says_which_loop_it_is_of(unit, where):
    text = text_of("layers").replace("shard_map/while", f"shard_map/{unit}.0.1.4/while")
    module = parse_module(text)
    analysis = analyse(module, *MESHES["layers"])
    found = {p.name: p.where for p in drawn(module, analysis)}
    assert found["region_0.2_spmd"] == where


def in_tick(name: str, tick: int, choice: str) -> str:
    """Write a conditional of an unrolled tick, whose heavier branch is a loss."""
    scopes = f"jit(train_step)/shard_map/ticks.{tick}.1.1/while/body/{choice}cond"
    return (
        f"  %{name} = bf16[128,128]{{1,0}} conditional(%turn, %end, %end), "
        f'branch_computations={{%idle, %loss}}, metadata={{op_name="{scopes}"}}\n'
    )


AFTER = (
    "  %turn = s32[] get-tuple-element(%ticks), index=0\n"
    "  %end = bf16[128,128]{1,0} get-tuple-element(%ticks), index=1\n"
    f"{in_tick('never', 2, 'phase.loss/')}{in_tick('half', 2, 'exchange/')}"
    f"{in_tick('always', 3, 'phase.loss/')}"
    "  ROOT %after = bf16[128,128]{1,0} fusion(%end, %end), kind=kCustom, "
    "calls=%matmul\n"
)
"""Instructions after the loop; one of two stages runs the branch called half."""


def on_compute(picture: Picture) -> list[Span]:
    spans = [span for span in picture.spans if span.stream in ("compute", "wait")]
    return sorted(spans, key=lambda span: span.start_s)


@pytest.mark.parametrize("choice", ["phase.loss/", "exchange/", ""])
def test_the_picture_of_the_whole_step_is_as_long_as_the_modelled_step(choice):
    module, analysis = with_choice(f"{TICKS}/{choice}cond", AFTER)
    found = played(module, analysis)
    every = reading.count_runs(module, analysis)
    taken = reading.count_runs(module, analysis, SCHEDULE)
    sizes = analysis.sizes
    model = reading.modelled(
        CONFIG, sizes, TOPOLOGY, found, every, taken, slots=frozenset()
    )
    whole = drawn(module, analysis, SCHEDULE)[0]
    boxes = on_compute(whole)
    assert [span.name for span in boxes] == ["ticks", "half", "always", "after"]
    seconds = [span.stop_s - span.start_s for span in boxes]
    assert sum(seconds) == pytest.approx(model.step_s)
    assert seconds[1] == pytest.approx(seconds[2] / 2)
    assert max(s.stop_s for s in whole.spans) == pytest.approx(model.step_s)
    assert whole.mean_s == pytest.approx(model.step_s)
    assert whole.branches == ()
    assert model.step_s < 0.95 * found.step_s  # the replay takes the choice every time


def test_a_tick_is_drawn_with_all_branches_and_its_mean_is_that_of_the_step():
    module, analysis = with_choice(f"{TICKS}/phase.loss/cond")
    whole, *others = drawn(module, analysis, SCHEDULE)
    (tick,) = (p for p in others if p.name == "tick")
    (branch,) = tick.branches
    assert (branch.part, branch.runs) == ("head and loss", pytest.approx(2))
    (box,) = (s for s in tick.spans if s.name == "choice")
    assert box.kind == "branch"
    assert box.stop_s - box.start_s == pytest.approx(branch.seconds)
    (loss,) = (p for p in others if p.name == "loss")
    assert branch.seconds == pytest.approx(max(s.stop_s for s in loss.spans))
    drawn_s = max(s.stop_s for s in tick.spans)
    assert tick.mean_s == pytest.approx(drawn_s - 3 / 5 * branch.seconds)
    (loop,) = (s for s in whole.spans if s.name == "ticks")
    assert loop.stop_s - loop.start_s == pytest.approx(5 * tick.mean_s)


def test_boxes_touch_and_a_wait_ends_with_its_transfer():
    module, analysis = with_choice(f"{TICKS}/phase.loss/cond", AFTER)
    for picture in drawn(module, analysis, SCHEDULE):
        boxes = on_compute(picture)
        for before, after in itertools.pairwise(boxes):
            assert before.stop_s == pytest.approx(after.start_s)
        for wait in (span for span in boxes if span.stream == "wait"):
            sent = [s for s in picture.spans if s.name == wait.name and s != wait]
            assert max(s.stop_s for s in sent) == pytest.approx(wait.stop_s)


@pytest.mark.parametrize(
    ("scopes", "passes"),
    [
        ("", ()),
        ("phase.forward/", ("forward",)),
        ("phase.forward/transpose(jvp())/", ("backward",)),
        ("phase.loss/", ("head and loss",)),
    ],
)
def test_a_picture_is_named_by_the_scopes_of_its_kernels(scopes, passes):
    text = text_of("layers").replace("shard_map/while", f"shard_map/{scopes}while")
    module = parse_module(text)
    analysis = analyse(module, *MESHES["layers"])
    found = drawn(module, analysis)
    assert {p.name: p.passes for p in found}["region_0.2_spmd"] == passes
    whole = next(p for p in found if p.where == "the whole step")
    assert {s.passes for s in whole.spans if s.kind == "loop"} == {passes}
    assert not any(s.passes for s in whole.spans if s.stream != "compute")

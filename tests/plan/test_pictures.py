"""The pictures of a plan are of the computations that take its time."""

import pytest

from mjax.hardware.gpus import GPUS
from mjax.plan import reading
from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import analyse
from mjax.plan.hlo.parse import parse as parse_module
from mjax.plan.pictures import pictures
from mjax.plan.replay import Replay, replay
from tests.plan.modules import MESHES, recorded, text_of


def played(module, analysis) -> Replay:
    return replay(module, analysis, CostModel.of(GPUS["h200"]))


def test_pictures_are_of_what_takes_the_time_and_count_its_runs():
    module, analysis = recorded("pipeline")
    runs = reading.count_runs(module, analysis)
    found = pictures(module, analysis, played(module, analysis), runs)
    assert {p.name: p.runs for p in found}["layer"] == 15
    assert {p.where for p in found} == {"the body of a loop", "a branch"}
    times = [
        p.runs * sum(s.stop_s - s.start_s for s in p.spans if s.kind != "loop")
        for p in found
    ]
    assert times == sorted(times, reverse=True)


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
    runs = reading.count_runs(module, analysis)
    found = pictures(module, analysis, played(module, analysis), runs)
    assert {p.name: p.passes for p in found}["region_0.2_spmd"] == passes
    whole = next(p for p in found if p.where == "the whole step")
    assert {s.passes for s in whole.spans if s.kind == "loop"} == {passes}
    assert not any(s.passes for s in whole.spans if s.stream != "compute")

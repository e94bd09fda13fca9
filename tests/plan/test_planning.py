"""What a plan cannot know of a compiled step is in its notes."""

import pytest

from mjax.estimate.memory import Estimate
from mjax.plan.compile import CompiledMemory, Executable
from mjax.plan.host_copies import with_copies
from mjax.plan.options import Topology
from mjax.plan.page import page
from mjax.plan.planning import read
from mjax.plan.result import HOST_COPIES, Source
from tests.plan.modules import MESHES, text_of
from tests.plan.plans import GIB, make_plan, memory, modelled, settled

TRACED = Estimate(state=60, compute_copy=10, gradients=20, stash=0, working_set=30)
PIPELINE = "--mesh.pp 2 --model.layers 4 --batch.size 16 --batch.microbatches 4"
UNKNOWN = "XLA: some_option=True left out: this XLA does not know it"


def notes_of(name: str, flags: str, kernel: str = "attention_forward") -> str:
    """Read a recorded step, its kernel renamed, as that of a run; return the notes."""
    sizes, gpus_per_node = MESHES[name]
    executable = Executable(
        text=text_of(name).replace("attention_forward", kernel),
        needed=CompiledMemory(
            argument_bytes=60,
            output_bytes=60,
            aliased_bytes=60,
            temporary_bytes=60,
            code_bytes=0,
        ),
        params_bytes=20,
        traced=TRACED,
        trace_s=1.0,
        compile_s=1.0,
        notes=(UNKNOWN,),
    )
    topology = Topology(gpu="h200", nodes=2, gpus_per_node=gpus_per_node)
    config, _, _ = settled(f"--recipe debug {flags}", nodes=1)
    return "\n".join(read("debug", config, sizes, topology, executable).notes)


@pytest.mark.parametrize(
    ("flags", "is_noted"),
    [("--model.remat full", False), ("--model.remat offload", True)],
)
def test_copies_to_the_host_and_options_left_out_are_noted(flags, is_noted):
    notes = notes_of("layers", flags)
    assert UNKNOWN in notes
    assert ("copies to the host" in notes) == is_noted


@pytest.mark.parametrize(("kernel", "is_noted"), [("attention_forward", 0), ("new", 1)])
def test_kernels_that_are_priced_by_their_bytes_are_named(kernel, is_noted):
    notes = notes_of("pipeline", PIPELINE, kernel)
    assert ("for want of their FLOPs" in notes) == is_noted
    assert (kernel in notes) == is_noted


def test_copies_of_the_optimizer_state_lengthen_the_step():
    host = {"optimizer state": 8 * GIB}
    rows = (
        Source(name="norms", seconds=1.0, num_bytes=1, floor_s=None),
        Source(name="other", seconds=0.0, num_bytes=0, floor_s=None),
    )
    plan = make_plan(memory=memory(host=host), modelled=modelled(), sources=rows)
    found = with_copies(plan)
    # Twice over PCIe Gen5, of whose 64 GB/s 85% are reached.
    seconds = 2 * 8 * GIB / 64e9 / 0.85
    assert found.modelled.parts_s[HOST_COPIES] == pytest.approx(seconds)
    assert found.modelled.step_s == pytest.approx(1 + seconds)
    # The rows by source still add up to the step, and the last is what has no place.
    assert [row.name for row in found.sources] == ["norms", HOST_COPIES, "other"]
    assert sum(row.seconds for row in found.sources) == found.modelled.step_s
    assert found.modelled.mfu == pytest.approx(plan.modelled.mfu / (1 + seconds))
    assert "in pinned host memory: optimizer state, 8.0 GiB a GPU" in page(found)
    assert with_copies(make_plan(modelled=modelled())).modelled.step_s == 1.0

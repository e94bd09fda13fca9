"""What a plan cannot know of a compiled step is in its notes."""

import pytest

from mjax.estimate.memory import Estimate
from mjax.hardware.gpus import GPUS
from mjax.plan import closed_form
from mjax.plan.compile import CompiledMemory, Executable
from mjax.plan.host_copies import LINK_EFFICIENCY, input_waits_s
from mjax.plan.options import Topology
from mjax.plan.page import page
from mjax.plan.planning import modelled_by_formulas, read
from mjax.plan.result import HOST_COPIES
from tests.plan.modules import MESHES, text_of
from tests.plan.plans import GIB, make_plan, memory, settled

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


def test_options_left_out_are_noted():
    assert UNKNOWN in notes_of("layers", "")


@pytest.mark.parametrize(("kernel", "is_noted"), [("attention_forward", 0), ("new", 1)])
def test_kernels_that_are_priced_by_their_bytes_are_named(kernel, is_noted):
    notes = notes_of("pipeline", PIPELINE, kernel)
    assert ("FLOPs of these kernels are unknown" in notes) == is_noted
    assert (kernel in notes) == is_noted


def test_copies_of_the_optimizer_state_lengthen_the_step():
    on_device, on_host = (
        modelled_by_formulas(*settled(f"--recipe gpt-1b3 --optim.state-memory {where}"))
        for where in ("device", "host")
    )
    # Moments in float32, sharded over 64 GPUs, twice over PCIe Gen5, of whose 64 GB/s
    # 85% are reached. Embedding and head are not counted.
    weights = 24 * 12 * 2048**2 / 64
    seconds = 2 * 8 * weights / 64e9 / 0.85
    assert on_host.parts_s[HOST_COPIES] == pytest.approx(seconds, rel=1e-3)
    assert on_host.step_s == pytest.approx(on_device.step_s + seconds, rel=1e-3)
    assert on_host.mfu * on_host.step_s == pytest.approx(
        on_device.mfu * on_device.step_s
    )
    assert HOST_COPIES not in on_device.parts_s


def test_the_page_names_what_is_in_host_memory():
    plan = make_plan(memory=memory(host={"optimizer state": 8 * GIB}))
    assert "in pinned host memory: optimizer state, 8.0 GiB a GPU" in page(plan)


@pytest.mark.parametrize(
    ("layers_s", "waits_s"), [(8.0, 0.0), (4.0, 0.0), (2.0, 0.5), (0.4, 1.6)]
)
def test_copies_of_inputs_are_overlapped_by_the_pass_they_belong_to(layers_s, waits_s):
    """A second each way: a quarter of the time is forward, the rest backward."""
    gpu = GPUS["h100"]
    num_bytes = gpu.host_link_bytes_per_s * LINK_EFFICIENCY
    assert input_waits_s(num_bytes, layers_s, gpu) == pytest.approx(waits_s)


def test_offload_keeps_the_inputs_of_few_layers_on_the_gpu():
    found = {
        remat: closed_form.estimate(
            *settled(f"--recipe gpt-1b3 --model.remat {remat}", nodes=1)
        )
        for remat in ("full", "offload")
    }
    # 64 rows of 2048 tokens on a GPU, in four microbatches, in bfloat16.
    one_input = 16 * 2048 * 2048 * 2
    saved = found["full"].memory.total_bytes - found["offload"].memory.total_bytes
    assert saved == (24 - 3) * one_input
    assert found["full"].total_s == found["offload"].total_s

"""A full memory is explained: which one, what needs less, and the planner's command."""

import dataclasses
import shlex

import jax
import pytest

from mjax.config.command_line import parse_with
from mjax.config.train import TrainConfig, to_json
from mjax.estimate.memory import Estimate
from mjax.mesh.axes import AxisSizes
from mjax.plan.options import Options
from mjax.recipes import RECIPES
from mjax.run.out_of_memory import (
    Needs,
    OutOfMemoryError,
    explained,
    planner_command,
)

GIB = 2**30
FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes."
BRANCHES = (
    FULL + "\nBufferAssignment OOM Debugging.",
    "RESOURCE_EXHAUSTED: Failed to allocate request for 2.99GiB on device ordinal 0",
)
NEEDS = Needs(
    config=RECIPES["gpt-1b3"](),
    sizes=AxisSizes(pp=1, dp_replicate=1, dp_node=1, dp_shard=8, tp=1),
    estimate=Estimate(
        state=3 * GIB,
        compute_copy=2 * GIB,
        gradients=GIB,
        stash=0,
        working_set=64 * GIB,
    ),
    device_kind="NVIDIA H100 80GB HBM3",
    is_cpu=False,
    num_nodes=1,
    per_node=8,
    available_bytes=int(59.4 * GIB),
    host_bytes=512 * GIB,
    flags=["--recipe", "gpt-1b3"],
)


def message(needs: Needs, error: Exception) -> str:
    with (
        pytest.raises(OutOfMemoryError) as found,
        explained(needs, "compilation"),
    ):
        raise error
    return str(found.value)


@pytest.mark.parametrize("text", BRANCHES)
def test_a_full_gpu_is_explained_with_flags_and_the_planner(text: str):
    found = message(NEEDS, jax.errors.JaxRuntimeError(text))
    assert f"full during compilation ({text.splitlines()[0]})" in found
    assert "BufferAssignment" not in found
    assert "need 70.0 GiB of 59.4 GiB" in found
    for flag in ("--model.remat", "--batch.microbatches", "--optim.state-memory host"):
        assert found.count(flag) == 1
    assert found.endswith(planner_command(NEEDS))


def test_a_process_is_told_what_filled_the_gpu_of_another():
    assert "the memory of a GPU is full" in message(NEEDS, RuntimeError(FULL))


@pytest.mark.parametrize(
    ("zero", "remat", "pp", "advice"),
    [(1, "none", 2, "--zero 2"), (2, "core", 1, "--zero 3"), (2, "none", 1, None)],
)
def test_a_higher_zero_level_is_advised_only_if_it_is_accepted(zero, remat, pp, advice):
    config = NEEDS.config
    config = dataclasses.replace(
        config,
        zero=zero,
        mesh=dataclasses.replace(config.mesh, pp=pp),
        model=dataclasses.replace(config.model, remat=remat),
    )
    sizes = AxisSizes(pp=pp, dp_replicate=1, dp_node=1, dp_shard=8 // pp, tp=1)
    needs = dataclasses.replace(NEEDS, config=config, sizes=sizes)
    found = message(needs, jax.errors.JaxRuntimeError(FULL)).partition("; the planner")
    assert ("--zero" in found[0]) == (advice is not None)
    assert advice is None or f" or {advice} or " in found[0]


@pytest.mark.parametrize(
    ("kind", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-80g"),
        ("NVIDIA L40S", "h200"),
    ],
)
def test_the_planner_reads_the_run_and_its_gpus_from_the_command(tmp_path, kind, gpu):
    path = tmp_path / "a run" / "config.json"
    path.parent.mkdir()
    path.write_text(to_json(NEEDS.config))
    words = ["--config", str(path)]
    needs = dataclasses.replace(NEEDS, device_kind=kind, flags=words, num_nodes=2)
    program, *argv = shlex.split(planner_command(needs).removeprefix("python -m "))
    assert program == "mjax.plan"
    config, _, options = parse_with(Options(), argv, RECIPES, program)
    assert options == Options(gpu=gpu, nodes=2, gpus_per_node=8, search=True)
    assert config == dataclasses.replace(NEEDS.config, device_memory_gib=59.0)


def test_a_full_host_is_told_from_a_full_gpu():
    text = "Unable to allocate 7.45 GiB for an array with shape (1000000000,)"
    found = message(NEEDS, MemoryError(text))
    assert f"the memory of the host is full during compilation ({text})" in found
    assert "a checkpoint" in found
    estimate = dataclasses.replace(NEEDS.estimate, host_state=10 * GIB)
    pinned = dataclasses.replace(NEEDS, estimate=estimate)
    assert "each GPU needs 10.0 GiB of pinned memory" in message(pinned, MemoryError())
    on_cpu = dataclasses.replace(NEEDS, is_cpu=True, config=TrainConfig())
    found = message(on_cpu, jax.errors.JaxRuntimeError(FULL))
    assert "the memory of the host is full" in found
    assert "fewer simulated devices" in found
    assert "mjax.plan" not in found


def test_offload_is_no_remedy_on_a_cpu_whose_memory_is_named():
    on_cpu = dataclasses.replace(NEEDS, is_cpu=True, per_node=2, host_bytes=23 * GIB)
    found = message(on_cpu, jax.errors.JaxRuntimeError(FULL))
    assert "the host has 23.0 GiB, and each of its 2 devices needs" in found
    assert "--batch.microbatches" in found
    assert "offload" not in found


@pytest.mark.parametrize(
    ("is_cpu", "limit", "more"),
    [(True, "the host's memory, 23.0 GiB", "hosts"), (False, "GPU, 59.4 GiB", "GPUs")],
)
def test_a_state_that_does_not_fit_alone_is_helped_only_by_sharding(
    is_cpu: bool, limit: str, more: str
):
    needs = dataclasses.replace(
        NEEDS,
        estimate=dataclasses.replace(NEEDS.estimate, state=146 * GIB),
        is_cpu=is_cpu,
        per_node=1,
        host_bytes=23 * GIB,
    )
    found = message(needs, jax.errors.JaxRuntimeError(FULL))
    assert "the state at rest alone, 146.0 GiB, exceeds " in found
    assert limit in found
    assert f"a smaller model or more {more} by --mesh.tp, --mesh.pp" in found
    assert "--model.remat" not in found
    assert "--batch.microbatches" not in found


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit"),
        jax.errors.JaxRuntimeError("INTERNAL: Out of memory is not the cause"),
        ValueError(FULL),
    ],
)
def test_other_errors_pass(error: Exception):
    with pytest.raises(type(error)) as found, explained(NEEDS, "training"):
        raise error
    assert found.value is error

"""How many bytes XLA may combine into one collective over data parallelism."""

import pytest

from mjax.config.command_line import parse
from mjax.config.step import CombineConfig
from mjax.hardware import xla_flags
from mjax.hardware.combining import Thresholds, Weight, choose_thresholds
from mjax.hardware.described import abstract_mesh
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.recipes import RECIPES
from mjax.run import report
from mjax.step.traced import program_of

NORM, SMALL, LARGE = (Weight(size=n, is_matrix=n > 16) for n in (16, 1024, 4096))
LAYER = [NORM, SMALL, LARGE, SMALL]


def chosen(level: int = 2, *, is_pipeline: bool = False, **asked: int) -> Thresholds:
    return choose_thresholds(
        *(LAYER, LAYER[1:]),
        **asked,
        gather_itemsize=2,
        reduce_itemsize=4,
        level=level,
        shards=8,
        shards_per_node=4,
        is_pipeline=is_pipeline,
    )


def test_a_layer_shares_a_collective_and_its_result_is_a_shard_if_it_scatters():
    found = chosen()
    assert found.all_gather == 2 * (16 + 1024 + 4096 + 1024)
    assert found.reduce_scatter == 4 * (1024 + 4096 + 1024) // 4
    assert found.all_reduce == 4 * (1024 + 4096 + 1024) // 8


@pytest.mark.parametrize("level", [0, 1])
def test_an_all_reduce_without_a_scatter_carries_whole_gradients(level: int):
    assert chosen(level).all_reduce == 4 * (1024 + 4096 + 1024)


def test_a_pipeline_combines_no_two_matrices():
    found = chosen(is_pipeline=True)
    assert found.all_gather == 2 * SMALL.size < 2 * (SMALL.size + NORM.size)
    assert found.reduce_scatter == 4 * SMALL.size // 4


def test_what_the_user_asks_for_wins():
    found = chosen(gather_bytes=100, reduce_bytes=800)
    assert found == Thresholds(all_gather=100, reduce_scatter=200, all_reduce=100)
    with pytest.raises(ValueError, match=r"--combine\.gather-bytes must be at least 0"):
        CombineConfig(gather_bytes=-1)
    with pytest.raises(ValueError, match=r"--combine\.reduce-bytes must be at least 0"):
        CombineConfig(reduce_bytes=-1)


def options(dp_shard: int, thresholds: Thresholds) -> dict[str, xla_flags.Value]:
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=dp_shard, tp=8 // dp_shard)
    mesh = abstract_mesh(sizes, gpu="h100")
    found = xla_flags.choose(mesh, tp_chunks=1, thresholds=thresholds)
    lines = found.describe()
    used = found.as_compiler_options().items()
    assert all(any(f"{k}={v}: " in line for line in lines) for k, v in used)
    return {k: v for k, v in used if "combine_threshold" in k}


def test_a_step_with_data_parallelism_sets_every_threshold_and_says_so():
    thresholds = Thresholds(all_gather=3, reduce_scatter=2, all_reduce=1)
    assert options(8, thresholds) == {
        "xla_gpu_all_gather_combine_threshold_bytes": 3,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2,
        "xla_gpu_all_reduce_combine_threshold_bytes": 1,
    }
    assert options(1, thresholds) == {}


@pytest.mark.parametrize(
    ("flags", "tp", "expected"),
    [
        ("", 1, 2 * (12 * 2048**2 + 7 * 2048)),
        # Split over tp: the matrices, and the bias of the wider projection.
        ("--mesh.tp 2", 2, 2 * (12 * 2048**2 // 2 + 3 * 2048 + 4 * 2048 // 2)),
        ("--combine.gather-bytes 12345", 1, 12345),
    ],
)
def test_a_run_gathers_the_weights_of_a_layer_at_once(
    flags: str, tp: int, expected: int
):
    config, _ = parse(["--recipe", "gpt-1b3", *flags.split()], RECIPES, "prog")
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=8 // tp, tp=tp)
    program = program_of(config, abstract_mesh(sizes, gpu="h100"))
    found = program.xla_options.as_compiler_options()
    assert found["xla_gpu_all_gather_combine_threshold_bytes"] == expected


@pytest.mark.parametrize(
    ("gpu", "shards", "zero", "without_effect"),
    [
        ("h100", 8, 2, {}),
        ("h100", 8, 0, {"gather": "weights are not sharded with --zero 0"}),
        ("h100", 1, 2, {"gather": "and dp_shard 1, so none", "reduce": "dp is 1, so"}),
        (None, 8, 2, {"gather": "XLA has no such", "reduce": "XLA has no such"}),
    ],
)
def test_a_limit_without_effect_is_said_at_the_start(
    gpu: str | None, shards: int, zero: int, without_effect: dict[str, str]
):
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=shards, tp=8 // shards)
    thresholds = Thresholds(all_gather=3, reduce_scatter=2, all_reduce=1)
    mesh = abstract_mesh(sizes, gpu=gpu) if gpu else build_mesh(sizes)
    found = xla_flags.choose(mesh, tp_chunks=1, thresholds=thresholds)
    names = found.as_compiler_options()
    both = CombineConfig(gather_bytes=5, reduce_bytes=6)
    lines = [*report.describe_combine(both, names, sizes, zero)]
    for line, (name, why) in zip(lines, without_effect.items(), strict=True):
        assert f"warning: --combine.{name}-bytes" in line
        assert why in line
    assert [*report.describe_combine(CombineConfig(), names, sizes, zero)] == []

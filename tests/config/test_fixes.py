"""What a refusal of sizes advises is accepted by all checks."""

import dataclasses
import functools
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mjax.cli import flags
from mjax.config.command_line import parse
from mjax.config.fixes import MAX_FIXES, Devices, sizes_of
from mjax.config.sizes import as_flags, with_fields
from mjax.config.train import TrainConfig
from mjax.mesh.__main__ import Flags
from mjax.mesh.axes import MeshConfig

NUM_DRAWN = 150
NUM_PARSED = 20
"""Refusals whose fixes go through the command line, which takes 0.1 s for each."""

BASE = TrainConfig()
MESH: dict[str, Sequence[Any]] = {
    "mesh.pp": (1, 1, 2, 3, 4),
    "mesh.tp": (1, 1, 2, 3, 4, 8),
    "mesh.dp": (-1, -1, -1, 1, 2),
    "mesh.dp_shard": (None, None, None, None, 3),
}
OTHERS: dict[str, Sequence[Any]] = {
    "pipeline.chunks": (2, 3),
    "pipeline.schedule": ("gpipe", "1f1b", "interleaved-1f1b"),
    "pipeline.uneven_layers": (True,),
    "pipeline.idle": ("skip",),
    "mesh.tp_overlap": ("chunks",),
    "mesh.tp_chunks": (2, 4),
    "mesh.tp_across_hosts": (True,),
    "batch.size": (12, 24, 30),
    "batch.microbatches": (2, 4, 6),
    "model.layers": (3, 10, 12, 96),
    "model.heads": (6, 12),
    "model.head_dim": (32,),
    "model.kv_heads": (1, 2, 3, 6),
    "model.d_ff": (500,),
    "model.window": ((8, None), (8, 16, None)),
    "model.vocab_multiple": (1, 6),
    "model.remat": ("offload",),
    "data.seq_len": (101,),
}


def refusal_of(config: TrainConfig, devices: Devices) -> str:
    """Return why a run is refused; empty where it fits."""
    try:
        sizes_of(config, devices)
    except ValueError as refusal:
        return str(refusal)
    return ""


def fixes_of(refusal: str) -> list[str]:
    _, found, advice = refusal.partition("; nearest that fit: ")
    return advice.split(", or ") if found else []


@functools.cache
def refused() -> list[tuple[TrainConfig, Devices, str]]:
    """Draw runs and devices, and keep what is refused with the refusal."""
    rng = np.random.default_rng(25)
    found = []

    def pick[T](values: Sequence[T]) -> T:
        return values[int(rng.integers(len(values)))]

    for _ in range(NUM_DRAWN):
        few = rng.choice(list(OTHERS), size=rng.integers(1, 5), replace=False)
        fields = MESH | {name: OTHERS[name] for name in few}
        drawn = {name: pick(values) for name, values in fields.items()}
        product = drawn["mesh.pp"] * drawn["mesh.tp"] * abs(drawn["mesh.dp"])
        count = pick((product, product, 2 * product, 1, 8))
        devices = Devices(
            count=count,
            flag="simulate_devices",
            per_host=pick((None, None, max(1, count // 2))),
        )
        try:
            config = with_fields(BASE, drawn)
        except ValueError:  # the flags are refused on any mesh
            continue
        refusal = refusal_of(config, devices)
        if refusal:
            found.append((config, devices, refusal))
    return found


def test_the_drawn_runs_meet_the_checks_of_every_part():
    refusals = " ".join(refusal for _, _, refusal in refused())
    for rule in (
        "the number of devices must be --mesh.pp",
        "the number of devices must be a multiple of --mesh.pp",
        "--mesh.dp-shard must be a divisor of dp",
        "the 4 devices of a host",
        "--model.layers must be a multiple of --mesh.pp",
        "--model.layers must be at least --mesh.pp",
        "--batch.microbatches must be a multiple of --mesh.pp",
        "--pipeline.chunks must be 1",
        "--model.heads must be a multiple of --mesh.tp",
        "--data.seq-len must be a multiple of --mesh.tp",
        "--model.vocab-multiple 1, must be a multiple of --mesh.tp",
    ):
        assert rule in refusals


def test_nearly_all_refusals_have_a_fix_and_none_has_more_than_four():
    """Measured with 600 draws: 324 of 327; the others need a fifth flag."""
    counts = [len(fixes_of(refusal)) for _, _, refusal in refused()]
    assert np.count_nonzero(counts) >= 0.95 * len(counts)
    assert max(counts) <= MAX_FIXES


def test_all_checks_accept_what_a_refusal_advises():
    """Every rule is tried: the first refusal of each, then others at random."""
    by_rule = {re.sub(r"\d+|;.*", "", case[-1]): case for case in refused()}
    others = np.random.default_rng(1).permutation(len(refused()))
    cases = [*by_rule.values(), *(refused()[index] for index in others)]
    for config, devices, refusal in cases[:NUM_PARSED]:
        for fix in fixes_of(refusal):
            changed, _ = parse(fix.split(), {"demo": TrainConfig}, "", base=config)
            there = dataclasses.replace(
                devices, count=changed.simulate_devices or devices.count
            )
            assert refusal_of(changed, there) == "", (refusal, fix)


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh.tp": 3, "mesh.pp": 7, "mesh.dp": 5},
        {"mesh.pp": 7, "mesh.dp": 13, "mesh.dp_shard": 3},
        {"mesh.pp": 64, "mesh.tp": 8, "pipeline.chunks": 5, "batch.microbatches": 3},
        {"mesh.pp": 64, "mesh.tp": 8, "model.heads": 6, "model.head_dim": 32},
        {"mesh.dp_shard": 48, "mesh.pp": 4, "model.window": (8, 16, 32, 64, None)},
    ],
)
def test_advice_takes_less_than_half_a_second_on_many_devices(fields):
    fields |= {"model.layers": 96, "batch.size": 768, "data.seq_len": 8191}
    config = with_fields(BASE, fields)
    started_s = time.process_time()
    assert refusal_of(config, Devices(count=16_384, flag="simulate_devices"))
    assert time.process_time() - started_s < 0.5


def test_a_number_of_nodes_is_advised_where_nodes_are_what_is_counted():
    config = with_fields(BASE, {"mesh.pp": 8, "mesh.tp": 8, "model.layers": 8})
    config = with_fields(config, {"model.heads": 8, "batch.size": 12})
    devices = Devices(count=24, flag="nodes", per_flag=8, per_host=8)
    assert "--nodes 8" in refusal_of(config, devices)


@pytest.mark.parametrize(
    ("flags", "count", "message"),
    [
        (
            "--mesh.tp 4 --model.heads 6 --model.head-dim 32",
            4,
            "--model.heads must be a multiple of --mesh.tp 4, got 6; nearest that "
            "fit: --model.heads 8, or --mesh.tp 2",
        ),
        (
            "--mesh.tp 4 --model.d-ff 510",
            4,
            "--model.d-ff must be a multiple of --mesh.tp 4, got 510; nearest that "
            "fit: --model.d-ff 512, or --mesh.tp 2",
        ),
        (
            "--mesh.tp 2 --data.seq-len 101",
            2,
            "--data.seq-len must be a multiple of --mesh.tp 2, got 101; nearest that "
            "fit: --data.seq-len 102, or --mesh.tp 1",
        ),
        (
            "--mesh.tp 4 --model.heads 12 --model.kv-heads 6 --model.head-dim 32",
            4,
            "--model.kv-heads must be a multiple or a divisor of --mesh.tp 4, got 6; "
            "nearest that fit: --model.kv-heads 4, or --mesh.tp 2",
        ),
        (
            "--mesh.tp 4 --model.vocab-multiple 1",
            4,
            "--model.vocab-size 257, padded to a multiple of --model.vocab-multiple "
            "1, must be a multiple of --mesh.tp 4, got 257; nearest that fit: "
            "--model.vocab-multiple 4, or --mesh.tp 1",
        ),
        (
            "--batch.size 12 --batch.microbatches 2 --mesh.dp-shard 2",
            4,
            "--batch.size must be a multiple of dp x --batch.microbatches = 4 x 2 = "
            "8, got 12; nearest that fit: --batch.size 16, or --batch.microbatches 3",
        ),
        (
            "--mesh.dp 4 --mesh.tp 4",
            8,
            "the number of devices must be --mesh.pp 1 x --mesh.dp 4 x --mesh.tp 4 = "
            "16, got 8; nearest that fit: --mesh.dp -1, or --mesh.tp 2, or "
            "--simulate-devices 16",
        ),
        (
            "--mesh.tp 16",
            8,
            "the number of devices must be a multiple of --mesh.pp 1 x --mesh.tp 16 "
            "= 16, got 8; nearest that fit: --mesh.tp 4, or --simulate-devices 16 "
            "--model.heads 16",
        ),
        (
            "--mesh.tp 3",
            8,
            "the number of devices must be a multiple of --mesh.pp 1 x --mesh.tp 3 = "
            "3, got 8; nearest that fit: --mesh.tp 4",
        ),
        (
            "--mesh.pp 3 --mesh.dp 5 --mesh.tp 3",
            8,
            "the number of devices must be --mesh.pp 3 x --mesh.dp 5 x --mesh.tp 3 = "
            "45, got 8; nearest that fit: --mesh.pp 1 --mesh.dp -1 --mesh.tp 4",
        ),
        (
            "--mesh.dp-shard 3",
            8,
            "--mesh.dp-shard must be a divisor of dp, which is 8 on 8 devices, got "
            "3; nearest that fit: --mesh.dp-shard 4",
        ),
        (
            "--mesh.tp 4 --mesh.tp-overlap chunks --mesh.tp-chunks 8",
            4,
            "--mesh.tp-chunks must be at most --mesh.tp 4, got 8; nearest that fit: "
            "--mesh.tp-chunks 4, or --mesh.tp 1",
        ),
        (
            "--mesh.pp 4 --model.layers 10",
            4,
            "without --pipeline.uneven-layers, --model.layers must be a multiple of "
            "--mesh.pp 4 x --pipeline.chunks 1 = 4, got 10; nearest that fit: "
            "--pipeline.uneven-layers, or --model.layers 12, or --mesh.pp 2",
        ),
        (
            "--mesh.pp 4 --model.layers 3",
            4,
            "without --pipeline.uneven-layers, --model.layers must be a multiple of "
            "--mesh.pp 4 x --pipeline.chunks 1 = 4, got 3; nearest that fit: "
            "--model.layers 4, or --mesh.pp 1",
        ),
        (
            "--mesh.pp 4 --model.layers 3 --pipeline.uneven-layers",
            4,
            "--model.layers must be at least --mesh.pp 4 x --pipeline.chunks 1 = 4, "
            "got 3; nearest that fit: --model.layers 4, or --mesh.pp 2",
        ),
        (
            "--mesh.pp 4 --model.layers 8 --pipeline.chunks 2 --batch.size 48 "
            "--batch.microbatches 6",
            4,
            "with --pipeline.chunks 2, --batch.microbatches must be a multiple of "
            "--mesh.pp 4, got 6; nearest that fit: --pipeline.chunks 1, or "
            "--batch.microbatches 8, or --mesh.pp 2",
        ),
        (
            "--mesh.pp 4 --model.layers 8 --pipeline.chunks 2 --pipeline.schedule "
            "gpipe --batch.microbatches 8",
            4,
            "with --pipeline.schedule gpipe, --pipeline.chunks must be 1, got 2; "
            "nearest that fit: --pipeline.schedule interleaved-1f1b, or "
            "--pipeline.chunks 1",
        ),
        (
            "--mesh.pp 4 --pipeline.chunks 3 --model.layers 12 --model.window 8 16 "
            "None --batch.microbatches 4",
            4,
            "without --pipeline.uneven-layers, --model.layers must be a multiple of "
            "--mesh.pp 4 x --pipeline.chunks 3 x 3, the pattern of --model.window "
            "and --model.rope, = 36, got 12; nearest that fit: --model.layers 36, or "
            "--pipeline.chunks 1",
        ),
        (
            "--mesh.pp 2 --pipeline.uneven-layers --model.layers 7 --model.window 8 "
            "16 None",
            2,
            "the virtual stages of --mesh.pp 2 x --pipeline.chunks 1 hold whole "
            "patterns: --model.layers must be a multiple of 3, the pattern of "
            "--model.window and --model.rope, got 7; nearest that fit: --mesh.pp 1, "
            "or --model.layers 6",
        ),
        (
            "--mesh.pp 4 --model.remat offload",
            4,
            "--model.remat offload keeps the inputs of layers in host memory, but "
            "--pipeline.stash residuals keeps them in ring buffers on the "
            "device; nearest that fit: --model.remat full, or --pipeline.stash input",
        ),
        (
            "--mesh.pp 4 --pipeline.stash input --model.remat offload "
            "--model.offload-horizon 2",
            4,
            "--model.offload-horizon 2 needs --mesh.pp 1 and --pipeline.chunks 1, got "
            "--mesh.pp 4 and --pipeline.chunks 1: a stage loads the inputs of a "
            "virtual stage within one half-tick; nearest that fit: "
            "--model.offload-horizon None, or --mesh.pp 1",
        ),
        (
            "--mesh.pp 2 --mesh.tp 2 --mesh.tp-overlap chunks --pipeline.idle skip",
            4,
            "--pipeline.idle skip keeps idle stages out of the permutes of "
            "--mesh.tp-overlap chunks, and the other stages would wait forever; "
            "nearest that fit: --pipeline.idle compute, or --mesh.tp-overlap off",
        ),
        (
            "--mesh.gather-first --mesh.dp-shard 1",
            4,
            "--mesh.gather-first needs weights that are sharded over dp, got --mesh.dp "
            "4 with --mesh.dp-shard 1: there is nothing to gather; nearest that fit: "
            "--mesh.no-gather-first, or --mesh.dp-shard 2",
        ),
        (
            "--mesh.gather-first --pipeline.chunks 2 --model.d-model 30 --model.heads "
            "2",
            4,
            "with --mesh.gather-first and a pipeline, --model.d-model must be a "
            "multiple of --mesh.dp-shard 4, got 30; nearest that fit: "
            "--mesh.no-gather-first, or --mesh.dp-shard 2",
        ),
        (
            "--mesh.pp 4 --batch.size 48 --batch.microbatches 4",
            20,
            "--batch.size must be a multiple of dp x --batch.microbatches = 5 x 4 = "
            "20, got 48; nearest that fit: --batch.size 40",
        ),
    ],
)
def test_a_refusal_states_the_rule_the_values_and_the_nearest_fixes(
    flags: str, count: int, message: str
):
    config, _ = parse(flags.split(), {"demo": TrainConfig}, "")
    devices = Devices(count=count, flag="simulate_devices")
    assert refusal_of(config, devices) == message


def test_every_fix_that_the_mesh_program_suggests_works():
    """Through its command line, on a cluster and on simulated devices."""
    rng, num_fixes = np.random.default_rng(5), 0
    sizes = MESH | {"mesh.dp": (-1, 1, 2, 3), "mesh.dp_shard_per_node": (None, 2, 3)}
    for _ in range(120):
        given = {name: of[int(rng.integers(len(of)))] for name, of in sizes.items()}
        count, is_simulated = int(rng.integers(1, 13)), rng.random() < 0.5
        devices = Devices(
            count=count,
            flag="simulate_devices" if is_simulated else None,
            per_host=None if is_simulated else max(1, count // 2),
            is_mesh_alone=True,
        )
        try:
            mesh = MeshConfig(**{n.partition(".")[2]: v for n, v in given.items()})
        except ValueError:  # refused on any number of devices
            continue
        for fix in fixes_of(refusal_of(TrainConfig(mesh=mesh), devices)):
            words = [*as_flags(given).split(), *fix.split()]
            changed = flags.read(Flags, words, prog="mesh")
            there = dataclasses.replace(
                devices, count=changed.simulate_devices or devices.count
            )
            assert refusal_of(TrainConfig(mesh=changed.mesh), there) == "", (fix, given)
            num_fixes += 1
    assert num_fixes > 60


def test_the_mesh_program_suggests_sizes_of_the_mesh_alone():
    words = ["--simulate-devices", "6", "--mesh.tp", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "mjax.mesh", *words], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: the number of devices must be a multiple of --mesh.pp 1 x --mesh.tp 4 "
        "= 4, got 6; nearest that fit: --mesh.tp 3, or --simulate-devices 8\n"
    )

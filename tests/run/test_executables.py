"""The compiled step is cached for the next start, and no other step is loaded."""

import dataclasses
import inspect
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from mjax.ckpt.config import CkptConfig
from mjax.config.lora import LoraConfig
from mjax.config.run import ObserveConfig
from mjax.kernels.stamp import api as stamp
from mjax.recipes import RECIPES
from mjax.run.executables import name_of
from mjax.run.metrics import read_computed
from mjax.step import traced
from mjax.step.program import build_program

FLAGS = [
    *("--recipe", "debug", "--data.path", "synthetic", "--steps", "6"),
    *("--ckpt.every", "3", "--eval.every", "3", "--log.sample-tokens", "2"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def train(home, work_dir, *flags):
    words = [*FLAGS, "--work-dir", str(work_dir), *flags]
    done = subprocess.run(
        [sys.executable, "-m", "mjax.train", *words],
        env={**os.environ, "XDG_CACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kept(home):
    return sorted((home / "mjax" / "steps").iterdir())


@pytest.mark.slow
def test_a_second_start_loads_the_step_and_computes_the_same(home, tmp_path):
    first = train(home, tmp_path / "first")
    assert "start-up: compile" in first
    assert len(kept(home)) == 1
    second = train(home, tmp_path / "second", "--log.every", "2", "--ckpt.every", "2")
    assert "start-up: load" in second
    assert "warning" not in second
    for line in ("memory of a device", "model FLOPs"):  # as a trace would have told
        said = [[w for w in text.splitlines() if line in w] for text in (first, second)]
        assert said[0] == said[1]
    rows = [read_computed(tmp_path / name) for name in ("first", "second")]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_a_second_start_loads_a_step_with_stamps(home, tmp_path):
    flags = ("--observe.stamps", "True", "--observe.spans")
    first = train(home, tmp_path / "first", *flags)
    assert "start-up: compile" in first
    assert "warning" not in first
    second = train(home, tmp_path / "second", *flags)
    assert "start-up: load" in second
    spans = (tmp_path / "second" / "spans").rglob("*")
    assert any("device:0" in path.read_text() for path in spans if path.is_file())


LOADED = """
import sys
import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable
from mjax.kernels.stamp import api

arguments = jnp.zeros((2,)), jnp.ones((3, 3))
tree = jax.tree.structure
step = serialize_executable.deserialize_and_load(
    sys.stdin.buffer.read(), tree((arguments, {})), tree(arguments)
)
print(step(*arguments)[0][:, 0].tolist())
"""


def test_a_process_that_has_traced_no_stamp_runs_a_step_with_stamps():
    def step(x, y):
        log, y = stamp.begin(3, y, 7)
        log, x = stamp.append(log, x, 8)
        return log, x

    traced_step = jax.jit(step).trace(jnp.zeros((2,)), jnp.ones((3, 3)))
    payload, _, _ = serialize_executable.serialize(traced_step.lower().compile())
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        input=payload,
        capture_output=True,
    )
    assert done.stdout == b"[2, 7, 8, 0]\n", done.stderr.decode()


@pytest.mark.slow
def test_what_is_damaged_or_does_not_load_is_compiled(home, tmp_path):
    train(home, tmp_path / "first")
    for path in kept(home):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert "start-up: compile" in train(home, tmp_path / "damaged")
    assert "start-up: load" in train(home, tmp_path / "again")


@pytest.mark.slow
def test_it_may_be_switched_off(tmp_path):
    output = train(tmp_path, tmp_path / "run", "--no-keep-compiled")
    assert "start-up: compile" in output
    assert not (tmp_path / "mjax" / "steps").exists()


CONFIG = RECIPES["debug"]()


def mesh_of(order, axes=("pp", "tp")):
    devices = np.array([jax.devices()[index] for index in order])
    return Mesh(devices.reshape(1, 2), axes)


@pytest.mark.parametrize(
    ("is_same", "changes"),
    [
        (True, {"init_from": "adapters"}),
        (False, {"rank": 3}),
        (False, {"alpha": 8.0}),  # a constant of the step, which does not affect shapes
        (False, {"targets": ("wq",)}),
        (False, {"base_dtype": "bfloat16"}),
    ],
)
def test_a_step_with_adapters_is_kept_by_what_they_compute(is_same, changes):
    lora = LoraConfig(rank=2)
    names = [
        name_of(
            dataclasses.replace(CONFIG, init_from="base", lora=found),
            mesh_of([0, 1]),
            {},
        )
        for found in (lora, dataclasses.replace(lora, **changes))
    ]
    assert (names[0] == names[1]) is is_same


def test_a_step_with_stamps_is_another_one(monkeypatch):
    monkeypatch.setattr(traced, "writes_stamps", lambda wanted, mesh: bool(wanted))
    names = [
        name_of(
            dataclasses.replace(CONFIG, observe=ObserveConfig(stamps=wanted)),
            mesh_of([0, 1]),
            {},
        )
        for wanted in (None, True, False)
    ]
    assert names[0] == names[2] != names[1]


def test_no_argument_of_the_program_is_left_out_of_the_name():
    arguments = set(inspect.signature(build_program).parameters)
    found = traced.ingredients_of(CONFIG, mesh_of([0, 1]))
    assert arguments == {"mesh", *found}


@pytest.mark.parametrize(
    ("is_same", "changes"),
    [
        (True, {"work_dir": "elsewhere", "gc_every": 7}),
        (True, {"ckpt": CkptConfig(every=3)}),
        (False, {"steps": CONFIG.steps + 1}),  # the learning rate decays until then
        (False, {"seed": 1}),
        (False, {"zero": 3}),
        (False, {"optim": dataclasses.replace(CONFIG.optim, lr=1.0)}),
        (False, {"model": dataclasses.replace(CONFIG.model, rope_base=1e6)}),
        (False, {"data": dataclasses.replace(CONFIG.data, isolate_documents=False)}),
        (False, {"lora": LoraConfig(rank=2), "init_from": "base"}),
    ],
)
def test_the_file_is_of_what_goes_into_the_step_and_nothing_else(is_same, changes):
    mesh, facts = mesh_of([0, 1]), {"mjax/step/plain.py": "a1"}
    before = name_of(CONFIG, mesh, facts)
    assert (name_of(dataclasses.replace(CONFIG, **changes), mesh, facts) == before) is (
        is_same
    )
    assert name_of(CONFIG, mesh_of([1, 0]), facts) != before
    assert name_of(CONFIG, mesh_of([0, 1], ("tp", "pp")), facts) != before
    assert name_of(CONFIG, mesh, {"mjax/step/plain.py": "a2"}) != before

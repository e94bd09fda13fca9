"""Small training states, and ways to damage saved ones."""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mjax.ckpt import manifest
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.saving import Attempt

PATIENCE_S = 60


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: optax.OptState


def sharding(rows: int, columns: int, *spec: str | None) -> NamedSharding:
    mesh = jax.make_mesh(
        (rows, columns), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2
    )
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_state(where: NamedSharding, *, width: int = 8, step: int = 3) -> State:
    rng = np.random.default_rng(step)
    params = {
        "embed": rng.normal(size=(16, width)).astype(np.float32),
        "blocks": {"w": rng.normal(size=(4, width)).astype(jnp.bfloat16)},
    }
    params = jax.tree.map(lambda leaf: jax.device_put(leaf, where), params)
    replicated = NamedSharding(where.mesh, PartitionSpec())
    state = State(jnp.int32(step), params, optax.adamw(1e-3).init(params))
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, where if leaf.ndim else replicated), state
    )


def abstract(state: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        state,
    )


def assert_same(left: Any, right: Any) -> None:
    """Compare bit by bit: NaN is itself, and 0.0 is not -0.0."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def saved(manager: Checkpoints, state: Any, step: int, **facts: Any) -> None:
    """Save, and wait until it is committed."""
    manager.save(step, lambda: state, facts)
    assert manager.wait()


def attempts(manager: Checkpoints, enough: Callable[[list], bool]) -> list[Attempt]:
    """Collect the results of attempts until there are enough."""
    found: list[Attempt] = []
    end_s = time.monotonic() + PATIENCE_S
    while not enough(found):
        assert time.monotonic() < end_s, found
        found += manager.attempts()
        time.sleep(0.01)
    return found


def flip_a_bit(step_dir: os.PathLike) -> None:
    """Damage the largest file with values of arrays."""
    files = Path(step_dir, "state").glob("ocdbt.process_*/d/*")
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))


def copy_as_step(source: os.PathLike, target: os.PathLike) -> None:
    """Copy a step to another step number, with a valid manifest."""
    shutil.copytree(source, target)
    path = Path(target, manifest.MAIN_FILE)
    body = manifest.unseal(path.read_text(), "")
    path.write_text(manifest.seal(body | {"step": int(Path(target).name)}))


def make_newer(step_dir: os.PathLike) -> None:
    """Rewrite a manifest as an intact one of the next format version."""
    path = Path(step_dir, manifest.MAIN_FILE)
    body = manifest.unseal(path.read_text(), "")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest, "VERSION", manifest.VERSION + 1)
        path.write_text(manifest.seal(body))

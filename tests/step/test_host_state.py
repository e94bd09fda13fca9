"""Moments in host memory: the update in pieces is the one at once, but for rounding."""

import dataclasses
import functools
import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.config.optim import OptimConfig
from mjax.hardware.described import described_mesh, put_in_host_memory
from mjax.mesh.axes import AxisSizes
from mjax.mesh.host_memory import (
    HOST_KIND,
    check_host_memory,
    on_host,
    reaches_host,
    to_host,
)
from mjax.pipeline.config import PipelineConfig
from mjax.plan.compile import read_memory
from mjax.step import optim
from mjax.step.host_state import HostUpdate
from tests.training import (
    ONE_DEVICE,
    TINY,
    Layout,
    make_batch,
    make_mesh,
    make_program,
)

STEPS = 9
STACKED = {"blocks": {"w": True, "scale": True}, "embed": False, "norm": False}
DECAYED = {"blocks": {"w": True, "scale": False}, "embed": True, "norm": False}
SPECS = {
    "blocks": {"w": P("pp", "dp_shard", "tp"), "scale": P("pp", "dp_shard")},
    "embed": P("tp", "dp_shard"),
    "norm": P("dp_shard"),
}
SHAPES = {
    "blocks": {"w": (6, 8, 16), "scale": (6, 8)},
    "embed": (24, 8),
    "norm": (8,),
}
PIPELINED = Layout((2, 1, 2, 1), 2, 2, PipelineConfig(chunks=2))
MODEL = dataclasses.replace(TINY, layers=4)


def values(seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def make(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return jax.tree.map(make, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def kinds(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def moments(state: Any) -> Any:
    return state.opt_state["adam"].mu, state.opt_state["adam"].nu


def assert_same_bits(got: Any, wanted: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        got,
        wanted,
    )


def assert_equal_but_for_rounding(got: Any, wanted: Any, before: Any) -> None:
    """Compare two updates of one state with the roundings of float32.

    XLA fuses the two programs differently: it may round a multiplication that is added
    next, or not, and sums the squares of LAMB's norms in another order. That is one
    rounding of the result and a few of its change: 4 (0.4 seen).
    """

    def check(a: Any, b: Any, old: Any) -> None:
        a, b, old = (np.asarray(x, np.float64) for x in (a, b, old))
        bound = np.maximum(abs(b), abs(old)) + 4 * abs(b - old)
        assert (abs(a - b) <= np.finfo(np.float32).eps * bound).all()

    jax.tree.map(check, got, wanted, before)


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_an_update_in_pieces_is_one_at_once_but_for_rounding(name, accepted):
    """Two stages of three layers; gradients are clipped by value and by norm."""
    config = OptimConfig(name=name, clip_value=1.5, clip_norm=0.5)
    tx = optim.build_optimizer(
        config, num_steps=STEPS, stacked=STACKED, decayed=DECAYED
    )
    mesh = make_mesh((2, 1, 2, 2))
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    params, grads, mu, nu = (jax.device_put(values(n), placed) for n in range(4))
    state = cast(Any, tx.init(params))
    state["adam"] = state["adam"]._replace(mu=mu, nu=jax.tree.map(jnp.square, nu))
    norm = cast(jax.Array, optax.tree.norm(grads))

    @jax.jit
    def at_once(accept, grads, state, params):
        to_clip = optim.norm_to_clip(config, grads, norm)
        updates, after = tx.update(grads, state, params, norm=to_clip)
        new = optax.apply_updates(params, updates), after
        return optim.select(accept, new, (params, state))

    pieces = HostUpdate(
        config=config,
        num_steps=STEPS,
        stacked=STACKED,
        decayed=DECAYED,
        num_stages=2,
    )

    @jax.jit
    def in_pieces(accept, grads, state, params):
        to_clip = optim.norm_to_clip(config, grads, norm)
        return pieces(accept, to_clip, grads, state, params)

    there = jax.tree.map(on_host, placed)
    moved = state["adam"]._replace(
        mu=jax.device_put(mu, there), nu=jax.device_put(state["adam"].nu, there)
    )
    accept = jnp.asarray(accepted)
    wanted = at_once(accept, grads, state, params)
    got = in_pieces(accept, grads, type(state)(state | {"adam": moved}), params)
    assert_equal_but_for_rounding(got, wanted, (params, state))
    if not accepted:
        assert_same_bits(got, (params, state))
    assert kinds((got[1]["adam"].mu, got[1]["adam"].nu)) == {HOST_KIND}
    assert (int(got[1]["adam"].count) == 1) == accepted


@pytest.mark.parametrize(
    ("layout", "name"),
    [(PIPELINED, "lamb"), (ONE_DEVICE, "adamw")],
)
def test_runs_with_and_without_moments_on_the_host_resume_each_other(
    tmp_path, layout, name
):
    """Stages of two chunks: a checkpoint has the layers in another order."""
    programs = {
        memory: make_program(
            layout, MODEL, OptimConfig(name=name, state_memory=memory, warmup_steps=1)
        )
        for memory in ("device", "host")
    }
    for memory, other in (("device", "host"), ("host", "device")):
        program = programs[memory]
        state, metrics = program.train_step(program.init(), make_batch(program, 0))
        assert int(metrics["skipped"]) == 0
        assert kinds(moments(state)) == {HOST_KIND if memory == "host" else "device"}
        assert kinds(state.params) == {"device"}
        assert program.is_finite(state)
        before = program.to_saved(state)
        checkpoints = Checkpoints(tmp_path / memory, CkptConfig(keep=1))
        checkpoints.save(1, lambda before=before: before, {})
        assert checkpoints.wait()
        before = jax.tree.map(np.asarray, before)
        state, _ = program.train_step(state, make_batch(program, 1))
        undisturbed = program.to_saved(state)
        program = programs[other]
        found = checkpoints.restore(program.abstract_saved)
        checkpoints.close()
        assert found is not None
        state = program.from_saved(found.state)
        assert kinds(moments(state)) == {HOST_KIND if other == "host" else "device"}
        assert_same_bits(program.to_saved(state), before)
        state, _ = program.train_step(state, make_batch(program, 1))
        assert_equal_but_for_rounding(program.to_saved(state), undisturbed, before)


def _of(x: Any) -> Any:
    return x.sharding


def test_a_platform_without_host_memory_is_refused_with_the_remedy(monkeypatch):
    only = [types.SimpleNamespace(kind="device")]
    device = type(jax.devices()[0])
    monkeypatch.setattr(device, "addressable_memories", lambda _: only)
    mesh = make_mesh((1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"has only device; use --optim.state-memory"):
        check_host_memory(mesh, "--flag", "use --optim.state-memory device")
    assert not reaches_host(mesh)


@pytest.mark.plan
def test_a_gpu_holds_the_moments_of_few_layers_and_copies_beside_the_update():
    mesh = described_mesh(AxisSizes(pp=1, dp_replicate=1, dp_shard=2, tp=1))
    layers, size = 8, 1024
    config = OptimConfig(name="lamb")
    update = HostUpdate(
        config=config,
        num_steps=STEPS,
        stacked={"w": True},
        decayed={"w": True},
        num_stages=1,
    )
    tx = optim.build_optimizer(
        config, num_steps=STEPS, stacked={"w": True}, decayed={"w": True}
    )

    def step(state, params, grads):
        adam = jax.tree.map(to_host, (state["adam"].mu, state["adam"].nu))
        adam = state["adam"]._replace(mu=adam[0], nu=adam[1])
        state = type(state)(state | {"adam": adam})
        norm = cast(jax.Array, optax.tree.norm(grads))
        params, state = update(jnp.isfinite(norm), norm, grads, state, params)
        return state, params

    sharding = NamedSharding(mesh, P(None, "dp_shard"))
    shape = jax.ShapeDtypeStruct((layers, size, size), jnp.float32, sharding=sharding)
    whole = NamedSharding(mesh, P())
    shapes = jax.eval_shape(tx.init, {"w": shape})
    state = jax.tree.map(lambda s: _at(s, sharding if s.ndim else whole), shapes)
    step = jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=(jax.tree.map(_of, state), {"w": sharding}),
    )
    lowered = step.lower(state, {"w": shape}, {"w": shape})
    put_in_host_memory(
        lowered, [leaf.ndim == 3 for leaf in jax.tree.leaves(shapes)] + [False]
    )
    compiled = lowered.compile()
    layer = size * size // 2 * 4
    found = read_memory(compiled)
    assert found.host_bytes == 2 * layers * layer
    # Parameters and gradients; scalars.
    assert found.argument_bytes < 2 * layers * layer + 4096
    # Moments of this layer, of the next and of the last, its update, and scalars.
    assert found.temporary_bytes < 7 * layer + 2**15 < 2 * layers * layer
    bodies = (compiled.as_text() or "").split("\n\n")
    [body] = [text for text in bodies if "%dynamic-update-slice-start" in text]
    lines = [line.split("=")[0].strip() for line in body.splitlines()]

    def place(name: str) -> int:
        return next(n for n, line in enumerate(lines) if line.startswith(f"%{name}"))

    # The next layer comes while this one is updated; then this one goes back.
    start, done = place("dynamic-slice-start"), place("dynamic-slice-done")
    assert any("fusion" in line for line in lines[start + 1 : done])
    assert done < place("dynamic-update-slice-start")


def _at(s: Any, sharding: Any) -> Any:
    return functools.partial(jax.ShapeDtypeStruct, sharding=sharding)(s.shape, s.dtype)

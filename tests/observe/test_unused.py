"""Parameters without a gradient: in moments made by hand, and in real runs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mjax import train
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.cli import exit_codes
from mjax.layers.mlp import Mlp
from mjax.model.transformer import Transformer
from mjax.observe import gradient_traces, unused
from mjax.observe.gradient_traces import MU, NU, Unused
from tests.ckpt.states import saved

LAYERS = 3


class Arrays:
    """Moments in memory, cut into two pieces along each first dim."""

    def __init__(self, arrays):
        self.arrays = arrays

    def names(self):
        return self.arrays.keys()

    def shape(self, name):
        return self.arrays[name].shape

    def pieces(self, name):
        array = self.arrays[name]
        cut = array.shape[0] // 2
        for start, stop in ((0, cut), (cut, array.shape[0])):
            rest = tuple((0, size) for size in array.shape[1:])
            yield ((start, stop), *rest), array[start:stop]


def moments(**gradients):
    """Return mu and nu after one step of Adam with these gradients."""
    adam = optax.scale_by_adam(0.9, 0.95)
    grads = {name: jnp.asarray(value) for name, value in gradients.items()}
    _, state = adam.update(grads, adam.init(grads))
    found = {}
    for prefix, moment in ((MU, "mu"), (NU, "nu")):
        tree = optax.tree.get(state, moment)
        found |= {prefix + n.replace("__", "."): np.array(a) for n, a in tree.items()}
    return Arrays(found)


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_nothing_is_named_where_each_gradient_was_once_not_zero():
    found = gradient_traces.find_unused(
        moments(blocks__w=random(LAYERS, 4, 6), norm=random(4))
    )
    assert (found.num_parameters, found.unused, found.parts) == (LAYERS + 1, (), ())
    assert found.dead_layers == ()


def test_a_parameter_and_one_layer_of_a_stack_are_named():
    stack = random(LAYERS, 4, 6)
    stack[1] = 0
    found = gradient_traces.find_unused(
        moments(blocks__w=stack, blocks__b=random(LAYERS, 5), extra=np.zeros((2, 3)))
    )
    assert found.unused == (
        Unused(name="blocks.w", layer=1, shape=(4, 6), reason="no gradient"),
        Unused(name="extra", layer=None, shape=(2, 3), reason="no gradient"),
    )
    assert found.dead_layers == ()
    assert found.parts == ()


def test_a_layer_is_dead_if_all_its_parameters_are():
    of_w, of_b = random(LAYERS, 4, 6), random(LAYERS, 5)
    of_w[2], of_b[2] = 0, 0
    found = gradient_traces.find_unused(moments(blocks__w=of_w, blocks__b=of_b))
    assert found.dead_layers == (2,)


def test_one_head_is_a_part_and_no_unused_parameter():
    wq = random(LAYERS, 8, 4, 2)
    wq[1, :, 3] = 0
    found = gradient_traces.find_unused(moments(blocks__wq=wq))
    assert found.unused == ()
    (part,) = found.parts
    assert (part.layer, part.dim, part.size, part.indexes) == (1, 1, 4, (3,))


def test_rows_that_are_never_read_are_a_part():
    table = random(10, 4)
    table[7:] = 0
    (part,) = gradient_traces.find_unused(moments(table=table)).parts
    assert (part.name, part.dim, part.indexes) == ("table", 0, (7, 8, 9))


def test_a_gradient_whose_square_underflows_is_told_from_none():
    tiny = np.full((4, 2), 1e-25, np.float32)
    found = gradient_traces.find_unused(moments(small=tiny, none=np.zeros((4, 2))))
    assert {one.name: one.reason for one in found.unused} == {
        "none": "no gradient",
        "small": "tiny gradient",
    }


def test_a_layer_with_tiny_gradients_is_not_dead():
    found = gradient_traces.find_unused(moments(blocks__w=np.full((2, 3), 1e-25)))
    assert found.dead_layers == ()
    assert {one.reason for one in found.unused} == {"tiny gradient"}


def test_nan_counts_as_a_gradient():
    nan = np.full((4, 2), np.nan, np.float32)
    found = gradient_traces.find_unused(Arrays({NU + "w": nan, MU + "w": nan}))
    assert found.unused == ()


@pytest.mark.parametrize("beta2", [0.5, 0.9])
def test_a_gradient_is_forgotten_when_that_is_said(beta2):
    adam = optax.scale_by_adam(0.9, beta2)
    state = adam.init({"w": jnp.zeros(2)})
    _, state = adam.update({"w": jnp.full(2, 1e-6)}, state)
    after = gradient_traces.forgotten_after(beta2)

    def is_unused(nu):
        moments = Arrays({NU + "w": np.array(nu), MU + "w": np.zeros(2, np.float32)})
        return bool(gradient_traces.find_unused(moments).unused)

    first = np.asarray(optax.tree.get(state, "nu")["w"])
    nu = first.astype(np.float64)  # without the rounding of subnormal numbers
    assert not is_unused(nu * beta2 ** (after - 2))
    assert is_unused(nu * beta2**after)


# -------------------------------------------------------------------------- real runs


@pytest.fixture
def keep_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def trained(work_dir, *more):
    """Train some steps in this process; return what the command finds."""
    flags = [
        *("--recipe", "debug", "--data.path", "synthetic", "--steps", "4"),
        *("--model.layers", "4", "--model.window", "16", "--data.seq-len", "16"),
        *("--model.rope", "True"),
        *("--eval.batches", "1", "--log.sample-tokens", "0", "--no-keep-compiled"),
        *("--optim.name", "adamw", "--work-dir", str(work_dir)),
    ]
    assert train.main([*flags, *more]) == exit_codes.DONE
    return unused.read(work_dir, None)


@pytest.mark.usefixtures("keep_caches")
def test_a_run_without_unused_parameters_names_none(tmp_path, capsys):
    report = trained(tmp_path / "run", "--mesh.tp", "2")
    assert report.found.unused == ()
    assert report.updates == 4
    rows = {part.name: part.indexes for part in report.found.parts}
    # 256 bytes, one token that ends a document, the padding of the vocabulary.
    assert set(range(256, 384)) <= set(rows["embed.table"])
    assert rows["head.table"] == tuple(range(257, 384))
    capsys.readouterr()
    assert unused.main(["--work-dir", str(tmp_path / "run")]) == 0
    assert "had a gradient" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.usefixtures("keep_caches")
def test_a_bias_that_the_model_never_reads_is_named_in_each_layer(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Mlp, "out_bias", lambda self: None)
    flags = ("--model.mlp-bias", "--zero", "3")  # dp 8, all of it sharded
    report = trained(tmp_path / "run", *flags)
    assert [(one.name, one.layer) for one in report.found.unused] == [
        ("blocks.mlp.b_out", layer) for layer in range(4)
    ]
    assert report.found.dead_layers == ()
    capsys.readouterr()
    out = tmp_path / "out.json"
    words = ["--work-dir", str(tmp_path / "run"), "--json", "--out", str(out)]
    assert unused.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(out.read_text())
    assert said["summary"] == (
        f"4 of {said['num_parameters']} parameters had no gradient in any of 4 updates"
    )


@pytest.mark.usefixtures("keep_caches")
def test_a_dead_layer_has_its_number_in_the_model_under_pp_tp_and_dp(
    tmp_path, capsys, monkeypatch
):
    pattern = Transformer.pattern

    def without_layer_2(self, *args, **options):
        found = pattern(self, *args, **options)

        def layer(kind, x, params, index, context):
            return jnp.where(
                index == 2, x, found.layer(kind, x, params, index, context)
            )

        return dataclasses.replace(found, layer=layer)

    monkeypatch.setattr(Transformer, "pattern", without_layer_2)
    flags = ("--mesh.pp", "2", "--mesh.tp", "2", "--batch.microbatches", "2")
    # Interleaved: the first stage has layers 0 and 2, the second 1 and 3.
    report = trained(tmp_path / "run", *flags, "--pipeline.chunks", "2")
    assert report.found.dead_layers == (2,)
    assert {one.layer for one in report.found.unused} == {2}
    capsys.readouterr()
    assert unused.main(["--work-dir", str(tmp_path / "run")]) == 0
    assert "all parameters of the layer  2" in capsys.readouterr().out


# -------------------------------------------------------------------------- bad input


def save(work_dir, *, count, names=("w",)):
    params = {name: jnp.ones((2, 2)) for name in names}
    moments = {"w": jnp.ones((2, 2))}
    adam = {"count": jnp.int32(count), "mu": moments, "nu": moments}
    state = {"params": params, "opt_state": {"adam": adam}}
    manager = Checkpoints(work_dir, CkptConfig())
    saved(manager, state, 7, config={"optim": {"beta2": 0.5}, "ckpt": {"dir": None}})
    manager.attempts()
    manager.close()


def test_a_state_before_the_first_update_is_refused(tmp_path, capsys):
    save(tmp_path, count=0)
    assert unused.main(["--work-dir", str(tmp_path)]) == 2
    assert "has had no update" in capsys.readouterr().err


def test_a_parameter_without_moments_is_said_not_to_be_judged(tmp_path, capsys):
    save(tmp_path, count=3, names=("w", "frozen"))
    assert unused.main(["--work-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "frozen: no moments" in said.err
    assert "each of 1 parameters" in said.out


def test_a_folder_without_checkpoints_is_refused(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert unused.main(["--work-dir", str(tmp_path)]) == 2
    assert "nothing was saved yet" in capsys.readouterr().err

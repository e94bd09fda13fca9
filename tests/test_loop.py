"""The loop with a tiny program: rows, saves, stops, resuming, giving up."""

import contextlib
import dataclasses
import functools
import os
import resource
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mjax import loop as loop_module
from mjax.ckpt import manager
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.loop import Cadence, Loop, StopRequest
from mjax.metrics import LogConfig, Recorder, Utilization, make_row, read_rows

VOCAB = 16
WIDTH = 4096
CKPT = CkptConfig(every=3, keep=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict[str, jax.Array]


class TinyProgram:
    """Pulls a vector to the batch; a batch of NaN is skipped."""

    def __init__(self):
        mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
        self.batch_sharding = NamedSharding(mesh, PartitionSpec("dp"))
        self.train_step = jax.jit(self._train_step, donate_argnums=0)

    def init(self):
        where = self.batch_sharding
        whole = NamedSharding(where.mesh, PartitionSpec())
        return State(
            jax.device_put(jnp.int32(0), whole),
            {"w": jax.device_put(jnp.zeros(WIDTH, jnp.float32), where)},
        )

    def abstract_state(self):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding
            ),
            self.init(),
        )

    def to_saved(self, state):
        return state

    def _train_step(self, state, batch):
        grad = state.params["w"] - batch
        loss = jnp.mean(grad**2)
        skipped = ~jnp.isfinite(loss)
        w = jnp.where(skipped, state.params["w"], state.params["w"] - 0.1 * grad)
        metrics = {
            "loss": loss,
            "grad_norm": jnp.linalg.norm(grad),
            "lr": jnp.float32(0.1),
            "tokens": jnp.int32(WIDTH),
            "skipped": skipped.astype(jnp.int32),
        }
        return State(state.step + 1, {"w": w}), metrics

    def eval_step(self, params, batch):
        return {"nll": jnp.sum((params["w"] - batch) ** 2), "tokens": jnp.int32(WIDTH)}

    def next_token_logits(self, params, tokens, length):
        following = (tokens[:, length - 1] + 1) % VOCAB
        return 1e3 * jax.nn.one_hot(following, VOCAB + 4)


class TinyBatches:
    """The batch of a step depends on the step alone."""

    data_wait_s = 0.0
    checkpoints: Checkpoints

    def __init__(self, start_step=0, *, nan_at=(), at_step=None):
        self.step, self.nan_at, self.at_step = start_step, nan_at, at_step or {}

    def __next__(self):
        # A step here takes less than a save; in a run it takes more.
        while self.checkpoints.is_writing:
            time.sleep(1e-3)
        self.step += 1
        self.at_step.get(self.step, lambda: None)()
        if self.step in self.nan_at:
            return np.full(WIDTH, np.nan, np.float32)
        return np.random.default_rng(self.step).normal(size=WIDTH).astype(np.float32)


def run(
    work_dir,
    batches=None,
    *,
    num_steps=10,
    max_consecutive_skips=3,
    ckpt=CKPT,
):
    """Start or resume a run in work_dir, as train does."""
    program = TinyProgram()
    checkpoints = Checkpoints(work_dir, ckpt)
    restored = checkpoints.restore(program.abstract_state())
    start_step = 0 if restored is None else restored.step
    state = program.init() if restored is None else restored.state
    batches = batches or TinyBatches()
    batches.step, batches.checkpoints = start_step, checkpoints
    recorder = Recorder(
        work_dir,
        LogConfig(every=100),
        start_step=start_step,
        num_steps=num_steps,
        active=True,
    )
    held_out = [np.ones(WIDTH, np.float32)] * 2
    loop = Loop(
        program=program,
        state=state,
        batches=batches,
        cadence=Cadence(
            num_steps=num_steps,
            eval_every=4,
            ckpt_every=ckpt.every,
            max_consecutive_skips=max_consecutive_skips,
        ),
        recorder=recorder,
        checkpoints=checkpoints,
        make_row=functools.partial(
            make_row,
            bytes_per_token=1.0,
            utilization=Utilization(
                flops_per_token=1.0, peak_flops_per_s=None, num_devices=8
            ),
        ),
        evaluate=lambda params: loop_module.evaluate(
            program, params, held_out, 2 * WIDTH
        ),
        facts={"seed": 0},
    )
    try:
        with StopRequest() as stop:
            return loop.run(start_step, stop)
    finally:
        recorder.close()
        checkpoints.close()


def timeless(work_dir):
    timing = {"step_s", "data_wait_s", "tokens_per_s", "mfu"}
    rows = read_rows(work_dir / "metrics.jsonl")
    return [
        {k: v for k, v in row.items() if k not in timing and not k.startswith("ckpt_")}
        for row in rows
    ]


@pytest.fixture
def undisturbed(tmp_path):
    (tmp_path / "undisturbed").mkdir()
    outcome = run(tmp_path / "undisturbed")
    assert outcome.exit_code == loop_module.DONE
    return timeless(tmp_path / "undisturbed"), outcome.state


@pytest.fixture
def work_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


class Killed(BaseException):
    pass


def kill():
    raise Killed


def test_each_step_has_one_row_and_evaluations_are_on_their_steps(undisturbed):
    rows, state = undisturbed
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8, 10]
    assert int(state.step) == 10
    w = np.asarray(state.params["w"], np.float64)
    expected = np.mean((w - 1) ** 2)
    # float32 sums of WIDTH squares
    assert rows[-1]["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert rows[-1]["eval_bits_per_byte"] == pytest.approx(
        expected / np.log(2), rel=1e-6
    )


@pytest.mark.parametrize("step", [1, 4, 7, 10])
def test_a_run_that_dies_at_any_step_continues_bitwise(undisturbed, work_dir, step):
    rows, state = undisturbed
    with pytest.raises(Killed):
        run(work_dir, TinyBatches(at_step={step: kill}))
    outcome = run(work_dir)
    assert timeless(work_dir) == rows
    np.testing.assert_array_equal(outcome.state.params["w"], state.params["w"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_says_preempted(
    undisturbed, work_dir, number
):
    before = signal.getsignal(number)
    batches = TinyBatches(at_step={5: lambda: os.kill(os.getpid(), number)})
    outcome = run(work_dir, batches)
    assert (outcome.exit_code, outcome.step) == (loop_module.PREEMPTED, 5)
    assert [row["step"] for row in timeless(work_dir)] == [1, 2, 3, 4, 5]
    assert (work_dir / "checkpoints" / "5").is_dir()
    assert signal.getsignal(number) is before
    assert run(work_dir).exit_code == loop_module.DONE
    assert timeless(work_dir) == undisturbed[0]


def test_a_signal_in_the_last_step_is_an_ordinary_end(work_dir):
    batches = TinyBatches(at_step={10: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    assert run(work_dir, batches).exit_code == loop_module.DONE


def test_skipped_steps_have_strict_rows_and_the_run_goes_on(work_dir):
    outcome = run(work_dir, TinyBatches(nan_at=(2, 3, 7)))
    assert outcome.exit_code == loop_module.DONE
    rows = timeless(work_dir)
    assert [row["step"] for row in rows if row["skipped"]] == [2, 3, 7]
    assert rows[1]["loss"] is None
    assert rows[1]["nonfinite"]["loss"] == "nan"
    assert np.isfinite(np.asarray(outcome.state.params["w"])).all()


@pytest.mark.parametrize("first", [4, 5])
def test_a_run_gives_up_after_too_many_skipped_steps_in_a_row(work_dir, capsys, first):
    outcome = run(work_dir, TinyBatches(nan_at=range(first, 11)))
    assert outcome.exit_code == loop_module.GAVE_UP
    assert "gave up: the last" in capsys.readouterr().out
    rows = timeless(work_dir)
    assert [row["step"] for row in rows] == list(range(1, outcome.step + 1))
    assert sum(row["skipped"] for row in rows) >= 3


def test_a_finished_run_has_nothing_left_to_do(undisturbed, tmp_path):
    outcome = run(tmp_path / "undisturbed")
    assert (outcome.exit_code, outcome.step) == (loop_module.DONE, 10)
    assert timeless(tmp_path / "undisturbed") == undisturbed[0]


def test_more_steps_may_be_asked_later(undisturbed, tmp_path):
    outcome = run(tmp_path / "undisturbed", num_steps=12)
    assert outcome.step == 12
    assert [row["step"] for row in timeless(tmp_path / "undisturbed")][-2:] == [11, 12]


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_save_is_reported_and_a_last_one_that_fails_is_exit_1(
    work_dir, capsys, monkeypatch
):
    monkeypatch.setattr(manager, "_LAST_ATTEMPTS", 1)
    with files_of_at_most(8000) as limit:
        outcome = run(work_dir, TinyBatches(at_step={8: limit}))
    assert outcome.exit_code == loop_module.FAILED
    out = capsys.readouterr().out
    assert "warning: checkpoint 9 was not saved (try 1): process 0: " in out
    assert "warning: checkpoint 10 was not saved (try 1): process 0: " in out
    assert run(work_dir).exit_code == loop_module.DONE


def test_a_run_that_cannot_save_goes_on_for_a_while_and_gives_up(work_dir, capsys):
    ckpt = CkptConfig(every=2, keep=2, max_unsaved=5)
    with files_of_at_most(8000) as limit:
        batches = TinyBatches(at_step={3: limit})
        outcome = run(work_dir, batches, num_steps=100, ckpt=ckpt)
    assert outcome.exit_code == loop_module.GAVE_UP
    assert outcome.step == 8
    out = capsys.readouterr().out
    assert "gave up: nothing was saved since step 2, 6 steps ago" in out
    assert run(work_dir, num_steps=100, ckpt=ckpt).step == 100


def test_what_is_made_for_a_save_is_off_the_devices_before_the_next_step(
    work_dir, monkeypatch
):
    made, is_gone = [], []

    def to_saved(program, state):
        made.append(jnp.copy(state.params["w"]))
        return State(state.step, {"w": made[-1]})

    monkeypatch.setattr(TinyProgram, "to_saved", to_saved)
    batches = TinyBatches(at_step={4: lambda: is_gone.append(made[0].is_deleted())})
    state = run(work_dir, batches).state
    assert is_gone == [True]
    assert not state.step.is_deleted()
    checkpoints = Checkpoints(work_dir, CkptConfig(keep=2))
    restored = checkpoints.restore(TinyProgram().abstract_state())
    checkpoints.close()
    assert restored is not None
    np.testing.assert_array_equal(restored.state.params["w"], state.params["w"])


def test_a_save_without_room_on_the_devices_is_a_warning_and_the_run_goes_on(
    work_dir, monkeypatch, capsys
):
    calls = []

    def to_saved(program, state):
        calls.append(state)
        if len(calls) == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return state

    monkeypatch.setattr(TinyProgram, "to_saved", to_saved)
    assert run(work_dir).exit_code == loop_module.DONE
    out = capsys.readouterr().out
    assert "not saved (try 1): process 0: RESOURCE_EXHAUSTED: out of memory" in out


def test_generation_continues_the_prompt_beyond_the_length_of_the_sequence():
    program = TinyProgram()
    ids = loop_module.generate(
        program,
        {},
        np.array([3, 4, 5]),
        num_rows=8,
        seq_len=12,
        num_tokens=100,
        vocab_size=VOCAB,
        seed=0,
    )
    assert ids.tolist() == [(6 + i) % VOCAB for i in range(100)]


def test_generation_draws_only_ids_that_the_tokenizer_knows():
    program = TinyProgram()
    program.next_token_logits = lambda params, tokens, length: jnp.zeros((8, 100))
    ids = loop_module.generate(
        program,
        {},
        np.array([1]),
        num_rows=8,
        seq_len=40,
        num_tokens=39,
        vocab_size=5,
        seed=0,
    )
    assert len(ids) == 39
    assert ids.max() < 5
    assert len(set(ids.tolist())) > 1

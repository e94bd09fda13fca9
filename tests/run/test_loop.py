"""The loop with a tiny program: rows, saves, stops, resuming, giving up."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import re
import resource
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mjax.ckpt import manager, saving
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.store import Store
from mjax.cli import exit_codes
from mjax.config.run import LogConfig
from mjax.hardware.utilization import Utilization
from mjax.observe import spans
from mjax.run import evaluation, sampling
from mjax.run.json_files import write_atomically
from mjax.run.loop import Cadence, Loop, StopRequest
from mjax.run.metrics import Recorder, make_row, read_computed, read_rows
from mjax.run.spans import Spans
from mjax.run.watch import Watch
from mjax.step.replicas import Corruption

VOCAB = 16
WIDTH = 4096
CKPT = CkptConfig(every=3, keep=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    skips: jax.Array
    params: dict[str, jax.Array]


class TinyProgram:
    """Moves a vector towards the batch; skips a batch of NaN."""

    def __init__(self, diverges_at=None):
        self.diverges_at = diverges_at
        mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
        self.batch_sharding = NamedSharding(mesh, PartitionSpec("dp"))
        self.train_step = jax.jit(self._train_step, donate_argnums=0)

    def init(self):
        where = self.batch_sharding
        whole = NamedSharding(where.mesh, PartitionSpec())
        return State(
            jax.device_put(jnp.int32(0), whole),
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

    find_corruption = None
    gather_first = None

    def is_finite(self, state):
        return jnp.isfinite(state.params["w"]).all()

    def _train_step(self, state, batch):
        grad = state.params["w"] - batch
        loss = jnp.mean(grad**2)
        skipped = ~jnp.isfinite(loss)
        w = jnp.where(skipped, state.params["w"], state.params["w"] - 0.1 * grad)
        if self.diverges_at is not None:
            w = jnp.where(state.step + 1 == self.diverges_at, jnp.inf, w)
        metrics = {
            "loss": loss,
            "grad_norm": jnp.linalg.norm(grad),
            "lr": jnp.float32(0.1),
            "tokens": jnp.int32(WIDTH),
            "visible_pairs": jnp.float32(WIDTH),
            "skipped": skipped.astype(jnp.int32),
        }
        skips = (state.skips + 1) * skipped
        return State(state.step + 1, skips, {"w": w}), metrics

    def eval_step(self, params, batch):
        return {"nll": jnp.sum((params["w"] - batch) ** 2), "tokens": jnp.int32(WIDTH)}

    def next_token_logits(self, params, tokens, length):
        following = (tokens[:, length - 1] + 1) % VOCAB
        return 1e3 * jax.nn.one_hot(following, VOCAB + 4)


class GatheringProgram(TinyProgram):
    """Gathers its vector in a separate call."""

    def __init__(self):
        super().__init__()
        self.gathered = []
        whole = NamedSharding(self.batch_sharding.mesh, PartitionSpec())
        self._gather = jax.jit(lambda params: params["w"], out_shardings=whole)
        self.train_step = jax.jit(self._gathered_step, donate_argnums=0)

    def gather_first(self, params):
        self.gathered.append(self._gather(params))
        return self.gathered[-1]

    def _gathered_step(self, state, batch, first):
        w = jax.lax.with_sharding_constraint(first, self.batch_sharding)
        return self._train_step(dataclasses.replace(state, params={"w": w}), batch)


class TinyBatches:
    """The batch of a step depends only on the step."""

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
    held_out=lambda: [np.ones(WIDTH, np.float32)] * 2,
    diverges_at=None,
    stop=None,
    replica_check_every=100,
    watch=None,
    program=None,
):
    """Start or resume a run in work_dir, as train does."""
    program = program or TinyProgram(diverges_at)
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
        is_ours=checkpoints.owns_store,
    )
    loop = Loop(
        program=program,
        state=state,
        batches=batches,
        cadence=Cadence(
            num_steps=num_steps,
            eval_every=4,
            ckpt_every=ckpt.every,
            max_consecutive_skips=max_consecutive_skips,
            gc_every=4,
            replica_check_every=replica_check_every,
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
        evaluate=lambda params, is_stopped: evaluation.evaluate(
            program, params, held_out(), 2 * WIDTH, is_stopped
        ),
        facts={"seed": 0},
        consecutive_skips=int(state.skips),
        is_evaluated=restored is None or restored.run["eval_loss"] is not None,
        watch=watch or Watch(),
    )
    try:
        if stop is not None:
            return loop.run(start_step, stop)
        with StopRequest() as stop:
            return loop.run(start_step, stop)
    finally:
        recorder.close()
        checkpoints.close()


@pytest.fixture
def undisturbed(tmp_path):
    (tmp_path / "undisturbed").mkdir()
    outcome = run(tmp_path / "undisturbed")
    assert outcome.exit_code == exit_codes.DONE
    return read_computed(tmp_path / "undisturbed"), outcome.state


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


def test_the_rows_are_on_disk_before_their_step_is_saved_or_copied(
    work_dir, tmp_path, monkeypatch
):
    flushed, kept = [0], []
    sync = Recorder.sync

    def note_rows(recorder):
        sync(recorder)
        flushed.append(len(read_rows(work_dir / "metrics.jsonl")))

    def noted(name, keep):
        def note_step(checkpoints, step, *args, **kwargs):
            kept.append((name, step, flushed[-1]))
            return keep(checkpoints, step, *args, **kwargs)

        return note_step

    monkeypatch.setattr(Recorder, "sync", note_rows)
    for name in ("save", "copy"):
        method = noted(name, getattr(Checkpoints, name))
        monkeypatch.setattr(Checkpoints, name, method)
    ckpt = CkptConfig(every=3, local_dir=str(tmp_path / "copies"), local_every=4)
    assert run(work_dir, ckpt=ckpt).exit_code == exit_codes.DONE
    assert kept == [
        *(("save", 3, 3), ("copy", 4, 4), ("save", 6, 6), ("copy", 8, 8)),
        *(("save", 9, 9), ("save", 10, 10)),
    ]


def spans_of_steps(work_dir, *args, **kwargs):
    """Run, and return the line of spans of each step."""
    header = spans.Header(
        run="a",
        host="h",
        rank=0,
        generation=1,
        pid=1,
        wall_ns=0,
        monotonic_ns=0,
        devices=(),
        mesh={},
    )
    watch = Watch(spans=Spans(work_dir, header))
    run(work_dir, *args, watch=watch, **kwargs)
    watch.close(0)
    found = spans.read(work_dir / "h-0-1.jsonl")
    return {line.step: line for line in found.lines if line.step > 0}


def test_weights_are_gathered_before_the_loader_has_the_batch(undisturbed, work_dir):
    program, num_gathered = GatheringProgram(), []

    def late():
        """Return the batch once the weights of its step have been gathered."""
        num_gathered.append(len(program.gathered))
        program.gathered[-1].block_until_ready()

    batches = TinyBatches(at_step=dict.fromkeys(range(1, 11), late))
    lines = spans_of_steps(work_dir, batches, program=program)
    assert num_gathered == list(range(1, 11))
    for step, line in lines.items():
        host = sorted(
            (span.start_ns, span.name, span.kind)
            for span in line.spans
            if span.name in ("gather", "data", "dispatch")
        )
        order = [(name, kind) for _, name, kind in host]
        expected = [("gather", "host"), ("data", "data"), ("dispatch", "host")]
        assert order == expected, step
    assert read_computed(work_dir) == undisturbed[0]


def test_spans_account_for_the_time_of_every_step(work_dir):
    lines = spans_of_steps(work_dir)
    assert [*lines] == list(range(1, 11))
    kinds = {
        step: {span.name for span in line.spans if span.stream == "host"}
        for step, line in lines.items()
    }
    assert {"data", "dispatch", "device", "metrics", "agree"} <= kinds[2]
    assert [step for step in kinds if "eval" in kinds[step]] == [4, 8, 10]
    assert [step for step in kinds if "save" in kinds[step]] == [3, 6, 9, 10]
    host = sorted(
        (span for line in lines.values() for span in line.spans),
        key=lambda span: span.start_ns,
    )
    host = [span for span in host if span.stream == "host"]
    for one, following in itertools.pairwise(host):
        assert one.end_ns == following.start_ns
    rows = {row["step"]: row["step_s"] for row in read_rows(work_dir / "metrics.jsonl")}
    steps = {
        step: (span.end_ns - span.start_ns) / 1e9
        for step, line in lines.items()
        for span in line.spans
        if span.stream == "step"
    }
    assert steps == pytest.approx(rows)


@pytest.mark.parametrize("step", [1, 4, 7, 10])
def test_a_run_that_dies_at_any_step_continues_bitwise(undisturbed, work_dir, step):
    rows, state = undisturbed
    with pytest.raises(Killed):
        run(work_dir, TinyBatches(at_step={step: kill}))
    outcome = run(work_dir)
    assert read_computed(work_dir) == rows
    np.testing.assert_array_equal(outcome.state.params["w"], state.params["w"])


def test_a_step_whose_save_found_the_writer_busy_is_not_saved_and_said_so(
    work_dir, monkeypatch, capsys
):
    ask = Checkpoints.ask

    def busy_at_first(self, step, **kwargs):
        answer = ask(self, step, **kwargs)
        return manager.Answer.BUSY if step in (3, 4) else answer

    monkeypatch.setattr(Checkpoints, "ask", busy_at_first)
    run(work_dir, num_steps=5)
    said = capsys.readouterr().out
    assert said.count("is not saved") == 1
    assert (
        "step 3 is not saved: the previous checkpoint is still being written; the "
        "newest step is saved when it is done"
    ) in said
    assert Checkpoints(work_dir, CKPT).store.steps() == [5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_says_preempted(
    undisturbed, work_dir, number
):
    before = signal.getsignal(number)
    batches = TinyBatches(at_step={5: lambda: os.kill(os.getpid(), number)})
    outcome = run(work_dir, batches)
    assert (outcome.exit_code, outcome.step) == (exit_codes.PREEMPTED, 5)
    assert [row["step"] for row in read_computed(work_dir)] == [1, 2, 3, 4, 5]
    assert (work_dir / "checkpoints" / "5").is_dir()
    assert signal.getsignal(number) is before
    assert run(work_dir).exit_code == exit_codes.DONE
    assert read_computed(work_dir) == undisturbed[0]


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_says_which_step_is_saved(work_dir, capsys):
    run(work_dir, TinyBatches(at_step={5: interrupt}))
    said = "saving step 5; press Ctrl-C again to stop without saving"
    assert said in capsys.readouterr().out.splitlines()


def test_a_second_ctrl_c_ends_without_saving(work_dir, monkeypatch, capfd):
    def exit_now(code):
        raise Killed(code)

    monkeypatch.setattr(os, "_exit", exit_now)
    batches = TinyBatches(at_step={5: lambda: (interrupt(), interrupt())})
    with pytest.raises(Killed, match=r"^130$"):
        run(work_dir, batches)
    assert capfd.readouterr().err.endswith("\nstopped without saving\n")
    assert saved_steps(work_dir) == [3]


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_in_the_last_step_leaves_its_evaluation_to_the_next_start(
    undisturbed, work_dir
):
    outcome = run(work_dir, TinyBatches(at_step={10: terminate}))
    assert (outcome.exit_code, outcome.step) == (exit_codes.PREEMPTED, 10)
    assert "eval_loss" not in read_computed(work_dir)[-1]
    assert run(work_dir).exit_code == exit_codes.DONE
    assert read_computed(work_dir) == undisturbed[0]


@pytest.mark.parametrize("evaluation", [1, 3])
def test_a_signal_during_an_evaluation_ends_it_after_the_batch(
    undisturbed, work_dir, evaluation
):
    """The evaluations of ten steps are at 4, 8 and 10."""
    step = (4, 8, 10)[evaluation - 1]
    begun, read = [], []

    def held_out():
        begun.append(None)
        for number in range(2):
            if len(begun) == evaluation:
                terminate()
                read.append(number)
            yield np.ones(WIDTH, np.float32)

    outcome = run(work_dir, held_out=held_out)
    assert (outcome.exit_code, outcome.step) == (exit_codes.PREEMPTED, step)
    assert read == [0]
    assert (work_dir / "checkpoints" / str(step)).is_dir()
    assert "eval_loss" not in read_computed(work_dir)[-1]
    assert run(work_dir).exit_code == exit_codes.DONE
    assert read_computed(work_dir) == undisturbed[0]


def taken_over_at(step, work_dir, more=lambda: None):
    """Return batches of a run that another start takes over, as on another host."""
    batches = TinyBatches()

    def take_over():
        Store(work_dir / "checkpoints").fence.claim("", 0)
        more()

    batches.at_step = {1: lambda: batches.checkpoints.claim("", 0), step: take_over}
    return batches


@pytest.mark.parametrize(("taken_at", "seen_at"), [(5, 6), (10, 10)])
def test_a_run_that_is_taken_over_gives_up_at_its_next_save_without_a_retry(
    work_dir, capsys, taken_at, seen_at
):
    batches = taken_over_at(taken_at, work_dir)
    outcome = run(work_dir, batches)
    assert outcome.exit_code == exit_codes.GAVE_UP
    assert seen_at <= outcome.step <= seen_at + 1  # the save is in the background
    said = capsys.readouterr().out
    assert said.count("(try 1): another start of this run has taken over") == 1
    assert "(try 2)" not in said
    assert "this start ends and leaves the run to it" in said
    assert not (work_dir / "checkpoints" / str(seen_at)).exists()


def test_a_run_that_is_taken_over_leaves_the_rows_of_the_other_start(work_dir, capsys):
    path, theirs = work_dir / "metrics.jsonl", '{"step": 1}\n'
    batches = taken_over_at(8, work_dir, lambda: write_atomically(path, theirs))
    outcome = run(work_dir, batches)
    assert (outcome.exit_code, outcome.step) == (exit_codes.GAVE_UP, 8)
    assert path.read_text() == theirs
    said = capsys.readouterr().out
    assert said.count("another start of this run has taken over") == 1
    assert "warning" not in said


def test_a_signal_before_the_first_step_saves_nothing(work_dir):
    with StopRequest() as stop:
        terminate()
        outcome = run(work_dir, stop=stop)
    assert (outcome.exit_code, outcome.step) == (exit_codes.PREEMPTED, 0)
    assert not (work_dir / "checkpoints").exists()


def saved_steps(work_dir):
    return sorted(int(path.name) for path in (work_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("diverges_at", "seen_at", "saved"), [(2, 3, []), (7, 9, [3, 6]), (10, 10, [6, 9])]
)
def test_a_state_that_is_not_finite_is_not_saved_and_the_run_gives_up(
    work_dir, capsys, diverges_at, seen_at, saved
):
    for start in range(2):
        outcome = run(work_dir, diverges_at=diverges_at, max_consecutive_skips=20)
        assert (outcome.exit_code, outcome.step) == (exit_codes.GAVE_UP, seen_at)
        assert outcome.has_diverged
        (work_dir / "checkpoints").mkdir(exist_ok=True)
        assert saved_steps(work_dir) == saved
        said = f"gave up: the state after step {seen_at} holds NaN or infinity"
        out = capsys.readouterr().out
        assert out.count(said) == 1, start
        kept = [f"the checkpoint of step {saved[-1]} is kept"] if saved else []
        assert re.findall(r"the checkpoint of step \d+ is kept", out) == kept


@pytest.mark.parametrize(
    ("wrong_at", "every", "seen_at", "saved"),
    [(2, 1, 2, []), (5, 100, 6, [3]), (7, 1, 7, [3, 6])],
)
def test_a_state_whose_replicas_differ_is_not_saved(
    work_dir, monkeypatch, capsys, wrong_at, every, seen_at, saved
):
    found = Corruption((1,), is_sure=True)

    def find(program, state):
        return found if state.step >= wrong_at else None

    monkeypatch.setattr(TinyProgram, "find_corruption", find)
    outcome = run(work_dir, replica_check_every=every)
    assert (outcome.exit_code, outcome.step) == (exit_codes.GAVE_UP, seen_at)
    assert (outcome.corruption, outcome.has_diverged) == (found, False)
    (work_dir / "checkpoints").mkdir(exist_ok=True)
    assert saved_steps(work_dir) == saved
    out = capsys.readouterr().out
    assert "the replicas of the state differ: process 1 from the majority" in out
    kept = [f"from the checkpoint of step {saved[-1]}"] if saved else []
    assert re.findall(r"from the checkpoint of step \d+", out) == kept


def test_a_state_that_is_not_finite_is_not_begun_with(work_dir, monkeypatch, capsys):
    init = TinyProgram.init

    def damaged(program):
        state = init(program)
        return dataclasses.replace(state, params={"w": state.params["w"] * jnp.nan})

    monkeypatch.setattr(TinyProgram, "init", damaged)
    outcome = run(work_dir)
    assert (outcome.exit_code, outcome.step) == (exit_codes.GAVE_UP, 0)
    assert "the state after step 0 holds NaN" in capsys.readouterr().out


def test_a_saved_state_that_is_not_finite_is_not_named_as_the_one_to_go_back_to(
    work_dir, monkeypatch, capsys
):
    assert run(work_dir).exit_code == exit_codes.DONE
    assert saved_steps(work_dir) == [9, 10]
    monkeypatch.setattr(TinyProgram, "is_finite", lambda program, state: False)
    assert run(work_dir).exit_code == exit_codes.GAVE_UP
    assert "with a lower --optim.lr; the checkpoint of step 9 is kept" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("num_steps", "first_skipped", "exit_code"),
    [
        (10, 10, exit_codes.DONE),
        (10, 7, exit_codes.DONE),
        (10, 6, exit_codes.GAVE_UP),
        (4, 3, exit_codes.GAVE_UP),
        (3, 3, exit_codes.DONE),
        (1, 1, exit_codes.GAVE_UP),
        (60, 42, exit_codes.DONE),
        (60, 41, exit_codes.GAVE_UP),
    ],
)
def test_a_run_is_done_only_if_one_of_its_last_steps_was_accepted(
    work_dir, capsys, num_steps, first_skipped, exit_code
):
    batches = TinyBatches(nan_at=range(first_skipped, num_steps + 1))
    ckpt = CkptConfig(every=50, keep=2)
    outcome = run(
        work_dir, batches, num_steps=num_steps, max_consecutive_skips=99, ckpt=ckpt
    )
    assert (outcome.exit_code, outcome.step) == (exit_code, num_steps)
    is_saved = (work_dir / "checkpoints" / str(num_steps)).is_dir()
    assert is_saved == (exit_code == exit_codes.DONE)
    said = f"gave up: the last {num_steps + 1 - first_skipped} steps were skipped"
    assert (said in capsys.readouterr().out) == (exit_code == exit_codes.GAVE_UP)


def test_skipped_steps_are_counted_across_restarts(work_dir):
    first = TinyBatches(nan_at=range(4, 11), at_step={7: terminate})
    outcome = run(work_dir, first, max_consecutive_skips=20)
    assert (outcome.exit_code, outcome.step) == (exit_codes.PREEMPTED, 7)
    again = TinyBatches(nan_at=range(4, 11))
    outcome = run(work_dir, again, max_consecutive_skips=20)
    assert (outcome.exit_code, outcome.step) == (exit_codes.GAVE_UP, 10)


def test_a_run_whose_last_held_out_loss_is_not_finite_gives_up(work_dir, capsys):
    outcome = run(work_dir, held_out=lambda: [np.full(WIDTH, np.inf, np.float32)])
    assert (outcome.exit_code, outcome.step) == (exit_codes.GAVE_UP, 10)
    said = "gave up: the held-out loss after the last step, 10, is inf"
    assert said in capsys.readouterr().out
    assert saved_steps(work_dir) == [6, 9]


def test_skipped_steps_have_strict_rows_and_the_run_goes_on(work_dir):
    outcome = run(work_dir, TinyBatches(nan_at=(2, 3, 7)))
    assert outcome.exit_code == exit_codes.DONE
    rows = read_computed(work_dir)
    assert [row["step"] for row in rows if row["skipped"]] == [2, 3, 7]
    assert rows[1]["loss"] is None
    assert rows[1]["nonfinite"]["loss"] == "nan"
    assert np.isfinite(np.asarray(outcome.state.params["w"])).all()


@pytest.mark.parametrize("first", [4, 5])
def test_a_run_gives_up_after_too_many_skipped_steps_in_a_row(work_dir, capsys, first):
    outcome = run(work_dir, TinyBatches(nan_at=range(first, 11)))
    assert outcome.exit_code == exit_codes.GAVE_UP
    assert "gave up: the last" in capsys.readouterr().out
    rows = read_computed(work_dir)
    assert [row["step"] for row in rows] == list(range(1, outcome.step + 1))
    assert sum(row["skipped"] for row in rows) >= 3


def test_a_finished_run_has_nothing_left_to_do(undisturbed, tmp_path):
    outcome = run(tmp_path / "undisturbed")
    assert (outcome.exit_code, outcome.step) == (exit_codes.DONE, 10)
    assert read_computed(tmp_path / "undisturbed") == undisturbed[0]


def test_python_collects_its_garbage_at_agreed_steps_only(work_dir):
    batches = TinyBatches()
    full = []

    def note(phase, info):
        if phase == "start":
            full.append((batches.step, info["generation"]))

    gc.callbacks.append(note)
    try:
        run(work_dir, batches, num_steps=10)
    finally:
        gc.callbacks.remove(note)
    during = [(step, generation) for step, generation in full if 0 < step < 10]
    assert during == [(4, 2), (8, 2)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_more_steps_may_be_asked_later(undisturbed, tmp_path):
    outcome = run(tmp_path / "undisturbed", num_steps=12)
    assert outcome.step == 12
    rows = read_computed(tmp_path / "undisturbed")
    assert [row["step"] for row in rows][-2:] == [11, 12]


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
    assert outcome.exit_code == exit_codes.FAILED
    out = capsys.readouterr().out
    assert "warning: checkpoint 9 was not saved (try 1): process 0: " in out
    assert "warning: checkpoint 10 was not saved (try 1): process 0: " in out
    assert "failed: step 10 was not saved (the newest checkpoint is of step 6): " in out
    assert "max-unsaved" not in out
    assert run(work_dir).exit_code == exit_codes.DONE


def test_a_signal_ends_the_wait_for_a_last_save_that_fails(
    work_dir, monkeypatch, capsys
):
    """Its tries are reported while the run waits, not only at the end."""
    monkeypatch.setattr(saving, "_FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(saving, "_POLL_S", 0.02)
    report_saves, said = Loop.report_saves, []

    def report_and_stop(self):
        report_saves(self)
        said.append(capsys.readouterr().out)
        if "checkpoint 10 was not saved" in said[-1]:
            terminate()

    monkeypatch.setattr(Loop, "report_saves", report_and_stop)
    with files_of_at_most(8000) as limit:
        outcome = run(work_dir, TinyBatches(at_step={8: limit}))
    assert outcome.exit_code == exit_codes.FAILED
    told = "".join(said)
    assert told.count("checkpoint 10 was not saved") == 1
    assert "next try in 60 s; the run waits" in told
    assert "failed: step 10 was not saved" in capsys.readouterr().out


def test_a_run_that_cannot_save_goes_on_for_a_while_and_gives_up(work_dir, capsys):
    ckpt = CkptConfig(every=2, keep=2, max_unsaved=5)
    with files_of_at_most(8000) as limit:
        batches = TinyBatches(at_step={3: limit})
        outcome = run(work_dir, batches, num_steps=100, ckpt=ckpt)
    assert outcome.exit_code == exit_codes.GAVE_UP
    assert not outcome.has_diverged
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
        return State(state.step, state.skips, {"w": made[-1]})

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
    assert run(work_dir).exit_code == exit_codes.DONE
    out = capsys.readouterr().out
    assert "not saved (try 1): process 0: RESOURCE_EXHAUSTED: out of memory" in out


def test_generation_continues_the_prompt_beyond_the_length_of_the_sequence():
    program = TinyProgram()
    ids = sampling.generate(
        program,
        {},
        np.array([3, 4, 5]),
        num_rows=8,
        seq_len=12,
        num_tokens=100,
        vocab_size=VOCAB,
        seed=0,
        is_stopped=lambda: False,
    )
    assert ids is not None
    assert ids.tolist() == [(6 + i) % VOCAB for i in range(100)]


def test_generation_ends_before_the_next_token_when_it_is_stopped():
    program, asked = TinyProgram(), []

    def is_stopped():
        asked.append(None)
        return len(asked) == 3

    drawn = sampling.generate(
        program,
        {},
        np.array([3]),
        num_rows=8,
        seq_len=12,
        num_tokens=100,
        vocab_size=VOCAB,
        seed=0,
        is_stopped=is_stopped,
    )
    assert drawn is None
    assert len(asked) == 3


def test_generation_ends_with_the_first_token_that_ends_an_answer():
    ids = sampling.generate(
        TinyProgram(),
        {},
        np.array([3]),
        num_rows=8,
        seq_len=12,
        num_tokens=100,
        vocab_size=VOCAB,
        seed=0,
        end_ids={6},
    )
    assert ids is not None
    assert ids.tolist() == [4, 5, 6]


def test_generation_draws_only_ids_that_the_tokenizer_knows():
    program = TinyProgram()
    program.next_token_logits = lambda params, tokens, length: jnp.zeros((8, 100))
    ids = sampling.generate(
        program,
        {},
        np.array([1]),
        num_rows=8,
        seq_len=40,
        num_tokens=39,
        vocab_size=5,
        seed=0,
        is_stopped=lambda: False,
    )
    assert ids is not None
    assert len(ids) == 39
    assert ids.max() < 5
    assert len(set(ids.tolist())) > 1

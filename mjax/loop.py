"""Run the steps: dispatch, read metrics one step late, evaluate, save, stop cleanly.

Enters: a compiled program, a state, an iterator of batches, and where rows and
checkpoints go, all as arguments. Leaves: the state after the last step, and why the
loop ended. The device never waits for the host: while it runs step n, the host reads
the metrics of step n - 1. The loop knows no config, no files and no model.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from mjax.ckpt.manager import Answer, Checkpoints
from mjax.ckpt.saving import Attempt
from mjax.metrics import Recorder, Row, bits_per_byte

DONE, FAILED, BAD_INPUT, PREEMPTED, GAVE_UP = 0, 1, 2, 42, 93
"""Exit codes of a run; GAVE_UP asks whoever restarts runs not to."""

_TEMPERATURE = 0.8


@runtime_checkable
class Program(Protocol):
    """What the loop needs of `mjax.step.Program`."""

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of [B, T] arrays."""
        ...

    def to_saved(self, state: Any, /) -> Any:
        """Return what a checkpoint holds: leaves of the state, and new arrays."""
        ...

    def train_step(self, state: Any, batch: Any, /) -> tuple[Any, Mapping[str, Any]]:
        """Take one optimizer step; the state passed in is donated."""
        ...

    def eval_step(self, params: Any, batch: Any, /) -> Mapping[str, Any]:
        """Return `nll`, summed nats, and `tokens`, their number."""
        ...

    def next_token_logits(self, params: Any, tokens: Any, length: Any, /) -> jax.Array:
        """Return [B, V] logits of the token that follows the first `length`."""
        ...


@runtime_checkable
class Batches(Protocol):
    """What the loop needs of `mjax.data.loader.Loader`."""

    data_wait_s: float

    def __next__(self) -> Any:
        """Return the batch of the next step."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """How far the run goes, and what happens how often, in steps."""

    num_steps: int
    """Optimizer steps of the whole run."""
    eval_every: int
    """Between evaluations; the last step is always evaluated."""
    ckpt_every: int
    """Between checkpoints; the last step is always saved."""
    max_consecutive_skips: int
    """The run gives up when so many steps in a row were skipped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the loop ended."""

    state: Any
    """The state after the last step."""
    step: int
    """Optimizer steps that it has seen."""
    exit_code: int
    """DONE, FAILED, PREEMPTED or GAVE_UP."""


class StopRequest:
    """A wish to stop, from SIGTERM or Ctrl-C, that all processes see at the same step.

    Use it in a with statement around the loop, in the main thread. A second Ctrl-C ends
    the process at once. With several processes jax itself catches SIGTERM and agrees on
    a step; Ctrl-C is turned into SIGTERM there.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._interrupts = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        caught = [signal.SIGINT]
        if jax.process_count() == 1:
            caught.append(signal.SIGTERM)
        for number in caught:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def reached(self, step: int) -> bool:
        """Say whether the run stops after this step; every process asks every step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received is not None

    def _handle(self, number: int, frame: object) -> None:
        del frame
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(FAILED)
            if jax.process_count() > 1:
                os.kill(os.getpid(), signal.SIGTERM)
        self._received = number


@dataclasses.dataclass(kw_only=True)
class Loop:
    """One run of steps. Every process of the run executes it alike."""

    program: Program
    state: Any
    batches: Batches
    cadence: Cadence
    recorder: Recorder
    checkpoints: Checkpoints
    make_row: Callable[..., Row]
    """`mjax.metrics.make_row` with its constants bound."""
    evaluate: Callable[[Any], Row]
    """Parameters to `eval_loss`, `eval_bits_per_byte`."""
    facts: Mapping[str, Any]
    """JSON facts that each checkpoint carries: config, seed, versions."""

    def __post_init__(self) -> None:
        self._is_first = True
        self._is_overdue = False
        self._consecutive_skips = 0
        self._eval_loss: float | None = None
        self._save_facts: Row = {}
        self._unfinished: tuple[int, Mapping[str, Any], float] | None = None
        self._finished_s = time.perf_counter()

    def run(self, start_step: int, stop: StopRequest) -> Outcome:
        """Take steps from `start_step` until the end, a stop request, or giving up.

        Args:
          start_step: optimizer steps that the state has seen.
          stop: asked after each step; a stop saves first.
        """
        step, exit_code = start_step, DONE
        self._finished_s = time.perf_counter()
        while step < self.cadence.num_steps and exit_code == DONE:
            batch = next(self.batches)
            self.state, metrics = self.program.train_step(self.state, batch)
            step += 1
            self._finish()
            self._unfinished = (step, metrics, self.batches.data_wait_s)
            exit_code = self._after(step, stop)
        return Outcome(state=self.state, step=step, exit_code=exit_code)

    def _after(self, step: int, stop: StopRequest) -> int:
        """Do what is due after a step; return the exit code, DONE to go on."""
        is_last = step == self.cadence.num_steps
        is_stopped = stop.reached(step)
        ends = is_last or is_stopped
        self._report_saves()
        answer = None
        if ends or self._is_overdue or step % self.cadence.ckpt_every == 0:
            answer = self._ask_to_save(step, is_last=ends)
        save_due = answer is Answer.ACCEPTED
        evaluation_due = is_last or step % self.cadence.eval_every == 0
        copy_due = self.checkpoints.copy_is_due(step)
        pauses = evaluation_due or save_due or copy_due
        if pauses:
            self._finish(self.evaluate if evaluation_due else None)
        if answer is Answer.HOPELESS:
            self.recorder.say(f"gave up: {self.checkpoints.why_unsaved(step)}")
        if answer is Answer.HOPELESS or self._gives_up():
            return GAVE_UP
        if save_due:
            self._save(step, is_last=ends)
        if copy_due:
            self._copy(step)
        self._restart_clock(pauses)
        if ends and not self._wait_for_save():
            return FAILED
        if is_stopped and not is_last:
            return PREEMPTED
        return DONE

    def save_now(self, step: int) -> bool:
        """Save the present state and wait for it; say whether it is in the store."""
        self.checkpoints.ask(step, is_last=True)
        self._save(step, is_last=True)
        return self._wait_for_save()

    def _gives_up(self) -> bool:
        """Say whether too many steps in a row were skipped."""
        limit = self.cadence.max_consecutive_skips
        if self._consecutive_skips >= limit:
            self._finish()  # the step that runs now may have ended the series
        if self._consecutive_skips < limit:
            return False
        self.recorder.say(
            f"gave up: the last {self._consecutive_skips} steps were skipped, their "
            "loss or gradient norm was not finite or spiked. The newest checkpoint is "
            "kept. Lower --optim.lr, or look at the data of those steps (python -m "
            "mjax.data show --step N)"
        )
        return True

    def _finish(self, evaluate: Callable[[Any], Row] | None = None) -> None:
        """Wait for the step whose metrics are outstanding, and write its row."""
        if self._unfinished is None:
            return
        step, metrics, data_wait_s = self._unfinished
        self._unfinished = None
        metrics = jax.device_get(dict(metrics))
        now_s = time.perf_counter()
        if self._is_first:
            self.recorder.say(f"start-up: first step {now_s - self._finished_s:.2f} s")
            self._is_first = False
        row = self.make_row(
            step, metrics, step_s=now_s - self._finished_s, data_wait_s=data_wait_s
        )
        self._finished_s = now_s
        self._consecutive_skips = self._consecutive_skips + 1 if row["skipped"] else 0
        evaluated = evaluate(self.state.params) if evaluate else {}
        self._eval_loss = evaluated.get("eval_loss")
        self.recorder.record(row | evaluated | self._save_facts)
        self._save_facts = {}

    def _restart_clock(self, has_paused: bool) -> None:
        """Keep evaluation and saving out of the time of the next step."""
        if has_paused:
            self._finished_s = time.perf_counter()

    def _ask_to_save(self, step: int, *, is_last: bool) -> Answer:
        """Ask whether a save that is due can begin; say so if it must wait."""
        answer = self.checkpoints.ask(step, is_last=is_last)
        if answer is Answer.BUSY and not self._is_overdue:
            self.recorder.say(
                f"checkpoint {step} waits: the one before is still being written"
            )
        self._is_overdue = answer is Answer.BUSY
        return answer

    def _save(self, step: int, *, is_last: bool) -> None:
        """Start a save, its rows on the disk before it."""
        self.recorder.sync()
        with self._state_to_save() as make:
            copy = self.checkpoints.save(step, make, self._facts(step), is_last=is_last)
        if copy is not None:
            self._save_facts |= {
                "ckpt_copy_s": copy.copy_s,
                "ckpt_copy_gb_per_s": copy.num_bytes / copy.copy_s / 1e9,
            }

    def _copy(self, step: int) -> None:
        """Copy the state to the hosts, its rows on the disk before it."""
        self.recorder.sync()
        with self._state_to_save() as make:
            self.checkpoints.copy(step, make, self._facts(step))

    def _facts(self, step: int) -> Mapping[str, Any]:
        return {**self.facts, "next_step": step, "eval_loss": self._eval_loss}

    @contextlib.contextmanager
    def _state_to_save(self) -> Iterator[Callable[[], Any]]:
        """Yield what makes the saved form; its device memory is freed at the end."""
        made: list[Any] = []

        def make() -> Any:
            made.append(self.program.to_saved(self.state))
            return made[0]

        try:
            yield make
        finally:
            for saved in made:
                self._free(saved)

    def _report_saves(self) -> None:
        """Say how saves went that were tried in the background; training goes on."""
        for attempt in self.checkpoints.attempts():
            self.recorder.say(_describe(attempt))
            if attempt.error is None:
                self._save_facts |= {
                    "ckpt_step": attempt.step,
                    "ckpt_write_s": attempt.write_s,
                    "ckpt_write_gb_per_s": attempt.num_bytes / attempt.write_s / 1e9,
                }

    def _free(self, saved: Any) -> None:
        """Free the device memory of what was made for a save.

        Leaves of the state itself stay.
        """
        kept = {id(leaf) for leaf in jax.tree.leaves(self.state)}
        for leaf in jax.tree.leaves(saved):
            if id(leaf) not in kept:
                leaf.delete()

    def _wait_for_save(self) -> bool:
        is_saved = self.checkpoints.wait()
        self._report_saves()
        return is_saved


def _describe(attempt: Attempt) -> str:
    """Tell people how a try to write a checkpoint went."""
    if attempt.error is not None:
        then = "it is given up"
        if attempt.pause_s is not None:
            then = f"next try in {attempt.pause_s:.0f} s; training goes on"
        return (
            f"warning: checkpoint {attempt.step} was not saved (try {attempt.number}): "
            f"{attempt.error}; {then}"
        )
    tries = f", at try {attempt.number}" if attempt.number > 1 else ""
    removed = "".join(f", {step}" for step in attempt.removed)[2:]
    warning = f"; warning: {attempt.warning}" if attempt.warning else ""
    return (
        f"checkpoint {attempt.step} saved: {attempt.num_bytes / 1e6:.1f} MB in "
        f"{attempt.write_s:.2f} s{tries}{'; removed ' + removed if removed else ''}"
        f"{warning}"
    )


def evaluate(
    program: Program, params: PyTree, batches: Iterable[Any], num_bytes: int
) -> Row:
    """Measure the loss on held-out batches.

    Args:
      program: its `eval_step` is used.
      params: of the state, with its shardings.
      batches: the same ones at every evaluation.
      num_bytes: bytes that all targets of the batches stand for.
    Returns:
      `eval_loss`, mean nats per target token, and `eval_bits_per_byte`.
    Raises:
      ValueError: no position of the batches has a target.
    """
    results: list[Mapping[str, Any]] = []
    for batch in batches:
        results.append(program.eval_step(params, batch))
        # Two in flight hide the reading of a batch; more would only hold memory, and
        # queues of programs starve simulated devices (see `generate`).
        jax.block_until_ready(dict(results[max(0, len(results) - 2)]))
    # Summed on the host in float64: the order and rounding are the same everywhere.
    nll = sum(float(result["nll"]) for result in results)
    tokens = sum(int(result["tokens"]) for result in results)
    if tokens == 0:
        raise ValueError(
            "the held-out samples have no targets: every document is shorter than two "
            "tokens; give longer text or --data.no-isolate-documents"
        )
    return {
        "eval_loss": nll / tokens,
        "eval_bits_per_byte": bits_per_byte(nll, num_bytes),
    }


def generate(
    program: Program,
    params: PyTree,
    prompt: Int[np.ndarray, "n"],
    *,
    num_rows: int,
    seq_len: int,
    num_tokens: int,
    vocab_size: int,
    seed: int,
) -> Int[np.ndarray, "m"]:
    """Continue a prompt by sampling at a fixed temperature.

    The whole prefix is computed again for each token: this is a look at the model, not
    a way to serve it.

    Args:
      program: its `next_token_logits` is used.
      params: of the state, with its shardings.
      prompt: token ids, at least one.
      num_rows: rows of the token array, a multiple of the data-parallel size; all hold
        the same prompt and the first is returned.
      seq_len: columns of the token array; a longer text is continued from its last
        seq_len tokens.
      num_tokens: to draw.
      vocab_size: ids that the tokenizer can decode.
      seed: of the sampling.
    Returns:
      The continuation, without the prompt.
    """
    sharding = program.batch_sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())

    # The key is made inside: jax cannot put one on the devices of other processes.
    def draw(logits, count):
        known = jnp.arange(logits.shape[-1]) < vocab_size
        logits = jnp.where(known, logits.astype(jnp.float32) / _TEMPERATURE, -jnp.inf)
        return jax.random.categorical(
            jax.random.fold_in(jax.random.key(seed), count), logits[0]
        )

    draw = jax.jit(draw, out_shardings=whole)
    shape = (num_rows, seq_len)
    seen = prompt.tolist()
    for count in range(num_tokens):
        context = np.asarray(seen[-seq_len:], np.int32)
        rows = np.broadcast_to(np.pad(context, (0, seq_len - len(context))), shape)
        tokens = jax.make_array_from_callback(shape, sharding, rows.__getitem__)
        logits = program.next_token_logits(params, tokens, len(context))
        # Read one by one. Simulated devices share few threads: with all tokens queued,
        # collectives that wait for each other took them all, and XLA aborted after
        # 40 s (seen with 8 devices on 2 cores, jax 0.11.2).
        seen.append(int(draw(logits, count)))
    return np.asarray(seen[len(prompt) :])

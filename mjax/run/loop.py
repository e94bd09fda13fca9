"""Run the steps: dispatch, read metrics one step late, evaluate, save, stop cleanly.

Input: a compiled program, a state, an iterator of batches, and the destinations of
rows and checkpoints, all as arguments. Output: the last state, and why the loop ended.
The device never waits for the host: while it runs step n, the host reads the metrics
of step n - 1. The loop does not depend on the config, files or the model.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from mjax.ckpt.manager import Answer, Checkpoints
from mjax.cli import exit_codes
from mjax.processes.progress import Phase
from mjax.run.ending import StopRequest
from mjax.run.garbage import collections_every
from mjax.run.host_reads import read_numbers
from mjax.run.loop_protocols import Batches, Corruption, Program
from mjax.run.metrics import Recorder, Row
from mjax.run.watch import Watch

_AGAIN = "The same command would fail again: start another run, in another --work-dir, "
STAMPS = "stamps"
"""Metric of a step that holds the logs of all devices, see `mjax.step.stamps`."""


class _Unfinished(NamedTuple):
    """A step whose metrics have not been read."""

    step: int
    metrics: Mapping[str, Any]
    data_wait_s: float
    dispatched_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """Length of the run and intervals of periodic actions, in steps."""

    num_steps: int
    """Optimizer steps of the whole run."""
    eval_every: int
    """Steps between evaluations; the last step is always evaluated."""
    ckpt_every: int
    """Steps between checkpoints; the last step is always saved."""
    max_consecutive_skips: int
    """Number of consecutive skipped steps after which the run gives up."""
    gc_every: int
    """Steps between Python's garbage collections."""
    replica_check_every: int = 100
    """Steps between comparisons of the replicas; each save compares them too."""

    @property
    def last_steps(self) -> int:
        """Number of last steps; the run is done only if one of them was accepted."""
        return min(max(2, min(20, self.num_steps // 2)), self.num_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the loop ended."""

    state: Any
    """The state after the last step."""
    step: int
    """Optimizer steps of that state."""
    exit_code: int
    """DONE, FAILED, PREEMPTED or GAVE_UP."""
    has_diverged: bool = False
    """Whether the run gave up because of its state; an earlier state may help."""
    corruption: Corruption | None = None
    """How replicas differ, if the run gave up because of this; otherwise None."""


@dataclasses.dataclass(kw_only=True)
class Loop:
    """The loop over the steps. Every process of the run executes the same loop."""

    program: Program
    state: Any
    batches: Batches
    cadence: Cadence
    recorder: Recorder
    checkpoints: Checkpoints
    make_row: Callable[..., Row]
    """`mjax.run.metrics.make_row` with its constants bound."""
    evaluate: Callable[[Any, Callable[[], bool]], Row]
    """Takes the parameters and the stop query; returns `eval_loss` and
    `eval_bits_per_byte`, or nothing if stopped."""
    facts: Mapping[str, Any]
    """JSON metadata saved in each checkpoint: config, seed, versions."""
    consecutive_skips: int = 0
    """Skipped steps since the last accepted step of the state."""
    is_evaluated: bool = True
    """False if an evaluation of the state is due and has not finished."""
    watch: Watch = dataclasses.field(default_factory=Watch)
    """Reports what this process is doing and where its time goes."""

    def __post_init__(self) -> None:
        self._is_first = True
        self._is_overdue = False
        self._has_diverged = False
        self._corruption: Corruption | None = None
        self._eval_loss: float | None = None
        self._save_facts: Row = {}
        self._unfinished: _Unfinished | None = None
        self._finished_ns = time.monotonic_ns()

    def run(self, start_step: int, stop: StopRequest) -> Outcome:
        """Take steps from `start_step` until the end, a stop request, or giving up.

        Args:
          start_step: optimizer steps of the state.
          stop: called after each step and before each batch of an evaluation. On a stop
            the state is saved first, if a step was taken.
        """
        step, exit_code = start_step, self._begin(start_step, stop)
        with collections_every(self.cadence.gc_every) as collect:
            self._finished_ns = time.monotonic_ns()
            while step < self.cadence.num_steps and exit_code == exit_codes.DONE:
                self.watch.marks.mark(Phase.STEP, step)
                self.watch.slow_steps.begin()
                unfinished = self._dispatch(step + 1)
                step += 1
                self.watch.marks.mark(Phase.STEP, step)
                collect(step)
                self._finish()
                self._unfinished = unfinished
                if (slow := self.watch.slow_steps.end(step)) is not None:
                    self.watch.spans.tell(slow)
                    self.recorder.say(f"warning: {slow.text}")
                self.watch.spans.enter("agree", "host", step)
                exit_code = self._after(step, stop)
                self.watch.spans.flush(before=step)
        return Outcome(
            state=self.state,
            step=step,
            exit_code=exit_code,
            has_diverged=self._has_diverged,
            corruption=self._corruption,
        )

    def _dispatch(self, step: int) -> _Unfinished:
        """Dispatch a step; a separate gather is dispatched before the batch arrives."""
        first: tuple[Any, ...] = ()
        if self.program.gather_first is not None:
            self.watch.spans.enter("gather", "host", step)
            first = (self.program.gather_first(self.state.params),)
        self.watch.spans.enter("data", "data", step)
        batch = next(self.batches)
        dispatched_ns = self.watch.spans.enter("dispatch", "host", step)
        metrics = self._take_step(step, batch, *first)
        return _Unfinished(step, metrics, self.batches.data_wait_s, dispatched_ns)

    def _take_step(self, step: int, batch: Any, *first: Any) -> Mapping[str, Any]:
        """Take a step; if it is profiled, wait for it and overlap nothing with it."""
        windows = self.watch.windows
        if windows is None or not windows.is_due(step):
            self.state, metrics = self.program.train_step(self.state, batch, *first)
            return metrics
        self._finish()
        self.watch.slow_steps.skip()
        self.watch.spans.enter("profile", "host", step)
        jax.block_until_ready((self.state, batch, first))
        with windows.window(step):
            self.state, metrics = self.program.train_step(self.state, batch, *first)
            jax.block_until_ready((self.state, dict(metrics)))
        return metrics

    def _begin(self, step: int, stop: StopRequest) -> int:
        """Finish the work due for the initial state; return DONE, or the exit code.

        The previous start may have been stopped before it evaluated or saved this
        state: the last state may have only a copy on the hosts, and no checkpoint. This
        also compiles the check for non-finite values before the first save.
        """
        is_last = step >= self.cadence.num_steps
        if not self.is_evaluated and self._evaluation_is_due(step):
            evaluated = self._evaluate(step, stop.reached)
            self._eval_loss = evaluated.get("eval_loss")
            self.recorder.amend(step, evaluated)
        if self._gives_up(step, is_last=is_last, keeps=True):
            return exit_codes.GAVE_UP
        if stop.reached():
            return exit_codes.PREEMPTED
        return self._save_now(step, stop) if is_last else exit_codes.DONE

    def _after(self, step: int, stop: StopRequest) -> int:
        """Do the work due after a step; return the exit code, DONE to continue."""
        is_last = step == self.cadence.num_steps
        self.report_saves()
        if self.checkpoints.is_taken_over:
            stop.ask()  # only process 0 knows of the takeover; all see a stop
        is_stopped = stop.reached()
        evaluates = self._evaluation_is_due(step) and not is_stopped
        if evaluates:
            self._finish(stop.reached)
            is_stopped = stop.reached()
        ends = is_last or is_stopped
        answer = None
        if ends or self._is_overdue or step % self.cadence.ckpt_every == 0:
            answer = self._ask_to_save(step, is_last=ends)
        save_due = answer is Answer.ACCEPTED
        copy_due = self.checkpoints.copy_is_due(step)
        if save_due or copy_due:
            self._finish()
        if answer is Answer.HOPELESS:
            self.recorder.say(f"gave up: {self.checkpoints.why_unsaved(step)}")
            return exit_codes.GAVE_UP
        keeps = save_due or copy_due
        if self._is_corrupted(step, keeps=keeps):
            return exit_codes.GAVE_UP
        if self._gives_up(step, is_last=is_last, keeps=keeps):
            return exit_codes.GAVE_UP
        if save_due:
            stop.announce_save(step, self.recorder.say)
            self._save(step, is_last=ends)
        if copy_due:
            self._copy(step)
        if evaluates or save_due or copy_due:  # not part of the next step's time
            self._finished_ns = time.monotonic_ns()
        if ends:
            code = self._wait_for_save(step, None if is_stopped else stop)
            if code != exit_codes.DONE:
                return code
        return exit_codes.PREEMPTED if is_stopped else exit_codes.DONE

    def _evaluation_is_due(self, step: int) -> bool:
        is_last = step == self.cadence.num_steps
        return step > 0 and (is_last or step % self.cadence.eval_every == 0)

    def _save_now(self, step: int, stop: StopRequest) -> int:
        """Save the current state and wait; return DONE, or the exit code."""
        self.checkpoints.ask(step, is_last=True)
        self._save(step, is_last=True)
        return self._wait_for_save(step, stop)

    def _gives_up(self, step: int, *, is_last: bool, keeps: bool) -> bool:
        """Return whether continuing is useless; every process gets the same answer.

        Args:
          step: optimizer steps of the state.
          is_last: whether the run would end here as done.
          keeps: whether the state would be saved or copied now.
        """
        limit = self.cadence.max_consecutive_skips
        if is_last:
            limit = min(limit, self.cadence.last_steps)
        if self.consecutive_skips >= limit:
            self._finish()  # the step in progress may have been accepted
        skips = self.consecutive_skips
        problem = None
        if (keeps or skips >= limit) and not self.program.is_finite(self.state):
            problem = (
                f"the state after step {step} holds NaN or infinity and is not saved. "
                f"{_AGAIN}with a lower --optim.lr"
            )
        elif skips >= limit:
            problem = (
                f"the last {skips} steps were skipped: their loss or gradient norm was "
                f"not finite or spiked. {_AGAIN}with a lower --optim.lr, or inspect "
                "the data of those steps (python -m mjax.data show --step N)"
            )
        elif is_last and not math.isfinite(self._eval_loss or 0.0):
            problem = (
                f"the held-out loss after the last step, {step}, is {self._eval_loss}. "
                f"{_AGAIN}with a lower --optim.lr"
            )
        if problem is not None:
            older = self._saved_before(step)
            problem += f"; the checkpoint of step {older} is kept" if older else ""
            self.recorder.say(f"gave up: {problem}")
        self._has_diverged = problem is not None
        return self._has_diverged

    def _is_corrupted(self, step: int, *, keeps: bool) -> bool:
        """Return whether replicas differ, if a check is due; equal on all processes."""
        find = self.program.find_corruption
        is_due = keeps or step % self.cadence.replica_check_every == 0
        if find is None or not is_due:
            return False
        self._corruption = found = find(self.state)
        if found is not None:
            named = ", ".join(map(str, found.processes))
            who = f"process {named} from the majority"
            if not found.is_sure:
                who = f"processes {named}, without a majority"
            older = self._saved_before(step)
            source = f" from the checkpoint of step {older}" if older else ""
            self.recorder.say(
                f"gave up: after step {step} the replicas of the state differ: {who}. "
                f"It is not saved; restart on other hosts{source}"
            )
        return found is not None

    def _saved_before(self, step: int) -> int | None:
        """Return the newest saved step before `step`; None if none is known."""
        steps: list[int] = []
        with contextlib.suppress(OSError):  # the store does not answer
            steps = self.checkpoints.store.steps()
        return max((saved for saved in steps if saved < step), default=None)

    def _finish(self, is_stopped: Callable[[], bool] | None = None) -> None:
        """Wait for the step whose metrics have not been read, and write its row.

        Args:
          is_stopped: stop query, given if an evaluation is due; True ends the
            evaluation.
        """
        if self._unfinished is None:
            return
        step, metrics, data_wait_s, dispatched_ns = self._unfinished
        self._unfinished = None
        self.watch.spans.enter("device", "compute", step)
        numbers = read_numbers({n: x for n, x in metrics.items() if n != STAMPS})
        now_ns = self.watch.spans.enter("metrics", "host", step)
        if STAMPS in metrics:
            self.watch.add_stamps(step, metrics[STAMPS], dispatched_ns, now_ns)
        step_s = (now_ns - self._finished_ns) / 1e9
        self.watch.spans.add(
            "step", "compute", "step", self._finished_ns, now_ns, step=step
        )
        if self._is_first:
            self.recorder.say(f"start-up: first step {step_s:.2f} s")
            self.watch.marks.ended_first_step()
            self._is_first = False
        row = self.make_row(step, numbers, step_s=step_s, data_wait_s=data_wait_s)
        if self.watch.windows is not None and self.watch.windows.is_due(step):
            row |= {"profiled": 1}
        self._finished_ns = now_ns
        self.consecutive_skips = self.consecutive_skips + 1 if row["skipped"] else 0
        evaluated = self._evaluate(step, is_stopped) if is_stopped else {}
        self._eval_loss = evaluated.get("eval_loss")
        self.recorder.record(row | evaluated | self._save_facts)
        self._save_facts = {}

    def _evaluate(self, step: int, is_stopped: Callable[[], bool]) -> Row:
        """Return the metrics of an evaluation; update the progress word per batch."""
        self.watch.slow_steps.skip()
        self.watch.spans.enter("eval", "eval", step)
        batches = itertools.count()

        def begins_batch() -> bool:
            self.watch.marks.mark(Phase.EVAL, step, next(batches))
            return is_stopped()

        evaluated = self.evaluate(self.state.params, begins_batch)
        self.watch.spans.enter("metrics", "host", step)
        return evaluated

    def _ask_to_save(self, step: int, *, is_last: bool) -> Answer:
        """Ask whether a save can begin; print a line if an earlier save still runs."""
        # `ask` synchronises the processes in any case.
        self.watch.spans.barrier(self.watch.meet)
        answer = self.checkpoints.ask(step, is_last=is_last)
        if answer is Answer.BUSY and not self._is_overdue:
            self.recorder.say(
                f"step {step} is not saved: the previous checkpoint is still being "
                "written; the newest step is saved when it is done"
            )
        self._is_overdue = answer is Answer.BUSY
        return answer

    def _save(self, step: int, *, is_last: bool) -> None:
        """Write the rows so far to disk, then start a save of the state."""
        self._begin_save("save", step)
        self.recorder.sync()
        with self._state_to_save() as make:
            copy = self.checkpoints.save(step, make, self._facts(step), is_last=is_last)
        if copy is not None:
            self._save_facts |= {
                "ckpt_copy_s": copy.copy_s,
                "ckpt_copy_gb_per_s": copy.num_bytes / copy.copy_s / 1e9,
            }

    def _copy(self, step: int) -> None:
        """Write the rows so far to disk, then copy the state to the hosts."""
        self._begin_save("copy", step)
        self.recorder.sync()
        with self._state_to_save() as make:
            self.checkpoints.copy(step, make, self._facts(step))

    def _facts(self, step: int) -> Mapping[str, Any]:
        return {**self.facts, "next_step": step, "eval_loss": self._eval_loss}

    @contextlib.contextmanager
    def _state_to_save(self) -> Iterator[Callable[[], Any]]:
        """Yield a function that makes the arrays to save; free them at the end."""
        made: list[Any] = []

        def make() -> Any:
            made.append(self.program.to_saved(self.state))
            return made[0]

        try:
            yield make
        finally:
            for saved in made:
                self._free(saved)

    def report_saves(self) -> None:
        """Report background saves and uploads; training continues."""
        for upload in self.checkpoints.uploads():
            self.recorder.say(upload.describe())
            self._save_facts |= upload.metrics
        for attempt in self.checkpoints.attempts():
            self.recorder.say(attempt.describe())
            if attempt.error is None:
                self.watch.marks.saved(attempt.step)
                self._save_facts |= attempt.metrics

    def _free(self, saved: Any) -> None:
        """Free the arrays that were made for a save; keep leaves of the state."""
        kept = {id(leaf) for leaf in jax.tree.leaves(self.state)}
        for leaf in jax.tree.leaves(saved):
            if id(leaf) not in kept:
                leaf.delete()

    def _begin_save(self, name: str, step: int) -> None:
        self.watch.slow_steps.skip()
        self.watch.marks.mark(Phase.SAVE, step)
        self.watch.spans.enter(name, "ckpt", step)

    def _wait_for_save(self, step: int, stop: StopRequest | None) -> int:
        """Return DONE if the state is in the store, otherwise the exit code.

        Args:
          step: optimizer steps of the state.
          stop: a stop request ends further attempts; None if the run already stops.
        """
        self._begin_save("wait for save", step)
        is_stopped = (lambda: False) if stop is None else stop.reached
        is_saved = self.checkpoints.wait(self.report_saves, is_stopped)
        self.report_saves()
        if is_saved:
            return exit_codes.DONE
        self.recorder.say(self.checkpoints.why_last_unsaved(step))
        return (
            exit_codes.GAVE_UP if self.checkpoints.is_taken_over else exit_codes.FAILED
        )

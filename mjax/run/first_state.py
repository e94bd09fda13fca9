"""The state that the loop over steps begins with: the newest saved one, or a new one.

Input: a run that is built, checked and claimed. Output: the state on the run's mesh,
and the number of steps in it.
"""

import dataclasses
import time
from typing import Any

from mjax.run import metrics, report
from mjax.run.init_from import initial_params
from mjax.run.prepare import Run, check_facts, init_from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Initial state of the loop over steps."""

    step: int
    """Optimizer steps already taken."""
    state: Any
    """State of the program, on its mesh."""
    is_evaluated: bool
    """Whether the held-out loss of the state is known; true for a new state, which is
    not evaluated."""


def first_state(run: Run) -> Start:
    """Restore the newest intact state onto the run's mesh, or initialise a new one.

    All processes call this. Process 0 prints the source of a restored state, and the
    steps of an earlier start that are lost.

    Args:
      run: the run, with its compiled program.
    Raises:
      ValueError: the saved state is of another run, or the source of --init-from does
        not fit the model.
      LostError: steps were saved but none is intact.
      RuntimeError: the store does not answer.
    """
    program = run.program
    assert run.checkpoints is not None
    started_s = time.perf_counter()
    restored = run.checkpoints.restore(program.abstract_saved)
    if restored is None:
        _tell_repeated(run, 0)
        return Start(step=0, state=_new_state(run), is_evaluated=True)
    for lost in restored.put_aside:
        report.say(f"warning: a checkpoint was put aside: {lost}")
    report.say(
        f"resuming after step {restored.step}, from {restored.source}; restored in "
        f"{time.perf_counter() - started_s:.2f} s, process 0 read "
        f"{restored.bytes_read / 1e6:.1f} MB"
    )
    _tell_repeated(run, restored.step)
    where = f"the state of step {restored.step} from {restored.source}"
    run.agreement.together(
        lambda: check_facts(run.config, run.dataset, restored.step, restored.run, where)
    )
    state = program.from_saved(restored.state)
    for line in report.describe_new_steps(
        restored.run["config"], run.config, restored.step, state.opt_state
    ):
        report.say(line)
    is_evaluated = restored.run.get("eval_loss") is not None
    return Start(step=restored.step, state=state, is_evaluated=is_evaluated)


def _tell_repeated(run: Run, step: int) -> None:
    """Print which steps of an earlier start this start takes again."""
    if run.agreement.rank != 0:
        return
    rows = metrics.read_rows(run.work_dir / "metrics.jsonl")
    if rows and (last := rows[-1]["step"]) > step:
        begins = "" if step else "starting at step 0, because no step was saved; "
        which = f"step {last}" if last == step + 1 else f"steps {step + 1} to {last}"
        report.say(f"{begins}{which} of the earlier start will be taken again")


def _new_state(run: Run) -> Any:
    """Make the state of step 0, with new parameters or those of --init-from."""
    program, agreement = run.program, run.agreement
    weights = run.weights or init_from(run.config, program, agreement)
    state = program.init()
    if weights is None:
        return state
    report.say(weights.described)
    saved = program.to_saved(state)
    abstract = program.abstract_saved.params
    params = initial_params(weights, abstract, saved.params, agreement)
    saved = dataclasses.replace(saved, params=params)
    return program.from_saved(saved)

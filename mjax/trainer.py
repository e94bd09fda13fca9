"""One run, from a checked config to its summary.

Input: the config and its command line. Output: the work dir that `mjax.train`
describes, and the exit code of the run. `mjax.train` imports this module after it has
read the flags, because importing jax takes more than a second.

Read `run_training`, then `prepare.prepare`, then `train`.
"""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax

import mjax
from mjax.ckpt.recovery import LostError
from mjax.cli import exit_codes
from mjax.config.command_line import Command, shared_facts
from mjax.config.fixes import Devices, sizes_of
from mjax.config.train import TrainConfig, flattened, to_fields
from mjax.data import skips
from mjax.data.cache_files import DamagedFileError
from mjax.data.loader import (
    Loader,
    OneBatch,
    held_out_batches,
    held_out_num_bytes,
)
from mjax.mesh.build import build_mesh, describe, devices_per_host
from mjax.mesh.devices import (
    keep_compiled_programs,
    load_plugin_without_gpu,
    simulate_devices,
)
from mjax.plan import operations
from mjax.processes import distributed, progress
from mjax.processes.agreement import Agreement
from mjax.processes.comparison import check_same, code_facts, environment_facts
from mjax.processes.progress import Phase
from mjax.records import config_json
from mjax.run import (
    disk_space,
    ending,
    evaluation,
    loop,
    metrics,
    out_of_memory,
    record,
    report,
    schedule_record,
)
from mjax.run.ending import is_ours
from mjax.run.first_state import Start, first_state
from mjax.run.prepare import Run, claim_work_dir, prepare
from mjax.run.tracking import names as tracker_names
from mjax.run.tracking.delivery import Delivery
from mjax.run.tracking.tracker import RunFacts
from mjax.run.watch import Watch
from mjax.run.work_dir_lock import WorkDirLock
from mjax.step.program import Program

_SAME_COMMAND = (
    "Start all processes with the same flags, environment, code and versions; only "
    "--distributed.process-id, and folders of one host, may differ"
)


def run_training(
    config: TrainConfig,
    command: Command,
    argv: Sequence[str],
    marks: progress.Writer,
    *,
    is_resumed: bool,
    imported_s: float,
) -> int:
    """Run the training of a config; return the exit code.

    Args:
      config: config of the run.
      command: options of the command line besides the config.
      argv: the flags.
      marks: records the progress of this process.
      is_resumed: whether config.json of the work dir supplied the missing flags.
      imported_s: `time.perf_counter` after the imports.
    """
    watch = Watch(marks=marks)
    watch.start(Phase.INIT)
    launch = os.environ.get(progress.LAUNCH_VARIABLE, "")
    with WorkDirLock(launch, marks.generation) as lock:
        return _run(
            *(config, command, argv, watch, lock),
            is_resumed=is_resumed,
            imported_s=imported_s,
        )


def _run(
    config: TrainConfig,
    command: Command,
    argv: Sequence[str],
    watch: Watch,
    lock: WorkDirLock,
    *,
    is_resumed: bool,
    imported_s: float,
) -> int:
    """Run the training, as `run_training`, with the lock of the work dir."""
    try:
        agreement, facts = _start_processes(config, command)
        changes_nothing = command.dry_run or command.print_mesh
        if config.work_dir is not None and not changes_nothing:
            given = Path(config.work_dir)
            agreement.decide(lambda: lock.check(given) or "")
        if is_resumed:
            report.say(
                f"resuming the run in {config.work_dir}: its config.json gives the "
                "flags that are absent here"
            )
        devices = _start_devices(config)
        sizes = sizes_of(config, devices)
        mesh = build_mesh(sizes, tp_across_hosts=config.mesh.tp_across_hosts)
        shows_details = report.shows_details(command)
        layout = describe(mesh)
        if not (shows_details or command.print_mesh):
            layout = layout.partition("\n")[0]
        report.say(layout)
        if command.print_mesh:
            return exit_codes.DONE
        if shows_details:
            report.say(f"start-up: import {imported_s - mjax.STARTED_S:.1f} s")
        started_s = time.perf_counter()
        watch.start(Phase.BUILD)
        run = prepare(
            *(config, command, devices, mesh, agreement, facts, argv), lock=lock
        )
        if shows_details:
            report.say(f"start-up: build {time.perf_counter() - started_s:.1f} s")
    except Exception as error:
        return _refused(error)
    needs = out_of_memory.needs_of(run, devices, command, argv, is_resumed=is_resumed)
    watch.start(Phase.COMPILE)
    try:
        with out_of_memory.explained(needs, "compilation"):
            run = dataclasses.replace(run, program=_compile(run, watch.marks))
    except (ValueError, out_of_memory.OutOfMemoryError) as error:
        return _refused(error)
    if command.dry_run:
        return exit_codes.DONE
    started_s = time.perf_counter()
    watch.start(Phase.RESTORE)
    full_disk = functools.partial(disk_space.explained, run.work_dir)
    try:
        with full_disk():
            with out_of_memory.explained(needs, "the start"):
                start = first_state(run)
            assert run.checkpoints is not None
            launch = os.environ.get(progress.LAUNCH_VARIABLE, "")
            run.checkpoints.claim(launch, watch.marks.generation)
            recorded = record.write(
                *(run.work_dir, mesh, agreement, facts, argv),
                launch=launch,
                generation=watch.marks.generation,
                start_step=start.step,
            )
            if jax.process_index() == 0:
                schedule_record.write(run.work_dir, recorded, run.program.pipeline)
        if start.step:
            watch.marks.saved(start.step)
        trackers = agreement.together(lambda: _trackers(run, recorded, start.step))
    except Exception as error:
        return _refused(error)
    agreement.together(lambda: None)  # from here on all processes stop together
    try:
        with (
            full_disk(),
            out_of_memory.explained(needs, "training"),
            ending.StopRequest() as stop,
        ):
            watch.open(config.observe, run.work_dir, recorded, mesh, agreement)
            text = functools.partial(_text_of_step, run)
            watch.open_windows(config.profile, run.work_dir, recorded, mesh, text)
            return train(run, start, stop, watch, trackers, started_s=started_s)
    except (
        DamagedFileError,
        disk_space.NoSpaceError,
        out_of_memory.OutOfMemoryError,
    ) as error:
        return _refused(error)


def train(
    run: Run,
    start: Start,
    stop: ending.StopRequest,
    watch: Watch,
    open_trackers: Callable[[Callable[[str], None]], Sequence[Delivery]],
    *,
    started_s: float,
) -> int:
    """Run the remaining steps, then write the results of the run.

    Args:
      run: the run, with its compiled program.
      start: the initial state.
      stop: polled at every safe point.
      watch: records the position of this process and how it spends its time.
      open_trackers: starts the trackers of the run; its argument prints to the
        terminal.
      started_s: `time.perf_counter` at the start of the run.
    Returns:
      the exit code.
    """
    config, is_rank_0 = run.config, jax.process_index() == 0
    assert run.checkpoints is not None  # not in a dry run
    recorder = metrics.Recorder(
        run.work_dir,
        config.log,
        start_step=start.step,
        num_steps=config.steps,
        active=is_rank_0,
        remake=lambda: claim_work_dir(run),
        is_ours=run.checkpoints.owns_store,
        open_trackers=open_trackers,
        memory=report.device_memory,
    )
    exit_code = exit_codes.FAILED
    try:
        exit_code = _take_steps(run, start, stop, recorder, watch)
    finally:
        watch.end(Phase.EXIT, "host")
        if is_rank_0:
            exit_code = report.write_summary(
                run.work_dir,
                config,
                run.dataset,
                recorder,
                exit_code=exit_code,
                is_saved=run.checkpoints.store.path(config.steps).exists,
                wall_s=time.perf_counter() - started_s,
            )
        recorder.close(report.ENDINGS_SHORT.get(exit_code, "failed"))
        watch.close(exit_code)
    return int(run.agreement.from_rank(0, str(exit_code)))


def _trackers(
    run: Run, recorded: record.Start, start_step: int
) -> Callable[[Callable[[str], None]], Sequence[Delivery]]:
    """Return a function that starts the trackers; only process 0 has trackers."""
    names = run.config.track if jax.process_index() == 0 else ()
    made = {name: tracker_names.make(name) for name in names}
    facts = RunFacts(
        id=recorded.run,
        name=run.work_dir.name,
        work_dir=run.work_dir.absolute(),
        start_number=recorded.number,
        start_step=start_step,
    )
    config = flattened(to_fields(run.config))
    return lambda say: [
        Delivery(tracker_names.short_name(name), tracker, facts, config, say)
        for name, tracker in made.items()
    ]


def _take_steps(
    run: Run,
    start: Start,
    stop: ending.StopRequest,
    recorder: metrics.Recorder,
    watch: Watch,
) -> int:
    """Run the loop, generate a sample, and return the outcome of the run."""
    config = run.config
    assert run.checkpoints is not None
    with _batches(run, start) as loader:
        steps = _make_loop(run, start, loader, recorder, watch)
        outcome = steps.run(start.step, stop)
    exit_code = outcome.exit_code
    if outcome.has_diverged:
        _tell_ways_back(run, outcome.step, recorder, watch.marks)
    if outcome.corruption is not None:
        found = outcome.corruption
        watch.marks.corrupted(outcome.step, found.processes, is_sure=found.is_sure)
    watch.end(Phase.SAMPLE, "eval")
    if exit_code == exit_codes.DONE and not report.sample(
        run.program,
        outcome.state.params,
        run.dataset,
        recorder,
        path=run.work_dir / "sample.txt",
        num_rows=run.sizes.dp,
        num_tokens=config.log.sample_tokens,
        end_ids=run.end_ids,
        seed=config.seed,
        is_stopped=stop.reached,
    ):
        exit_code = exit_codes.PREEMPTED
    watch.end(Phase.SAVE, "ckpt")
    missing = run.checkpoints.finish_uploads(stop.stopped_s)
    run.checkpoints.close()
    steps.report_saves()
    if missing:
        recorder.say(f"warning: {missing}")
        if exit_code == exit_codes.DONE:
            exit_code = exit_codes.PREEMPTED if stop.reached() else exit_codes.FAILED
    return exit_code


def _batches(run: Run, start: Start) -> Loader | OneBatch:
    """Open the batches of the remaining steps; a `Loader` begins to read at once."""
    stream, sharding = run.dataset.train, run.program.batch_sharding
    batch_size = run.config.batch.size
    if run.config.data.one_batch:
        return OneBatch(stream, sharding, batch_size=batch_size)
    return Loader(stream, sharding, batch_size=batch_size, start_step=start.step)


def _text_of_step(run: Run) -> str:
    """Return the HLO text of the compiled step."""
    return cast(jax.stages.Compiled, run.program.train_step).as_text() or ""


def _tell_ways_back(
    run: Run, step: int, recorder: metrics.Recorder, marks: progress.Writer
) -> None:
    """Suggest a saved step from which the run can continue without the later data."""
    assert run.checkpoints is not None
    before = skips.read(run.config.data.skip)
    saved = [s for s in run.checkpoints.store.steps() if s < step] or [0]
    ways = {to: [str(s) for s in skips.roll_back(before, to, step)] for to in saved}
    marks.diverged(step, ways)
    recorder.say(
        f"to go back to step {saved[-1]} and skip the data since then, add --data.skip "
        f"{' '.join(ways[saved[-1]])}"
    )


def _refused(error: Exception) -> int:
    """Print errors that a user can fix, and return the exit code; raise all others."""
    if isinstance(error, LostError):
        exit_code = exit_codes.GAVE_UP
    elif isinstance(error, (ValueError, NotImplementedError)):
        exit_code = exit_codes.BAD_INPUT
    elif isinstance(error, RuntimeError):
        exit_code = exit_codes.FAILED
    else:
        raise error
    if not is_ours(error):
        raise error
    print(f"error: {error}", file=sys.stderr)
    return exit_code


def _start_processes(
    config: TrainConfig, command: Command
) -> tuple[Agreement, dict[str, Any]]:
    """Join the other processes, and check that all were started in the same way.

    Returns:
      the agreement between processes, and the description of code and environment that
      they share.
    """
    # `ending` turns jax's handling of signals on when the loop begins.
    jax.config.update("jax_enable_preemption_service", False)
    distributed.start(config.distributed)
    ending.watch_processes()
    agreement = Agreement("start")
    # Before the devices: processes with different meshes would deadlock there.
    facts = environment_facts() | code_facts()
    check_same(agreement, shared_facts(config, command) | facts, _SAME_COMMAND)
    return agreement, facts


def _start_devices(config: TrainConfig) -> Devices:
    """Start jax's devices according to the flags; return the devices of the mesh."""
    load_plugin_without_gpu()
    if config.simulate_devices is not None:
        simulate_devices(config.simulate_devices)
    keep_compiled_programs()
    count, per_host = jax.device_count(), devices_per_host(jax.devices())
    can_simulate = jax.default_backend() == "cpu" and per_host == count
    return Devices(
        count=count,
        flag="simulate_devices" if can_simulate else None,
        per_flag=jax.process_count(),
        per_host=None if can_simulate else per_host,
    )


def _compile(run: Run, marks: progress.Writer) -> Program:
    """Load the training step, or compile it ahead of time; print the time it took."""
    started_s, program = time.perf_counter(), run.program
    step, how = None, "load"
    if run.step is None:
        step = run.executables.load(program)
    if step is None:
        traced, how = run.step or program.trace(), "compile"
        step = run.executables.compile(traced, run.memory)
    gather = program.gather_first
    if gather is not None:
        lowered = cast(jax.stages.Wrapped, gather).lower(program.abstract_state.params)
        gather = run.agreement.together(lowered.compile)
    _tell_operations([step, *([] if gather is None else [gather])], marks)
    report.say(f"start-up: {how} {time.perf_counter() - started_s:.1f} s")
    return dataclasses.replace(program, train_step=step, gather_first=gather)


def _tell_operations(
    programs: Sequence[jax.stages.Compiled], marks: progress.Writer
) -> None:
    """Record where in the traced code the operations are that XLA names in a hang."""
    if not operations.are_tracked():
        return
    try:
        places = [operations.places_of(one.as_text() or "") for one in programs]
        marks.operations({name: one for each in places for name, one in each.items()})
    except ValueError as error:
        report.say(
            f"warning: operations cannot be mapped to places in the step ({error})"
        )


def _make_loop(
    run: Run,
    start: Start,
    loader: Loader | OneBatch,
    recorder: metrics.Recorder,
    watch: Watch,
) -> loop.Loop:
    """Assemble the parts of the training loop."""
    config, dataset, program = run.config, run.dataset, run.program
    assert run.checkpoints is not None
    utilization = report.utilization(config, run.sizes)
    recorder.say(utilization.describe())
    num_bytes = held_out_num_bytes(dataset, config.batch.size * config.eval.batches)

    def evaluate(params: Any, is_stopped: Callable[[], bool]) -> metrics.Row:
        batches = held_out_batches(
            dataset.held_out,
            program.batch_sharding,
            batch_size=config.batch.size,
            num_batches=config.eval.batches,
        )
        return evaluation.evaluate(program, params, batches, num_bytes, is_stopped)

    return loop.Loop(
        program=program,
        state=start.state,
        batches=loader,
        cadence=loop.Cadence(
            num_steps=config.steps,
            eval_every=config.eval.every,
            ckpt_every=config.ckpt.every,
            max_consecutive_skips=config.optim.max_consecutive_skips,
            gc_every=config.gc_every,
            replica_check_every=config.replica_check_every,
        ),
        recorder=recorder,
        checkpoints=run.checkpoints,
        watch=watch,
        make_row=functools.partial(
            metrics.make_row,
            bytes_per_token=dataset.bytes_per_token,
            utilization=utilization,
        ),
        evaluate=evaluate,
        facts={
            "config": config_json.stamped(to_fields(config)),
            "data_fingerprint": dataset.fingerprint,
            "corpus_hash": dataset.corpus_hash,
            "tokenizer_digest": dataset.tokenizer.digest,
            "seed": config.seed,
            "versions": report.versions(),
        },
        consecutive_skips=int(start.state.guard.num_consecutive_skips),
        is_evaluated=start.is_evaluated,
    )

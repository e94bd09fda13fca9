"""Turn a config into a run that is ready to compile: build, check, claim.

Input: a config, and the mesh of all processes. Output: a `Run`. Nothing is compiled
here. Until every check has passed on every process, nothing is printed or moved, and
nothing is written except caches of the data.
"""

import dataclasses
import functools
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.manifest import Manifest
from mjax.ckpt.places import is_without_steps
from mjax.ckpt.recovery import check_matches
from mjax.config.command_line import Command
from mjax.config.fixes import Devices, sizes_of
from mjax.config.own_recipe import short_name
from mjax.config.sizes import smaller
from mjax.config.train import TrainConfig, run_differences, to_fields
from mjax.data import end_tokens
from mjax.data.dataset import Dataset
from mjax.data.tokenizer_files import TokenizerFiles, files_of
from mjax.estimate import memory
from mjax.hugging_face import nearest
from mjax.mesh.axes import AxisSizes
from mjax.mesh.host_memory import reaches_host
from mjax.processes import progress
from mjax.processes.agreement import DAY_S, Agreement
from mjax.processes.comparison import check_same
from mjax.processes.config import DistributedConfig
from mjax.run import report, report_pipeline, work_dir
from mjax.run.executables import Executables
from mjax.run.init_from import Weights, open_weights
from mjax.run.open_data import open_data
from mjax.run.work_dir_lock import WorkDirLock
from mjax.step.program import Program
from mjax.step.traced import program_of, trace_step

_log = logging.getLogger(__name__)

_SAME_DATA = "Give all hosts the same files under --data.path"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """The parts of the run that each process builds on its own."""

    config: TrainConfig
    """The config, with the vocabulary of the tokenizer."""
    sizes: AxisSizes
    dataset: Dataset
    program: Program
    step: jax.stages.Traced | None
    """The traced training step; None if a compiled step was found."""
    executables: Executables
    """The cache file of the compiled step."""
    memory: memory.Estimate
    """Estimated memory of one device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is built, checked and claimed, before anything is compiled."""

    config: TrainConfig
    sizes: AxisSizes
    dataset: Dataset
    program: Program
    step: jax.stages.Traced | None
    """The traced training step; None if a compiled step was found."""
    executables: Executables
    """The cache file of the compiled step."""
    memory: memory.Estimate
    """Estimated memory of one device."""
    work_dir: Path
    tokenizer_files: Mapping[str, bytes]
    """Files for tokenizer/ in the work dir, by name; empty except on process 0."""
    end_ids: frozenset[int]
    """Tokens at which generation from the run's model ends."""
    checkpoints: Checkpoints | None
    """The checkpoints of the run; None in a dry run."""
    agreement: Agreement
    """Agreement of all processes."""
    weights: Weights | None
    """Source of --init-from; None if absent or opened later."""
    lock: WorkDirLock
    """Lock of the work dir."""


def prepare(
    config: TrainConfig,
    command: Command,
    devices: Devices,
    mesh: Mesh,
    agreement: Agreement,
    facts: Mapping[str, Any],
    argv: Sequence[str],
    *,
    lock: WorkDirLock,
) -> Run:
    """Build the run, check it, and claim its work dir.

    A dry run does not change the work dir.

    Args:
      config: config of the flags.
      command: options of the command, from the flags.
      devices: devices of the mesh.
      mesh: mesh of all processes.
      agreement: agreement of all processes.
      facts: values that describe code and environment; equal in all processes.
      argv: the flags, repeated in the resume command.
      lock: holds the work dir.
    Raises:
      ValueError: bad input, with the value and the fix; see the functions called.
    """
    opened = open_data(config, command, argv, agreement)
    config, dataset = opened.config, opened.dataset
    sizes = agreement.together(lambda: sizes_of(config, devices))
    executables = Executables(config, mesh, facts, agreement)
    built = agreement.together(
        lambda: _build(config, sizes, dataset, mesh, executables), timeout_s=DAY_S
    )
    run = _check(built, command, mesh, agreement, lock, opened.end_ids)
    shows_details = report.shows_details(command)
    lines = itertools.chain(opened.lines, _describe(built))
    if not shows_details:
        lines = report.brief(lines, built.config, built.memory)
    for line in lines:
        report.say(line)
    if not command.dry_run:
        agreement.decide(lambda: _claim(run, command))
        more = " (-v shows more)"
        if shows_details:
            is_launched = progress.LAUNCH_VARIABLE in os.environ
            resume = work_dir.resume_command(
                argv, run.work_dir, is_launched=is_launched
            )
            more = f", {resume}"
        report.say(f"work dir {run.work_dir}{more}")
    return run


# ------------------------------------------------------------------------------- build


def _build(
    config: TrainConfig,
    sizes: AxisSizes,
    dataset: Dataset,
    mesh: Mesh,
    executables: Executables,
) -> Built:
    """Build the program, and trace its step if it must be compiled."""
    if executables.kept is not None:
        step, needed = None, executables.kept.memory
        program = program_of(config, mesh)
    else:
        program, step, needed = trace_step(config, mesh)
    return Built(
        config=config,
        sizes=sizes,
        dataset=dataset,
        program=program,
        step=step,
        executables=executables,
        memory=needed,
    )


def _describe(built: Built) -> Iterator[str]:
    """Yield lines that describe a run before it starts."""
    config, sizes = built.config, built.sizes
    yield report.describe_run(config, built.dataset)
    unexported = nearest.describe(config.model, config.data.seq_len)
    if unexported is not None:
        yield unexported
    yield from report_pipeline.describe(config, sizes, built.memory)
    yield report.describe_tp(config, sizes)
    yield from report.describe_matmul(config, built.program.mesh)
    options = built.program.xla_options
    yield from options.describe()
    names = options.as_compiler_options()
    yield from report.describe_combine(config.combine, names, sizes, config.zero)
    yield from report.describe_gather_first(built.program)
    yield report.describe_memory(config, sizes, built.memory)
    if sizes.dp_replicate > 1:
        yield (
            f"replicas: {sizes.dp_replicate}, compared every "
            f"{config.replica_check_every} steps and before each save"
        )
    else:
        yield "replicas: one, so silent data corruption cannot be detected"


# ------------------------------------------------------------------------------- check


def _check(
    built: Built,
    command: Command,
    mesh: Mesh,
    agreement: Agreement,
    lock: WorkDirLock,
    end_ids: Sequence[int],
) -> Run:
    """Check that the run fits the devices, its work dir and its checkpoints.

    Nothing is created or changed. `end_ids` are the end tokens of the base.
    """
    config = built.config
    check_same(agreement, {"data": built.dataset.fingerprint}, _SAME_DATA)
    agreement.together(lambda: _check_memory(built, mesh))
    files = agreement.together(
        lambda: (
            _tokenizer_files(built.dataset, end_ids) if agreement.rank == 0 else None
        )
    )
    ends = agreement.decide(lambda: json.dumps(files.end_ids if files else ()))
    found = json.loads(agreement.decide(lambda: _look_at_work_dir(config, command)))
    # The given path may be relative to the current folder of process 0; the others
    # use the absolute path.
    path = Path(found["path" if agreement.rank == 0 else "absolute_path"])
    checkpoints, saved = None, None
    if not command.dry_run:
        unfit = functools.partial(_has_read_what_is_skipped, config)
        checkpoints = Checkpoints(path, config.ckpt, unfit)
        if command.restart_from_scratch:
            checkpoints.check_nothing_remote()
        else:
            saved = _check_newest(built, checkpoints, agreement)
    # A run that has begun may have copies on the hosts. Only the restore finds them, so
    # the source of --init-from is opened after it.
    may_have_copies = found["has_begun"] and config.ckpt.local_dir is not None
    weights = None
    if saved is None and not may_have_copies:
        weights = init_from(config, built.program, agreement)
    return Run(
        config=config,
        sizes=built.sizes,
        dataset=built.dataset,
        program=built.program,
        step=built.step,
        executables=built.executables,
        memory=built.memory,
        work_dir=path,
        tokenizer_files={} if files is None else files.contents,
        end_ids=frozenset(json.loads(ends)),
        checkpoints=checkpoints,
        agreement=agreement,
        weights=weights,
        lock=lock,
    )


def _tokenizer_files(dataset: Dataset, end_ids: Sequence[int]) -> TokenizerFiles:
    """Return the files of the tokenizer, with the template that rendered the chats."""
    files = files_of(dataset.tokenizer, dataset.tokenizer_path).with_end_ids(end_ids)
    if dataset.chat_template is None:
        return files
    text = end_tokens.text_after_answer(dataset.chat_template)
    if text is not None and end_tokens.first_name(text, files.added) is None:
        _log.warning(
            "the chat template ends an answer with %r, which is no token of its own, "
            "so nothing that generates from the model stops there; end it with "
            "{{ eos_token }} in --data.chat-template, or generate with --stop",
            text,
        )
    ends = sorted(dataset.held_out_prompt()[1])
    return files.with_template(dataset.chat_template).with_end_ids(ends)


def _check_newest(
    built: Built, checkpoints: Checkpoints, agreement: Agreement
) -> Manifest | None:
    """Return the manifest of the newest checkpoint, if any; refuse another run's."""
    saved = checkpoints.newest()
    if saved is not None:
        place = checkpoints.where(saved.step)
        where = f"the checkpoint at step {saved.step} in {place}"
        check_matches(saved, built.program.abstract_saved)
        config, dataset = built.config, built.dataset
        agreement.together(
            lambda: check_facts(config, dataset, saved.step, saved.run, where)
        )
    return saved


def _has_read_what_is_skipped(
    config: TrainConfig, step: int, facts: Mapping[str, Any]
) -> str:
    """Return why the run must go back to a step before this one, or ""."""
    if config.data.has_read(step, facts["config"]["data"].get("skip", ())):
        return ""
    return f"it has read data that --data.skip {' '.join(config.data.skip)} excludes"


def check_facts(
    config: TrainConfig,
    dataset: Dataset,
    step: int,
    facts: Mapping[str, Any],
    where: str,
) -> None:
    """Refuse a saved state of another run, judged by the metadata saved with it.

    Args:
      config: config of this start.
      dataset: dataset of this start.
      step: optimizer steps of the state.
      facts: metadata saved with the state.
      where: source of the state, in messages.
    Raises:
      ValueError: the state is of another run, of other data, or beyond the last step.
    """
    work_dir.refuse_other_run(where, run_differences(facts["config"], config))
    tokenizer = dataset.tokenizer.digest
    # Checkpoints of older versions do not hold the digest.
    if (saved := facts.get("tokenizer_digest", tokenizer)) != tokenizer:
        raise ValueError(
            f"the tokenizer is not that of {where}: digest {saved[:12]} there, "
            f"{tokenizer[:12]} now; give the same --data.tokenizer (it is in "
            "tokenizer/ of the work dir), or another --work-dir, or "
            "--restart-from-scratch"
        )
    if facts["data_fingerprint"] != dataset.fingerprint:
        raise ValueError(
            f"the data are not those of {where}: fingerprint "
            f"{facts['data_fingerprint'][:12]} there, {dataset.fingerprint[:12]} now; "
            "give the same files, or another --work-dir, or --restart-from-scratch"
        )
    if step > config.steps:
        raise ValueError(
            f"--steps must be at least the {step} steps that this run has taken, got "
            f"{config.steps}; give more steps, or another --work-dir, or "
            "--restart-from-scratch"
        )


def init_from(
    config: TrainConfig, program: Program, agreement: Agreement
) -> Weights | None:
    """Open the source of --init-from and check that it fits; None without the flag."""
    if config.init_from is None:
        return None
    params = program.abstract_saved.params
    return open_weights(
        *(config.init_from, config.model, params, agreement),
        adapters=config.adapters,
        adapters_from=config.lora.init_from,
    )


def _check_memory(built: Built, mesh: Mesh) -> None:
    """Refuse a run that does not fit in device memory, if its size is known."""
    available = report.device_memory_bytes(built.config)
    if available is not None:
        others = smaller(built.config, built.sizes)
        estimates = (
            (words, trace_step(other, mesh)[2])
            for words, other in others
            if other.model.remat != "offload" or reaches_host(mesh)
        )
        memory.check_fits(built.memory, available, estimates)


def _look_at_work_dir(config: TrainConfig, command: Command) -> str:
    """Choose the work dir and refuse another run's. Called on process 0.

    Returns:
      its path, absolute path and whether a run has begun there, as JSON.
    """
    path = work_dir.choose(config.work_dir, short_name(command.recipe))
    if command.restart_from_scratch:
        _check_moves(config, path)
    else:
        work_dir.check(
            path,
            lambda found: run_differences(found, config),
            functools.partial(is_without_steps, path),
        )
    has_begun = work_dir.has_begun(path) and not command.restart_from_scratch
    return json.dumps(
        {
            "path": str(path),
            "absolute_path": str(path.absolute()),
            "has_begun": has_begun,
        }
    )


def _check_moves(config: TrainConfig, path: Path) -> None:
    """Refuse to move a folder aside that cannot be moved or is needed."""
    if "://" in (config.ckpt.dir or ""):
        raise ValueError(
            f"--restart-from-scratch cannot move {config.ckpt.dir} aside; give another "
            "--ckpt.dir with it"
        )
    if config.init_from is None or "://" in config.init_from:
        return
    for folder in _folders(config, path):
        if Path(config.init_from).resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"--init-from {config.init_from} is in {folder}, which "
                "--restart-from-scratch moves aside; give another --work-dir instead"
            )


# ------------------------------------------------------------------------------- claim


def _claim(run: Run, command: Command) -> str:
    """Claim the work dir, after every check; return its path. Called on process 0."""
    if command.restart_from_scratch:
        run.lock.take(run.work_dir)
        for folder in _folders(run.config, run.work_dir):
            aside = work_dir.move_aside(folder)
            if aside is not None:
                report.say(f"the run that was in {folder} is now in {aside}")
    claim_work_dir(run)
    return str(run.work_dir)


def claim_work_dir(run: Run) -> None:
    """Create the work dir, or recreate it after its deletion. Called on process 0."""
    work_dir.make(run.work_dir)
    run.lock.take(run.work_dir)
    # How processes find each other may differ between starts of a run.
    config = dataclasses.replace(run.config, distributed=DistributedConfig())
    work_dir.write_config(run.work_dir, to_fields(config))
    work_dir.keep_tokenizer(run.work_dir, run.tokenizer_files)
    work_dir.keep_data_files(run.work_dir, run.dataset.versions)


def _folders(config: TrainConfig, path: Path) -> list[Path]:
    """Return the folders that hold the run."""
    return [path, *([] if config.ckpt.dir is None else [Path(config.ckpt.dir)])]

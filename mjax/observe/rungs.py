"""The rungs of `fake`: configs of short runs, each with one thing removed.

Input: the config of a run, and its numbers of processes and hosts. Output: for each
rung the config of its run, or why there is nothing to remove. This module writes
nothing and runs nothing.

Source of the idea: question 8 of the list for slow runs in Imbue's guide to the
infrastructure of a 70B model (https://imbue.com/research/70b-infrastructure/): does the
slowness persist with a smaller model, fake data, no checkpoints, one host?
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from mjax.config.run import ProfileConfig
from mjax.config.train import TrainConfig
from mjax.processes.config import DistributedConfig

FIRST, LAST = "as-it-is-first", "as-it-is-last"
"""The baseline: the unchanged run, before and after all others. Their difference is the
drift."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The original run."""

    config: TrainConfig
    processes: int
    hosts: int
    dp: int
    """Product of the data-parallel axis sizes."""
    pp: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """One short run."""

    name: str
    """Name of the rung and of its folder."""
    less: str
    """Description of the removed part, for people."""
    config: TrainConfig | None
    """Config of its run; None: the run has nothing of this kind to remove."""
    reason: str = ""
    """Reason if there is no config."""
    processes: int = 1
    hosts: int = 1
    layers_gone: float | None = None
    """Removed fraction of the layers; None: no layer is removed."""
    period: int = 1
    """Steps between two removed events, if they do not happen in every step."""


class _NothingError(Exception):
    """The run has nothing of this kind to remove; the text says why."""


def as_it_is(origin: Origin, folder: Path, name: str, steps: int) -> TrainConfig:
    """Return the config of a short run that repeats the run.

    It starts from scratch and writes to its own folders, on the same file systems and
    in the same bucket as the run's checkpoints and copies, and sends nothing to
    trackers. The learning rate warms up until the last step.

    Args:
      origin: the original run.
      folder: folder that will contain the folder of the short run.
      name: name of the short run.
      steps: number of steps of the short run.
    """
    config = origin.config
    own_ckpt = dataclasses.replace(
        config.ckpt,
        dir=_beside(config.ckpt.dir, name),
        local_dir=_beside(config.ckpt.local_dir, name),
        remote=_beside(config.ckpt.remote, name),
        keep=1,
        keep_every=None,
        keep_best=0,
        max_unsaved=None,
    )
    is_evaluated = config.eval.every < steps
    return dataclasses.replace(
        config,
        work_dir=str(folder / name),
        steps=steps,
        distributed=DistributedConfig(),
        optim=dataclasses.replace(
            config.optim, schedule="constant", warmup_steps=steps
        ),
        data=dataclasses.replace(config.data, skip=()),
        ckpt=own_ckpt,
        # The evaluation after the last step is not part of the comparison.
        eval=config.eval
        if is_evaluated
        else dataclasses.replace(config.eval, batches=1),
        log=dataclasses.replace(config.log, sample_tokens=0),
        track=(),
        observe=dataclasses.replace(config.observe, spans=True, spans_dir=None),
        profile=ProfileConfig(),
    )


def _beside(path: str | None, name: str) -> str | None:
    return None if path is None else f"{path.rstrip('/')}-fake-{name}"


def ladder(
    origin: Origin, folder: Path, steps: int, names: tuple[str, ...]
) -> list[Rung]:
    """Return the short runs in the order in which they run.

    Args:
      origin: the original run.
      folder: folder that will contain one folder for each short run.
      steps: number of steps of each short run.
      names: entries of `NAMES`: the rungs to run in addition to the baseline.
    """
    rungs = [_whole(origin, folder, FIRST, steps)]
    for name in names:
        base = as_it_is(origin, folder, name, steps)
        less, change = _CHANGES[name]
        rung = Rung(
            name=name,
            less=less,
            config=None,
            processes=origin.processes,
            hosts=origin.hosts,
        )
        try:
            rungs.append(change(rung, base, origin))
        except _NothingError as error:
            rungs.append(dataclasses.replace(rung, reason=str(error)))
        except ValueError as error:  # the changed config is invalid
            rungs.append(dataclasses.replace(rung, reason=f"not possible: {error}"))
    return [*rungs, _whole(origin, folder, LAST, steps)]


def _whole(origin: Origin, folder: Path, name: str, steps: int) -> Rung:
    return Rung(
        name=name,
        less="nothing",
        config=as_it_is(origin, folder, name, steps),
        processes=origin.processes,
        hosts=origin.hosts,
    )


# --------------------------------------------------------------------------- the rungs


def _fake_data(rung: Rung, config: TrainConfig, origin: Origin) -> Rung:
    del origin
    if config.data.one_batch:
        raise _NothingError(
            "the run uses the same batch in all steps (--data.one-batch)"
        )
    data = dataclasses.replace(config.data, one_batch=True)
    return dataclasses.replace(rung, config=dataclasses.replace(config, data=data))


def _no_saves(rung: Rung, config: TrainConfig, origin: Origin) -> Rung:
    del origin
    own, never = config.ckpt, config.steps + 1
    every = [own.every, *([own.local_every] if own.local_dir is not None else [])]
    ckpt = dataclasses.replace(own, every=never, local_dir=None)
    return dataclasses.replace(
        rung,
        config=dataclasses.replace(config, ckpt=ckpt),
        period=_period(every, config.steps, "saves"),
    )


def _no_evals(rung: Rung, config: TrainConfig, origin: Origin) -> Rung:
    del origin
    never = dataclasses.replace(config.eval, every=config.steps + 1, batches=1)
    return dataclasses.replace(
        rung,
        config=dataclasses.replace(config, eval=never),
        period=_period([config.eval.every], config.steps, "evaluations"),
    )


def _period(every: list[int], steps: int, what: str) -> int:
    """Return the number of steps between saves or evaluations."""
    due = [each for each in every if each < steps]
    if not due:
        raise _NothingError(
            f"no {what} in {steps} steps, they are {min(every)} steps apart; give more "
            "--steps"
        )
    return math.lcm(*due)


def _smaller_model(rung: Rung, config: TrainConfig, origin: Origin) -> Rung:
    model = config.model
    parts = 1 if config.pipeline.uneven_layers else config.pipeline.chunks
    unit = model.pattern_length * origin.pp * parts
    layers = model.layers // 2 // unit * unit
    if not layers:
        raise _NothingError(
            f"{model.layers} layers cannot be halved: they come in units of {unit}"
        )
    smaller = dataclasses.replace(model, layers=layers)
    return dataclasses.replace(
        rung,
        less=f"{model.layers - layers} of {model.layers} layers",
        layers_gone=1 - layers / model.layers,
        config=dataclasses.replace(config, model=smaller),
    )


def _one_host(rung: Rung, config: TrainConfig, origin: Origin) -> Rung:
    """Return the rung on one host, with the run's number of sequences per device.

    A step takes as long as in the original run, unless hosts of that run wait for each
    other.
    """
    hosts, batch = origin.hosts, config.batch
    if hosts == 1:
        raise _NothingError("the run has one host")
    if origin.dp % hosts or batch.size % hosts or origin.processes % hosts:
        raise _NothingError(
            f"cannot run on one of {hosts} hosts: data-parallel size {origin.dp}, "
            f"--batch.size {batch.size} and {origin.processes} processes must be "
            "multiples of the hosts"
        )
    dp = origin.dp // hosts
    shard = config.mesh.dp_shard
    mesh = dataclasses.replace(
        config.mesh,
        dp=-1 if config.mesh.dp == -1 else dp,
        dp_shard=None if shard is None else math.gcd(shard, dp),
        dp_shard_per_node=None,
    )
    smaller = dataclasses.replace(batch, size=batch.size // hosts)
    return dataclasses.replace(
        rung,
        less=f"{hosts - 1} of {hosts} hosts, each device with as many sequences",
        config=dataclasses.replace(config, mesh=mesh, batch=smaller),
        processes=origin.processes // hosts,
        hosts=1,
    )


def _no_spans(rung: Rung, config: TrainConfig, origin: Origin) -> Rung:
    own = origin.config.observe
    if not own.spans and own.stamps is False:
        raise _NothingError("the run writes neither spans nor stamps")
    observe = dataclasses.replace(
        config.observe, spans=False, stamps=False, slow_step_factor=None
    )
    changed = dataclasses.replace(config, observe=observe)
    return dataclasses.replace(rung, config=changed)


_CHANGES: dict[str, tuple[str, Callable[[Rung, TrainConfig, Origin], Rung]]] = {
    "fake-data": ("the loader", _fake_data),
    "no-saves": ("saves and copies", _no_saves),
    "no-evals": ("evaluations", _no_evals),
    "smaller-model": ("layers", _smaller_model),
    "one-host": ("hosts", _one_host),
    "no-spans": ("spans and stamps", _no_spans),
}
NAMES = tuple(_CHANGES)
"""All rungs except the baseline."""

"""The sizes of a run: whether model and batch divide over a mesh.

Enters: a config, and the sizes of the mesh axes once they are known. Leaves: nothing,
or an error that names the nearest sizes that fit. No device is touched.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mjax.config.train import TrainConfig
from mjax.mesh.axes import AxisSizes, tp_chunks
from mjax.pipeline.config import check_pipeline


def check_sizes(config: TrainConfig, sizes: AxisSizes) -> None:
    """Check that the model and the batch divide over a mesh; needs no device.

    Args:
      config: the run.
      sizes: of the mesh axes, resolved.
    Raises:
      ValueError: a size does not divide; the message has the nearest that does.
    """
    model, batch, tp = config.model, config.batch, sizes.tp
    check_pipeline(
        config.pipeline,
        num_layers=model.layers,
        period=model.pattern_length,
        num_stages=sizes.pp,
        num_microbatches=batch.microbatches,
        permutes=tp_chunks(config.mesh, tp) > 1,
    )
    is_pipeline = sizes.pp * config.pipeline.chunks > 1
    if is_pipeline and (model.remat, config.pipeline.stash) == ("offload", "residuals"):
        raise ValueError(
            "--model.remat offload leaves what a layer keeps on the host, and with "
            "--pipeline.stash residuals a pipeline has it in ring buffers on the "
            "device; use --pipeline.stash input, or --model.remat full"
        )
    problem = _split_problem(config, tp)
    if problem is not None:
        raise ValueError(f"{problem}; {_split_fixes(config, sizes)}")
    if model.padded_vocab % tp:
        multiple = _nearest(model.vocab_multiple, lambda n: n % tp == 0)
        raise ValueError(
            f"model.vocab_size={model.vocab_size}, padded to {model.padded_vocab}, "
            f"does not divide by mesh.tp={tp}; pad it to a multiple of tp: "
            f"--model.vocab-multiple {multiple}"
        )
    pieces = sizes.dp * batch.microbatches
    if batch.size % pieces:
        raise ValueError(
            f"batch.size={batch.size} does not divide by dp x batch.microbatches = "
            f"{sizes.dp} x {batch.microbatches} = {pieces}; nearest that does: "
            f"--batch.size {_nearest(batch.size, lambda n: n % pieces == 0)}"
        )


def smaller(config: TrainConfig, sizes: AxisSizes) -> Iterator[tuple[str, TrainConfig]]:
    """Yield runs that compute the same and keep less in memory.

    First one change after the other, then all of them with more and more microbatches.

    Args:
      config: a run that fits its mesh.
      sizes: of the mesh axes.
    Yields:
      the flags that make the change, and the run with it, which fits the mesh too.
    """
    is_pipeline = sizes.pp * config.pipeline.chunks > 1
    local = config.batch.size // sizes.dp
    remat = {}
    if config.model.remat not in ("full", "offload"):
        remat = {"model.remat": "full"}
    stash = {}
    if is_pipeline and config.pipeline.stash != "input":
        stash = {"pipeline.stash": "input"}
    schedule = {}
    if sizes.pp > 1 and config.pipeline.schedule_name == "gpipe":
        schedule = {"pipeline.schedule": "1f1b"}
    counts = [
        {"batch.microbatches": count}
        for count in range(config.batch.microbatches + 1, local + 1)
        if local % count == 0
    ]
    alone = [stash, remat, *counts, schedule]
    together = [stash | remat | schedule | count for count in ({}, *counts)]
    seen: list[dict[str, Any]] = [{}]
    for change in [*alone, *together]:
        if change in seen:
            continue
        seen.append(change)
        changed = with_fields(config, change)
        try:
            check_sizes(changed, sizes)
        except ValueError:  # as where the schedule wants a multiple of the stages
            continue
        yield as_flags(change), changed


def as_flags(fields: Mapping[str, Any]) -> str:
    """Write fields of a config as the flags that set them."""
    words = []
    for name, value in fields.items():
        part, dot, field = name.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{part}{dot}{'' if value else 'no-'}{field}")
            continue
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{part}{dot}{field}", *map(str, values)]
    return " ".join(words)


def with_fields(config: TrainConfig, fields: Mapping[str, Any]) -> TrainConfig:
    """Replace fields, named as their flags are, all at once as a command line does."""
    whole: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for field, value in fields.items():
        part, _, name = field.rpartition(".")
        if part:
            parts.setdefault(part, {})[name] = value
        else:
            whole[name] = value
    for part, values in parts.items():
        whole[part] = dataclasses.replace(getattr(config, part), **values)
    return dataclasses.replace(config, **whole)


def _split_problem(config: TrainConfig, tp: int) -> str | None:
    """Say which size cannot be split over tp, if there is one."""
    model = config.model
    sizes = {
        "model.heads": model.heads,
        "model.d_ff": model.ffn_width,
        "data.seq_len": config.data.seq_len,
    }
    for name, size in sizes.items():
        if size % tp:
            return f"{name}={size} does not divide by mesh.tp={tp}"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        return (
            f"model.kv_heads={model.num_kv_heads} can be neither split evenly nor "
            f"replicated evenly over mesh.tp={tp}"
        )
    return None


def _split_fixes(config: TrainConfig, sizes: AxisSizes) -> str:
    """Name the nearest changes that all checks accept, on as many devices."""
    model, tp = config.model, sizes.tp
    names = ("model.heads", "model.kv_heads", "model.d_ff", "data.seq_len")
    values = (model.heads, model.num_kv_heads, model.ffn_width, config.data.seq_len)
    tries = [
        # A multiple of tp beyond the nearest few is another model.
        [{name: n} for n in _by_distance(value, value + tp) if n % tp == 0][:4]
        for name, value in zip(names, values, strict=True)
    ]
    tries.append(list(_other_tp(config, sizes)))
    found = (
        next((fix for fix in fixes if _is_accepted(config, fix, sizes)), None)
        for fixes in tries
    )
    fixes = ", or ".join(as_flags(fix) for fix in found if fix is not None)
    return f"nearest that fit: {fixes or 'none on this number of devices'}"


def _other_tp(config: TrainConfig, sizes: AxisSizes) -> Iterator[dict[str, Any]]:
    """Yield other sizes of tp, nearest first, with a batch that fits the new dp."""
    dp = {} if config.mesh.dp == -1 else {"mesh.dp": -1}
    both = sizes.dp * sizes.tp
    for tp in _by_distance(sizes.tp, both):
        if tp == sizes.tp or both % tp:
            continue
        pieces = both // tp * config.batch.microbatches
        size = _nearest(config.batch.size, lambda n, pieces=pieces: n % pieces == 0)
        batch = {} if size == config.batch.size else {"batch.size": size}
        yield {"mesh.tp": tp} | dp | batch


def _is_accepted(
    config: TrainConfig, fields: Mapping[str, Any], sizes: AxisSizes
) -> bool:
    """Say whether no check refuses a config with these fields replaced."""
    tp = fields.get("mesh.tp", sizes.tp)
    dp = sizes.dp * sizes.tp // tp
    shard = config.mesh.dp_shard or dp
    mesh = AxisSizes(pp=sizes.pp, dp_replicate=dp // shard, dp_shard=shard, tp=tp)
    try:
        changed = with_fields(config, fields)
        if dp % shard or _split_problem(changed, tp) is not None:
            return False
        check_sizes(changed, mesh)
    except ValueError:
        return False
    return True


def _by_distance(value: int, largest: int) -> list[int]:
    """Return 1 to `largest`, nearest to value first; of two, the larger."""
    return sorted(range(1, largest + 1), key=lambda n: (abs(n - value), -n))


def _nearest(value: int, fits: Callable[[int], bool]) -> int:
    """Return the positive number nearest to value that fits; of two, the larger."""
    distance = 0
    while True:
        for candidate in (value + distance, value - distance):
            if candidate >= 1 and fits(candidate):
                return candidate
        distance += 1

"""Check that model and batch divide over a mesh.

Input: a config, and the sizes of the mesh axes once they are known. Output: nothing,
or an error with the rule and the values; `config.fixes` adds sizes that fit. Touches no
device.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mjax.config.train import TrainConfig
from mjax.layers.config import Remat
from mjax.mesh.axes import AxisSizes, tp_chunks
from mjax.pipeline.make import check_pipeline


def check_sizes(config: TrainConfig, sizes: AxisSizes) -> None:
    """Check that the model and the batch divide over a mesh; needs no device.

    Args:
      config: the run.
      sizes: sizes of the mesh axes, resolved.
    Raises:
      ValueError: a size does not divide. The message states the rule without advice.
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
            "--model.remat offload keeps the inputs of layers in host memory, but "
            "--pipeline.stash residuals keeps them in ring buffers on the device"
        )
    if is_pipeline and model.offload_horizon is not None:
        raise ValueError(
            f"--model.offload-horizon {model.offload_horizon} needs --mesh.pp 1 and "
            f"--pipeline.chunks 1, got --mesh.pp {sizes.pp} and --pipeline.chunks "
            f"{config.pipeline.chunks}: a stage loads the inputs of a virtual stage "
            "within one half-tick"
        )
    if config.mesh.gather_first:
        _check_gather_first(model.d_model, sizes, is_pipeline=is_pipeline)
    split = {
        "--model.heads": model.heads,
        "--model.d-ff": model.ffn_width,
        "--data.seq-len": config.data.seq_len,
    }
    for flag, size in split.items():
        if size % tp:
            raise ValueError(f"{flag} must be a multiple of --mesh.tp {tp}, got {size}")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise ValueError(
            f"--model.kv-heads must be a multiple or a divisor of --mesh.tp {tp}, got "
            f"{model.num_kv_heads}"
        )
    if model.padded_vocab % tp:
        raise ValueError(
            f"--model.vocab-size {model.vocab_size}, padded to a multiple of "
            f"--model.vocab-multiple {model.vocab_multiple}, must be a multiple of "
            f"--mesh.tp {tp}, got {model.padded_vocab}"
        )
    pieces = sizes.dp * batch.microbatches
    if batch.size % pieces:
        raise ValueError(
            "--batch.size must be a multiple of dp x --batch.microbatches = "
            f"{sizes.dp} x {batch.microbatches} = {pieces}, got {batch.size}"
        )


def _check_gather_first(d_model: int, sizes: AxisSizes, *, is_pipeline: bool) -> None:
    """Refuse --mesh.gather-first if nothing is sharded, or d_model does not divide."""
    shards = sizes.shards
    if shards == 1:
        raise ValueError(
            "--mesh.gather-first needs weights that are sharded over dp, got "
            f"--mesh.dp {sizes.dp} with --mesh.dp-shard 1: there is nothing to gather"
        )
    if is_pipeline and d_model % shards:
        raise ValueError(
            "with --mesh.gather-first and a pipeline, --model.d-model must be a "
            f"multiple of --mesh.dp-shard {shards}, got {d_model}"
        )


def smaller(config: TrainConfig, sizes: AxisSizes) -> Iterator[tuple[str, TrainConfig]]:
    """Yield runs that compute the same with less memory.

    Yields first each change alone, then all changes together with increasing numbers of
    microbatches. The combinations without `offload` come first, for devices that cannot
    access the memory of their host. The last run needs the least memory.

    Args:
      config: a run that divides over its mesh.
      sizes: sizes of the mesh axes.
    Yields:
      The flags of the change, and the changed run, which divides over the mesh too.
    """
    is_pipeline = sizes.pp * config.pipeline.chunks > 1
    local = config.batch.size // sizes.dp
    remats = [{"model.remat": policy} for policy in _less_kept(config.model.remat)]
    least = [remats[-1] if remats else {}]
    if config.model.remat != "offload" and config.model.layers > 1 and not is_pipeline:
        remats.append({"model.remat": "offload"})
        least.append(remats[-1])
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
    alone = [stash, *remats, *counts, schedule]
    together = [
        stash | remat | schedule | count for remat in least for count in ({}, *counts)
    ]
    seen: list[dict[str, Any]] = [{}]
    for change in [*alone, *together]:
        if change in seen:
            continue
        seen.append(change)
        changed = with_fields(config, change)
        try:
            check_sizes(changed, sizes)
        except ValueError:  # for example, the schedule needs a multiple of the stages
            continue
        yield as_flags(change), changed


def _less_kept(remat: Remat) -> tuple[Remat, ...]:
    """Return the remat policies that keep less on the device, in decreasing order.

    `attention` is left out: with a fused backend it keeps as much as `none`.
    """
    policies: tuple[Remat, ...] = ("none", "attention", "core", "dots", "full")
    first = max(2, policies.index(remat) + 1) if remat != "offload" else len(policies)
    return policies[first:]


def as_flags(fields: Mapping[str, Any]) -> str:
    """Format fields of a config as the flags that set them."""
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
    """Replace fields, given by flag name. The new values are checked together."""
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

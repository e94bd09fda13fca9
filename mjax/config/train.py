"""The run's configuration: a composition of the parts' own configs.

Enters: command-line flags, a recipe, or the config.json of an earlier run. Leaves: one
frozen, checked `TrainConfig`. Nothing is built here and no device is touched: sizes of
the mesh are checked once they are known (`check_sizes`).
"""

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mjax import checked_json, flags
from mjax.ckpt.config import CkptConfig
from mjax.config.optim import OptimConfig
from mjax.config.run import EvalConfig, LogConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.data.config import DataConfig
from mjax.mesh.axes import AxisSizes, MeshConfig, tp_chunks
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig, check_pipeline
from mjax.processes.config import DistributedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that defines a training run."""

    work_dir: str | None = None
    """Run folder; alone, it resumes the run there. None: runs/<recipe>-<time>."""
    init_from: str | None = None
    """Begin with these parameters: a run, a checkpoint, a Hugging Face folder."""
    steps: int = 100
    """Optimizer steps in all."""
    seed: int = 0
    """The one seed for initialisation, data order and dropout."""
    simulate_devices: int | None = None
    """Run on this many simulated CPU devices."""
    zero: int = 2
    """Sharded over dp_shard: 0 nothing, 1 optimizer, 2 gradients, 3 parameters."""
    peak_tflops: float | None = None
    """Peak dense TFLOP/s of one device, for MFU; None looks the device up."""
    device_memory_gib: float | None = None
    """GiB that a run may take of one device; None asks the device, if it knows."""
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    distributed: DistributedConfig = DistributedConfig()
    batch: BatchConfig = BatchConfig()
    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    ckpt: CkptConfig = CkptConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        """Check the fields that belong to no part, and those that two parts share.

        Raises:
          ValueError: a value is out of range, or two options contradict each other.
        """
        for name in ("work_dir", "init_from"):
            if getattr(self, name) == "":
                flag = name.replace("_", "-")
                raise ValueError(
                    f"{name} is empty; name a folder, or leave --{flag} out"
                )
        if self.steps < 1:
            raise ValueError(f"steps must be >= 1, got {self.steps}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")
        if self.simulate_devices is not None and self.simulate_devices < 1:
            raise ValueError(
                f"simulate_devices must be >= 1, got {self.simulate_devices}; leave it "
                "out to use the devices that exist"
            )
        for name in ("peak_tflops", "device_memory_gib"):
            number = getattr(self, name)
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {number}")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(
                f"zero must be 0, 1, 2 or 3, got {self.zero}: sharded are nothing, the "
                "optimizer state, also the gradients, also the parameters"
            )
        if self.zero == 3 and (self.mesh.pp != 1 or self.pipeline.chunks != 1):
            raise ValueError(
                f"zero=3 with mesh.pp={self.mesh.pp}, pipeline.chunks="
                f"{self.pipeline.chunks}: every microbatch would gather the parameters "
                "of its chunk again; use --zero 2, or --mesh.pp 1 --pipeline.chunks 1"
            )
        if self.zero == 3 and self.model.remat in ("none", "attention"):
            raise ValueError(
                f"--zero 3 with --model.remat {self.model.remat} would keep the "
                "gathered parameters of every layer until the backward pass, which "
                "level 3 is there to avoid; use --model.remat dots, full or offload"
            )


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
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return " ".join(words)


def with_fields(config: TrainConfig, fields: Mapping[str, Any]) -> TrainConfig:
    """Replace fields of a config's parts, named as their flags are."""
    for field, value in fields.items():
        part, _, name = field.partition(".")
        changed = dataclasses.replace(getattr(config, part), **{name: value})
        config = dataclasses.replace(config, **{part: changed})
    return config


def with_tokenizer(config: TrainConfig, num_tokens: int) -> TrainConfig:
    """Return the config with the vocabulary that the model really takes.

    The tokenizer's size replaces the recipe's, unless the run says `data.vocab=model`.

    Args:
      config: the run.
      num_tokens: size of the tokenizer's vocabulary.
    Raises:
      ValueError: the model's vocabulary is kept and is too small for the tokenizer.
    """
    if config.data.vocab == "model":
        if config.model.vocab_size < num_tokens:
            raise ValueError(
                f"model.vocab_size={config.model.vocab_size} is kept (data.vocab=model)"
                f", but the tokenizer has token ids up to {num_tokens - 1}; use "
                f"--data.vocab tokenizer, or --model.vocab-size {num_tokens}"
            )
        return config
    model = dataclasses.replace(config.model, vocab_size=num_tokens)
    return dataclasses.replace(config, model=model)


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


# ------------------------------------------------------------------ JSON, and resuming


def to_json(config: TrainConfig) -> str:
    """Write a config as JSON text, one field a line; `from_json` gives it back."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> TrainConfig:
    """Read what `to_json` wrote; a field that is absent has its default.

    Raises:
      ValueError: not JSON, a field that does not exist, or a value that is refused.
    """
    return _from_dict(TrainConfig, checked_json.read(text, Any), "")


def _from_dict[Config](cls: type[Config], values: Any, prefix: str) -> Config:
    if not isinstance(values, dict):
        raise ValueError(
            f"{prefix.rstrip('.') or 'the config'} must be an object of fields, got "
            f"{values!r}"
        )
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            nearest = flags.nearest(name, hints)
            raise ValueError(
                f"unknown field {prefix}{name}; the nearest is {prefix}{nearest}"
            )
        if dataclasses.is_dataclass(hints[name]):
            value = _from_dict(hints[name], value, f"{prefix}{name}.")
        else:
            value = checked_json.check(value, hints[name], f"{prefix}{name}")
        arguments[name] = value
    return cls(**arguments)


MAY_CHANGE = frozenset(
    {
        *("work_dir", "steps", "simulate_devices", "zero", "peak_tflops"),
        *("device_memory_gib", "mesh", "pipeline", "distributed", "ckpt", "eval"),
        *("log", "batch.microbatches", "model.attention", "model.remat"),
        "data.cache_dir",
    }
)
"""Fields and groups that a resumed run may change: how it runs and reports, not what
it computes (up to the order of floating-point sums). `steps` moves the end, and with it
the schedule. All others, new ones too, must be the same."""


def run_differences(
    old: Mapping[str, Any], new: TrainConfig
) -> list[tuple[str, Any, Any]]:
    """List the fields in which a run differs from what its work dir was started as.

    Args:
      old: what config.json of the work dir holds. A field that it lacks, being younger
        than the run, counts as having its default.
      new: the config of this start, its vocabulary settled as it was in the old one.
    Returns:
      (field, old value, new value), sorted by field, without those in `MAY_CHANGE`;
      a field that no longer exists has None as new value.
    """
    defaults = _flatten(json.loads(to_json(TrainConfig())))
    before = defaults | _flatten(old)
    after = _flatten(json.loads(to_json(new)))
    return [
        (field, before[field], after.get(field))
        for field in sorted(before)
        if before[field] != after.get(field)
        and field not in MAY_CHANGE
        and field.partition(".")[0] not in MAY_CHANGE
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


# ------------------------------------------------------------------------------- flags

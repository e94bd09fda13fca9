"""The run's configuration, composed of the configs of its parts.

Input: command-line flags, a recipe, or the config.json of an earlier run. Output: one
frozen, checked `TrainConfig`. This module builds nothing and touches no device. The
sizes of the mesh are checked later, when they are known (`config.sizes`).
"""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

from mjax import checked_json
from mjax.ckpt.config import CkptConfig
from mjax.cli import flags
from mjax.config.lora import LoraConfig, adapters
from mjax.config.optim import OptimConfig, check_schedule
from mjax.config.run import (
    EvalConfig,
    LogConfig,
    ObserveConfig,
    ProfileConfig,
    check_trackers,
)
from mjax.config.step import BatchConfig, CombineConfig, PrecisionConfig
from mjax.data.config import DataConfig
from mjax.layers.config import AdapterConfig
from mjax.mesh.axes import MeshConfig
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.processes.config import DistributedConfig
from mjax.records import config_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that defines a training run."""

    work_dir: str | None = None
    """Folder of the run. Given alone, it resumes the run there. Default:
    runs/<recipe>-<time>."""
    init_from: str | None = None
    """Initialise parameters from a run, a checkpoint or a Hugging Face folder. Its
    tokenizer, chat template, end tokens and vocabulary are used unless flags give
    others."""
    steps: int = 100
    """Total number of optimizer steps."""
    seed: int = 0
    """Seed of initialisation, data order and dropout."""
    simulate_devices: int | None = None
    """Simulate this many devices on the CPU."""
    zero: int = 2
    """ZeRO level: 0 shards nothing over dp_shard; 1 the optimizer state; 2 gradients
    too; 3 parameters too."""
    peak_tflops: float | None = None
    """Peak dense TFLOP/s of one device, for MFU; None looks up the device."""
    device_memory_gib: float | None = None
    """Memory of one device that the run may use, in GiB; None asks the device."""
    replica_check_every: int = 100
    """Steps between comparisons of HSDP replicas; each save compares them too."""
    gc_every: int = 100
    """Steps between Python garbage collections, on all processes at the same time."""
    keep_compiled: bool = True
    """Store the compiled step on this host for the next start."""
    track: tuple[str, ...] = ()
    """Send metrics to tensorboard, wandb or mlflow, or to your own FILE.py:NAME."""
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    distributed: DistributedConfig = DistributedConfig()
    batch: BatchConfig = BatchConfig()
    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    combine: CombineConfig = CombineConfig()
    data: DataConfig = DataConfig()
    lora: LoraConfig = LoraConfig()
    optim: OptimConfig = OptimConfig()
    ckpt: CkptConfig = CkptConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    observe: ObserveConfig = ObserveConfig()
    profile: ProfileConfig = ProfileConfig()

    def __post_init__(self) -> None:
        """Check the fields of the run itself, and combinations of fields of two parts.

        Raises:
          ValueError: a value is out of range, or two options contradict each other.
        """
        for name in ("work_dir", "init_from"):
            if getattr(self, name) == "":
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} is empty; name a folder, or leave it out")
        if "://" in (self.work_dir or ""):
            raise ValueError(
                f"--work-dir must be a folder of a file system, got the URL "
                f"{self.work_dir}; only --ckpt.dir may be one"
            )
        if self.init_from is None:  # otherwise the tokenizer may be that of the model
            self.data.check_trained()
        check_trackers(self.track)
        check_schedule(self.optim, self.steps)
        series = self.profile.series
        if series is not None and series[1] > self.steps + 1:
            raise ValueError(
                f"--profile.steps {self.profile.steps} profiles up to step "
                f"{series[1] - 1}, but --steps {self.steps} is the last one; let the "
                f"second number be at most {self.steps + 1}, or increase --steps"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be from 0 to {2**32 - 1}, got {self.seed}")
        if self.simulate_devices is not None and self.simulate_devices < 1:
            raise ValueError(
                f"--simulate-devices must be at least 1, got {self.simulate_devices}; "
                "leave it out to use the devices that exist"
            )
        if self.replica_check_every < 1:
            raise ValueError(
                "--replica-check-every must be at least 1, got "
                f"{self.replica_check_every}; 1 compares after each step"
            )
        if self.gc_every < 1:
            raise ValueError(
                f"--gc-every must be at least 1, got {self.gc_every}; 1 collects "
                "garbage after every step"
            )
        for name in ("peak_tflops", "device_memory_gib"):
            number = getattr(self, name)
            if number is not None and not 0 < number < math.inf:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be positive and finite, got {number}")
        rows = self.model.learned_positions
        if rows is not None and self.data.seq_len > rows:
            raise ValueError(
                f"--data.seq-len must be at most --model.learned-positions {rows}, got "
                f"{self.data.seq_len}; use --data.seq-len {rows}, or "
                f"--model.learned-positions {self.data.seq_len}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(
                f"--zero must be from 0 to 3, got {self.zero}; 0 shards nothing, 1 the "
                "optimizer state, 2 gradients too, 3 parameters too"
            )
        if self.zero == 0 and self.mesh.dp_shard_per_node is not None:
            raise ValueError(
                f"--mesh.dp-shard-per-node {self.mesh.dp_shard_per_node} needs --zero "
                "1, 2 or 3, got --zero 0, which shards nothing; use --zero 1, 2 or "
                "3, or leave --mesh.dp-shard-per-node out"
            )
        if self.zero == 0 and self.mesh.gather_first:
            raise ValueError(
                "--mesh.gather-first needs --zero 1, 2 or 3, got --zero 0: every "
                "device has all weights, so there is nothing to gather; use --zero 1, "
                "2 or 3, or leave --mesh.gather-first out; if a resumed run sets it, "
                "use --mesh.no-gather-first"
            )
        if self.zero == 3 and (self.mesh.pp != 1 or self.pipeline.chunks != 1):
            raise ValueError(
                "--zero 3 needs --mesh.pp 1 and --pipeline.chunks 1, got --mesh.pp "
                f"{self.mesh.pp} and --pipeline.chunks {self.pipeline.chunks}: each "
                "microbatch would gather the parameters of its virtual stage again; "
                "use --zero 2, or --mesh.pp 1 --pipeline.chunks 1"
            )
        if self.zero == 3 and self.model.remat in ("none", "attention"):
            raise ValueError(
                f"--zero 3 with --model.remat {self.model.remat} would keep the "
                "gathered parameters of every layer until the backward pass, which "
                "defeats the purpose of level 3; use --model.remat core, dots, full "
                "or offload"
            )
        self._check_lora()

    @property
    def adapters(self) -> AdapterConfig | None:
        """Adapters of the blocks; None trains all parameters."""
        return adapters(self.lora, self.model)

    def _check_lora(self) -> None:
        """Check that adapters have base weights, and a step that can train them.

        Raises:
          ValueError: the adapters have no base weights, or the step cannot train them.
        """
        if self.adapters is None:  # the property refuses a target that matches nothing
            return
        if self.init_from is None:
            raise ValueError(
                f"--lora.rank {self.lora.rank} trains adapters of an existing model, "
                "but --init-from is absent; give a run, a checkpoint or a Hugging "
                "Face folder as --init-from, or leave --lora.rank out"
            )
        if self.precision.matmul == "fp8":
            raise ValueError(
                f"--lora.rank {self.lora.rank} does not work with --precision.matmul "
                "fp8: adapters multiply in the compute dtype; use --precision.matmul "
                "compute"
            )
        if self.mesh.pp != 1 or self.pipeline.chunks != 1:
            raise ValueError(
                f"--lora.rank {self.lora.rank} needs --mesh.pp 1 and --pipeline.chunks "
                f"1, got --mesh.pp {self.mesh.pp} and --pipeline.chunks "
                f"{self.pipeline.chunks}: a pipeline accumulates the gradients of all "
                "weights; use --mesh.tp or --zero 3 for a model that does not fit"
            )


def with_tokenizer(config: TrainConfig, num_tokens: int) -> TrainConfig:
    """Return the config with the final vocabulary size of the model.

    The size of the tokenizer's vocabulary replaces the size in the recipe, except with
    `--data.vocab model`.

    Args:
      config: the run.
      num_tokens: size of the tokenizer's vocabulary.
    Raises:
      ValueError: with `--data.vocab model`, the vocabulary is too small for the
        tokenizer.
    """
    if config.data.vocab == "model":
        if config.model.vocab_size < num_tokens:
            raise ValueError(
                f"--model.vocab-size must be at least {num_tokens} for the ids of the "
                f"tokenizer, got {config.model.vocab_size} with --data.vocab model; "
                f"use --data.vocab tokenizer, or --model.vocab-size {num_tokens}"
            )
        return config
    model = dataclasses.replace(config.model, vocab_size=num_tokens)
    return dataclasses.replace(config, model=model)


# ------------------------------------------------------------------ JSON, and resuming


def to_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of a config as JSON has them, nested by group."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def to_json(config: TrainConfig) -> str:
    """Format a config as JSON with one field per line; `from_json` reads it."""
    return json.dumps(config_json.stamped(to_fields(config)), indent=2) + "\n"


_OF_OLD_RUNS = {"data.version": 1}
"""Fields of which a run that does not record them has another value than a new run."""


def from_json(text: str) -> TrainConfig:
    """Read a config.json of any format; absent fields have the values of old runs.

    Raises:
      ValueError: the text is not JSON, its format is newer, a field does not exist, or
        a value is refused.
    """
    values = checked_json.read(text, Any)
    if not isinstance(values, dict):
        raise ValueError(f"the config must be an object of fields, got {values!r}")
    values = config_json.current(values)
    config = _from_dict(TrainConfig, values, "")
    recorded = flattened(values)
    for name, value in _OF_OLD_RUNS.items():
        if name not in recorded:
            group, field = name.split(".")
            part = dataclasses.replace(getattr(config, group), **{field: value})
            config = dataclasses.replace(config, **{group: part})
    return config


def _from_dict[Config](cls: type[Config], values: Any, prefix: str) -> Config:
    if not isinstance(values, dict):
        raise ValueError(
            f"{prefix.rstrip('.')} must be an object of fields, got {values!r}"
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
        *("log", "observe", "profile", "track", "batch.microbatches", "combine"),
        *("model.attention", "model.attention_backward", "model.remat"),
        "model.offload_horizon",
        *(
            "optim.state_memory",
            "data.cache_dir",
            "data.cache",
            "gc_every",
            "keep_compiled",
            "replica_check_every",
        ),
    }
)
"""Fields and groups that a resumed run may change. They set how the run executes and
reports, not what it computes (up to the order of floating-point sums). `steps` moves
the end of the run, and with it the schedule. All other fields must stay the same."""


def run_differences(
    old: Mapping[str, Any], new: TrainConfig
) -> list[tuple[str, Any, Any]]:
    """List the fields in which a resumed run differs from the run in its work dir.

    Args:
      old: values in config.json of the work dir. A field that it lacks is newer than
        the run and counts as its default, or as its value in old runs.
      new: the config of this start, with a vocabulary size chosen as in the old one.
    Returns:
      (field, old value, new value), sorted by field, without those in `MAY_CHANGE`;
      a field that no longer exists has the new value None. `data.skip` may grow, see
      `skips.continues`.
    """
    recorded = flattened(config_json.current(old))
    defaults = flattened(to_fields(TrainConfig()))
    before: dict[str, Any] = {**defaults, **_OF_OLD_RUNS, **recorded}
    after = flattened(to_fields(new))
    may_change = {*MAY_CHANGE}
    if new.data.goes_on(before["data.skip"]):
        may_change.add("data.skip")
    return [
        (field, before[field], after.get(field))
        for field in sorted(before)
        if before[field] != after.get(field) and not may_change & _with_groups(field)
    ]


def _with_groups(field: str) -> set[str]:
    """Return the dotted name of a field, and the names of the groups around it."""
    parts = field.split(".")
    return {".".join(parts[: end + 1]) for end in range(len(parts))}


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested objects by dotted name: {"optim.lr": 0.001}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat

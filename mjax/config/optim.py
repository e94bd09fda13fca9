"""The optimizer, its schedule, and the rule that skips a step."""

import dataclasses
import math
from typing import Literal, get_args

OptimName = Literal["lamb", "adamw"]


ScheduleName = Literal["cosine", "wsd", "constant"]
StateMemory = Literal["device", "host"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: OptimName = "lamb"
    """lamb: layerwise adaptive rates for large batches; adamw: Adam with decoupled
    weight decay."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: ScheduleName = "cosine"
    """Learning rate after the warm-up: cosine to the end, wsd (warm-up-stable-decay),
    or constant."""
    warmup_steps: int = 0
    """Steps of linear warm-up: the peak is reached at this step, counted from 1."""
    final_lr_fraction: float = 0.1
    """cosine, wsd: learning rate at the last step, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """wsd: fraction of all steps spent in the final linear decay."""
    beta1: float = 0.9
    """Decay rate of the running mean of gradients."""
    beta2: float = 0.95
    """Decay rate of the running mean of squared gradients."""
    eps: float = 1e-6
    """Constant that is added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay; not on biases and norm scales."""
    clip_value: float | None = None
    """Clip each gradient entry to +-this, before the norm is computed."""
    clip_norm: float | None = 1.0
    """Scale gradients down to this global L2 norm."""
    skip_spike_factor: float | None = None
    """Skip a step whose gradient norm exceeds this factor times its running mean."""
    spike_mean_decay: float = 0.98
    """Decay rate of the running mean of gradient norms, per accepted step."""
    spike_warmup_steps: int = 20
    """Number of accepted steps before spikes are detected."""
    max_consecutive_skips: int = 20
    """Stop the run after this many skipped steps in a row."""
    state_memory: StateMemory = "device"
    """Memory of the moments between updates: device, or pinned host memory."""

    def __post_init__(self) -> None:
        """Check each field alone; `check_schedule` checks them against `--steps`.

        Raises:
          ValueError: a field is out of range.
        """
        names, schedules = get_args(OptimName), get_args(ScheduleName)
        _check(self, "name", self.name in names, "be " + " or ".join(names))
        _check(
            self, "schedule", self.schedule in schedules, "be " + " or ".join(schedules)
        )
        memories = get_args(StateMemory)
        ok = self.state_memory in memories
        _check(self, "state_memory", ok, "be " + " or ".join(memories))
        for name in ("lr", "eps"):
            ok = 0 < getattr(self, name) < math.inf
            _check(self, name, ok, "be positive and finite")
        for name in ("beta1", "beta2", "spike_mean_decay"):
            ok = 0 <= getattr(self, name) < 1
            _check(self, name, ok, "be at least 0 and below 1")
        ok = 0 <= self.final_lr_fraction <= 1
        _check(
            self, "final_lr_fraction", ok, "be from 0 to 1", "it is a fraction of lr"
        )
        ok = 0 < self.decay_fraction <= 1
        fix = "it is a fraction of all steps"
        _check(self, "decay_fraction", ok, "be above 0 and at most 1", fix)
        ok = 0 <= self.weight_decay < math.inf
        _check(self, "weight_decay", ok, "be at least 0 and finite", "0 decays nothing")
        for name in ("clip_value", "clip_norm"):
            value = getattr(self, name)
            ok = value is None or value > 0
            _check(self, name, ok, "be positive", "None clips nothing")
        ok = self.skip_spike_factor is None or self.skip_spike_factor > 1
        fix = "2 skips a norm of twice the mean, None skips no spike"
        _check(self, "skip_spike_factor", ok, "be above 1", fix)
        for name in ("spike_warmup_steps", "max_consecutive_skips"):
            _check(self, name, getattr(self, name) >= 1, "be at least 1")
        ok = self.warmup_steps >= 0
        _check(self, "warmup_steps", ok, "be at least 0", "0 means no warm-up")

    def decay_steps(self, num_steps: int) -> int:
        """Return the number of steps in the final decay of wsd, of this many steps."""
        return max(1, round(self.decay_fraction * num_steps))


def check_schedule(config: OptimConfig, num_steps: int) -> None:
    """Check that the learning rate schedule fits into the run.

    `TrainConfig` calls this when it is made; `step.optim` calls it for optimizers that
    are built without one.

    Args:
      config: the optimizer config whose warm-up and decay are checked.
      num_steps: optimizer steps of the whole run.

    Raises:
      ValueError: the warm-up, or warm-up and decay together, are longer than the run.
    """
    warmup = config.warmup_steps
    if num_steps < 1:
        raise ValueError(f"--steps must be at least 1, got {num_steps}")
    if warmup > num_steps:
        raise ValueError(
            f"--optim.warmup-steps must be at most --steps {num_steps}, got "
            f"{warmup}; give --optim.warmup-steps {num_steps // 10} or --steps "
            f"{10 * warmup}"
        )
    decay_steps = config.decay_steps(num_steps)
    if config.schedule == "wsd" and warmup + decay_steps > num_steps:
        raise ValueError(
            f"--optim.warmup-steps must be at most {num_steps - decay_steps}, got "
            f"{warmup}, because --optim.schedule wsd with --optim.decay-fraction "
            f"{config.decay_fraction} decays over the last {decay_steps} of --steps "
            f"{num_steps}; lower one of the two"
        )


def _check(config: OptimConfig, name: str, ok: bool, rule: str, fix: str = "") -> None:
    if not ok:
        flag = f"--optim.{name.replace('_', '-')}"
        end = f"; {fix}" if fix else ""
        raise ValueError(f"{flag} must {rule}, got {getattr(config, name)}{end}")

"""When and where checkpoints are saved, and which are kept."""

import dataclasses
import math
from collections.abc import Mapping

from mjax.stores import address


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules for keeping steps: the newest step, and each step that any rule names."""

    last: int = 3
    """Keep the newest k steps."""
    every: int | None = None
    """Keep the steps that are multiples of this number."""
    best: int = 0
    """Keep the k evaluated steps with the lowest `eval_loss`."""

    def stays(self, steps: Mapping[int, float | None]) -> set[int]:
        """Return the steps to keep.

        Args:
          steps: intact step -> its `eval_loss`, or None if it was not evaluated.
        """
        newest = sorted(steps)[-max(1, self.last) :]
        multiples = [s for s in steps if self.every and s % self.every == 0]
        losses = sorted(
            (loss, step)
            for step, loss in steps.items()
            if loss is not None and math.isfinite(loss)
        )
        return {*newest, *multiples, *(s for _, s in losses[: self.best])}


_REMOTE = "--ckpt.remote"
_PATIENCE = 10
"""Default of --ckpt.max-unsaved in multiples of --ckpt.every; also the time limit of a
run's last save in multiples of --ckpt.timeout-s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CkptConfig:
    """Checkpoints of a run."""

    every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    dir: str | None = None
    """Folder of the checkpoints, shared by all processes; None: in the work dir."""
    keep: int = 3
    """Number of newest checkpoints kept."""
    keep_every: int | None = None
    """Keep every checkpoint whose step is a multiple of this."""
    keep_best: int = 0
    """Number of evaluated checkpoints kept, those with the lowest held-out loss."""
    max_unsaved: int | None = None
    """Steps without a new checkpoint after which the run stops; None: ten times
    --ckpt.every."""
    timeout_s: int = 600
    """Seconds that a save waits for a process to answer before it fails."""
    remote: str | None = None
    """URL to copy each checkpoint to, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX; the run
    resumes from it if the work dir is empty or older."""
    remote_keep: int | None = None
    """Number of newest checkpoints kept at --ckpt.remote; None: --ckpt.keep."""
    remote_wait_s: int = 300
    """Seconds that a run waits at its end for the upload of the last checkpoint."""
    remote_stop_wait_s: int = 20
    """Seconds after SIGTERM or Ctrl-C that a run waits for the upload of the last
    checkpoint. The machine may end the run about 30 s after the signal."""
    local_dir: str | None = None
    """Folder on each host (RAM disk, SSD) for copies of the state, which are made more
    often than checkpoints; None: no copies."""
    local_every: int = 10
    """Steps between copies of the state in --ckpt.local-dir."""

    def __post_init__(self) -> None:
        for name in (
            *("every", "keep", "keep_every", "timeout_s", "local_every"),
            *("remote_keep", "remote_wait_s", "remote_stop_wait_s"),
        ):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"--{_flag(name)} must be at least 1, got {number}")
        if self.keep_best < 0:
            raise ValueError(
                f"--ckpt.keep-best must be at least 0, got {self.keep_best}"
            )
        if self.max_unsaved is not None and self.max_unsaved < self.every:
            raise ValueError(
                f"--ckpt.max-unsaved must be at least --ckpt.every {self.every}, got "
                f"{self.max_unsaved}; the run would stop before its first save"
            )
        for name in ("dir", "local_dir"):
            if getattr(self, name) == "":
                raise ValueError(f"--{_flag(name)} is empty; name a folder")
        if self.remote is not None and not address.parse(self.remote, _REMOTE).prefix:
            raise ValueError(
                f"{_REMOTE} {self.remote} names a whole bucket; add a prefix, one for "
                f"each run: {self.remote.rstrip('/')}/RUN"
            )
        if self.remote is not None and "://" in (self.dir or ""):
            raise ValueError(
                f"--ckpt.dir must be a folder if {_REMOTE} is set, got {self.dir}; the "
                "steps are written there before they are copied"
            )
        if "://" in (self.local_dir or ""):
            raise ValueError(
                "--ckpt.local-dir must be a folder of each host, got "
                f"the URL {self.local_dir}; for example /dev/shm/mjax"
            )

    @property
    def unsaved_limit(self) -> int:
        """Number of steps without a new checkpoint after which the run stops."""
        if self.max_unsaved is not None:
            return self.max_unsaved
        return _PATIENCE * self.every

    @property
    def hung_s(self) -> int:
        """Seconds after which one attempt at the last save of a run is abandoned."""
        return _PATIENCE * self.timeout_s

    @property
    def retention(self) -> Retention:
        """Rules for keeping steps in the folder of checkpoints."""
        return Retention(last=self.keep, every=self.keep_every, best=self.keep_best)

    @property
    def remote_retention(self) -> Retention:
        """Rules for keeping steps at `remote`."""
        return dataclasses.replace(self.retention, last=self.remote_keep or self.keep)


def _flag(name: str) -> str:
    return f"ckpt.{name.replace('_', '-')}"

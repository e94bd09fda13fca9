"""The folder of a run's saved steps.

    120/                      a step: complete, read back, renamed into place
    160.unfinished-5f0c/      being written, or left by a process that died
    80.damaged/               quarantined, with the reason in damaged.json
    90.rolled-back/           quarantined too: the run has gone back behind it
    owner.json                which start of the run may change the folder, see `fence`

A step appears under its number by one rename, after everything in it is on the disk. It
disappears by a rename too, before its files are deleted. So a process that is killed at
any time leaves steps that are whole, and folders that are not called by a number.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Container
from typing import Literal

from etils import epath

from mjax import checked_json
from mjax.ckpt.config import Retention
from mjax.ckpt.fence import Fence
from mjax.ckpt.manifest import (
    MAIN_FILE,
    DamagedError,
    Manifest,
    Pieces,
    check_complete,
    part_name,
    read_manifest,
    read_pieces,
    text_crc32c,
)

_UNFINISHED = ".unfinished-"
_NAME = re.compile(
    rf"(0|[1-9][0-9]*)(?P<suffix>|\.(damaged|rolled-back)(-[0-9]+)?"
    rf"|{re.escape(_UNFINISHED)}[0-9a-f]+)"
)
_REASON_FILE = "damaged.json"
_MARGIN = 1.02  # of the arrays' bytes: what the files around them take


Kind = Literal["step", "quarantined", "unfinished"]


class Store:
    """The folder; one process of a run changes it, all may read."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Name the folder; it need not exist. Local paths may be relative.

        Raises:
          ValueError: it is a URL of a kind that no installed library opens.
        """
        self.directory = located(directory)
        self.fence = Fence(self.directory)

    def steps(self) -> list[int]:
        """List the steps that were committed, oldest first, damaged or not."""
        if not self.directory.exists():
            return []
        names = [path.name for path in self.directory.iterdir()]
        return sorted(int(name) for name in names if kind_of(name) == "step")

    def path(self, step: int) -> epath.Path:
        """Return the folder of a committed step."""
        return self.directory / str(step)

    def manifest(self, step: int) -> Manifest:
        """Read what a step says about itself.

        Raises:
          DamagedError: it is missing or not what was written.
          ValueError: a newer version of mjax wrote it.
        """
        return manifest_in(self.path(step))

    # ------------------------------------------------------------------------- writing

    def begin(self, step: int, num_bytes: int) -> epath.Path:
        """Make the folder in which a step is written.

        Unfinished folders of earlier attempts and dead processes are deleted first.

        Args:
          step: step to save.
          num_bytes: number of bytes of all arrays.
        Raises:
          OSError: the folder cannot be written, or has no space for so many bytes.
          TakenOverError: another start of the run has the folder now.
        """
        self.fence.check()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.clean()
        self._check_space(int(num_bytes * _MARGIN))
        path = self.directory / f"{step}{_UNFINISHED}{secrets.token_hex(4)}"
        (path / "state").mkdir(parents=True)
        return path

    def commit(self, unfinished: epath.Path, step: int) -> None:
        """Let a complete folder appear under its number.

        Raises:
          OSError: it cannot be renamed.
          TakenOverError: another start of the run has the folder now.
        """
        _sync_tree(unfinished)
        self.fence.check()
        target = self.path(step)
        if target.exists():  # useless, or the run would have continued from it
            self.quarantine(step, "another save of this step has taken its place")
        unfinished.rename(target)
        _sync(self.directory)

    def clean(self) -> None:
        """Delete what is unfinished.

        Raises:
          OSError: it cannot be deleted.
        """
        if self.directory.exists():
            for path in self.directory.iterdir():
                if kind_of(path.name) == "unfinished":
                    delete(path)

    def remove(self, step: int) -> None:
        """Delete a step.

        Raises:
          OSError: it cannot be deleted.
        """
        doomed = self.directory / f"{step}{_UNFINISHED}{secrets.token_hex(4)}"
        self.path(step).rename(doomed)
        delete(doomed)

    def prune(
        self,
        retention: Retention,
        *,
        newest: int,
        refused: Container[tuple[int, str]] = (),
        held: Collection[int] = (),
    ) -> list[int]:
        """Delete the good steps that no rule keeps; return them.

        The rules ignore damaged and refused steps, and folders that hold another step
        than their name says; these stay.

        Args:
          retention: the rules.
          newest: the step that was committed last; it stays whatever its number.
          refused: (step, save id) of what may not be restored.
          held: steps that stay for now, as while they are uploaded.
        Raises:
          OSError: one cannot be deleted.
        """
        good: dict[int, float | None] = {}
        for step in self.steps():
            with contextlib.suppress(DamagedError, ValueError):
                found = self.manifest(step)
                if (step, found.save_id) not in refused:
                    good[step] = found.run.get("eval_loss")
        removed = sorted(good.keys() - retention.stays(good) - {newest, *held})
        for step in removed:
            self.remove(step)
        return removed

    def quarantine(
        self, step: int, reason: str, *, is_damaged: bool = True
    ) -> epath.Path:
        """Give a step another name, with the reason inside; delete nothing.

        If the step is a link, only the link is renamed.

        Args:
          step: step that must not be restored.
          reason: why.
          is_damaged: False: the step is intact, but the run goes back to an older one.
        Raises:
          OSError: it cannot be renamed, as on a store that is read-only.
        """
        aside = self._free(f"{step}.{'damaged' if is_damaged else 'rolled-back'}")
        self.path(step).rename(aside)
        record = {"step": step, "reason": reason, "time": time.strftime("%FT%T%z")}
        if not _is_link(aside):
            with contextlib.suppress(OSError):  # the name tells the most important part
                (aside / _REASON_FILE).write_text(json.dumps(record, indent=1) + "\n")
        return aside

    def quarantined(self) -> dict[str, str]:
        """Return the folders that were quarantined, by name, with the reason."""
        found = {}
        if self.directory.exists():
            for path in self.directory.iterdir():
                if kind_of(path.name) == "quarantined":
                    found[path.name] = _reason(path)
        return dict(sorted(found.items()))

    def unfinished(self) -> list[str]:
        """Return the names of folders that are being written, or were left."""
        if not self.directory.exists():
            return []
        names = [path.name for path in self.directory.iterdir()]
        return sorted(name for name in names if kind_of(name) == "unfinished")

    def _check_space(self, num_bytes: int) -> None:
        if "://" in str(self.directory):
            return  # an object store has no free space to query
        free = shutil.disk_usage(self.directory).free
        if free < num_bytes:
            raise OSError(
                f"no space: the checkpoint takes {num_bytes / 1e6:.1f} MB, and "
                f"{self.directory} has {free / 1e6:.1f} MB left; make room there, or "
                "keep fewer steps (--ckpt.keep)"
            )

    def _free(self, name: str) -> epath.Path:
        number, path = 1, self.directory / name
        while path.exists() or _is_link(path):
            number += 1
            path = self.directory / f"{name}-{number}"
        return path


def kind_of(name: str) -> Kind | None:
    """Say what a folder of this name is; None: it is not of this store."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    suffix = found["suffix"]
    if not suffix:
        return "step"
    return "unfinished" if suffix.startswith(_UNFINISHED) else "quarantined"


def manifest_in(step_dir: epath.Path) -> Manifest:
    """Read checkpoint.json of a folder; raises as `Store.manifest`.

    A folder that is called by a number must hold that step.
    """
    where = f"{step_dir.name}/{MAIN_FILE}"
    manifest = read_manifest(read_file(step_dir / MAIN_FILE), where)
    if kind_of(step_dir.name) == "step" and int(step_dir.name) != manifest.step:
        raise DamagedError(
            f"{step_dir.name} holds step {manifest.step} (it was copied, renamed or "
            f"linked); its right name is {manifest.step}"
        )
    return manifest


def pieces_in(step_dir: epath.Path, manifest: Manifest) -> Pieces:
    """Read the list of the pieces of all processes; of the arrays, nothing.

    Raises:
      DamagedError: a file is missing or not what was written, or pieces are missing.
      ValueError: a newer version of mjax wrote them.
    """
    found: Pieces = {name: [] for name in manifest.leaves}
    for part in range(len(manifest.part_sums)):
        for leaf, pieces in pieces_of(step_dir, manifest, part).items():
            found[leaf] += pieces
    check_complete(manifest.leaves, found, step_dir.name)
    return found


def pieces_of(step_dir: epath.Path, manifest: Manifest, part: int) -> Pieces:
    """Read the list of the pieces of one process; raises as `pieces_in`."""
    where = f"{step_dir.name}/{part_name(part)}"
    text = read_file(step_dir / part_name(part))
    if text_crc32c(text) != manifest.part_sums[part]:
        raise DamagedError(f"{where} differs from what was written (CRC32C)")
    found = read_pieces(text, where)
    if unknown := sorted({*found} - {*manifest.leaves}):
        raise DamagedError(f"{where} has {unknown[0]}, which the step has not")
    return found


def read_file(path: epath.Path) -> str:
    """Read a text file of a step.

    Raises:
      DamagedError: it is missing, a folder, or no text.
      RuntimeError: the store does not answer; nothing is known of the file.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        return path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(f"{where} is missing") from error
    except IsADirectoryError as error:
        raise DamagedError(f"{where} is a folder") from error
    except UnicodeDecodeError as error:
        raise DamagedError(f"{where} is not text") from error
    except OSError as error:
        raise RuntimeError(f"{where} cannot be read now: {error}") from error


def write_file(path: epath.Path, text: str) -> None:
    """Write a text file and bring it to the disk.

    Raises:
      OSError: the store refuses.
    """
    path.write_text(text)
    _sync(path)


def located(path: str | os.PathLike[str]) -> epath.Path:
    """Return a local path as an absolute one, a URL as it is.

    Raises:
      ValueError: it is a URL of a kind that no installed library opens.
    """
    text = os.fspath(path)
    if "://" not in text:
        return epath.Path(text).absolute()
    try:
        found = epath.Path(text)
        found.exists()  # which imports the library for this kind
    except (ImportError, KeyError) as error:
        needed = f"{error}" if isinstance(error, ImportError) else "unknown kind of URL"
        raise ValueError(
            f"{text} cannot be opened here ({needed}); give a folder that is mounted, "
            "or install that library"
        ) from error
    return found


def _reason(path: epath.Path) -> str:
    if _is_link(path):
        return f"it was a link to {os.readlink(path)}"
    try:
        text = (path / _REASON_FILE).read_bytes()
        return checked_json.check(checked_json.read(text, dict).get("reason"), str)
    except (OSError, ValueError):
        return "the reason was not recorded"


def _is_link(path: epath.Path) -> bool:
    return "://" not in str(path) and os.path.islink(path)


def delete(path: epath.Path) -> None:
    """Delete a folder; of a link, or of a file in its place, only the name."""
    if _is_link(path) or not path.is_dir():
        path.unlink()
    else:
        path.rmtree()


def _sync_tree(folder: epath.Path) -> None:
    """Bring a folder to the disk: Orbax leaves its metadata to the system."""
    if "://" not in str(folder):
        for path, _, files in os.walk(folder, topdown=False):
            for name in files:
                _sync(epath.Path(path) / name)
            _sync(epath.Path(path))


def _sync(path: epath.Path) -> None:
    """Bring a local file or the names in a local folder to the disk."""
    if "://" in str(path):
        return  # an object is durable once it is written
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The folder of a run's saved steps.

    120/                      a step: complete, read back, renamed into place
    160.unfinished-5f0c/      being written, or left by a process that died
    80.damaged/               quarantined, with the reason in damaged.json
    90.rolled-back/           quarantined: the run resumed from an older step
    owner.json                which start of the run may change the folder, see `fence`

A step is committed by renaming its folder to its number, after all its files are synced
to disk. To delete a step, its folder is renamed first. So a process that is killed at
any time leaves only complete steps, and folders whose name is not a number.
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
_HUB = "hf://"
_MARGIN = 1.02  # free space needed, relative to the bytes of the arrays


Kind = Literal["step", "quarantined", "unfinished"]


class Store:
    """The folder of steps: one process of a run changes it, all may read it."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Store the path of the folder, which need not exist and may be relative.

        Raises:
          ValueError: the path is a file, or a URL that no installed library can open.
        """
        self.directory = located(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(
                f"{self.directory} is a file, not a folder of checkpoints; move it "
                "away, and put the folder back if there was one"
            )
        self.fence = Fence(self.directory)

    def steps(self) -> list[int]:
        """List the committed steps, including damaged ones, in increasing order."""
        if not self.directory.exists():
            return []
        names = [path.name for path in self.directory.iterdir()]
        return sorted(int(name) for name in names if kind_of(name) == "step")

    def path(self, step: int) -> epath.Path:
        """Return the folder of a committed step."""
        return self.directory / str(step)

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a step.

        Raises:
          DamagedError: the manifest is missing, or is not what was written.
          ValueError: a newer version of mjax wrote the manifest.
        """
        return manifest_in(self.path(step))

    # ------------------------------------------------------------------------- writing

    def begin(self, step: int, num_bytes: int) -> epath.Path:
        """Create and return the unfinished folder that a step is written to.

        Unfinished folders of earlier attempts and dead processes are deleted first.

        Args:
          step: step to save.
          num_bytes: bytes of all arrays.
        Raises:
          OSError: the folder cannot be written, or has too little space.
          TakenOverError: another start of the run now owns the folder.
        """
        self.fence.check()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.clean()
        self._check_space(int(num_bytes * _MARGIN))
        path = self.directory / f"{step}{_UNFINISHED}{secrets.token_hex(4)}"
        (path / "state").mkdir(parents=True)
        return path

    def commit(self, unfinished: epath.Path, step: int) -> None:
        """Rename a complete folder to its step number.

        Raises:
          OSError: the folder cannot be renamed.
          TakenOverError: another start of the run now owns the folder.
        """
        _sync_tree(unfinished)
        self.fence.check()
        target = self.path(step)
        if target.exists():  # the run did not resume from this step: it is unusable
            self.quarantine(step, "another save of this step has taken its place")
        unfinished.rename(target)
        _sync(self.directory)

    def clean(self) -> None:
        """Delete unfinished folders.

        Raises:
          OSError: a folder cannot be deleted.
        """
        if self.directory.exists():
            for path in self.directory.iterdir():
                if kind_of(path.name) == "unfinished":
                    delete(path)

    def remove(self, step: int) -> None:
        """Delete a step.

        Raises:
          OSError: the step cannot be deleted.
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
        """Delete the good steps that no rule keeps; return the deleted steps.

        Damaged steps, refused steps, and folders whose name is not the number of their
        step are kept. They do not count for the rules.

        Args:
          retention: rules for keeping steps.
          newest: step that was committed last; it is kept whatever its number.
          refused: (step, save id) of steps that must not be restored.
          held: steps to keep for now, for example while they are uploaded.
        Raises:
          OSError: a step cannot be deleted.
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
        """Rename a step, and write the reason into its folder; return the new path.

        Nothing is deleted. If the step is a link, only the link is renamed.

        Args:
          step: step that must not be restored.
          reason: why it must not be restored.
          is_damaged: whether the step is damaged; if not, the run goes back to an older
            step.
        Raises:
          OSError: the step cannot be renamed, for example in a read-only folder.
        """
        aside = self._free(f"{step}.{'damaged' if is_damaged else 'rolled-back'}")
        self.path(step).rename(aside)
        record = {"step": step, "reason": reason, "time": time.strftime("%FT%T%z")}
        if not _is_link(aside):
            with contextlib.suppress(OSError):  # the new name already tells the state
                (aside / _REASON_FILE).write_text(json.dumps(record, indent=1) + "\n")
        return aside

    def quarantined(self) -> dict[str, str]:
        """Return name of a quarantined folder -> the reason."""
        found = {}
        if self.directory.exists():
            for path in self.directory.iterdir():
                if kind_of(path.name) == "quarantined":
                    found[path.name] = _reason(path)
        return dict(sorted(found.items()))

    def unfinished(self) -> list[str]:
        """Return the names of unfinished folders, being written or left over."""
        if not self.directory.exists():
            return []
        names = [path.name for path in self.directory.iterdir()]
        return sorted(name for name in names if kind_of(name) == "unfinished")

    def _check_space(self, num_bytes: int) -> None:
        if "://" in str(self.directory):
            return  # an object store has no free space to query
        free = shutil.disk_usage(self.directory).free
        if free < num_bytes:
            # The newest step stays until a newer one is complete.
            fewer = ", or keep fewer steps (--ckpt.keep)" if self.steps()[1:] else ""
            raise OSError(
                f"no space: the checkpoint takes {num_bytes / 1e6:.1f} MB, and "
                f"{self.directory} has {free / 1e6:.1f} MB left; make room there{fewer}"
            )

    def _free(self, name: str) -> epath.Path:
        number, path = 1, self.directory / name
        while path.exists() or _is_link(path):
            number += 1
            path = self.directory / f"{name}-{number}"
        return path


def kind_of(name: str) -> Kind | None:
    """Return the kind of a folder by its name; None if a store makes no such name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    suffix = found["suffix"]
    if not suffix:
        return "step"
    return "unfinished" if suffix.startswith(_UNFINISHED) else "quarantined"


def manifest_in(step_dir: epath.Path) -> Manifest:
    """Read checkpoint.json of a folder; errors as in `Store.manifest`.

    A folder whose name is a number must hold that step.
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
    """Read the lists of the pieces of all processes, without reading arrays.

    Raises:
      DamagedError: a file is missing or not what was written, or pieces are missing.
      ValueError: a newer version of mjax wrote the files.
    """
    found: Pieces = {name: [] for name in manifest.leaves}
    for part in range(len(manifest.part_sums)):
        for leaf, pieces in pieces_of(step_dir, manifest, part).items():
            found[leaf] += pieces
    check_complete(manifest.leaves, found, step_dir.name)
    return found


def pieces_of(step_dir: epath.Path, manifest: Manifest, part: int) -> Pieces:
    """Read the list of the pieces of process `part`; errors as in `pieces_in`."""
    where = f"{step_dir.name}/{part_name(part)}"
    text = read_file(step_dir / part_name(part))
    if text_crc32c(text) != manifest.part_sums[part]:
        raise DamagedError(f"{where} differs from what was written (CRC32C)")
    found = read_pieces(text, where)
    if unknown := sorted({*found} - {*manifest.leaves}):
        raise DamagedError(f"{where} has {unknown[0]}, which the step does not have")
    return found


def read_file(path: epath.Path) -> str:
    """Read a text file of a step.

    Raises:
      DamagedError: the file is missing, is a folder, or is not text.
      RuntimeError: the store does not answer; the file may be intact.
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
        raise RuntimeError(
            f"{where} cannot be read now: {error}; check its permissions and "
            "connection, then repeat"
        ) from error


def write_file(path: epath.Path, text: str) -> None:
    """Write a text file and sync it to disk.

    Raises:
      OSError: the file cannot be written.
    """
    path.write_text(text)
    _sync(path)


def located(path: str | os.PathLike[str]) -> epath.Path:
    """Return a local path as an absolute path, and a URL unchanged.

    Raises:
      ValueError: the path is a URL that no installed library can open, or on a hub.
    """
    text = os.fspath(path)
    if "://" not in text:
        return epath.Path(text).absolute()
    if text.startswith(_HUB):
        raise ValueError(
            f"{text} is on a hub, where mjax reads tokenizers and data sets only; "
            "download a model (hf download NAME --revision REVISION --local-dir "
            "FOLDER), and give FOLDER"
        )
    try:
        found = epath.Path(text)
        found.exists()  # imports the library for this kind of URL
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
    """Delete a folder; if it is a link or a file, delete only that."""
    if _is_link(path) or not path.is_dir():
        path.unlink()
    else:
        path.rmtree()


def _sync_tree(folder: epath.Path) -> None:
    """Sync all files of a folder to disk, because Orbax does not sync its metadata."""
    if "://" not in str(folder):
        for path, _, files in os.walk(folder, topdown=False):
            for name in files:
                _sync(epath.Path(path) / name)
            _sync(epath.Path(path))


def _sync(path: epath.Path) -> None:
    """Sync a local file, or the names in a local folder, to disk."""
    if "://" in str(path):
        return  # an object is durable once it has been written
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

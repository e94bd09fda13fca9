"""Find the steps at a path: a work dir, a folder of steps, or one step.

This module neither reads arrays nor imports jax, so listing a folder is fast.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from etils import epath

from mjax import checked_json
from mjax.ckpt.journal import Journal, Records
from mjax.ckpt.manifest import MAIN_FILE, DamagedError, Manifest, Pieces
from mjax.ckpt.store import Store, kind_of, located, manifest_in, pieces_in

_NAMED_FILES = 5
_GIVE = "give a work dir, a folder of checkpoints, or one checkpoint"
_CONFIG = "config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The steps that a path refers to."""

    store: Store
    journal: Journal | None = None
    """Journal of the run; None if the path is not a work dir."""
    only: epath.Path | None = None
    """Folder of the only step, under any name; None if the path is not a single
    step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One step of a listing."""

    name: str
    """Name of the step's folder."""
    state: Literal[
        "good", "damaged", "newer", "foreign", "quarantined", "unfinished", "unreadable"
    ]
    """State according to the step's manifest; the arrays were not read."""
    reason: str | None = None
    """Why the step is not good; None if it is."""
    num_bytes: int | None = None
    """Bytes of all arrays. This field and those below are None without a manifest."""
    num_leaves: int | None = None
    eval_loss: float | None = None
    written_at: float | None = None
    """Modification time of the manifest file, in seconds since 1970."""


def find(path: str) -> Place:
    """Find the steps that a path refers to, without changing anything.

    Raises:
      ValueError: the path is absent, or holds no checkpoints of mjax.
    """
    check_exists(path)
    folder = located(path)
    if not folder.is_dir():
        raise ValueError(f"{path} is a file; {_GIVE}")
    names = sorted(child.name for child in folder.iterdir())
    if "checkpoints" in names or "checkpoints.jsonl" in names:
        steps_dir = _configured_dir(folder) or folder / "checkpoints"
        journal = Journal(folder / "checkpoints.jsonl")
        return Place(store=Store(steps_dir), journal=journal)
    if MAIN_FILE in names or kind_of(folder.name) is not None:
        return Place(store=Store(folder.parent), only=folder)
    if any(kind_of(name) is not None for name in names):
        return Place(store=Store(folder))
    shown = [*names[:_NAMED_FILES], *(["..."] if len(names) > _NAMED_FILES else [])]
    if is_hugging_face(folder):
        found = "is a model in the form of Hugging Face, not a checkpoint"
    elif shown:
        found = f"holds no checkpoint of mjax, but {', '.join(shown)}"
    else:
        found = "is empty"
    raise ValueError(f"{path} {found}; {_GIVE}")


def check_exists(path: str) -> None:
    """Refuse a path that is absent, before slow imports.

    Raises:
      ValueError: nothing has this path.
    """
    if not located(path).exists():
        raise ValueError(f"{path} does not exist; {_GIVE}")


def is_hugging_face(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a model in Hugging Face format."""
    path = located(folder)
    if not path.is_dir():
        return False
    names = [child.name for child in path.iterdir()]
    return _CONFIG in names and any(name.endswith(".safetensors") for name in names)


def choose(place: Place, step: int | None) -> epath.Path:
    """Return the folder of a step, or of the newest step if `step` is None.

    Raises:
      ValueError: there is no step, the given step is absent, or another run saved it.
    """
    if place.only is not None:
        if step is not None and place.only.name != str(step):
            raise ValueError(
                f"{place.only} is one checkpoint; leave out --step {step}, or give the "
                "folder above it"
            )
        return place.only
    steps = committed(place)
    if step is not None and step not in steps:
        raise ValueError(
            f"there is no step {step} in {place.store.directory}, only "
            f"{', '.join(map(str, steps))}; give one of these as --step"
        )
    folder = place.store.path(steps[-1] if step is None else step)
    with contextlib.suppress(DamagedError):  # its reader reports the error
        if why := why_foreign(place, manifest_in(folder)):
            raise ValueError(
                f"{folder} is not of this run: {why}. Give that folder itself to use "
                "it anyway, or another --step"
            )
    return folder


def committed(place: Place) -> list[int]:
    """List the steps of a folder, damaged or not.

    Raises:
      ValueError: the folder has no step.
    """
    store = place.store
    if steps := store.steps():
        return steps
    last = _records(place).last_saved
    if store.quarantined():
        why = "only quarantined ones, see `python -m mjax.ckpt ls`"
    elif last is not None:
        why = f"but the run has saved step {last}; mount the store"
    else:
        why = "nothing was saved yet"
    raise ValueError(f"there is no checkpoint in {store.directory}: {why}")


def is_without_steps(work_dir: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the run of a work dir has certainly saved no step.

    Args:
      work_dir: the folder with the journal.
      config: content of config.json in the work dir. If the run also saves outside of
        the work dir, the result is False.
    """
    ckpt = config.get("ckpt")
    if not isinstance(ckpt, dict):
        return False
    if any(ckpt.get(name) is not None for name in ("dir", "local_dir", "remote")):
        return False
    store = Store(work_dir / "checkpoints")
    records = Journal(work_dir / "checkpoints.jsonl").records()
    return not store.steps() and not store.quarantined() and records.last_saved is None


def entries(place: Place) -> list[Entry]:
    """List the steps from their manifests, then quarantined and unfinished ones.

    Raises:
      ValueError: there is no step of any kind.
    """
    store = place.store
    aside, unfinished = store.quarantined(), store.unfinished()
    if place.only is not None:
        name = place.only.name
        return [_entry(place.only, aside.get(name), Records())]
    if not aside and not unfinished:
        committed(place)
    records, none = _records(place), Records()
    return [
        *(_entry(store.path(step), None, records) for step in store.steps()),
        *(_entry(store.directory / name, why, none) for name, why in aside.items()),
        *(_entry(store.directory / name, None, none) for name in unfinished),
    ]


def why_foreign(place: Place, manifest: Manifest) -> str | None:
    """Return why a step is not of the run; None if it is, or if the run is unknown.

    A folder of checkpoints, or one checkpoint, has no journal that identifies the run.
    """
    return _records(place).why_foreign(manifest.step, manifest.save_id)


def _records(place: Place) -> Records:
    return Records() if place.journal is None else place.journal.records()


def describe(folder: epath.Path) -> tuple[Manifest, Pieces]:
    """Return a step's manifest and pieces, checked without reading arrays.

    Raises:
      DamagedError: a file is missing, incomplete, or not what was written.
      ValueError: a newer version of mjax wrote the step.
    """
    manifest = manifest_in(folder)
    return manifest, pieces_in(folder, manifest)


def written_at(folder: epath.Path) -> float:
    """Return the modification time of the manifest file, in seconds since 1970."""
    return float((folder / MAIN_FILE).stat().mtime)


def _entry(folder: epath.Path, reason: str | None, records: Records) -> Entry:
    """Return the entry of one folder, from its name and its manifest.

    Args:
      folder: folder of the step.
      reason: why the folder was renamed to quarantine it; None if it was not.
      records: records of the run, which name the steps that were quarantined without
        being renamed, with the reason.
    """
    kind = kind_of(folder.name)
    if kind == "unfinished":
        reason = "being written, or left by a process that died"
        return Entry(name=folder.name, state="unfinished", reason=reason)
    facts: dict[str, Any] = {}
    state, save_id = "good", ""
    try:
        manifest = manifest_in(folder)
        save_id = manifest.save_id
        facts = {
            "num_bytes": manifest.num_bytes,
            "num_leaves": len(manifest.leaves),
            "eval_loss": manifest.run.get("eval_loss"),
            "written_at": written_at(folder),
        }
        pieces_in(folder, manifest)
    except DamagedError as error:
        state, reason = "damaged", reason or str(error)
    except ValueError as error:
        state, reason = "newer", reason or str(error)
    except RuntimeError as error:
        state, reason = "unreadable", reason or str(error)
    if kind == "quarantined":
        state = "quarantined"
    if kind == "step":
        step = int(folder.name)
        if state == "good" and (why := records.why_foreign(step, save_id)):
            state, reason = "foreign", why
        if (step, save_id) in records.quarantined:
            state, reason = "quarantined", records.quarantined[step, save_id]
    return Entry(name=folder.name, state=state, reason=reason, **facts)


def _configured_dir(work_dir: epath.Path) -> str | None:
    """Return the --ckpt.dir of a work dir's run; None if it was not given.

    Raises:
      ValueError: the config in the work dir cannot be read.
    """
    path = work_dir / _CONFIG
    if not path.exists():
        return None
    try:
        config = checked_json.read(path.read_bytes(), dict[str, Any])
        ckpt = checked_json.check(config.get("ckpt"), dict[str, Any], "ckpt")
        directory = checked_json.check(ckpt.get("dir"), str | None, "ckpt.dir")
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} is not the config of a run ({error}); give the folder of its "
            "checkpoints itself"
        ) from error
    if directory is None or "://" in directory or os.path.isabs(directory):
        return directory
    raise ValueError(
        f"the checkpoints of {work_dir} are in {directory}, as seen from where the run "
        "was started; give that folder itself"
    )

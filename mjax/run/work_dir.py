"""The work dir: chosen by rank 0, the same for all ranks, never another run's.

Input: flags and the run's config as JSON. Output: a writable folder with this run's
config.json and tokenizer. Nothing here deletes a run: an unwanted run is moved aside.
"""

import contextlib
import json
import os
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax import checked_json
from mjax.records import config_json
from mjax.run import disk_space
from mjax.run.json_files import write_json

TOKENIZER = "tokenizer"
"""Folder in the work dir with the tokenizer of the run."""

_DATA_FILES = "data_files.json"
_FILES = ("metrics.jsonl", "checkpoints.jsonl", _DATA_FILES)
"""Files without which a run cannot continue."""
_STARTS = "starts"

Difference = tuple[str, Any, Any]
"""A field, its value in the work dir, and its value in this run."""


def choose(work_dir: str | None, recipe: str) -> Path:
    """Return the requested folder, or a new name under runs/."""
    if work_dir is not None:
        return Path(work_dir)
    name = Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return _free(name) if name.exists() else name


def check_place(path: Path) -> None:
    """Refuse a path at which no folder can be written; change nothing.

    Raises:
      ValueError: the path, or a part of it, is a file or not writable.
    """
    _refuse_file(path)
    above = path.absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise _unwritable(path, f"{above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _unwritable(path, f"{above} is not writable")


def check(
    path: Path,
    differences: Callable[[Mapping[str, Any]], Sequence[Difference]],
    is_without_steps: Callable[[Mapping[str, Any]], bool],
) -> None:
    """Refuse a path that holds another run or is not a folder; change nothing.

    Args:
      path: path of the work dir; it need not exist.
      differences: takes the config found there; returns the forbidden differences.
      is_without_steps: takes the same config; returns whether no step was saved there.
    Raises:
      ValueError: the run there differs or cannot be read, or a folder has the name of a
        file or the reverse.
    """
    _refuse_file(path)
    for name in _FILES:
        if (path / name).is_dir():
            raise ValueError(f"{path / name} is a folder, not a file; move it away")
    if (path / _STARTS).is_file():
        raise ValueError(f"{path / _STARTS} is a file, not a folder; move it away")
    found = read_config(path)
    if found is not None:
        refuse_other_run(
            f"the work dir {path}",
            differences(found),
            has_steps=not is_without_steps(found),
        )


def _refuse_file(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"the work dir {path} is a file; choose another --work-dir")


def has_begun(path: Path) -> bool:
    """Return whether a run has claimed the folder."""
    return (path / "config.json").exists()


def read_config(path: Path) -> Mapping[str, Any] | None:
    """Return the fields of config.json; None if the folder or the file is absent.

    Raises:
      ValueError: the file cannot be read, or as `config_json.current`.
    """
    config_path = path / "config.json"
    try:
        content = checked_json.read(config_path.read_bytes(), dict[str, Any])
        return config_json.current(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read {config_path}: {error}; choose another --work-dir, or move "
            "this one aside with --restart-from-scratch"
        ) from error


def refuse_other_run(
    where: str, differing: Sequence[Difference], *, has_steps: bool = True
) -> None:
    """Refuse the files of another run.

    Args:
      where: the place of the files, in messages.
      differing: the forbidden differences.
      has_steps: whether the run may have saved a step.
    Raises:
      ValueError: `differing` is not empty.
    """
    if differing:
        lines = [
            f"  {field}: {json.dumps(old)} there, {json.dumps(new)} in this run"
            for field, old, new in differing
        ]
        advice = (
            "Give the flags of that run to resume it, or another --work-dir, or move "
            "it aside with --restart-from-scratch"
        )
        if not has_steps:
            advice = (
                "No step was saved there, so --restart-from-scratch loses none: it "
                "moves the folder aside and starts this run"
            )
        raise ValueError(
            f"{where} holds another run:\n" + "\n".join(lines) + "\n" + advice
        )


def make(path: Path) -> None:
    """Create the folder, with its folder of checkpoints.

    Raises:
      ValueError: the folder cannot be written.
      NoSpaceError: the disk is full.
    """
    with _writing(path):
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, which claims the folder for this run.

    Args:
      path: the work dir.
      config: fields of the config.

    Raises:
      ValueError: the folder cannot be written.
      NoSpaceError: the disk is full.
    """
    with _writing(path):
        write_json(path / "config.json", config_json.stamped(config))


def keep_data_files(path: Path, versions: Mapping[str, str]) -> None:
    """Record which versions of files in object stores the run reads.

    Args:
      path: the work dir.
      versions: size and version in words, by URL; nothing is written if it is empty.
    Raises:
      ValueError: the record cannot be written.
      NoSpaceError: the disk is full.
    """
    if versions:
        with _writing(path):
            write_json(path / _DATA_FILES, versions)


def check_data_files(path: Path, versions: Mapping[str, str]) -> None:
    """Refuse files in object stores that differ from those that the run has read.

    Args:
      path: the work dir of a run that continues.
      versions: current versions, in the form of `keep_data_files`.
    Raises:
      ValueError: a file is new, gone, or in another version, or the record cannot be
        read.
    """
    record = path / _DATA_FILES
    if not record.exists():  # the run read no file of an object store when it began
        return
    try:
        before = checked_json.read(record.read_bytes(), dict[str, str])
    except (OSError, ValueError) as error:
        raise ValueError(f"{record} cannot be read: {error}") from None
    urls = sorted({*before, *versions})
    changed = [url for url in urls if before.get(url) != versions.get(url)]
    if changed:
        url, more = changed[0], len(changed) - 1
        raise ValueError(
            f"{url} differs from the file that the run in {path} has read: "
            f"{before.get(url, 'absent')} there, {versions.get(url, 'absent')} now"
            f"{f', and {more} more files differ' if more else ''}; put that version "
            "back, or give another --work-dir or --restart-from-scratch"
        )


def keep_tokenizer(path: Path, contents: Mapping[str, bytes]) -> None:
    """Write the folder tokenizer/ atomically; never change an existing one.

    Args:
      path: path of the work dir, which exists.
      contents: contents of the files by name.
    Raises:
      ValueError: another tokenizer is there, or the folder cannot be written.
      NoSpaceError: the disk is full.
    """
    folder = path / TOKENIZER
    unfinished = f".{TOKENIZER}.writing-"
    temporary = path / f"{unfinished}{uuid.uuid4().hex[:8]}"
    try:
        with _writing(path):
            for abandoned in path.glob(f"{unfinished}*"):  # left by a killed process
                shutil.rmtree(abandoned)
            if folder.exists():
                _check_tokenizer(folder, contents)
                return
            temporary.mkdir()
            for name, content in contents.items():
                with (temporary / name).open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def kept_tokenizer(path: Path) -> Path | None:
    """Return the folder of the run's tokenizer in a work dir; None if there is none."""
    folder = path / TOKENIZER
    return folder if (folder / "tokenizer.json").is_file() else None


def _check_tokenizer(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Refuse another tokenizer.json; configuration and template may differ."""
    path = folder / "tokenizer.json"
    if not path.is_file() or path.read_bytes() != contents[path.name]:
        raise ValueError(
            f"{path} is not the tokenizer of this run; move {folder} away, then it is "
            "written again"
        )


def move_aside(path: Path) -> Path | None:
    """Rename a folder to the next free name and return it; None if it is absent.

    Raises:
      ValueError: the folder cannot be renamed.
    """
    if not path.exists():
        return None
    try:
        return path.rename(_free(path))
    except OSError as error:
        raise ValueError(f"cannot move {path} aside: {error.strerror}") from error


def resume_command(argv: Sequence[str], path: Path, *, is_launched: bool) -> str:
    """Return a text with the command that resumes this run.

    The work dir has the config of the run, so only the flags by which processes find
    each other are repeated. --distributed.process-id is omitted, since all processes
    use the command.

    Args:
      argv: flags of this process.
      path: path of the work dir.
      is_launched: whether a launch started this process. The text then names the
        command of the launch, which a process started by hand would not join.
    """
    if is_launched:
        return (
            "resumed by the launch; after its end, repeat the command of the launch "
            "(python -m mjax.launch)"
        )
    kept, flag, is_numbered = [], "", False
    for word in argv:
        if word.startswith("--"):
            flag = word.partition("=")[0].replace("_", "-")
        if flag == "--distributed.process-id":
            is_numbered = True
        elif flag.startswith("--distributed."):
            kept.append(word)
    command = [*_typed_program(), "--work-dir", str(path), *kept]
    each = " (add the --distributed.process-id of each process)" if is_numbered else ""
    return f"resume with{each}: {shlex.join(command)}"


def _typed_program() -> list[str]:
    """Return the words that started the trainer: `mjax train`, or the module."""
    if Path("".join(sys.orig_argv[1:2])).name == "mjax":
        return ["mjax", "train"]
    return ["python", "-m", "mjax.train"]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Explain errors of writing the work dir inside a with statement."""
    try:
        with disk_space.explained(path):
            yield
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def _unwritable(path: Path, why: str) -> ValueError:
    return ValueError(
        f"cannot write the work dir {path}: {why}; choose another --work-dir"
    )


def _free(path: Path) -> Path:
    """Return the first of path.1, path.2, ... that does not exist."""
    path = path.absolute() if path.name in ("", "..") else path
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate

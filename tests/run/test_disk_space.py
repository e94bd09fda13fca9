"""A full disk ends the start of a run with one message, and loses nothing."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.run import disk_space, work_dir
from mjax.run.json_files import write_atomically
from mjax.run.metrics import read_computed

FLAGS = [
    *("--recipe", "debug", "--data.path", "synthetic", "--optim.warmup-steps", "1"),
    *("--ckpt.every", "2", "--eval.every", "2", "--log.sample-tokens", "0"),
    *("--optim.schedule", "constant"),  # the others depend on --steps
]
MIB = 1 << 20


def full(name: str | None) -> None:
    """Write to a full disk; an error of a write names no file."""
    try:
        Path("/dev/full").write_text("x")
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


@pytest.mark.parametrize("name", [None, "/dev/full"])
def test_a_full_disk_is_explained_with_path_bytes_and_the_way_on(tmp_path, name):
    words = (
        rf"^cannot write {name or tmp_path}: No space left on device, [\d,]+ bytes are "
        "free; make room there, then the same command resumes the run; what is saved"
    )
    with (
        pytest.raises(disk_space.NoSpaceError, match=words),
        disk_space.explained(tmp_path),
    ):
        full(name)


def test_other_errors_of_a_disk_are_passed_on(tmp_path):
    with pytest.raises(FileNotFoundError), disk_space.explained(tmp_path):
        (tmp_path / "absent").read_text()


def test_a_file_that_does_not_fit_is_named_and_keeps_its_old_content(
    tmp_path, monkeypatch
):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    monkeypatch.setattr(os, "fsync", lambda descriptor: full(None))
    with pytest.raises(OSError, match=r"No space left.*a\.json"):
        write_atomically(path, "new")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]
    with pytest.raises(disk_space.NoSpaceError, match=r"cannot write .*/config\.json"):
        work_dir.write_config(tmp_path, {})


# ------------------------------------------------------------------- a real small disk


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of 8 MiB; needs root. A refusal fails the test."""
    path = tmp_path / "disk"
    path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"run these tests where root may mount: {done.stderr}"
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Compile once."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def train(environment, *flags) -> tuple[int, str]:
    words = [sys.executable, "-m", "mjax.train", *map(str, flags)]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory, environment):
    """A run that met no fault."""
    path = tmp_path_factory.mktemp("whole")
    assert train(environment, *FLAGS, "--steps", 4, "--work-dir", path)[0] == 0
    return path


def fill(folder: Path, left_bytes: int) -> Path:
    path = folder / "filler"
    size = shutil.disk_usage(folder).free - left_bytes
    with path.open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, size)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.mark.services
@pytest.mark.parametrize("left_bytes", [0, 4096, 8192])
def test_a_resume_on_a_full_disk_says_so_and_the_same_command_goes_on(
    disk, whole, environment, left_bytes
):
    run = disk / "run"
    again = ["--work-dir", run, "--steps", 4]
    assert train(environment, *FLAGS, "--steps", 2, "--work-dir", run)[0] == 0
    filler = fill(disk, left_bytes)
    before = contents(run / "checkpoints" / "2")
    rows = (run / "metrics.jsonl").read_bytes()
    code, said = train(environment, *again)
    *_, last = said.splitlines()
    assert code == 1, said
    assert "Traceback" not in said
    assert last.startswith(f"error: cannot write {run}")
    assert "bytes are free; make room there, then the same command resumes" in last
    assert contents(run / "checkpoints" / "2") == before
    assert (run / "metrics.jsonl").read_bytes() == rows
    filler.unlink()
    assert train(environment, *again)[0] == 0
    assert read_computed(run) == read_computed(whole)

"""A folder that is complete or absent."""

import subprocess
import sys
from pathlib import Path

import pytest

from mjax.hugging_face.new_folder import new_folder


def test_a_folder_appears_when_all_went_well_and_not_before(tmp_path: Path):
    with new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "f").write_text("x")
        assert not (tmp_path / "deep" / "out").exists()
    assert (tmp_path / "deep" / "out" / "f").read_text() == "x"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_an_empty_folder_is_taken_and_a_full_one_is_not(tmp_path: Path):
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "f").touch()
    with (
        pytest.raises(ValueError, match="is not an empty folder"),
        new_folder(tmp_path / "out"),
    ):
        pass
    assert (tmp_path / "out" / "f").exists()


def test_a_url_is_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is a URL; give"), new_folder("s3://a/b"):
        pass
    assert not [*tmp_path.iterdir()]


def test_of_two_that_write_at_once_the_first_to_end_stays(tmp_path: Path):
    out = tmp_path / "out"

    def write_later() -> None:
        with new_folder(out) as later:
            (later / "f").write_text("later")
            with new_folder(out) as first:
                (first / "f").write_text("first")

    with pytest.raises(RuntimeError, match=r"out was not written: .* not empty"):
        write_later()
    assert (out / "f").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), RuntimeError), (KeyError(1), KeyError)],
)
def test_after_an_error_nothing_is_left(tmp_path: Path, error, raised):
    def fail() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "f").touch()
            raise error

    with pytest.raises(raised):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_leaves_no_folder_of_that_name(tmp_path: Path):
    code = (
        "import os, signal, sys\n"
        "from mjax.hugging_face.new_folder import new_folder\n"
        "with new_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'f').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "out")]
    assert subprocess.run(argv, cwd=Path(__file__).parents[2]).returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.writing-")

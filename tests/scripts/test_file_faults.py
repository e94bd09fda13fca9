"""Damages of single files, as `file_faults` does them to a run."""

import threading
from contextlib import AbstractContextManager

import pytest

from scripts.faults.file_faults import deleted, folder_instead, pipe_instead


def test_who_opens_a_pipe_is_blocked_until_the_damage_ends(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    opened = threading.Event()

    def read():
        path.open("rb").close()
        opened.set()

    with pipe_instead(path):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(0.2)
        assert not opened.is_set()
    thread.join(30)
    assert opened.is_set()
    assert not path.exists()


@pytest.mark.parametrize("damage", [deleted, folder_instead, pipe_instead])
def test_what_a_run_has_written_again_stays(tmp_path, damage):
    path = tmp_path / "file"
    path.write_text("before")
    done: AbstractContextManager[None] = damage(path)
    with done:
        assert not path.is_file()
        new = tmp_path / "new"
        new.write_text("again")
        if path.is_dir():
            path.rmdir()
        new.replace(path)
    assert path.read_text() == "again"


def test_a_folder_is_moved_away(tmp_path):
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans" / "a").touch()
    for _ in range(2):
        with folder_instead(tmp_path / "spans"):
            assert list((tmp_path / "spans").iterdir()) == []
        (tmp_path / "spans").mkdir()
    assert len(list(tmp_path.glob("spans.*.moved-away"))) == 2

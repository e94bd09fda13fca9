"""`python -m mjax.data mirror` on a folder of blocks."""

import pytest

from mjax.data.__main__ import main
from mjax.data.mirror.blocks import BlockStore, sealed


def run(capsys, *words) -> tuple[int, str, str]:
    code = main(["mirror", *map(str, words)])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def test_status_counts_blocks_and_purge_waits_for_the_run(tmp_path, capsys):
    store = BlockStore(tmp_path)
    store.write("a", sealed(b"x" * 10))
    store.write("b", sealed(b"x" * 20))
    held = (0, "blocks 2 bytes 94 held by a live run yes", "")
    assert run(capsys, "status", tmp_path) == held
    code, _, error = run(capsys, "purge", tmp_path)
    assert code == 2
    assert "end the run" in error
    store.close()
    assert run(capsys, "status", tmp_path)[1].endswith("held by a live run no")
    assert run(capsys, "purge", tmp_path) == (0, "removed bytes 94", "")
    assert run(capsys, "status", tmp_path)[1].startswith("blocks 0 bytes 0")


def test_purge_removes_no_file_of_others(tmp_path, capsys):
    with_blocks = BlockStore(tmp_path)
    with_blocks.write("a", sealed(b"x"))
    with_blocks.wait_for(1, 1e9)
    with_blocks.close()
    for name in ("notes.txt", "thesis.tmp"):
        (tmp_path / name).write_text("of a user")
    (tmp_path / "folder").mkdir()
    assert run(capsys, "purge", tmp_path)[0] == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"notes.txt", "thesis.tmp", "folder", "in_use.lock"}


@pytest.mark.parametrize("action", ["status", "purge"])
@pytest.mark.parametrize("name", ["", "missing"])
def test_a_folder_of_something_else_is_refused(tmp_path, capsys, action, name):
    (tmp_path / "thesis.block").write_text("of a user")
    code, _, error = run(capsys, action, tmp_path / name)
    assert code == 2
    assert "holds no blocks of a mirror" in error
    assert (tmp_path / "thesis.block").exists()


def test_an_unknown_action_is_refused(tmp_path, capsys):
    code, _, error = run(capsys, "empty", tmp_path)
    assert code == 2
    assert "purge" in error

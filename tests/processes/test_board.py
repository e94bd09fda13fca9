"""Texts between processes; here, between the threads of one."""

import threading

import pytest

from mjax.processes.board import Board


def test_a_text_is_read_under_its_name_and_key():
    Board("a").post("key", "one")
    Board("b").post("key", "two")
    assert Board("a").read("key", timeout_s=0.0) == "one"
    assert Board("b").read("key", timeout_s=0.0) == "two"
    for name in ("a", "b"):
        Board(name).remove("key")


def test_a_reader_waits_for_the_writer():
    board, found = Board("waits"), []
    reader = threading.Thread(
        target=lambda: found.append(board.read("key", timeout_s=60.0))
    )
    reader.start()
    board.post("other", "not this")
    board.post("key", "this")
    reader.join()
    assert found == ["this"]


def test_a_key_that_nobody_posts_is_told_with_its_name():
    with pytest.raises(TimeoutError, match="nothing at 3/go after 0 s"):
        Board("empty").read("3/go", timeout_s=0.01)


def test_a_key_is_posted_once():
    board = Board("once")
    board.post("key", "one")
    with pytest.raises(RuntimeError, match="mjax/once/key is posted already"):
        board.post("key", "two")
    assert board.read("key", timeout_s=0.0) == "one"


def test_keys_are_taken_down_alone_or_with_all_below():
    board = Board("removed")
    for key in ("done/1", "done/2", "done", "doner", "x"):
        board.post(key, key)
    board.remove("done")
    board.remove("x")
    assert board.read("doner", timeout_s=0.0) == "doner"
    for key in ("done/1", "done/2", "done", "x"):
        with pytest.raises(TimeoutError):
            board.read(key, timeout_s=0.0)

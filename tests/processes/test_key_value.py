"""Texts between processes; most tests are between the threads of one."""

import signal
import threading
import time

import jax
import pytest

from mjax.processes.key_value import KeyValueStore


@pytest.fixture(params=["a run of one process", "a run of several"])
def open_store(request, monkeypatch):
    if request.param == "a run of several":
        request.getfixturevalue("coordinator")
    return lambda name: KeyValueStore(f"{request.node.name}/{name}")


def test_a_text_is_read_under_its_name_and_key(open_store):
    open_store("a").post("key", "one")
    open_store("b").post("key", "two")
    assert open_store("a").read("key", timeout_s=0.0) == "one"
    assert open_store("b").read("key", timeout_s=0.0) == "two"
    for name in ("a", "b"):
        open_store(name).remove("key")


def test_a_reader_waits_for_the_writer(open_store):
    store, found = open_store("waits"), []
    reader = threading.Thread(
        target=lambda: found.append(store.read("key", timeout_s=60.0))
    )
    reader.start()
    store.post("other", "not this")
    store.post("key", "this")
    reader.join()
    assert found == ["this"]


def test_a_key_that_nobody_posts_is_told_with_its_name(open_store):
    with pytest.raises(TimeoutError, match="empty/3/go was not posted within 0 s"):
        open_store("empty").read("3/go", timeout_s=0.01)


def test_a_key_is_posted_once(open_store):
    store = open_store("once")
    store.post("key", "one")
    with pytest.raises(
        RuntimeError, match=r"cannot post mjax/.*once/key .* ALREADY_EXISTS"
    ):
        store.post("key", "two")
    assert store.read("key", timeout_s=0.0) == "one"


def test_keys_are_taken_down_alone_or_with_all_below(open_store):
    store = open_store("removed")
    for key in ("done/1", "done/2", "done", "doner", "x"):
        store.post(key, key)
    store.remove("done")
    store.remove("x")
    assert store.read("doner", timeout_s=0.0) == "doner"
    for key in ("done/1", "done/2", "done", "x"):
        with pytest.raises(TimeoutError):
            store.read(key, timeout_s=0.0)


def test_names_below_a_key_are_listed(open_store):
    store = open_store("names")
    for key in ("host/3", "host/12", "hosts/4", "host"):
        store.post(key, "")
    assert sorted(store.names("host")) == ["12", "3"]
    assert store.names("absent") == []


def test_a_text_may_have_any_length_and_any_character(open_store):
    store, text = open_store("long"), "é\0😀" * 3_000_000
    store.post("key", text)
    assert store.read("key", timeout_s=60.0) == text


def test_a_signal_is_handled_while_a_process_waits(open_store, monkeypatch):
    """The text comes from the handler: without it there would be none."""
    store = open_store("signals")
    before = signal.signal(signal.SIGUSR1, lambda *_: store.post("key", "handled"))
    timer = threading.Timer(
        0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)
    )
    try:
        timer.start()
        assert store.read("key", timeout_s=20.0) == "handled"
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_reader_that_stood_still_looks_again(monkeypatch):
    """A text that was posted meanwhile is not missing."""
    store, now_s = KeyValueStore("stood still"), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def stand_still(key, timeout_ms):
        now_s[0] += 600.0
        monkeypatch.setattr(store._client, "blocking_key_value_get", get)
        store.post("key", "posted meanwhile")
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    get = store._client.blocking_key_value_get
    monkeypatch.setattr(store._client, "blocking_key_value_get", stand_still)
    assert store.read("key", timeout_s=30.0) == "posted meanwhile"
    store.remove("key")

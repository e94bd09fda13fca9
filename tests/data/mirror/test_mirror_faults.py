"""A mirror with hosts that hang, lie or are lost, and a remote that changes."""

import collections
import contextlib
import http.server
import logging
import pathlib
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mjax.data.mirror import blocks, peers
from mjax.data.mirror.ahead import NUM_AHEAD
from mjax.data.mirror.blocks import BlockStore, sealed
from mjax.data.mirror.mirror import Mirror, WrongContentError
from mjax.data.mirror.server import Blocks, Server
from tests.data.mirror.four_hosts import (
    CONTENT,
    HOSTS,
    Remote,
    free_addresses,
    read_all,
    terms,
)

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def host(address: tuple[str, int], answer: Answer) -> Iterator[None]:
    """Serve requests of all methods in another way than a mirror does."""
    methods = dict.fromkeys(("do_GET", "do_POST", "do_DELETE"), answer)
    quiet = {"log_message": lambda *args: None, **methods}
    handler = type("Handler", (http.server.BaseHTTPRequestHandler,), quiet)
    with socketserver.ThreadingTCPServer(address, handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield
        server.shutdown()


def send(
    to: http.server.BaseHTTPRequestHandler, content: bytes, stated: int | None = None
) -> None:
    """Answer with a content that may be shorter than its stated length."""
    to.send_response(200)
    to.send_header("Content-Length", str(len(content) if stated is None else stated))
    to.end_headers()
    to.wfile.write(content)


def lies(to: http.server.BaseHTTPRequestHandler) -> None:
    """Send a block with a valid seal and wrong bytes."""
    send(to, sealed(b"?" * 1000))


def cuts(to: http.server.BaseHTTPRequestHandler) -> None:
    """Send half of a block."""
    send(to, sealed(b"?" * 1000)[:500], 1032)


def hangs_in_a_fetch(to: http.server.BaseHTTPRequestHandler) -> None:
    """Say at once that no block is here, and hang when asked to fetch one."""
    if to.command == "POST":
        to.rfile.read()  # until the other side leaves
    else:
        to.send_error(404)


@pytest.fixture
def no_waits(monkeypatch):
    monkeypatch.setattr("mjax.data.mirror.mirror._RETRY_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lies, "sent wrong bytes (they differ from their SHA-256; asked for bytes"),
        (cuts, "sent wrong bytes (they differ from their SHA-256; asked for bytes"),
        (hangs_in_a_fetch, "does not answer (timed out; asked for bytes"),
    ],
)
def test_a_host_that_gives_no_good_block_is_named_and_fails_no_read(
    tmp_path, caplog, answer, words
):
    addresses, remote = free_addresses(), Remote()
    config = terms(addresses, timeout_s=0.3)
    made = [Mirror(h, remote, config, tmp_path / h) for h in HOSTS if h != "b"]
    with host(addresses["b"], answer):
        for mirror in made:
            mirror.serve()
        for mirror in made:
            for name in CONTENT:
                mirror.check(name)
            assert read_all(mirror) == CONTENT
    for mirror in made:
        mirror.close()
    assert f"host b at 127.0.0.1:{addresses['b'][1]} {words}" in caplog.text
    assert " of large); other hosts or the remote are asked" in caplog.text


def test_wrong_bytes_of_the_right_size_are_repaired_from_the_remote(
    mirrors, tmp_path, caplog
):
    made, remote = mirrors
    for mirror in made.values():
        mirror.fill()
    block = next(b for b, hosts in made["a"].table.items() if "b" in hosts)
    wrong = sealed(b"?" * made["a"]._length(block))
    made["b"]._digests.clear()
    made["b"].store.write(block, wrong)  # memory of the host was damaged
    made["a"]._digests.clear()
    made["a"].table[block] = ("b", "c", "d")
    made["a"].store.remove(block)
    for name in CONTENT:
        made["a"].check(name)
    assert read_all(made["a"]) == CONTENT
    assert "host b at" in caplog.text
    assert "sent wrong bytes" in caplog.text
    assert made["b"].store.read(block) != wrong
    assert max(remote.reads.values()) == 2  # one file again, and only once


def test_a_damaged_remote_is_said_while_good_blocks_are_kept(mirrors, no_waits):
    made, remote = mirrors
    remote.checksums["large"] = f"sha256:{'0' * 64}"
    folder = made["a"].store._folder
    other = Mirror("a", remote, made["a"].config, folder)
    remote.down_after = 58
    with pytest.raises(WrongContentError, match=r"large has .* cannot be read again"):
        other.check("large")
    assert len([*folder.glob("*.block")]) > 30
    other.close()


def test_bytes_that_change_after_the_check_are_refused(tmp_path, no_waits):
    remote = Remote()
    config = terms({"a": ("127.0.0.1", 0)})
    with contextlib.closing(Mirror("a", remote, config, tmp_path)) as mirror:
        mirror.fill()
        digests = mirror.digests("large")
    for path in tmp_path.glob("*.block"):
        path.unlink()
    with contextlib.closing(Mirror("a", remote, config, tmp_path)) as mirror:
        assert not mirror.trust("large", digests[1:])
        assert mirror.trust("large", digests)
        remote.wrong = 1
        assert read_all(mirror) == CONTENT  # the next try was right
        assert remote.wrong == 0
        mirror.store.remove(mirror._blocks_of(mirror._files["large"])[1])
        remote.wrong = 4
        with pytest.raises(
            OSError, match=r"host a .* 1000 to 2000 of large .* other b"
        ):
            mirror.read_range("large", 1000, 1)


def test_a_slow_fetch_of_another_host_is_waited_for(tmp_path):
    addresses, remote = free_addresses(), Remote()
    config = terms(addresses, timeout_s=0.15, num_replicas=1)
    made = {h: Mirror(h, remote, config, tmp_path / h) for h in HOSTS}
    for mirror in made.values():
        mirror.serve()
    [first, *_] = [b for b, hosts in made["a"].table.items() if hosts == ("b",)]
    let_go = threading.Timer(0.5, remote.gate.set)
    remote.gate.clear()
    let_go.start()
    file, start = made["a"]._blocks[first]
    wanted = CONTENT[file.name][start : start + 10]
    assert made["a"].read_range(file.name, start, 10) == wanted
    assert [*remote.reads.values()] == [1]
    for mirror in made.values():
        mirror.close()


def _end(wait: Callable[[], object], close: Callable[[], None]) -> list[str]:
    """Return the errors of a wait that ends because something is closed."""
    errors = []

    def act() -> None:
        try:
            wait()
        except OSError as error:
            errors.append(str(error))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    close()
    thread.join(20)
    return errors


def test_a_host_that_ends_does_not_wait_for_a_busy_one(tmp_path):
    addresses, remote = free_addresses(), Remote()
    config = terms(addresses, timeout_s=0.15, num_replicas=1)
    a, b = (Mirror(host, remote, config, tmp_path / host) for host in "ab")
    b.serve()
    remote.gate.clear()
    file, start = a._blocks[next(k for k, hosts in a.table.items() if hosts == ("b",))]
    errors = _end(lambda: a.read_range(file.name, start, 1), a.close)
    assert "were closed" in errors[0]
    assert "host b: was busy until this host ended" in errors[0]
    remote.gate.set()
    b.close()


def test_a_store_that_is_closed_does_not_wait_for_a_lock(tmp_path):
    stores = [BlockStore(tmp_path), BlockStore(tmp_path)]
    with stores[0].locked("x"):
        errors = _end(lambda: stores[1].locked("x").__enter__(), stores[1].close)
    assert "were closed" in errors[0]
    stores[0].close()


def test_the_only_copy_is_read_from_a_host_that_failed_a_moment_ago(
    mirrors, tmp_path, no_waits, monkeypatch
):
    made, remote = mirrors
    for mirror in made.values():
        mirror.fill()
    for name in "ac":
        for path in (tmp_path / name).glob("*.block"):
            path.unlink()
    made.pop("d").close()
    remote.num_failures = 10**6
    a = made["a"]
    monkeypatch.setattr(a._peers, "_down", {"b": (1e30, 30.0, "")})
    here = [b for b, hosts in a.table.items() if "b" in hosts]
    for block in here:
        file, start = a._blocks[block]
        assert a.read_range(file.name, start, 1)
    [lost, *_] = [b for b, hosts in a.table.items() if "b" not in hosts]
    file, start = a._blocks[lost]
    with pytest.raises(
        OSError,
        match=f"host a cannot read bytes {start} to .* of {file.name} .* reset.*; host",
    ) as caught:
        a.read_range(file.name, start, 1)
    assert "host c: host c cannot read bytes" in str(caught.value)
    assert "host d: does not answer (" in str(caught.value)


def test_many_lost_hosts_delay_a_fetch_by_little(tmp_path, monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr("mjax.data.mirror.mirror.time.monotonic", lambda: now[0])
    names = [f"host {index}" for index in range(99)]
    config = terms(dict.fromkeys(names, ("127.0.0.1", 1)), num_replicas=1)
    with contextlib.closing(Mirror(names[0], Remote(), config, tmp_path)) as mirror:

        def timed_out(host, block, method, *args, **kwargs) -> peers.Answer:
            asked.append(host)
            now[0] += config.timeout_s
            return peers.Answer(None, "timed out")

        monkeypatch.setattr(mirror._peers, "ask", timed_out)
        mirror._fetched(next(iter(mirror.table)))
        assert len(asked) == 1


def test_a_lost_host_is_left_alone_for_longer_each_time(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(peers.time, "monotonic", lambda: now[0])
    [address, *_] = free_addresses().values()
    lost, times = peers.Peers({"b": address}, "secret", 1.0, 1.0, threading.Event()), []
    real = lost._request

    def request(*args) -> tuple[int, bytes]:
        times.append(now[0])
        return real(*args)

    monkeypatch.setattr(lost, "_request", request)
    while now[0] < 1500:
        reason = lost.ask("b", "x", "GET", label="x").reason
        assert reason == "does not answer ([Errno 111] Connection refused)"
        now[0] += 15
    assert times == [0, 30, 90, 210, 450, 930, 1410]
    assert caplog.text.count("does not answer") == 1


def test_several_blocks_are_read_at_a_time(tmp_path):
    remote, config = Remote(), terms({"a": ("127.0.0.1", 0)}, block_bytes=1006)
    del remote.checksums["small"]
    with contextlib.closing(Mirror("a", remote, config, tmp_path)) as mirror:
        barrier = threading.Barrier(NUM_AHEAD, timeout=20)
        after_first = iter([lambda: None])
        remote.before = lambda: next(after_first, barrier.wait)()
        assert len(mirror.table) == 57
        mirror.fetch()
    assert len(remote.reads) == 57


def test_a_stopped_process_with_a_lock_delays_a_read_only_for_a_while(
    tmp_path, caplog, monkeypatch
):
    code = (
        "import pathlib, sys, time\n"
        "from mjax.data.mirror.blocks import BlockStore\n"
        "with BlockStore(pathlib.Path(sys.argv[1])).locked('a'):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        store = BlockStore(tmp_path)
        with store.locked("a", wait_s=0.05):
            pass
        store.close()
        process.kill()
    assert "blocks cannot be locked" in caplog.text
    assert "a.lock for 0.05 s" in caplog.text


def test_writers_together_stay_within_the_limit(tmp_path, monkeypatch):
    store, most = BlockStore(tmp_path, limit_bytes=300), []
    real = blocks.os.fsync

    def fsync(fd: int) -> None:
        most.append(sum(p.stat().st_size for p in tmp_path.glob("*.[bt][lm]*")))
        real(fd)

    monkeypatch.setattr(blocks.os, "fsync", fsync)
    threads = [
        threading.Thread(target=store.write, args=(f"{i}", sealed(b"x" * 68)))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert max(most) <= 300
    assert len([*tmp_path.glob("*.block")]) == 3


def test_a_folder_that_became_read_only_is_still_read(tmp_path, caplog, monkeypatch):
    with contextlib.closing(BlockStore(tmp_path)) as store:
        store.write("a", sealed(b"x"))
    real = pathlib.Path.open

    def read_only(path, mode="r", *args, **kwargs):
        if mode not in ("r", "rb"):
            raise OSError(30, "Read-only file system")
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "open", read_only)
    with contextlib.closing(BlockStore(tmp_path)) as store:
        assert store.read("a") == sealed(b"x")
        assert "can only be read" in caplog.text
        with pytest.raises(blocks.InUseError):
            blocks.purge(tmp_path)
    with pytest.raises(OSError, match="Read-only"):
        BlockStore(tmp_path / "other")


def test_a_busy_server_says_so_and_a_lost_client_is_one_quiet_line(
    capfd, caplog, monkeypatch
):
    [address, *_] = free_addresses().values()
    content, gate = sealed(b"x" * 10_000_000), threading.Event()

    def read(name: str) -> bytes:
        gate.wait(20)
        return content

    names = {"x"}
    given = Blocks(names, read, read, names.discard, 1)
    server = Server(given, "secret", 0.3, address)
    server.answers.acquire()
    for _ in range(7):
        server.answers.acquire()
    statuses = collections.deque()
    asking = peers.Peers({"b": address}, "secret", 0.3, 20.0, threading.Event())
    real = asking._request

    def request(*args) -> tuple[int, bytes]:
        answer = real(*args)
        statuses.append(answer[0])
        if answer[0] == peers.BUSY:
            server.answers.release()
        return answer

    monkeypatch.setattr(asking, "_request", request)
    gate.set()
    assert asking.ask("b", "x", "GET", label="x").content == content
    assert [*statuses] == [peers.BUSY, 200]
    gate.clear()
    caplog.set_level(logging.DEBUG)
    with socket.create_connection(address) as leaving:
        text = "GET /x HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n"
        leaving.sendall(text.encode())
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    gate.set()
    while "left before its answer" not in caplog.text:
        time.sleep(0.01)
    server.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_named(tmp_path):
    addresses = free_addresses()
    with (
        socket.create_server(addresses["a"]),
        contextlib.closing(Mirror("a", Remote(), terms(addresses), tmp_path)) as mirror,
        pytest.raises(
            OSError, match=rf"cannot listen on 127.0.0.1:{addresses['a'][1]}"
        ),
    ):
        mirror.serve()

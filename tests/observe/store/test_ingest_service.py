"""The ingester behind HTTP, and the two commands."""

import http.client
import os
import signal
import socket
import threading
import time

import pytest

from mjax.observe import __main__ as command
from mjax.observe.store.base import StoreGoneError
from mjax.observe.stream import wire
from mjax.observe.stream.collector import Collector
from mjax.observe.stream.service import IngestService, make_token
from mjax.observe.stream.sinks import SinkGoneError, open_sink
from tests.observe.store.run_files import (
    batch,
    metric_bytes,
    span_bytes,
    span_path,
)


@pytest.fixture
def service(tmp_path):
    made = IngestService(
        store=str(tmp_path / "store.duckdb"),
        listen="127.0.0.1:0",
        token="secret",
        say=lambda text: None,
    )
    yield made
    made.close()


def ask(service, method: str, path: str, body: bytes = b"", token: str = "secret"):
    host, port = service.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    data = answer.read().decode()
    connection.close()
    return answer.status, data


@pytest.mark.parametrize("token", ["", "other", "secre", "secret2"])
def test_without_the_token_nothing_is_answered(service, token):
    for method, path in (("GET", "/metrics"), ("POST", "/marks"), ("POST", "/batches")):
        status, text = ask(service, method, path, b"x", token)
        error = wire.decode(text.encode(), wire.ErrorAnswer).error
        assert (status, error) == (401, "the token is wrong; give --token-file")


def test_requests_that_are_none_are_refused(service):
    assert ask(service, "GET", "/")[0] == 404
    assert ask(service, "GET", "/batches")[0] == 404
    assert ask(service, "POST", "/batches", b"x" * 100)[0] == 400
    status, text = ask(service, "POST", "/marks", b'{"run": 1}')
    assert status == 400
    assert "run" in text
    assert ask(service, "GET", "/metrics")[0] == 200


def test_a_request_that_is_too_large_is_refused_unread(service):
    host, port = service.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /batches HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            b"Content-Length: 99999999999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_database_that_is_gone_keeps_the_collector_waiting(
    service, tmp_path, monkeypatch
):
    def fail(changes):
        raise StoreGoneError("the disk is full")

    token = tmp_path / "token"
    token.write_text("secret\n")
    sink = open_sink(service.address, token)
    whole = batch(span_bytes(0, 3), "spans/node0-0-1.jsonl")
    monkeypatch.setattr(service.store, "write", fail)
    with pytest.raises(SinkGoneError, match="answered 503: the disk is full"):
        sink.send([whole], 0)
    monkeypatch.undo()
    (outcome,) = sink.send([whole], 0)
    assert outcome.verdict == "stored"
    sink.close()


def test_many_collectors_at_once_lose_and_double_nothing(service, tmp_path):
    whole = batch(span_bytes(0, 30), "spans/node0-0-1.jsonl")
    verdicts = []

    def send():
        sink = open_sink(service.address, token)
        (outcome,) = sink.send([whole], 0)
        verdicts.append(outcome.verdict)
        sink.close()

    token = tmp_path / "token"
    token.write_text("secret\n")
    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(verdicts) == ["known"] * 7 + ["stored"]
    assert service.store.query("select count(*) from spans") == [(210,)]


def test_a_socket_that_a_killed_ingester_left_is_used_again(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    store = str(tmp_path / "store.duckdb")
    made = IngestService(store=store, listen=f"unix:{path}", say=print)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="is in use by another ingester; stop it"):
        IngestService(
            store=str(tmp_path / "other"), listen=f"unix:{path}", say=lambda text: None
        )
    made.close()


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("unix:/tmp/" + "x" * 120, "is too long, a socket path has at most 107"),
        ("127.0.0.1", "--listen must be HOST:PORT with a port up to 65535, got 127"),
        ("127.0.0.1:70000", "a port up to 65535, got 127.0.0.1:70000; write --listen"),
        ("127.0.0.1:0", "needs --token-file"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(tmp_path, listen, message):
    with pytest.raises(ValueError, match=message):
        IngestService(
            store=str(tmp_path / "s.duckdb"),
            listen=listen,
            token="" if "token" in message else "secret",
            say=lambda text: None,
        )
    # The database was released.
    IngestService(
        store=str(tmp_path / "s.duckdb"),
        listen=f"unix:{tmp_path}/s",
        say=lambda text: None,
    ).close()


def test_a_token_is_made_once_and_only_for_its_owner(tmp_path):
    path = tmp_path / "observe" / "token"
    token = make_token(path)
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_token(path) == token
    path.chmod(0o644)
    with pytest.raises(ValueError, match="has mode 0644, so other users may read it"):
        make_token(path)


BAD_FLAGS = [
    (["collect"], "--work-dir"),
    (
        ["collect", "--work-dir", "{dir}", "--every-s", "0"],
        "--every-s must be at least",
    ),
    (
        ["collect", "--work-dir", "{dir}", "--quota-gb", "-1"],
        "--quota-gb must be above",
    ),
    (["collect", "--work-dir", "{dir}", "--drop-unstored"], "--drop-unstored needs"),
    (["collect", "--work-dir", "{dir}", "--log-quota-gb", "0"], "must be above 0, got"),
    (["collect", "--work-dir", "{dir}", "--delete-logs"], "--delete-logs needs"),
    (["ingest", "--work-dir", "{dir}", "--keep-days", "0"], "--keep-days must be"),
    (["ingest", "--work-dir", "{dir}", "--keep-days", "nan"], "--keep-days must be"),
    (
        ["ingest", "--work-dir", "{dir}", "--keep-sums-days", "3"],
        "--keep-sums-days 3 needs --keep-days; add --keep-days 3 or less",
    ),
    (
        [*("ingest", "--work-dir", "{dir}"), "--keep-sums-days=3", "--keep-days=4"],
        "--keep-sums-days must be at least --keep-days 4, got 3",
    ),
    (["collect", "--work-dir", "{dir}/none"], "is not a folder; give the work dir"),
    (["collect", "--work-dir", "{dir}", "--to", "ftp://x"], "--to must be unix:PATH"),
    (["collect", "--work-dir", "{dir}", "--to", "http://x"], "--token-file"),
    (["collect", "--work-dir", "{dir}", "--too", "x"], "unknown flag --too"),
    (["ingest", "--work-dir", "{dir}/none"], "is not a folder; give the work dir"),
    (["ingest", "--work-dir", "{dir}", "--threads", "0"], "--threads must be at least"),
    (["ingest", "--work-dir", "{dir}", "--store", "x://y"], "a store is a path or"),
    (["ingest", "--work-dir", "{dir}", "--nats", "x"], "--nats must be nats://HOST"),
    (["nothing"], "there is no command nothing"),
    ([], "a command is missing"),
]


@pytest.mark.parametrize(("words", "message"), BAD_FLAGS)
def test_bad_flags_are_one_message_and_exit_code_2(tmp_path, capsys, words, message):
    try:
        code = command.main([word.format(dir=tmp_path) for word in words])
    except SystemExit as ended:  # a required flag, which the parser reports
        code = ended.code
    said = capsys.readouterr()
    assert code == 2
    assert message in said.err + said.out
    assert "Traceback" not in said.err


def test_the_commands_bring_a_run_into_a_database(tmp_path, capsys):
    """Ingester in this thread, collector in another, SIGTERM at the end."""
    span_path(tmp_path, 0).write_bytes(span_bytes(0, 20))
    (tmp_path / "metrics.jsonl").write_bytes(metric_bytes(range(1, 5)))
    found = {}

    def collect():
        address = f"unix:{tmp_path}/observe/ingest.sock"
        sink = open_sink(address, None)
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                try:
                    one = Collector(tmp_path, sink, say=print)
                    one.round()
                    found["done"] = one.is_done()
                    break
                except SinkGoneError:
                    time.sleep(0.05)
        finally:
            sink.close()
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=collect)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        thread.start()
        assert command.main(["ingest", "--work-dir", str(tmp_path)]) == 0
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == {"done": True}
    service = IngestService(
        store=str(tmp_path / "observe" / "store.duckdb"),
        listen=f"unix:{tmp_path}/t",
        say=print,
    )
    assert service.store.query("select count(*) from spans") == [(140,)]
    assert (
        command.main(
            [
                "collect",
                "--work-dir",
                str(tmp_path),
                "--to",
                f"unix:{tmp_path}/t",
                "--once",
            ]
        )
        == 0
    )
    service.close()
    capsys.readouterr()
    (tmp_path / "spans" / "node9-9-1.jsonl").write_bytes(b"no header\n")
    gone = ["--to", f"unix:{tmp_path}/t", "--once", "--once-within-s", "0.01"]
    assert command.main(["collect", "--work-dir", str(tmp_path), *gone]) == 1
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert "; trying to send the files again, with pauses of up to 10 s" in said


def test_once_says_what_cannot_be_sent(tmp_path, capsys):
    span_path(tmp_path, 0).write_bytes(b"no header\n")
    service = IngestService(
        store=str(tmp_path / "s.duckdb"), listen=f"unix:{tmp_path}/t", say=print
    )
    words = ["collect", "--work-dir", str(tmp_path), "--to", service.address, "--once"]
    assert command.main(words) == 1
    assert "line 1 is not a header of spans" in capsys.readouterr().err
    service.close()


def test_marks_of_an_unknown_file_are_absent(service):
    request = wire.MarksRequest(run="r", sources=["spans/x"])
    status, text = ask(service, "POST", "/marks", wire.encode(request))
    assert status == 200
    assert wire.decode(text.encode(), wire.MarksAnswer).marks == []

"""Many clients at once: none is lost, gets another's answer, or stays."""

import concurrent.futures
import http.client
import json
import socket
import threading

import pytest

from mjax.generate.requests import Request, Sampling
from mjax.generate.server import serving
from mjax.generate.server.limits import Limits
from tests.generate.server.fake_engine import FakeEngine, whole_text
from tests.generate.server.running import NAME, Running, events, running


def expected(prompt: str, seed: int, max_tokens: int) -> str:
    sampling = Sampling(max_tokens=max_tokens, seed=seed)
    return whole_text(Request(prompt=tuple(prompt.encode()), sampling=sampling))


def is_free(server: Running) -> bool:
    """Return whether nothing is left of any request."""
    scheduler = server.server.scheduler
    return scheduler.num_open == 0 and server.engine.is_idle


def test_each_of_64_clients_gets_its_own_answer():
    engine = FakeEngine(slots=4)
    with (
        running(engine, Limits(queue=60)) as server,
        concurrent.futures.ThreadPoolExecutor(64) as pool,
    ):
        engine.may_step.clear()

        def client(number: int) -> str:
            asked = {"prompt": f"p{number}", "seed": number, "max_tokens": 20}
            if number % 2:
                return server.complete(**asked).json["choices"][0]["text"]
            chunks = server.complete(**asked, stream=True).events
            assert chunks.pop() == "[DONE]"
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        texts = [pool.submit(client, number) for number in range(64)]
        server.until(lambda: server.server.scheduler.num_open == 64)
        engine.may_step.set()
        for number, text in enumerate(texts):
            assert text.result(20) == expected(f"p{number}", number, 20)
        server.until(lambda: is_free(server))
    assert engine.most_running == 4
    assert engine.cancelled == []


def test_one_client_more_than_fits_is_told_when_to_try_again():
    engine = FakeEngine(slots=1)
    with running(engine, Limits(queue=1)) as server:
        engine.may_step.clear()
        waiting = [server.send(max_tokens=2) for _ in range(2)]
        server.until(lambda: server.server.scheduler.num_open == 2)
        answer = server.complete()
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert answer.error["type"] == "rate_limit_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        engine.may_step.set()
        for sent in waiting:
            assert sent.recv(15) == b"HTTP/1.1 200 OK"
        server.until(lambda: is_free(server))
        assert server.complete().status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(stream):
    engine = FakeEngine(slots=1)
    with running(engine) as server:
        engine.may_step.clear()
        gone = server.send(max_tokens=60, stream=stream)
        server.until(lambda: engine.num_waiting == 1)
        stays = server.send(max_tokens=2, seed=9)
        server.until(lambda: server.server.scheduler.num_open == 2)
        gone.close()
        server.until(lambda: server.server.scheduler.num_open == 1)
        engine.may_step.set()
        answer = http.client.HTTPResponse(stays)
        answer.begin()
        text = json.loads(answer.read())["choices"][0]["text"]
        assert text == expected("ab", 9, 2)
        server.until(lambda: is_free(server))
        counters = server.ask("/metrics").body.decode()
    assert engine.cancelled == [1]
    assert 'path="/v1/completions",status="499"} 1' in counters


def test_a_client_that_goes_away_in_the_middle_of_a_stream_frees_its_slot():
    engine = FakeEngine(slots=1, max_len=100_000)
    with running(engine, Limits(max_tokens=90_000)) as server:
        gone = server.send(max_tokens=90_000, stream=True)
        assert b"200 OK" in gone.recv(100)
        gone.close()
        server.until(lambda: is_free(server))
        assert server.complete().status == 200
    assert engine.cancelled == [1]


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue():
    engine = FakeEngine(slots=1)
    with running(engine) as server:
        engine.may_step.clear()
        first = server.send(max_tokens=2)
        server.until(lambda: engine.num_waiting == 1)
        gone = server.send(max_tokens=2)
        server.until(lambda: server.server.scheduler.num_open == 2)
        gone.close()
        server.until(lambda: server.server.scheduler.num_open == 1)
        engine.may_step.set()
        assert first.recv(15) == b"HTTP/1.1 200 OK"
        server.until(lambda: is_free(server))
    assert engine.cancelled == [2]


def test_each_accepted_request_is_counted_by_its_end():
    engine = FakeEngine(slots=2, max_len=100_000)
    with running(engine, Limits(queue=2, max_tokens=90_000)) as server:
        assert server.complete(max_tokens=3, n=2).status == 200
        runs = [server.send(max_tokens=90_000, stream=True) for _ in range(2)]
        for sent in runs:
            assert b"200 OK" in sent.recv(100)
        waits = server.send(max_tokens=5, n=2)
        server.until(lambda: server.server.scheduler.num_waiting == 2)
        assert server.complete().status == 429
        waits.close()
        server.until(lambda: server.server.scheduler.num_waiting == 0)
        for sent in runs:
            sent.close()
        server.until(lambda: is_free(server))
        server.until(lambda: server.server.scheduler.num_running == 0)
        lines = server.ask("/metrics").body.decode().splitlines()
    found = dict(line.split(" ") for line in lines if line.startswith("mjax_requests"))
    ends = {"accepted": 6, "finished": 2, "cancelled_waiting": 2}
    ends |= {"cancelled_running": 2, "failed": 0}
    assert found == {f"mjax_requests_{k}_total": str(n) for k, n in ends.items()}
    assert "mjax_waiting_answers 0" in lines


def test_several_choices_are_cancelled_together():
    engine = FakeEngine(slots=2)
    with running(engine) as server:
        engine.may_step.clear()
        gone = server.send(max_tokens=30, n=5)
        server.until(lambda: server.server.scheduler.num_open == 5)
        gone.close()
        server.until(lambda: server.server.scheduler.num_open == 0)
        engine.may_step.set()
        server.until(lambda: engine.is_idle)
    assert sorted(engine.cancelled) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_ends_with_an_error(stream):
    engine = FakeEngine()
    with running(engine, Limits(request_s=0.1)) as server:
        engine.may_step.clear()
        answer = server.complete(stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "timeout")
        assert "not complete after 0.1 s (--request-s" in answer.error["message"]
        engine.may_step.set()
        server.until(lambda: is_free(server))
        assert engine.cancelled == [1]


def test_a_stream_that_takes_too_long_ends_with_an_error_event():
    engine = FakeEngine(max_len=10_000_000)
    limits = Limits(request_s=1.5, max_tokens=9_000_000)
    with running(engine, limits) as server:
        chunks = server.complete(stream=True, max_tokens=9_000_000).events
        assert chunks[0]["choices"][0]["text"]
        assert chunks[-1]["error"]["code"] == "timeout"
        server.until(lambda: is_free(server))


def test_a_client_that_reads_nothing_is_cut_off_and_holds_no_memory(monkeypatch):
    monkeypatch.setattr("mjax.generate.server.app._GOODBYE_S", 0.05)
    engine = FakeEngine(slots=1, max_len=10_000_000)
    limits = Limits(request_s=1.5, max_tokens=9_000_000)
    with running(engine, limits) as server:
        # Small kernel buffers, as with a distant client.
        server.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        # The kernel waits as long as a request may take. Here it waits longer;
        # otherwise it could give up while the final error is sent, and the answer would
        # seem received.
        serving.set_timeouts(server.server._socket, 3.0)
        server.send(max_tokens=9_000_000, stream=True, logprobs=5, buffer_bytes=4096)
        server.until(lambda: server.server.scheduler.num_open == 1)
        server.until(lambda: is_free(server))
        assert engine.cancelled == [1]
        # The kernel drops the unsent data, and the server drops the connection.
        connections = server.server._uvicorn.server_state.connections
        server.until(lambda: not connections)
        # It is counted when its task ends, a moment after its connection.
        gone = 'path="/v1/completions",status="499"} 1'
        server.until(lambda: gone in server.ask("/metrics").body.decode())


def test_the_kernel_gives_up_on_accepted_connections_too():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving.set_timeouts(listening, 1.5)
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            with accepted:
                option = socket.TCP_USER_TIMEOUT
                assert accepted.getsockopt(socket.IPPROTO_TCP, option) == 1500
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


@pytest.mark.parametrize("length", ["1000000", "9" * 5000])
def test_a_body_that_says_that_it_is_too_large_is_refused_unread(length):
    with running(limits=Limits(max_body_bytes=2000)) as server:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sent:
            sent.sendall(head.encode())
            sent.shutdown(socket.SHUT_WR)
            # A client that stops sending is dropped; one that continues gets the
            # answer.
        answer = server.ask("/v1/completions", b"x" * 1_000_000)
        assert answer.status == 413
        assert answer.error["message"].startswith("the body must have at most 2000 by")


def test_a_body_of_unknown_length_is_refused_when_it_becomes_too_large():
    with running(limits=Limits(max_body_bytes=2000)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request(
            "POST",
            "/v1/completions",
            iter([b"x" * 1000] * 100),
            {"content-type": "application/json"},
            encode_chunked=True,
        )
        assert connection.getresponse().status == 413
        connection.close()
        body = {"model": NAME, "prompt": "ab", "user": "x" * 1900}
        assert server.ask("/v1/completions", body).status == 200


def test_a_body_that_does_not_come_is_given_up():
    with running(limits=Limits(body_s=0.1)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sent:
            sent.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: 50\r\n\r\n{"
            )
            assert sent.recv(12) == b"HTTP/1.1 408"
        assert server.complete().status == 200


def test_if_the_engine_fails_every_client_is_told_and_the_process_too(capfd):
    engine = FakeEngine(slots=1, max_len=100_000)
    with running(engine, Limits(max_tokens=90_000)) as server:
        streaming = server.send(max_tokens=90_000, stream=True)
        assert b"200 OK" in streaming.recv(100)
        waiting = [server.send(max_tokens=5, stream=bool(i % 2)) for i in range(6)]
        server.until(lambda: server.server.scheduler.num_open == 7)
        engine.fails_in = 3
        for sent in waiting:
            answer = http.client.HTTPResponse(sent)
            answer.begin()
            assert answer.status == 500
            error = json.loads(answer.read())["error"]
            assert error["code"] == "engine_failed"
            assert "RuntimeError: the device is gone" in error["message"]
        rest = b""
        while part := streaming.recv(1 << 16):
            rest += part
            if part.endswith(b"0\r\n\r\n"):
                break
        assert b'"code":"engine_failed"' in rest
        assert b"[DONE]" not in rest
        assert server.news.get(timeout=20) == "ended"
        assert server.server.scheduler.failure is not None
        answer = server.complete()
        assert (answer.status, answer.error["code"]) == (500, "engine_failed")
        health = server.ask("/health")
        assert (health.status, health.json) == (503, {"status": "failed"})
        counts = server.server.scheduler.counts
        assert (counts.accepted, counts.failed) == (7, 7)
    assert "the device is gone" in capfd.readouterr().err


def test_an_engine_that_forgets_a_request_has_failed(capfd):
    engine = FakeEngine(slots=1)
    forget = engine.step

    def step():
        engine._running.clear()
        engine._waiting.clear()
        return []

    engine.step = step  # pyright: ignore[reportAttributeAccessIssue]
    assert forget() == []
    with running(engine) as server:
        answer = server.complete()
        assert answer.status == 500
        assert "1 requests never ended" in answer.error["message"]
    assert "never ended" in capfd.readouterr().err


def test_what_the_engine_refuses_is_the_clients_error():
    engine = FakeEngine(max_len=64)
    with running(engine, max_len=1000) as server:
        answer = server.complete(prompt="x" * 64, max_tokens=1)
        assert (answer.status, answer.error["message"]) == (
            400,
            "the prompt is too long",
        )
        assert server.server.scheduler.num_open == 0


def drained(
    server: Running, grace_s: float, *, is_urgent: bool = False
) -> concurrent.futures.Future[int]:
    """Drain a server in another thread."""
    found: concurrent.futures.Future[int] = concurrent.futures.Future()

    def drain() -> None:
        found.set_result(server.server.drain(grace_s, lambda: is_urgent))

    threading.Thread(target=drain, daemon=True).start()
    return found


def test_a_server_that_stops_finishes_what_it_has_accepted():
    engine = FakeEngine(slots=1)
    with running(engine) as server:
        engine.may_step.clear()
        accepted = [server.send(max_tokens=9, seed=seed) for seed in range(3)]
        server.until(lambda: server.server.scheduler.num_open == 3)
        stopping = drained(server, 20.0)
        server.until(lambda: server.ask("/health").status == 503)
        refused = server.complete()
        assert (refused.status, refused.error["code"]) == (503, "stopping")
        assert int(refused.headers["retry-after"]) > 0
        assert not stopping.done()
        engine.may_step.set()
        for seed, sent in enumerate(accepted):
            answer = http.client.HTTPResponse(sent)
            answer.begin()
            text = json.loads(answer.read())["choices"][0]["text"]
            assert text == expected("ab", seed, 9)
        assert stopping.result(20) == 0


def test_what_is_not_finished_when_the_grace_ends_gets_an_error():
    engine = FakeEngine(slots=2, max_len=10_000_000)
    with running(engine, Limits(max_tokens=9_000_000)) as server:
        streaming = server.send(max_tokens=9_000_000, stream=True)
        assert b"200 OK" in streaming.recv(100)
        engine.may_step.clear()
        waiting = server.send(max_tokens=9)
        server.until(lambda: server.server.scheduler.num_open == 2)
        assert drained(server, 0.05).result(20) == 2
        answer = http.client.HTTPResponse(waiting)
        answer.begin()
        assert answer.status == 503
        assert json.loads(answer.read())["error"]["code"] == "stopped"
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            part = streaming.recv(1 << 16)
            assert part
            rest += part
        assert b'"code":"stopped"' in rest


def test_each_request_that_a_second_signal_cuts_is_counted_once():
    engine = FakeEngine(slots=2, max_len=10_000_000)
    with running(engine, Limits(max_tokens=9_000_000)) as server:
        engine.may_step.clear()
        waiting = [server.send(max_tokens=9) for _ in range(8)]
        server.until(lambda: server.server.scheduler.num_open == 8)
        assert drained(server, 20.0, is_urgent=True).result(20) == 8
        for sent in waiting:
            answer = http.client.HTTPResponse(sent)
            answer.begin()
            assert answer.status == 503


def test_a_request_after_an_error_on_the_same_connection_is_answered():
    with running() as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        statuses = []
        for body in (b"{", b'{"prompt": "ab", "max_tokens": 2}'):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        connection.close()
    assert statuses == [400, 200]


def test_a_stream_can_be_read_while_it_is_generated():
    engine = FakeEngine(slots=1)
    with running(engine) as server:
        engine.may_step.clear()
        sent = server.send(max_tokens=3, stream=True, seed=4)
        step, released = engine.step, threading.Semaphore(0)

        def one_step():
            assert released.acquire(timeout=20)
            return step()

        engine.step = one_step  # pyright: ignore[reportAttributeAccessIssue]
        engine.may_step.set()
        text = ""
        received = b""
        released.release()  # the step in progress, or the first one
        found = []
        while text != expected("ab", 4, 3):
            released.release()
            part = sent.recv(4096)
            assert part
            received += part
            body = received.partition(b"\r\n\r\n")[2].decode()
            lines = [ln for ln in body.split("\r\n") if ln.startswith("data: {")]
            found = [event for line in lines for event in events(line)]
            text = "".join(event["choices"][0]["text"] for event in found)
        assert len(found) >= 2

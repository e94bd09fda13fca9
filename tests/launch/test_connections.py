"""Lines arrive complete and in order, however the network splits them."""

import asyncio
import random
import socket
import time

import pytest

from mjax.cli.listening import admission
from mjax.cli.listening.admission import Admission
from mjax.launch import messages
from mjax.launch.config import RunConfig
from mjax.launch.connections import Buffer, Connection
from mjax.launch.driver import Driver
from mjax.launch.messages import Command, Hello, Refused


class Listener:
    """A server that stores the lines it receives."""

    def __init__(self, reply: Refused | None = None, closes_after: int | None = None):
        self.lines, self.ended, self.connections = {}, [], []
        self.reply, self.closes_after = reply, closes_after
        self._buffer, self.admission = Buffer(), Admission(first_bytes=2**24)

    def connection(self):
        made = Connection(self._buffer, self.admission, self._take, self.ended.append)
        self.connections.append(made)
        return made

    def _take(self, connection, line):
        mine = self.lines.setdefault(connection, [])
        mine.append(line)
        if self.reply is not None:
            connection.send(self.reply)
        if len(mine) == self.closes_after:
            connection.close()


def serve(play, listener, num_peers=1):
    """Let `play` talk to the listener, in a thread, until all peers have gone."""

    async def run():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(listener.connection, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        result = await asyncio.to_thread(play, address)
        async with asyncio.timeout(10):
            while len(listener.ended) < num_peers:
                await asyncio.sleep(0.01)
        server.close()
        return result

    return asyncio.run(run())


@pytest.mark.parametrize("seed", range(4))
def test_lines_of_many_connections_come_whole_and_in_order(seed):
    rng, listener = random.Random(seed), Listener()
    sizes = [0, 1, 300, 2**16 - 1, 2**16, 2**17 + 3]
    said = [
        [bytes([65 + who]) * rng.choice(sizes) for _ in range(20)] for who in range(3)
    ]

    def play(address):
        places = [0, 0, 0]
        texts = [b"".join(line + b"\n" for line in lines) for lines in said]
        peers = [socket.create_connection(address) for _ in said]
        while any(p < len(t) for p, t in zip(places, texts, strict=True)):
            who = rng.randrange(3)
            num = rng.choice([1, 7, 400, 2**16, 2**18])
            peers[who].sendall(texts[who][places[who] : places[who] + num])
            places[who] += num
        for peer in peers:
            peer.close()

    serve(play, listener, num_peers=3)
    assert sorted(listener.lines.values()) == sorted(said)


def test_what_has_no_end_of_line_is_not_handed_on():
    listener = Listener()

    def play(address):
        with socket.create_connection(address) as peer:
            peer.sendall(b"whole\nhalf")

    serve(play, listener)
    assert [*listener.lines.values()] == [[b"whole"]]


def test_a_line_that_is_too_long_ends_the_connection(monkeypatch):
    monkeypatch.setattr(messages, "MAX_LINE_BYTES", 2**18)
    listener = Listener()

    def play(address):
        with socket.create_connection(address, timeout=10) as peer:
            try:
                for _ in range(100):
                    peer.sendall(b"x" * 2**16)
                peer.recv(1)
            except ConnectionError:
                return True
            return False

    assert serve(play, listener)
    assert listener.lines == {}


def test_after_a_close_nothing_is_taken_and_what_was_said_arrives():
    listener = Listener(reply=Refused(reason="no"), closes_after=2)

    def play(address):
        with socket.create_connection(address, timeout=10) as peer:
            peer.sendall(b"one\ntwo\nthree\nfour\n")
            return peer.makefile("rb").read()

    answers = serve(play, listener)
    assert answers == 2 * messages.encode(Refused(reason="no"))
    assert [*listener.lines.values()] == [[b"one", b"two"]]
    (connection,) = listener.connections
    connection.send(Refused(reason="too late"))  # to a closed connection: no error


def is_closed(peer):
    """Return whether a driver has closed a connection; drop what it has sent."""
    peer.settimeout(0.01)
    try:
        while peer.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def until(condition):
    until_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_answered(address):
    """Return whether a driver answers a command."""
    command = Command(version=messages.VERSION, token="word", name="status")
    with socket.create_connection(address, timeout=20) as peer:
        peer.sendall(messages.encode(command))
        return b'"answer"' in peer.makefile("rb").readline()


def drive(play, work_dir):
    """Let `play` talk to a driver, in a thread; then end the driver."""
    driver = Driver(
        RunConfig(hosts=2), [], work_dir=work_dir, token="word", bind=("127.0.0.1", 0)
    )

    async def run():
        serving = asyncio.create_task(driver.run())
        while not driver.is_listening:
            await asyncio.sleep(0.01)
        try:
            await asyncio.to_thread(play, driver.address)
        finally:
            driver._supervisor.stop(time.monotonic())
            await serving

    asyncio.run(run())


def hello(**fields):
    facts = fields.pop("facts", {})
    given = {"host": "a", "address": "127.0.0.1", "pid": 7, "token": "word"} | fields
    return messages.encode(Hello(version=messages.VERSION, facts=facts, **given))


def test_silent_peers_of_a_driver_make_room_and_agents_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "MOST_UNAUTHENTICATED", 8)
    monkeypatch.setattr(admission, "LIMIT_S", 0.5)

    def play(address):
        agent = socket.create_connection(address, timeout=20)
        agent.sendall(hello(facts={"log": "x" * 2**19}))
        silent = [socket.create_connection(address) for _ in range(80)]
        assert is_answered(address)
        until(lambda: all(map(is_closed, silent)))  # the last ones after the limit
        assert is_answered(address)
        assert not is_closed(agent)
        agent.sendall(b"x" * 2**21)  # it may send long lines
        assert not is_closed(agent)
        for peer in (agent, *silent):
            peer.close()

    drive(play, tmp_path)


def test_a_driver_reads_little_from_a_peer_without_a_token(tmp_path):
    def play(address):
        lines = [hello(token="wrong"), hello(facts={"x": "x" * 2**21}), b"x" * 2**21]
        for line in lines:
            with socket.create_connection(address, timeout=20) as peer:
                try:
                    peer.sendall(line)
                    answer = peer.recv(2**16)
                except ConnectionError:
                    answer = b""
                assert not answer or b'"refused"' in answer
        assert is_answered(address)

    drive(play, tmp_path)

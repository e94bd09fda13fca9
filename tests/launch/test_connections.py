"""Lines arrive complete and in order, however the network splits them."""

import asyncio
import random
import socket

import pytest

from mjax.launch import messages
from mjax.launch.connections import Buffer, Connection
from mjax.launch.messages import Refused


class Listener:
    """A server that stores the lines it receives."""

    def __init__(self, reply: Refused | None = None, closes_after: int | None = None):
        self.lines, self.ended, self.connections = {}, [], []
        self.reply, self.closes_after = reply, closes_after
        self._buffer = Buffer()

    def connection(self):
        made = Connection(self._buffer, self._take, self.ended.append)
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

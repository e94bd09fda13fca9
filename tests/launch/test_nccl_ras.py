"""A report of NCCL's RAS service, from a fake server."""

import asyncio
import contextlib

import pytest

from mjax.launch import nccl_ras
from mjax.launch.agent import free_port

REPORT = "NCCL version 2.28.7\nCommunicators... (0.00s)\n  1  8  8  64  RUNNING\n"


async def ask(answer, *, closes=True):
    asked, gone = [], asyncio.Event()

    async def serve(reader, writer):
        asked.append(await reader.readline())
        with contextlib.suppress(ConnectionError):
            writer.write(answer)
            await writer.drain()
            if not closes:
                await reader.read()
        writer.close()
        gone.set()

    server = await asyncio.start_server(serve, "localhost", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        report = await nccl_ras.status(port, timeout_s=0.5)
        await gone.wait()
    finally:
        server.close()
    return asked, report


@pytest.mark.parametrize("closes", [True, False])
def test_what_came_before_the_end_or_the_limit_is_the_report(closes):
    asked, report = asyncio.run(ask(REPORT.encode() + b"\xff", closes=closes))
    assert asked == [b"verbose status\n"]
    assert report == REPORT + "\ufffd"


def test_a_report_without_end_is_cut():
    _, report = asyncio.run(ask(b"x" * 2**20))
    assert len(report) == 2**18


def test_where_nobody_listens_there_is_no_report():
    assert asyncio.run(nccl_ras.status(free_port())) == ""

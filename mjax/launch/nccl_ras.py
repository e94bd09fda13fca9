"""Query the RAS service of NCCL on this host for the state of its communicators.

Input: a port of this host. Output: the report, as text for people. The report is only
evidence: RAS counts launched operations, and has reported a hung run as healthy
(NVIDIA/nccl issue 1730). Not yet tested on a GPU.

Source: NCCL user guide, "RAS"; the service listens since NCCL 2.24.
"""

import asyncio

PORT = 28028
"""Default port; NCCL_RAS_ADDR overrides address and port."""
_QUESTION = b"verbose status\n"
_MOST_BYTES = 2**18


async def status(port: int = PORT, timeout_s: float = 1.0) -> str:
    """Return the report; empty if no service listens or answers in time."""
    report = b""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("localhost", port)
            try:
                writer.write(_QUESTION)
                while len(report) < _MOST_BYTES and (part := await reader.read(2**16)):
                    report += part
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        pass  # return the part that has arrived
    return report[:_MOST_BYTES].decode(errors="replace")

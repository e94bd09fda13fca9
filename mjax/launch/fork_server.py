"""A process that imports the trainer once and forks ranks, for warm starts.

Input: a module, and requests of the agent, one JSON line each, on a socket. Output: for
each request the process id of a rank, which is equivalent to `python -m MODULE
ARGUMENTS` but need not spend seconds on imports. The server starts no thread and uses
no device, because either would make a fork unsafe.

A rank is a child of the agent, not of the server. So the agent receives the exit code
of the rank, and ranks survive the death of the server. For this, the server forks a
process that forks the rank and exits; the agent adopts orphans
(PR_SET_CHILD_SUBREAPER).

Source: Android's zygote, and Python's `multiprocessing.forkserver`. Differs: the latter
runs functions, whereas a rank is a command.
"""

import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

_PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
libc = ctypes.CDLL(None, use_errno=True)


class Request(msgspec.Struct, kw_only=True, frozen=True):
    """Request to fork a rank."""

    module: str
    """Module to run: the imported module, or another module of its package."""
    arguments: list[str]
    """Arguments after the module's name."""
    environment: dict[str, str]
    """Complete environment of the rank. Modules that read variables when imported have
    read those of the server."""
    log: str
    """File to which the rank's output is appended."""


class Forked(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to a request; process id 0 reports that the imports are done."""

    pid: int = 0
    error: str = ""
    """Why no rank was forked; the agent then ends the server. "" on success."""


def die_with(parent: int) -> None:
    """Make the kernel kill the calling process when its parent ends."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent had ended before the call
        os._exit(1)


def serve(module: str, connection: socket.socket) -> None:
    """Import a module, then fork ranks until the agent is gone.

    The module's IMPORTED_LATER names modules that it imports only when it runs. They
    are imported before the forks as well.
    """
    agent = os.getppid()
    program = importlib.import_module(module)
    for later in getattr(program, "IMPORTED_LATER", ()):
        importlib.import_module(later)
    stamps = _stamps(module)
    gc.collect()
    gc.freeze()  # a garbage collection in a rank would copy all memory pages
    _say(connection, Forked())
    with connection.makefile("rb") as lines:
        for line in lines:
            request = msgspec.json.decode(line, type=Request)
            error = _why_not(module, stamps)
            if error:
                _say(connection, Forked(error=error))
                return
            reading, writing = os.pipe()
            middle = os.fork()
            if not middle:
                os.close(reading)
                _fork_again(request, connection, agent, writing)
                return  # this is the rank, whose program has returned
            os.close(writing)
            os.waitpid(middle, 0)
            pid = int(os.read(reading, 16) or b"0")
            os.close(reading)
            _say(connection, Forked(pid=pid) if pid else Forked(error="fork failed"))


def _fork_again(
    request: Request, connection: socket.socket, agent: int, writing: int
) -> None:
    """Fork the rank, and exit, so that the agent adopts the rank."""
    middle, rank = os.getpid(), os.fork()
    if rank:
        os.write(writing, str(rank).encode())
        os._exit(0)
    os.close(writing)
    connection.close()
    while os.getppid() == middle:  # until the agent is the parent
        os.sched_yield()
    die_with(agent)
    _become(request)


def _become(request: Request) -> None:
    """Run as `python -m MODULE ARGUMENTS`."""
    module = request.module
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = [module, *request.arguments]
    importlib.reload(sys.modules[module.partition(".")[0]])  # sets the start time
    sys.modules.pop(module, None)  # so that it is executed again, as a program
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _why_not(module: str, stamps: Mapping[str, float]) -> str:
    """Return why no rank can be forked; "" if it can."""
    if stamps != _stamps(module):
        return f"the files of {module} have changed"
    # OpenBLAS also has threads, but stops them before a fork.
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        return f"{module} has started threads: {names}"
    return ""


def _stamps(module: str) -> dict[str, float]:
    """Return path -> modification time, for each imported file of the package."""
    package = module.partition(".")[0]
    files = {
        one.__file__
        for name, one in sys.modules.items()
        if name.partition(".")[0] == package and getattr(one, "__file__", None)
    }
    return {file: Path(file).stat().st_mtime for file in files if file}


def _say(connection: socket.socket, answer: Forked) -> None:
    connection.sendall(msgspec.json.encode(answer) + b"\n")


def main(argv: Sequence[str]) -> None:
    """Run the server: `python -m mjax.launch.fork_server MODULE DESCRIPTOR`."""
    module, descriptor = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(module, socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    main(sys.argv[1:])

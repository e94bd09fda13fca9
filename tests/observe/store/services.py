"""PostgreSQL and NATS on this machine, to be killed at any moment.

Needs root and Debian's packages postgresql and nats-server. PostgreSQL refuses to run
as root: it runs as the user postgres, in a folder of its own.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Protocol

_INSTALL = "as root: apt-get install postgresql nats-server"
_UP_S = 60
_PATHS = os.pathsep.join(
    [
        os.environ.get("PATH", ""),
        "/usr/sbin",
        *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)),
    ]
)


class Service(Protocol):
    """A server that can be killed and started again with the same files."""

    address: str

    def start(self) -> None:
        """Start it, and wait until it answers."""
        ...

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        ...

    def end(self) -> None:
        """Kill it and remove its files."""
        ...


def program(name: str) -> str:
    """Return the path of a program.

    Raises:
      RuntimeError: it is not installed.
    """
    path = shutil.which(name, path=_PATHS)
    if path is None:
        raise RuntimeError(f"{name} is missing; {_INSTALL}")
    return path


class Postgres:
    """A PostgreSQL that listens on a socket in its folder."""

    def __init__(self) -> None:
        """Make a database `mjax` and start the server.

        Raises:
          RuntimeError: a program or root is missing, or it does not come up.
        """
        self._server = program("postgres")
        if os.geteuid() != 0:
            raise RuntimeError("this needs root, to run PostgreSQL as user postgres")
        self._folder = Path(tempfile.mkdtemp(prefix="mjax-postgres-"))
        shutil.chown(self._folder, "postgres", "postgres")
        self._data = self._folder / "data"
        self._run(program("initdb"), "-D", str(self._data), "-A", "trust", "--no-sync")
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"postgresql:///mjax?host={self._folder}&user=postgres"
        self.start()
        self.new_database("mjax")

    def new_database(self, name: str) -> str:
        """Make an empty database; return its address."""
        self._run(program("createdb"), "-h", str(self._folder), name)
        return f"postgresql:///{name}?host={self._folder}&user=postgres"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = ["-k", str(self._folder), "-c", "listen_addresses="]
        ready = [program("pg_isready"), "-q", "-h", str(self._folder)]
        until = time.monotonic() + _UP_S
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                # It refuses to start until all processes of the killed server have
                # ended.
                with (self._folder / "log").open("ab") as log:
                    self._process = subprocess.Popen(
                        [self._server, "-D", str(self._data), *options],
                        user="postgres",
                        group="postgres",
                        cwd=self._folder,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
            time.sleep(0.1)
            if subprocess.run(ready, timeout=10).returncode == 0:
                return
        raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:])

    def kill(self) -> None:
        """Kill the server with SIGKILL; its workers notice and end."""
        _kill(self._process)

    def end(self) -> None:
        """Kill the server and remove its files."""
        self.kill()
        time.sleep(0.2)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, *argv: str) -> None:
        done = subprocess.run(
            argv,
            user="postgres",
            group="postgres",
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{argv[0]} ended with {done.returncode}: {done.stderr}")


class Nats:
    """A NATS server with JetStream on a loopback port."""

    def __init__(self) -> None:
        """Start it.

        Raises:
          RuntimeError: the program is missing, or it does not come up.
        """
        self._server = program("nats-server")
        self._folder = Path(tempfile.mkdtemp(prefix="mjax-nats-"))
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]
        self.address = f"nats://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self._server, "-js", "-a", "127.0.0.1", "-p", str(self._port)),
                    *("-sd", str(self._folder / "store")),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(100):
            time.sleep(0.1)
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                    return
            except OSError:
                continue
        raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:])

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        _kill(self._process)

    def forget(self) -> None:
        """Remove the files of the killed server."""
        shutil.rmtree(self._folder / "store", ignore_errors=True)

    def end(self) -> None:
        """Kill the server and remove its files."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _kill(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None and process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()

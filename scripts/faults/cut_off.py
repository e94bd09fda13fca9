"""A launch with one proxy per host, which can cut the host off from the driver.

Input: flags of the trainer. Output: a launch like that of `launched`, but its driver
and agents are started separately, as on different machines or in containers.
"""

import contextlib
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from mjax.launch.client import write_private
from scripts.faults.launched import Launched

_CHUNK_BYTES = 65536
_POLL_S = 0.1
CONTAINER = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc")
"""Makes a command process 1 of its own namespace of processes. Needs root."""


class Proxy:
    """Forwards TCP bytes in both directions until it is cut."""

    def __init__(self, target: tuple[str, int]) -> None:
        """Listen on a free port.

        Args:
          target: host and port to which the proxy connects.
        """
        self._target, self._is_cut = target, False
        self._selector = selectors.DefaultSelector()
        self._others: dict[socket.socket, socket.socket] = {}
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._selector.register(self._server, selectors.EVENT_READ)
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        """Stop forwarding without closing any connection."""
        self._is_cut = True

    def heal(self) -> None:
        """Forward again; close connections that lost bytes."""
        if self._is_cut:
            for one in [*self._others]:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self._is_cut = False

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(_POLL_S):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self._server:
                    self._accept()
                elif one in self._others:
                    self._hand_on(one)

    def _accept(self) -> None:
        near, _ = self._server.accept()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        self._others |= {near: far, far: near}
        for one in (near, far):
            self._selector.register(one, selectors.EVENT_READ)

    def _hand_on(self, one: socket.socket) -> None:
        try:
            data = one.recv(_CHUNK_BYTES)
            if data and not self._is_cut:
                self._others[one].sendall(data)
        except OSError:
            data = b""
        if data:
            return
        for end in (one, self._others[one]):
            self._selector.unregister(end)
            del self._others[end]
            end.close()


class CutOff(Launched):
    """A launch with a proxy between the driver and the agent of each host."""

    def __init__(
        self,
        work_dir: Path,
        hosts: int,
        spares: int,
        flags: Sequence[str],
        *,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start the launch.

        Args:
          work_dir: work dir of the run.
          hosts: number of hosts that train.
          spares: number of spare hosts.
          flags: flags of the trainer.
          prefix: words before the command of each agent, such as `CONTAINER`.
        """
        self._prefix = [*prefix]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._bind = f"127.0.0.1:{port}"
        self._proxies = {
            f"host-{index}": Proxy(("127.0.0.1", port))
            for index in range(hosts + spares)
        }
        (work_dir / "launch").mkdir(parents=True)
        self._token = work_dir / "launch" / "token"
        write_private(self._token, "a token of this run alone")
        super().__init__(work_dir, hosts, spares, flags)
        for name in self._proxies:
            self.start_agent(name)

    def start(self) -> None:
        """Start the driver alone."""
        own = ["driver", "--bind", self._bind, "--token-file", str(self._token)]
        at = self._command.index("mjax.launch") + 1
        self.process = self.popen([*self._command[:at], *own, *self._command[at:]])

    def start_agent(self, name: str) -> None:
        """Start the agent of a host, or start it again."""
        pid_path = self.work_dir / "launch" / f"agent-{name}.pid"
        pid_path.write_text(str(self.one_more_agent(name).pid))

    def one_more_agent(self, name: str) -> subprocess.Popen[bytes]:
        """Start an agent with the name of a host, which may have one."""
        port = self._proxies[name].port
        words = ["--driver", f"127.0.0.1:{port}", "--host", name]
        words += ["--token-file", str(self._token), "--address", "127.0.0.1"]
        agent = [sys.executable, "-m", "mjax.launch", "agent", *words]
        return self.popen([*self._prefix, *agent])

    def cut_off(self, host: str) -> None:
        """Cut a host off from the driver; its ranks continue."""
        self._proxies[host].cut()

    def heal(self) -> None:
        """Undo all cuts."""
        for proxy in self._proxies.values():
            proxy.heal()

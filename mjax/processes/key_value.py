"""Key-value store of a run, kept by jax's coordination service.

It runs no collective and touches no device, so texts can be exchanged before the
devices are known, while they compute, and from background threads. A text may have any
length. In a single-process run a dictionary replaces the service.
"""

import threading
import time
from typing import Any

import jax

from mjax.processes import distributed

_SLICE_S = 1.0
_LEAST_S = 0.1  # allows at least one request and its answer


class KeyValueStore:
    """Texts that all processes of the run share under a name.

    A key is posted once. To change a text, post it under another key.
    """

    def __init__(self, name: str) -> None:
        """Open the store of a name, which must be the same in every process."""
        self._prefix = f"mjax/{name}/"
        self._client: Any = distributed.client() or _in_this_process

    def post(self, key: str, text: str) -> None:
        """Let every process read a text.

        Raises:
          RuntimeError: the key was already posted, or the coordinator is gone.
        """
        try:
            self._client.key_value_set(self._prefix + key, text)
        except jax.errors.JaxRuntimeError as error:
            raise _failed("post", self._prefix + key, error) from error

    def read(self, key: str, *, timeout_s: int | float) -> str:
        """Wait for a text and return it.

        Time in which this process stands still does not count: others may have posted
        meanwhile.

        Raises:
          TimeoutError: the text was not posted in time.
          RuntimeError: the coordinator is gone.
        """
        left_s = timeout_s
        while True:
            # Wait in short steps: Python runs signal handlers only between them.
            wait_s, began_s = max(min(left_s, _SLICE_S), _LEAST_S), time.monotonic()
            try:
                return self._client.blocking_key_value_get(
                    self._prefix + key, int(1e3 * wait_s)
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _failed("read", self._prefix + key, error) from error
            left_s -= min(time.monotonic() - began_s, 2 * wait_s)
            if left_s <= 0:
                raise TimeoutError(
                    f"{self._prefix}{key} was not posted within {timeout_s:.0f} s"
                )

    def names(self, key: str) -> list[str]:
        """List the names of the texts below `key/`, without waiting."""
        folder = f"{self._prefix}{key}/"
        found = self._client.key_value_dir_get(folder)
        return [name.removeprefix(folder) for name, _ in found]

    def remove(self, key: str) -> None:
        """Remove a text, or all texts below `key/`."""
        self._client.key_value_delete(self._prefix + key)


class _InThisProcess:
    """Replaces the used methods of jax's client in a single-process run."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, text: str) -> None:
        with self._changed:
            if key in self._texts:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key}")
            self._texts[key] = text
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._texts, timeout_ms / 1e3):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: key {key}")
            return self._texts[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        with self._changed:
            return [(k, v) for k, v in self._texts.items() if k.startswith(folder)]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for name in [*self._texts]:
                if name == key or name.startswith(f"{key}/"):
                    del self._texts[name]


_in_this_process = _InThisProcess()


def _failed(what: str, key: str, error: Exception) -> RuntimeError:
    reason = str(error).splitlines()[0]
    return RuntimeError(f"cannot {what} {key} at the coordinator: {reason}")

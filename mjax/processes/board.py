"""Short texts between the processes of a run, past the devices.

jax's coordination service holds them: no collective runs, so a thread in the background
may post and read while the devices work. In a run of one process a dictionary does.
"""

import threading
from typing import Any

import jax

_local: dict[str, str] = {}
_changed = threading.Condition()


class Board:
    """Texts under a name that all processes of the run share.

    A key is posted once. Whoever needs another word takes another key.
    """

    def __init__(self, name: str) -> None:
        """Take part in the board of that name, the same in every process."""
        self._prefix = f"mjax/{name}/"
        self._client = _client()

    def post(self, key: str, text: str) -> None:
        """Let every process read a text.

        Raises:
          RuntimeError: the key is taken, or the coordinator is gone.
        """
        if self._client is not None:
            self._client.key_value_set(self._prefix + key, text)
            return
        with _changed:
            if self._prefix + key in _local:
                raise RuntimeError(f"{self._prefix}{key} is posted already")
            _local[self._prefix + key] = text
            _changed.notify_all()

    def read(self, key: str, *, timeout_s: int | float) -> str:
        """Wait for a text and return it.

        Raises:
          TimeoutError: nobody posted it in time.
          RuntimeError: the coordinator is gone.
        """
        if self._client is not None:
            return self._read_remote(key, timeout_s)
        with _changed:
            if not _changed.wait_for(lambda: self._prefix + key in _local, timeout_s):
                raise TimeoutError(f"nothing at {key} after {timeout_s:.0f} s")
            return _local[self._prefix + key]

    def remove(self, key: str) -> None:
        """Take down a text, or all texts below `key/`."""
        if self._client is not None:
            self._client.key_value_delete(self._prefix + key)
            return
        with _changed:
            for taken in [*_local]:
                whole = self._prefix + key
                if taken == whole or taken.startswith(whole + "/"):
                    del _local[taken]

    def _read_remote(self, key: str, timeout_s: int | float) -> str:
        try:
            return self._client.blocking_key_value_get(
                self._prefix + key, int(timeout_s * 1e3)
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(f"nothing at {key} after {timeout_s:.0f} s") from None


def _client() -> Any:
    from jax._src.distributed import global_state  # the store has no public name

    return global_state.client

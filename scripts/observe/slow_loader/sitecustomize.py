"""Make the loader of a run sleep before each batch; this folder is put on PYTHONPATH.

Python imports this module when it starts. If SLOW_LOADER_S is set, reading the
sequences of a batch then takes that many seconds longer. See `fake_cases`.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_MODULE = "mjax.data.stream"
_SLEEP_S = float(os.environ.get("SLOW_LOADER_S", "0"))


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that changes the module of the token stream."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module with the other import hooks, then add the sleep to its
        reader."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_slowly(module: ModuleType) -> None:
            load(module)
            rows = module.Stream.rows

            def slow_rows(self: Any, *args: Any) -> Any:
                time.sleep(_SLEEP_S)
                return rows(self, *args)

            module.Stream.rows = slow_rows

        spec.loader.exec_module = load_slowly
        return spec


if _SLEEP_S:
    sys.meta_path.insert(0, _Finder())

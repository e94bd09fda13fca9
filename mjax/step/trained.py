"""Selection of the trained parameters: all, or only those of the adapters.

Trees of parameters are nested dicts. Frozen parameters have no gradient and no
optimizer state: the trees of gradients and optimizer state omit them.
"""

import dataclasses
from typing import Any

from mjax.layers.adapters import ADAPTERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """Select the trained part of a tree that has the structure of the parameters."""

    adapters_only: bool
    """Train only the parameters below a key `ADAPTERS`; freeze the rest."""

    def of(self, tree: Any) -> Any:
        """Return the trained part of a tree of parameters, or of one of its subtrees.

        Everything that is not a dict is a leaf. Dicts without a trained leaf are left
        out, so the result is an empty dict if no leaf is trained.
        """
        return _below(tree, ADAPTERS) if self.adapters_only else tree

    def put(self, part: Any, whole: Any) -> Any:
        """Return `whole` with its trained part replaced by `part`."""
        return _replaced(part, whole) if self.adapters_only else part

    def has(self, path: str) -> bool:
        """Return whether the parameter with this dotted path is trained."""
        return not self.adapters_only or ADAPTERS in path.split(".")


ALL_TRAINED = Trained(adapters_only=False)
"""Selection of a run without adapters: all parameters."""


def _below(tree: Any, key: str) -> Any:
    found = {}
    for name, child in tree.items():
        if name == key:
            found[name] = child
        elif isinstance(child, dict) and (part := _below(child, key)):
            found[name] = part
    return found


def _replaced(part: Any, whole: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {
        name: _replaced(part[name], child) if name in part else child
        for name, child in whole.items()
    }

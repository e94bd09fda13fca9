"""Save and restore the training state with Orbax."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CkptConfig:
    """When the state is saved, and how many saves are kept."""

    every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 3
    """Newest checkpoints kept."""

"""What the loop over steps needs of a program, of batches, and of a found corruption.

The loop receives objects of these protocols, so it does not depend on the step.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding


@runtime_checkable
class Corruption(Protocol):
    """The part of `mjax.step.replicas.Corruption` that the loop uses."""

    @property
    def processes(self) -> tuple[int, ...]:
        """Processes that differ from the majority; without one, all that disagree."""
        ...

    @property
    def is_sure(self) -> bool:
        """Whether a majority of the replicas agrees."""
        ...


@runtime_checkable
class Program(Protocol):
    """The part of `mjax.step.program.Program` that the loop uses."""

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of [B, T] arrays."""
        ...

    def to_saved(self, state: Any, /) -> Any:
        """Return the arrays of a checkpoint: leaves of the state, and new arrays."""
        ...

    def is_finite(self, state: Any, /) -> jax.Array:
        """Return whether all floats of the state are finite."""
        ...

    @property
    def find_corruption(self) -> Callable[[Any], Corruption | None] | None:
        """A function that compares the replicas of a state; None with one replica."""
        ...

    @property
    def gather_first(self) -> Callable[[Any], Any] | None:
        """A function of the parameters that returns the gathered weights `first` for
        `train_step`; None if the step gathers them itself."""
        ...

    def train_step(
        self, state: Any, batch: Any, /, *first: Any
    ) -> tuple[Any, Mapping[str, Any]]:
        """Return the state after a step, and its metrics; donates the state."""
        ...

    def eval_step(self, params: Any, batch: Any, /) -> Mapping[str, Any]:
        """Return `nll`, the sum over targets in nats, and `tokens`, their number."""
        ...

    def next_token_logits(self, params: Any, tokens: Any, length: Any, /) -> jax.Array:
        """Return [B, V] logits of the token after the first `length` tokens."""
        ...


@runtime_checkable
class Batches(Protocol):
    """The part of `mjax.data.loader.Loader` that the loop uses."""

    data_wait_s: float

    def __next__(self) -> Any:
        """Return the batch of the next step."""
        ...

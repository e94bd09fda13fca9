"""What keeps a model from being exported, and which flags would change that.

Enters: a model. Leaves: the family that differs from it in the fewest flags. Nothing
here is a list of what a family can do: a model is written in the form of each family,
read back, and compared.
"""

import dataclasses
from typing import Any

from mjax.hugging_face import families
from mjax.hugging_face.families import Family
from mjax.model.config import ModelConfig

_ROUNDS = 3
"""Chosen: a change can bring others with it, as positions bring their base."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearest:
    """The family that is nearest to a model that no family can express."""

    family: str
    lacks: tuple[str, ...]
    """Flags of the model that the family lacks."""
    instead: tuple[str, ...]
    """Flags that would make the model one of the family."""


def has_form(model: ModelConfig, seq_len: int) -> bool:
    """Say whether a model can be written in the form of some family."""
    return any(_can(family, model, seq_len) for family in families.FAMILIES)


def nearest(model: ModelConfig, seq_len: int) -> Nearest | None:
    """Find the family that takes the fewest flags; None if no flags lead to any.

    A family that would remove all positions is not near: cohere2 has none in layers
    that see all keys.

    Args:
      model: that no family can express.
      seq_len: longest sequence that it is meant for.
    """
    found = []
    for family in families.FAMILIES:
        changes = _changes(family, model, seq_len)
        if changes is not None and any(changes.get("rope", (True,))):
            found.append((len(changes), family.name, changes))
    if not found:
        return None
    _, name, changes = min(found, key=lambda entry: entry[0])
    own = families.essence(model)
    return Nearest(
        family=name,
        lacks=tuple(families.flag(field, own[field]) for field in changes),
        instead=tuple(families.flag(field, value) for field, value in changes.items()),
    )


def describe(model: ModelConfig, seq_len: int) -> str | None:
    """Say in one line that a model cannot be exported; None if it can."""
    if has_form(model, seq_len):
        return None
    found = nearest(model, seq_len)
    if found is None:
        return "export: this model has no Hugging Face form (docs/hugging_face.md)"
    return (
        f"export: this model has no Hugging Face form: {found.family} has no "
        f"{', '.join(found.lacks)}; {' '.join(found.instead)} would give it "
        f"{found.family}"
    )


def _can(family: Family, model: ModelConfig, seq_len: int) -> bool:
    try:
        families.hf_config(model, seq_len=seq_len, family=family.name)
    except ValueError:
        return False
    return True


def _changes(family: Family, model: ModelConfig, seq_len: int) -> dict[str, Any] | None:
    """Return the fields that make a model one of a family; None if none do."""
    changes: dict[str, Any] = {}
    changed = model
    for _ in range(_ROUNDS):
        try:
            back = families.model_config(_written(family, changed, seq_len))
            differing = families.differences(changed, back)
            changes |= {name: theirs for name, (_, theirs) in differing.items()}
            changed = dataclasses.replace(model, **changes)
        except ValueError:  # of a size, which is not to be changed
            return None
        if _can(family, changed, seq_len):
            return changes
    return None


def _written(family: Family, model: ModelConfig, seq_len: int) -> dict[str, Any]:
    """Write what a family can hold of a model; the rest is left out."""
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        **family.write(model, seq_len),
    }

"""Find the flags that prevent the export of a model, and their alternatives.

Input: a model. Output: the family that differs from it in the fewest flags. There is
no list of the abilities of families: a model is written as each family, read back, and
compared.
"""

import dataclasses
from typing import Any

from mjax.hugging_face import families
from mjax.hugging_face.families import Family
from mjax.model.config import ModelConfig

_ROUNDS = 3
"""Maximum number of rounds of changes. One change can require others; for example,
rotary positions require a base."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearest:
    """The nearest family of a model that no family can express."""

    family: str
    lacks: tuple[str, ...]
    """Flags of the model that the family lacks."""
    instead: tuple[str, ...]
    """Flags with which the family could express the model."""


def has_form(model: ModelConfig, seq_len: int) -> bool:
    """Return whether some family can express a model."""
    return any(_can(family, model, seq_len) for family in families.FAMILIES)


def nearest(model: ModelConfig, seq_len: int) -> Nearest | None:
    """Find the family with the fewest changed flags; None if there is none.

    A family that would remove all positions is excluded: cohere2 has none in layers
    with full attention.

    Args:
      model: a model that no family can express.
      seq_len: longest sequence of the model in tokens.
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
    """Return a line if a model cannot be exported; None if it can."""
    if has_form(model, seq_len):
        return None
    found = nearest(model, seq_len)
    if found is None:
        return "export: this model has no Hugging Face form (docs/hugging_face.md)"
    return (
        f"export: this model has no Hugging Face form: {found.family} lacks "
        f"{', '.join(found.lacks)}; {' '.join(found.instead)} would make it "
        f"{found.family}"
    )


def _can(family: Family, model: ModelConfig, seq_len: int) -> bool:
    try:
        families.hf_config(model, seq_len=seq_len, family=family.name)
    except ValueError:
        return False
    return True


def _changes(family: Family, model: ModelConfig, seq_len: int) -> dict[str, Any] | None:
    """Return the fields to change for a family; None if no change suffices."""
    changes: dict[str, Any] = {}
    changed = model
    for _ in range(_ROUNDS):
        try:
            back = families.model_config(_written(family, changed, seq_len))
            differing = families.differences(changed, back)
            changes |= {name: theirs for name, (_, theirs) in differing.items()}
            changed = dataclasses.replace(model, **changes)
        except ValueError:  # a size would have to change
            return None
        if _can(family, changed, seq_len):
            return changes
    return None


def _written(family: Family, model: ModelConfig, seq_len: int) -> dict[str, Any]:
    """Return the keys of a model in a family, without fields that it cannot express."""
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        **family.write(model, seq_len),
    }

"""config.json of a run: its format, and the fields that no longer exist.

Input: the object in config.json of any run, or in a checkpoint. Output: the same fields
as this version names them. Whoever reads the config of a run reads it through
`current`, so that runs of older versions resume, generate, export and are evaluated.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

FORMAT = 2
"""Format of the configs that this version writes. It grows when a field is removed or
renamed; a config without a format has format 1."""
KEY = "format"

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Renamed:
    """A field with a new name, or a new place."""

    field: str
    """Dotted name in older formats."""
    to: str
    """Dotted name now."""
    until: int
    """Newest format that has the field."""

    def refusal(self, value: Any) -> str | None:
        """Return why a file that people write may not have the field."""
        return f"{self.field} is called {self.to}; use that name"

    def apply(self, fields: Fields, value: Any) -> None:
        """Set the new field.

        Raises:
          ValueError: it is set to another value.
        """
        group = _group(fields, self.to)
        name = self.to.rpartition(".")[2]
        if group.get(name, value) != value:
            raise ValueError(
                f"{self.field} is {value!r} and {self.to}, its new name, is "
                f"{group[name]!r}; remove {self.field}"
            )
        group[name] = value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Removed:
    """A field whose meaning no field has."""

    field: str
    """Dotted name in older formats."""
    neutral: tuple[Any, ...]
    """Values that changed nothing."""
    remedy: str
    """What to do instead, for messages."""
    until: int
    """Newest format that has the field."""
    convert: Callable[[Fields, Any], None] | None = None
    """Sets other fields to the same effect; None: there are none."""

    def refusal(self, value: Any) -> str | None:
        """Return why the value is refused; None for a neutral value."""
        if value in self.neutral:
            return None
        return f"{self.field} {value!r} was removed; {self.remedy}"

    def apply(self, fields: Fields, value: Any) -> None:
        """Set other fields, or nothing for a neutral value.

        Raises:
          ValueError: the value changed something that no other field does.
        """
        refusal = self.refusal(value)
        if refusal is None:
            return
        if self.convert is None:
            raise ValueError(refusal)
        self.convert(fields, value)


def _track_tensorboard(fields: Fields, value: Any) -> None:
    trackers = [*fields.get("track", ())]
    if "tensorboard" not in trackers:
        fields["track"] = [*trackers, "tensorboard"]


CHANGES: tuple[Renamed | Removed, ...] = (
    Removed(
        field="log.tensorboard",
        neutral=(False,),
        remedy="use --track tensorboard",
        until=1,
        convert=_track_tensorboard,
    ),
)
"""Every field that a config of an older format may have and that no longer exists."""


def stamped(fields: Mapping[str, Any]) -> Fields:
    """Return the content of config.json for the fields of a config."""
    return {KEY: FORMAT, **fields}


def current(content: Mapping[str, Any]) -> Fields:
    """Return the fields of a config.json of any format, as this version names them.

    Fields that never existed are kept; who reads them refuses them.

    Args:
      content: the object in the file; it is not changed.
    Raises:
      ValueError: the format is newer than this version; a removed field had a meaning
        that no field has; or a renamed field has two values.
    """
    fields = _copied(content)
    number = checked_format(fields.pop(KEY, 1))
    for change in CHANGES:
        group = _group(fields, change.field)
        name = change.field.rpartition(".")[2]
        if number <= change.until and name in group:
            change.apply(fields, group.pop(name))
    return fields


def checked_format(number: Any) -> int:
    """Return a format that this version reads.

    Raises:
      ValueError: it is not a number, or newer than this version.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"its {KEY} must be a whole number from 1, got {number!r}")
    if number > FORMAT:
        raise ValueError(
            f"its {KEY} is {number}, and this version of mjax reads formats up to "
            f"{FORMAT}; use the version that wrote it, or a newer one"
        )
    return number


def _copied(values: Mapping[str, Any]) -> Fields:
    return {
        name: _copied(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def _group(fields: Fields, field: str) -> Fields:
    """Return the group of a field; an absent or damaged group is empty."""
    group: Any = fields
    for part in field.split(".")[:-1]:
        group = group.get(part)
        if not isinstance(group, dict):
            return {}
    return group

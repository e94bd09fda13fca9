"""JSON of others: what is returned, and one line for everything else."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from mjax import checked_json


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Whole:
    parts: Mapping[str, Part]
    rate: float
    mode: Literal["a", "b"] = "a"
    window: int | tuple[int | None, ...] | None = None
    boxes: list[tuple[tuple[int, int], ...]] = dataclasses.field(default_factory=list)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def test_a_value_is_returned_as_its_type_says():
    text = json.dumps(
        {
            "parts": {"x": {"name": "w", "shape": [2, 3]}},
            "rate": 1,
            "mode": "b",
            "window": [4, None],
            "boxes": [[[0, 1], [2, 3]], []],
            "facts": {"any": [1, {"thing": None}]},
        }
    )
    assert checked_json.read(text, Whole) == Whole(
        parts={"x": Part("w", (2, 3))},
        rate=1.0,
        mode="b",
        window=(4, None),
        boxes=[((0, 1), (2, 3)), ()],
        facts={"any": [1, {"thing": None}]},
    )


WHOLE = {"parts": {}, "rate": 0.5}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], r"the value must be an object, got \[\]"),
        (WHOLE | {"rate": "x"}, "rate must be a number, got 'x'"),
        (WHOLE | {"rate": True}, "rate must be a number, got True"),
        (WHOLE | {"rate": 10**400}, "rate must be a number that a float"),
        (WHOLE | {"mode": ["a"]}, r"mode must be one of 'a', 'b', got \['a"),
        (
            WHOLE | {"window": [1.5]},
            r"window\[0\] must be a whole number or null",
        ),
        (
            WHOLE | {"boxes": [[[0]]]},
            r"boxes\[0\]\[0\] must be a list of 2 items, got",
        ),
        (WHOLE | {"boxes": 7}, "boxes must be a list, got 7"),
        (WHOLE | {"parts": {"x": 1}}, r"parts\.x must be an object, got 1"),
        (WHOLE | {"parts": {"x": {}}}, r"parts\.x must be an object with name"),
        (WHOLE | {"more": 1}, "must be an object of parts, rate, mode"),
    ],
)
def test_another_type_is_refused_with_its_place(value, says):
    with pytest.raises(ValueError, match=says) as caught:
        checked_json.read(json.dumps(value), Whole)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON: Expecting value"),
        (b"\xff", "not JSON: 'utf-8' codec"),
        ("1" * 6000, "not JSON: Exceeds the limit"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 200 + "]" * 200, "nested too deeply"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested too deeply"),
    ],
)
def test_what_is_no_json_or_too_deep_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        checked_json.read(text, Any)


def test_depth_below_the_limit_is_taken():
    value = checked_json.read("[" * 60 + "]" * 60, list)
    assert len(json.dumps(value)) == 120

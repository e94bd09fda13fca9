"""Configs of older formats, with fields that were removed or renamed."""

import json
import re
from typing import Any

import pytest

from mjax.config.train import TrainConfig, from_json, run_differences, to_fields
from mjax.records import config_json
from mjax.records.config_json import FORMAT, Removed, Renamed, current, stamped


@pytest.fixture(autouse=True)
def changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(fields: dict[str, Any], value: Any) -> None:
        fields["seed"] = int(value)

    table = (
        Renamed(field="optim.rate", to="optim.lr", until=1),
        Removed(field="old", neutral=(None, 0), remedy="use --new", until=1),
        Removed(
            field="text_seed",
            neutral=("",),
            remedy="use --seed",
            until=1,
            convert=convert,
        ),
    )
    monkeypatch.setattr(config_json, "CHANGES", table)


def test_a_config_without_a_format_gets_the_names_of_today():
    old = {"optim": {"rate": 0.5}, "old": 0, "text_seed": "7", "steps": 3}
    assert current(old) == {"optim": {"lr": 0.5}, "steps": 3, "seed": 7}
    assert old["optim"] == {"rate": 0.5}  # not changed in place


def test_the_fields_of_this_version_are_kept():
    fields = to_fields(TrainConfig())
    assert current(stamped(fields)) == fields
    assert json.dumps(stamped(fields)).startswith(f'{{"format": {FORMAT}, ')


def test_a_config_of_this_format_must_not_have_older_fields():
    content = stamped({"optim": {"rate": 0.5}})
    assert current(content) == {"optim": {"rate": 0.5}}
    with pytest.raises(ValueError, match=r"unknown field optim\.rate"):
        from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"old": 5}, "old 5 was removed; use --new"),
        (
            {"optim": {"rate": 0.5, "lr": 0.25}},
            "optim.rate is 0.5 and optim.lr, its new name, is 0.25; remove optim.rate",
        ),
        (
            {"format": FORMAT + 1},
            f"its format is {FORMAT + 1}, and this version of mjax reads formats up to "
            f"{FORMAT}; use the version that wrote it, or a newer one",
        ),
        ({"format": "2"}, "its format must be a whole number from 1, got '2'"),
        ({"format": True}, "its format must be a whole number from 1, got True"),
    ],
)
def test_what_cannot_be_read_is_refused(content: dict[str, Any], message: str):
    for read in (current, lambda content: from_json(json.dumps(content))):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            read(content)


def test_a_run_of_an_older_format_is_compared_by_the_names_of_today():
    old = to_fields(TrainConfig())
    old["optim"]["rate"] = old["optim"].pop("lr")
    assert run_differences(old, TrainConfig()) == []
    old["optim"]["rate"] *= 2
    (difference,) = run_differences(old, TrainConfig())
    assert difference[0] == "optim.lr"


def test_a_damaged_group_is_left_to_the_reader():
    assert current({"optim": 3}) == {"optim": 3}
    with pytest.raises(ValueError, match="optim must be an object"):
        from_json('{"optim": 3}')

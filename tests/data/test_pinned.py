"""A run goes on with the commits of a hub with which it began."""

import dataclasses
import json

import pytest

from mjax.data.config import DataConfig
from mjax.data.hub_datasets import fetch
from mjax.data.pinned import has_names, pinned, remember
from tests.data.hub_server import COMMIT, NEXT

MAIN, KEPT = "hf://datasets/org/texts@main", f"hf://datasets/org/texts@{COMMIT}"


def recorded(config: DataConfig) -> dict:
    """Return what config.json has of a configuration."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def test_names_get_commits_and_keep_them_when_the_revision_moves(hub, caplog):
    config = DataConfig(path=("a.txt", MAIN, f"{MAIN}::train"))
    began = pinned(config, {})
    assert began.path == ("a.txt", KEPT, f"{KEPT}::train")
    hub.commit = NEXT
    assert pinned(config, recorded(began)) == began
    assert caplog.text.count(f"is commit {NEXT} now, but the run began with") == 2
    assert pinned(began, recorded(began)) == began
    assert caplog.text.count("now, but the run began with") == 2
    other = dataclasses.replace(config, path=(f"{MAIN}:default",))
    assert pinned(other, recorded(began)).path == (
        f"hf://datasets/org/texts@{NEXT}:default",
    )


def test_names_in_a_mixture_get_commits_too(hub):
    config = DataConfig(mixture=(f"0.7={MAIN},b.txt", "0.3=stdlib"))
    began = pinned(config, {})
    assert began.mixture == (f"0.7={KEPT},b.txt", "0.3=stdlib")
    hub.commit = NEXT
    assert pinned(config, recorded(began)) == began


@pytest.mark.parametrize("found", [{"path": 3, "mixture": [1], "tokenizer": None}, {}])
def test_a_record_of_another_form_records_nothing(hub, found):
    assert pinned(DataConfig(path=(MAIN,)), found).path == (KEPT,)


def test_what_arrived_by_its_commit_is_found_by_its_revision_without_the_hub(hub):
    config = DataConfig(path=(MAIN,))
    began = pinned(config, {})
    files = fetch(began.path[0])
    hub.status = 503
    with pytest.raises(ValueError, match="no complete copy"):
        fetch(MAIN)
    remember(config, began)
    assert fetch(MAIN) == files


def test_without_names_on_a_hub_nothing_is_asked(hub):
    config = DataConfig(path=("a.txt",), tokenizer="train:300")
    assert not has_names(config)
    assert pinned(config, {}) == config
    remember(config, config)
    assert hub.asked == []
    assert has_names(DataConfig(mixture=(f"1={MAIN}",)))
    assert has_names(DataConfig(tokenizer="hf://org/model@main"))

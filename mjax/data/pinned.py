"""Replace the revisions of data sets and tokenizers on a hub by commits.

All processes of a run, and a resumed run, must read the same commit, even if a branch
moves between their starts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mjax.data import hub_datasets, hub_tokenizers
from mjax.data.config import DataConfig


def has_names(config: DataConfig) -> bool:
    """Return whether a configuration names anything on a hub."""
    names = [config.tokenizer_name, *_paths(config.path, config.mixture)]
    return any(map(hub_tokenizers.is_on_hub, names))


def pinned(config: DataConfig, recorded: Mapping[str, Any]) -> DataConfig:
    """Return the configuration with a commit as the revision of each hub name.

    Args:
      config: data of the run.
      recorded: the group `data` of config.json for a resumed run, whose commits are
        kept, with a warning if a revision now refers to another commit; empty for a new
        run.
    Raises:
      ValueError: a name, a revision or a tokenizer does not exist, or the hub cannot be
        reached and this machine has no copy.
    """
    texts = {key: _texts(recorded.get(key)) for key in ("path", "mixture")}
    before = _paths(texts["path"], texts["mixture"])
    return dataclasses.replace(
        config,
        tokenizer=hub_tokenizers.pinned(
            config.tokenizer_name, str(recorded.get("tokenizer", ""))
        ),
        path=tuple(hub_datasets.pinned(path, before) for path in config.path),
        mixture=tuple(_pinned_part(part, before) for part in config.mixture),
    )


def remember(config: DataConfig, pinned: DataConfig) -> None:
    """Record the commit of each revision, for starts that cannot reach the hub.

    Args:
      config: configuration as given by the flags.
      pinned: the same configuration with commits, whose files are all on this machine.
    Raises:
      ValueError: the cache of the hub cannot be written.
    """
    names = _paths(config.path, config.mixture)
    for name, commit in zip(names, _paths(pinned.path, pinned.mixture), strict=True):
        hub_datasets.remember(name, commit)


def _texts(value: Any) -> Sequence[str]:
    """Return the strings in a JSON list; ignore values of other types."""
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _paths(path: Sequence[str], mixture: Sequence[str]) -> list[str]:
    parts = [part.partition("=")[2].split(",") for part in mixture]
    return [*path, *(name for names in parts for name in names)]


def _pinned_part(part: str, before: Sequence[str]) -> str:
    weight, equals, names = part.partition("=")
    commits = (hub_datasets.pinned(name, before) for name in names.split(","))
    return weight + equals + ",".join(commits)

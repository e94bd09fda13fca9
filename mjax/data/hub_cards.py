"""Choose the files of one configuration and split of a data set, using its card.

A card is the README.md of a data set. The YAML at its beginning may name
configurations, with the files of each split. Without this YAML, file names determine
the splits.

Source: https://huggingface.co/docs/hub/datasets-manual-configuration and
datasets-file-names-and-splits. Differs: if no split is given, only `train` is read, not
all splits; files of all supported formats are read, not only of the most common one.
"""

import difflib
import fnmatch
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mjax import checked_json
from mjax.data.compressed import plain_name

CARD = "README.md"
DEFAULT = "default"
SUFFIXES = frozenset({".txt", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"})
"""Suffixes of files that hold text or records."""
_TRAIN = "train"
_KEYWORDS = {
    _TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"data/([\w.-]+?)-\d{5}-of-\d{5}\b.*")
# Files about a data set, which belong to it only if its card names them.
_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|authors|"
    r"requirements|dataset_infos?|config)(?![a-z]).*\.(txt|json)",
    re.IGNORECASE,
)


class Chosen(NamedTuple):
    """The files of a data set to read."""

    files: list[str]
    config: str
    split: str
    left_out: list[str]
    """Files that are not read; those that a user might expect to be read come first."""


def choose(
    files: Iterable[str], card: str, config: str | None, split: str | None
) -> Chosen:
    """Choose the files of a configuration and a split.

    Args:
      files: files of the data set.
      card: text of the card; empty if there is none.
      config: name of the configuration; None means the only one, or the card's default.
      split: name of the split; None means train, or the only split.
    Raises:
      ValueError: the configuration or split does not exist, there are several and no
        name is given, or the split has no readable file.
    """
    files = sorted(files)
    configs = _configs(card)
    if configs:
        found = _chosen_config(configs, config)
        config, splits = str(found["config_name"]), _splits_of(found, files)
    elif config not in (None, "", DEFAULT):
        raise ValueError(f"its card names no configurations, so there is no {config!r}")
    else:
        config, splits = DEFAULT, _inferred([f for f in files if _is_data(f)])
    if not splits:
        raise ValueError(f"holds no file of text; {endings()}")
    split = _chosen_split(splits, split)
    matching = splits[split]
    kept = [file for file in matching if is_text(file)]
    if not kept:
        shown = ", ".join(matching[:3]) or "none"
        raise ValueError(
            f"split {split!r} of configuration {config!r} has no file that is read, "
            f"only {shown}; {endings()}"
        )
    unread = [file for file in matching if file not in kept]
    others = [file for file in files if file not in matching and file != CARD]
    others.sort(key=lambda file: not is_text(file))
    return Chosen(kept, config, split, unread + others)


def is_text(file: str) -> bool:
    """Return whether a file has a readable format."""
    plain = plain_name(file)
    suffix = pathlib.PurePosixPath(plain).suffix.lower()
    return suffix in SUFFIXES and not (suffix == ".parquet" and plain != file)


def endings() -> str:
    """Return a text on which files are read."""
    return (
        f"files that are read end in {', '.join(sorted(SUFFIXES))}, optionally "
        "followed by .gz or .zst (not after .parquet)"
    )


def _is_data(file: str) -> bool:
    return is_text(file) and not _ABOUT.fullmatch(pathlib.PurePosixPath(file).name)


# ------------------------------------------------------------------------------- cards


def _configs(card: str) -> Sequence[Mapping[str, Any]]:
    """Return the configurations that a card names.

    Raises:
      ValueError: the card's YAML cannot be read.
    """
    import yaml  # a dependency of huggingface_hub

    match = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\n---[ \t]*(\r?\n|$)", card, re.DOTALL)
    try:
        found = (yaml.safe_load(match[1]) if match else None) or {}
        configs = checked_json.check(found, dict[Any, Any]).get("configs") or []
        return [
            {DEFAULT: False, "config_name": DEFAULT, **config}
            for config in checked_json.check(configs, list[dict[str, Any]], "configs")
        ]
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"the YAML of its card cannot be read: {said}") from None


def _chosen_config(
    configs: Sequence[Mapping[str, Any]], name: str | None
) -> Mapping[str, Any]:
    names = [str(config["config_name"]) for config in configs]
    if name:
        if name in names:
            return configs[names.index(name)]
        raise ValueError(_unknown("configuration", name, names))
    for index, config in enumerate(configs):
        if config[DEFAULT] is True or len(configs) == 1:
            return configs[index]
    if DEFAULT in names:
        return configs[names.index(DEFAULT)]
    raise ValueError(
        f"has {len(names)} configurations ({_some(names)}); name one, as @REVISION:"
        f"{names[0]}"
    )


def _splits_of(config: Mapping[str, Any], files: list[str]) -> dict[str, list[str]]:
    """Return split -> files, for a configuration."""
    name = f"data_files of configuration {config['config_name']!r}"
    folder = str(config.get("data_dir") or "").strip("/")
    inside = [f for f in files if not folder or f.startswith(f"{folder}/")]
    entries = config.get("data_files")
    if entries is None:
        return _inferred([file for file in inside if _is_data(file)])
    if isinstance(entries, str) or (
        isinstance(entries, list) and all(isinstance(e, str) for e in entries)
    ):
        entries = [{"split": _TRAIN, "path": entries}]
    if isinstance(entries, dict):
        entries = [{"split": split, "path": path} for split, path in entries.items()]
    splits: dict[str, list[str]] = {}
    for entry in checked_json.check(entries, list[dict[str, Any]], name):
        paths = entry.get("path")
        paths = checked_json.check(
            [paths] if isinstance(paths, str) else paths, list[str], f"{name}: path"
        )
        if outside := [path for path in paths if "://" in path]:
            raise ValueError(
                f"{name} has {outside[0]}, which is not in the data set; download it "
                "and give the files as --data.path"
            )
        prefix = f"{folder}/" if folder else ""
        patterns = [f"{prefix}{path.removeprefix('./')}" for path in paths]
        found = [f for f in files if any(_matches(f, pattern) for pattern in patterns)]
        splits.setdefault(str(entry.get("split", _TRAIN)), []).extend(found)
    return {split: sorted({*found}) for split, found in splits.items()}


def _matches(file: str, pattern: str) -> bool:
    """Return whether a path matches a pattern; ** matches any number of folders."""
    pattern = f"{pattern}**" if pattern.endswith("/") else pattern
    return _parts_match(file.split("/"), pattern.split("/"))


def _parts_match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        rest = range(len(parts) + 1) if patterns[1:] else [len(parts)]
        return any(_parts_match(parts[i:], patterns[1:]) for i in rest)
    return (
        bool(parts)
        and fnmatch.fnmatchcase(parts[0], patterns[0])
        and _parts_match(parts[1:], patterns[1:])
    )


# ------------------------------------------------------------------------------ splits


def _inferred(files: Sequence[str]) -> dict[str, list[str]]:
    """Return split -> files, inferred from shard, file or folder names.

    The first kind of name in which a split occurs is used, and files whose name of this
    kind has no split are left out. If no name has a split, all files belong to train.
    """
    if not files:
        return {}
    by_shard: dict[str, list[str]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file):
            by_shard.setdefault(match[1], []).append(file)
    if by_shard:
        return by_shard
    for part in ("name", "parent"):
        found: dict[str, list[str]] = {}
        for file in files:
            words = _words(str(getattr(pathlib.PurePosixPath(file), part)))
            for split, keywords in _KEYWORDS.items():
                if words & {*keywords}:
                    found.setdefault(split, []).append(file)
                    break
        if found:
            return found
    return {_TRAIN: [*files]}


def _words(name: str) -> set[str]:
    return {*re.split(r"[^a-z]+", name.lower())}


def _chosen_split(splits: Mapping[str, list[str]], name: str | None) -> str:
    if name:
        if name in splits:
            return name
        raise ValueError(_unknown("split", name, [*splits]))
    if _TRAIN in splits or len(splits) == 1:
        return _TRAIN if _TRAIN in splits else next(iter(splits))
    raise ValueError(
        f"has no split {_TRAIN!r}, but {_some([*splits])}; name one, as "
        f"@REVISION::{next(iter(splits))}"
    )


def _unknown(what: str, name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"has no {what} {name!r}, but {_some(names)}{hint}"


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > 10 else ""
    return ", ".join(map(str, names[:10])) + more

"""Open the data of a run, with the same commits and versions in all processes.

Input: the config of the flags. Output: the config with the commits of names on a hub,
the data version of a resumed run and the vocabulary of the tokenizer, and the data.
Process 0 decides on commits and compares versions; every process opens its own data.
"""

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mjax.config.command_line import Command
from mjax.config.own_recipe import short_name
from mjax.config.train import TrainConfig, with_tokenizer
from mjax.data import end_tokens, pinned, remote, remote_hosts
from mjax.data.dataset import Dataset, open_dataset
from mjax.data.hub import NoCopyError
from mjax.data.hub_tokenizers import is_gone
from mjax.processes.agreement import DAY_S, Agreement
from mjax.run import base, work_dir

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """The data of a run, and what its base determines."""

    config: TrainConfig
    """The config, with commits, tokenizer and vocabulary."""
    dataset: Dataset
    end_ids: Sequence[int]
    """End tokens of the base or of the run's record."""
    lines: Sequence[str]
    """Messages about the base."""


def open_data(
    config: TrainConfig, command: Command, argv: Sequence[str], agreement: Agreement
) -> Opened:
    """Open the data.

    Args:
      config: config of the flags.
      command: command of this start.
      argv: the flags.
      agreement: agreement of all processes.
    """
    decided = json.loads(
        agreement.decide(lambda: json.dumps(_decided(config, command, argv)))
    )
    settled, kept = base.Settled(**decided["settled"]), decided["kept_tokenizer"]
    config = settled.applied(config)
    data = dataclasses.replace(
        config.data,
        version=decided["version"],
        tokenizer=decided["tokenizer"],
        path=tuple(decided["path"]),
        mixture=tuple(decided["mixture"]),
    )

    def act(files: remote.RemoteFiles | None) -> tuple[TrainConfig, Dataset]:
        own, copy = (
            dataclasses.replace(data, tokenizer=kept),
            "the run reads its own copy",
        )
        has_gone = kept is not None and is_gone(data.tokenizer_name)
        if has_gone:
            name = data.tokenizer_name
            _log.warning("--data.tokenizer %s is gone; %s in %s", name, copy, kept)
        try:
            first = own if has_gone else data
            dataset = open_dataset(first, seed=config.seed, remote=files)
        except NoCopyError as error:
            if error.kind != "model" or kept is None:
                raise
            _log.warning("%s; %s in %s", error, copy, kept)
            dataset = open_dataset(own, seed=config.seed, remote=files)
        if decided["is_new"]:
            pinned.remember(config.data, data)
        opened = dataclasses.replace(config, data=data)
        opened = with_tokenizer(opened, dataset.tokenizer.vocab_size)
        dataset.check_vocab_size(opened.model.vocab_size)
        return opened, dataset

    # The hosts serve files to each other until all have read what they need.
    with remote_hosts.shared(data, agreement) as files:
        agreement.decide(lambda: _check_versions(config, command, files))
        config, dataset = agreement.together(lambda: act(files), timeout_s=DAY_S)
    ids = [*settled.end_ids, *decided["kept_end_ids"]]
    return Opened(config=config, dataset=dataset, end_ids=ids, lines=settled.lines)


def _decided(
    config: TrainConfig, command: Command, argv: Sequence[str]
) -> dict[str, Any]:
    """Return JSON values that all processes share; called on process 0.

    They are what comes with the base, the data version, and the names in the data, with
    the revisions of hub names resolved to commits. A resumed run keeps those of its
    config.json.
    """
    path = _begun(config, command)
    recorded = None if path is None else work_dir.read_config(path)
    settled = base.settle(config, argv, recorded)
    data = settled.applied(config).data
    before = (recorded or {}).get("data", {})
    before = before if isinstance(before, dict) else {}
    version = data.version if path is None else before.get("version", 1)
    if version != data.version:
        _log.info("data version %s, with which the run in %s began", version, path)
    is_pinned = pinned.has_names(data)
    if is_pinned:
        data = pinned.pinned(data, before)
    kept = None if path is None else work_dir.kept_tokenizer(path)
    return {
        "settled": dataclasses.asdict(settled),
        "version": version,
        "is_new": is_pinned and path is None,
        "kept_tokenizer": None if kept is None else str(kept.absolute()),
        "kept_end_ids": () if kept is None else end_tokens.listed(kept),
        "tokenizer": data.tokenizer,
        "path": data.path,
        "mixture": data.mixture,
    }


def _begun(config: TrainConfig, command: Command) -> Path | None:
    """Return the work dir of a run that continues; None for a new run."""
    path = work_dir.choose(config.work_dir, short_name(command.recipe))
    is_new = command.restart_from_scratch or not work_dir.has_begun(path)
    return None if is_new else path


def _check_versions(
    config: TrainConfig, command: Command, files: remote.RemoteFiles | None
) -> str:
    """On process 0, refuse files in object stores that changed since the run began.

    Returns:
      an empty string, the value that all processes agree on.
    """
    path = _begun(config, command)
    if path is not None and files is not None:
        work_dir.check_data_files(path, files.versions)
    return ""

"""Open the data of a run, with the same commits and versions in all processes.

Input: the config of the flags. Output: the config with the commits of names on a hub,
the data version of a resumed run and the vocabulary of the tokenizer, and the data.
Process 0 decides on commits and compares versions; every process opens its own data.
"""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from mjax.config.command_line import Command
from mjax.config.own_recipe import short_name
from mjax.config.train import TrainConfig, with_tokenizer
from mjax.data import pinned, remote, remote_hosts
from mjax.data.dataset import Dataset, open_dataset
from mjax.data.hub import NoCopyError
from mjax.processes.agreement import DAY_S, Agreement
from mjax.run import work_dir

_log = logging.getLogger(__name__)


def open_data(
    config: TrainConfig, command: Command, agreement: Agreement
) -> tuple[TrainConfig, Dataset]:
    """Open the data.

    Args:
      config: config of the flags.
      command: command of this start.
      agreement: agreement of all processes.
    Returns:
      the config with the commits, the data version and the vocabulary of the tokenizer,
      and the data.
    """
    found = json.loads(agreement.decide(lambda: _recorded(config, command)))
    data, commits = dataclasses.replace(config.data, version=found["version"]), None
    if "commits" in found:
        commits = found["commits"]
        data = dataclasses.replace(
            data,
            tokenizer=commits["tokenizer"],
            path=tuple(commits["path"]),
            mixture=tuple(commits["mixture"]),
        )

    def act(files: remote.RemoteFiles | None) -> tuple[TrainConfig, Dataset]:
        try:
            dataset = open_dataset(data, seed=config.seed, remote=files)
        except NoCopyError as error:
            kept = None if commits is None else commits["kept_tokenizer"]
            if error.kind != "model" or kept is None:
                raise
            _log.warning("%s; the run reads its own copy in %s", error, kept)
            own = dataclasses.replace(data, tokenizer=kept)
            dataset = open_dataset(own, seed=config.seed, remote=files)
        if commits and commits["is_new"]:
            pinned.remember(config.data, data)
        opened = dataclasses.replace(config, data=data)
        opened = with_tokenizer(opened, dataset.tokenizer.vocab_size)
        dataset.check_vocab_size(opened.model.vocab_size)
        return opened, dataset

    # The hosts serve files to each other until all have read what they need.
    with remote_hosts.shared(data, agreement) as files:
        agreement.decide(lambda: _check_versions(config, command, files))
        return agreement.together(lambda: act(files), timeout_s=DAY_S)


def _recorded(config: TrainConfig, command: Command) -> str:
    """Return JSON of the data version, and of hub names with revisions as commits.

    Called on process 0. A resumed run keeps the version and commits of its config.json.
    """
    path, recorded = _begun(config, command), {}
    if path is not None:
        before = (work_dir.read_config(path) or {}).get("data", {})
        recorded = before if isinstance(before, dict) else {}
    version = config.data.version if path is None else recorded.get("version", 1)
    if version != config.data.version:
        _log.info("data version %s, with which the run in %s began", version, path)
    found: dict[str, Any] = {"version": version}
    if pinned.has_names(config.data):
        data = pinned.pinned(config.data, recorded)
        kept = None if path is None else work_dir.kept_tokenizer(path)
        found["commits"] = {
            "is_new": path is None,
            "kept_tokenizer": None if kept is None else str(kept.absolute()),
            "tokenizer": data.tokenizer,
            "path": data.path,
            "mixture": data.mixture,
        }
    return json.dumps(found)


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

"""Find the local files of a tokenizer by its name.

A name is a path, or `hf://NAME@REVISION` for the repository of a model on a Hugging
Face hub. Only the tokenizer's files are downloaded from there.
"""

import pathlib
import re
from collections.abc import Iterable

from mjax.data import hub
from mjax.data.hub import Repository, Snapshot
from mjax.data.names import BYTES, trained_vocab_size

SPEC = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FLAG = "--data.tokenizer"
_NAME = re.compile(r"hf://((?:[\w.-]+/)?[\w.-]+)@([\w./-]+)")
_OTHER_SPECS = (".model", ".txt", ".tiktoken", "vocab.json")


def is_on_hub(name: str) -> bool:
    """Return whether the name of a tokenizer refers to a hub."""
    return name.startswith(hub.PREFIX)


def is_gone(name: str) -> bool:
    """Return whether the name of a tokenizer is a path that does not exist."""
    is_path = name != BYTES and not is_on_hub(name) and trained_vocab_size(name) is None
    return is_path and not pathlib.Path(name).expanduser().exists()


def local(name: str, *, flag: str = FLAG) -> pathlib.Path:
    """Return the tokenizer.json of a tokenizer, downloaded if it is on a hub.

    Its tokenizer_config.json and chat_template.jinja, if any, are in the same folder.

    Args:
      name: a tokenizer.json, a folder that holds one, or hf://NAME@REVISION.
      flag: flag that names the tokenizer, for messages.
    Returns:
      The path of tokenizer.json; if the name is a local path, the file may not exist.
    Raises:
      ValueError: the name is not of the form hf://NAME@REVISION; the repository or the
        revision does not exist or holds no tokenizer.json; the hub cannot be reached
        and this machine has no complete copy; or a file of the copy was changed.
    """
    if is_on_hub(name):
        return hub.fetch(_repository(name, flag), _choose).folder / SPEC
    path = pathlib.Path(name).expanduser()
    return path / SPEC if path.is_dir() else path


def pinned(name: str, recorded: str | None = None, *, flag: str = FLAG) -> str:
    """Return the name of a tokenizer with its revision replaced by the commit.

    Args:
      name: name of any tokenizer; one that is not on a hub is returned unchanged.
      recorded: name with which a resumed run began. If it is a commit of the same
        repository, it is returned, with a warning if the revision now refers to another
        commit.
      flag: flag that names the tokenizer, for messages.
    Raises:
      ValueError: as in `local`.
    """
    if not is_on_hub(name):
        return name
    repository = _repository(name, flag)
    match = _NAME.fullmatch(recorded or "")
    before = Repository("model", match[1], match[2], flag) if match else repository
    if repository.is_fixed:
        return name
    if before.name != repository.name or not before.is_fixed:
        return hub.fetch(repository, _choose).origin
    return before.at(hub.kept_commit(repository, before.revision))


def _repository(name: str, flag: str = FLAG) -> Repository:
    match = _NAME.fullmatch(name)
    if match is None or name.startswith(f"{hub.PREFIX}datasets/"):
        raise ValueError(
            f"{flag} must be hf://NAME@REVISION (a branch, tag or commit of a "
            f"repository of a model), got {name!r}; for example hf://org/model@main"
        )
    return Repository("model", match[1], match[2], flag)


def _choose(snapshot: Snapshot) -> Iterable[str]:
    files = snapshot.files
    if SPEC not in files:
        others = [file for file in files if file.endswith(_OTHER_SPECS)]
        has = f", only {', '.join(sorted(others)[:5])}" if others else ""
        raise ValueError(
            f"{snapshot.repository} holds no {SPEC}{has}; convert it with "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) of "
            f"transformers, and give the folder as {snapshot.repository.flag}"
        )
    return [file for file in (SPEC, CONFIG, TEMPLATE) if file in files]

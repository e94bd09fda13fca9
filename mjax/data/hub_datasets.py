"""Download data sets from a Hugging Face hub by name.

A name is `hf://datasets/NAME@REVISION`, followed by `:CONFIGURATION` and `:SPLIT` if
the data set has several. The files of that split are read in the order of their names.
Other files of the data set are not downloaded.
"""

import logging
import re
from collections.abc import Sequence

from mjax.data import hub, hub_cards
from mjax.data.hub import Fetched, Repository, Snapshot
from mjax.data.hub_cards import CARD, Chosen
from mjax.data.listing import Listing, log_left_out

_NAME = re.compile(
    r"hf://datasets/(?P<name>(?:[\w.-]+/)?[\w.-]+)@(?P<revision>[\w./-]+)"
    r"(?::(?P<config>[^:]*)(?::(?P<split>[^:]+))?)?"
)
_FLAG = "--data.path"
_log = logging.getLogger(__name__)


def fetch(path: str) -> Fetched:
    """Download the files of one split of a data set.

    Args:
      path: hf://datasets/NAME@REVISION, hf://datasets/NAME@REVISION:CONFIGURATION or
        hf://datasets/NAME@REVISION:CONFIGURATION:SPLIT. The revision is a branch, a tag
        or a commit. An empty configuration means the default.
    Raises:
      ValueError: the name has another format; the data set, the revision, the
        configuration or the split does not exist or holds no text; or the hub cannot be
        reached and this machine does not have all files.
    """
    snapshot, chosen = _choose(path)
    fetched = snapshot.bring(chosen.files)
    snapshot.tell()
    snapshot.remember()
    _log_choice(path, chosen)
    return fetched._replace(origin=_origin(snapshot, chosen))


def list_files(path: str) -> Listing:
    """List the files of one split of a data set; download only its card.

    Args:
      path: as in `fetch`.
    Raises:
      ValueError: as in `fetch`.
    """
    snapshot, chosen = _choose(path)
    snapshot.tell()
    _log_choice(path, chosen)
    return Listing(
        base=snapshot.repository.at(snapshot.commit),
        origin=_origin(snapshot, chosen),
        files=snapshot.remote_files(chosen.files),
        read_range=snapshot.read_range,
        remember=snapshot.remember,
    )


def _choose(path: str) -> tuple[Snapshot, Chosen]:
    match = _parsed(path)
    snapshot = Snapshot(_repository(match))
    card = _card(snapshot)
    try:
        chosen = hub_cards.choose(snapshot.files, card, match["config"], match["split"])
    except ValueError as error:
        raise ValueError(f"{_FLAG} {path} {error}") from None
    return snapshot, chosen


def _origin(snapshot: Snapshot, chosen: Chosen) -> str:
    at_commit = snapshot.repository.at(snapshot.commit)
    return f"{at_commit}:{chosen.config}:{chosen.split}"


def pinned(path: str, recorded: Sequence[str]) -> str:
    """Return a path in which the data set's revision is replaced by its commit.

    Args:
      path: path of any corpus; one that is not on a hub is returned unchanged.
      recorded: paths with which a resumed run began. If one of them is the same split
        at a commit, that path is returned, with a warning if the revision now refers to
        another commit.
    Raises:
      ValueError: as in `fetch`.
    """
    if not path.startswith(hub.PREFIX):
        return path
    match = _parsed(path)
    repository, behind = _repository(match), path[match.end("revision") :]
    if repository.is_fixed:
        return path
    begin = f"{repository.at('')}"
    for before in recorded:
        commit = before.removeprefix(begin).removesuffix(behind)
        if before == begin + commit + behind and hub.COMMIT.fullmatch(commit):
            return begin + hub.kept_commit(repository, commit) + behind
    snapshot = Snapshot(repository)
    snapshot.tell()
    return begin + snapshot.commit + behind


def remember(path: str, at_commit: str) -> None:
    """Record the commit of a revision; call this when all files are downloaded.

    Args:
      path: path of any corpus, as given by a flag.
      at_commit: the result of `pinned` for this path.
    Raises:
      ValueError: the cache of the hub cannot be written.
    """
    if path != at_commit:
        repository = _repository(_parsed(path))
        hub.remember(repository, _parsed(at_commit)["revision"])


def _parsed(path: str) -> re.Match[str]:
    match = _NAME.fullmatch(path)
    if match is None:
        raise ValueError(
            f"{_FLAG} must be hf://datasets/NAME@REVISION (a branch, tag or commit), "
            f"optionally followed by :CONFIGURATION or :CONFIGURATION:SPLIT, got "
            f"{path!r}; for example hf://datasets/org/texts@main:en:train"
        )
    return match


def _repository(match: re.Match[str]) -> Repository:
    return Repository("dataset", match["name"], match["revision"], _FLAG)


def _card(snapshot: Snapshot) -> str:
    """Return the text of the card; "" if there is none."""
    if CARD not in snapshot.files:
        return ""
    folder = snapshot.bring([CARD]).folder
    return (folder / CARD).read_text("utf-8", "replace")


def _log_choice(path: str, chosen: Chosen) -> None:
    """Log once which files are read, and which are left out."""
    _log.info(
        "%s %s: %d files of configuration %s, split %s",
        *(_FLAG, path, len(chosen.files), chosen.config, chosen.split),
    )
    log_left_out(path, chosen.left_out)

"""Find the files of a corpus and read their documents.

A document is a name and its text, in pieces of about a megabyte, so a file of any size
is read in bounded memory. A text file is one document; a record of JSONL, CSV or
parquet is one document. All formats except parquet may be compressed.

An indexed dataset of Megatron-LM holds token ids instead of text: see `megatron`.

Files with the same bytes count as the same documents, whatever their paths: see
`contents`.
"""

import dataclasses
import difflib
import logging
import os
import pathlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from mjax.data import formats, hub, hub_datasets, megatron
from mjax.data.chat_records import without_nulls
from mjax.data.chats import Chat, ChatRules, read_chat
from mjax.data.compressed import SUFFIXES, ignore, plain_name
from mjax.data.files import File, RemotePath
from mjax.data.megatron import TokenIds
from mjax.data.names import STDLIB, SYNTHETIC
from mjax.data.remote import RemoteFiles
from mjax.data.tokenizers import Tokenizer

# Folders left out of the corpus `stdlib`: tests have odd encodings and broken code;
# pydoc_data is one generated file of 800 kB, which would be most of the held-out text.
_STDLIB_SKIP = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "pydoc_data"}
)
_STDLIB_SKIP_ENDS = ("tests", "_test")
_MAX_NAMED = 10  # left-out files to log per folder
_DATA_SET = re.compile(r"\w[\w-]*/\w[\w-]*(?:\.\d[\w-]*)*")
"""Pattern of ORG/NAME, a data set on a hub. A suffix must be a version, as in x-1.5;
with any other suffix the name is that of a file."""
Kind = Literal["text", "megatron"] | formats.RecordKind
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """One file of the corpus."""

    name: str
    """Path relative to the folder that was searched, so equal on every machine."""
    path: File
    kind: Kind
    digest: str = ""
    """SHA-256 of the content, which `contents.hash_sources` sets."""
    first_name: str = ""
    """Name of the first file of the run with this content. A hash of this name decides
    between training and held-out."""
    is_repeat: bool = False
    """Whether an earlier file of the corpus has this content."""
    origin: str = ""
    """Remote path, and the version that is read; empty for a local file."""

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """Local files to read: `path`, and for an indexed dataset its index."""
        if isinstance(self.path, RemotePath):
            return ()
        if self.kind == "megatron":
            return self.path, self.path.with_suffix(megatron.INDEX)
        return (self.path,)


@dataclasses.dataclass(frozen=True)
class Document:
    """One document; its pieces can be read once, before the next document is taken."""

    source: Source
    index: int | None
    """Line or row in the file; None if the document is the whole file."""
    pieces: Iterator[str | TokenIds]
    """Pieces of text, or of token ids for an indexed dataset."""
    chat: Chat | None = None
    """The chat, whose text is the only piece; None if the document is no chat."""
    source_index: int = 0
    """Index of the file in the corpus."""

    @property
    def name(self) -> str:
        """Name of the file, with the line or row if there is one."""
        return self._named(self.source.name)

    @property
    def first_name(self) -> str:
        """Name that decides between training and held-out; equal for all copies."""
        return self._named(self.source.first_name or self.source.name)

    @property
    def content(self) -> tuple[str, int | None]:
        """Key that is equal for equal documents of files with the same bytes."""
        return self.source.digest, self.index

    def _named(self, file: str) -> str:
        return file if self.index is None else f"{file}:{self.index}"


def find_sources(
    paths: tuple[str, ...], remote: RemoteFiles | None = None
) -> list[Source]:
    """List the files of a corpus, in an order that does not depend on the machine.

    Args:
      paths: `stdlib`, files and folders; folders are searched recursively, without
        hidden files and __pycache__.
      remote: remote files, which are read in blocks; None if there are none.
    Returns:
      The files in the order of `paths`; files of a folder are sorted by relative path.
    Raises:
      ValueError: a path does not exist, or holds no text.
    """
    return [source for path in paths for source in _find_under(path, remote)]


def check_text(sources: list[Source]) -> None:
    """Refuse files that hold token ids instead of text.

    Raises:
      ValueError: an indexed dataset is among the files.
    """
    for source in sources:
        if source.kind == "megatron":
            raise ValueError(
                f"--data.path: {source.path} is an indexed dataset of token ids, which "
                "only training reads; give files of text"
            )


def documents(
    sources: list[Source],
    text_field: str,
    chats: ChatRules | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    start: tuple[int, int] = (0, 0),
    on_read: Callable[[int], None] = ignore,
) -> Iterator[Document]:
    """Yield the documents of a corpus one after the other.

    Args:
      sources: result of `find_sources`.
      text_field: field or column of records that holds the text.
      chats: how chats are read and rendered; None if the files hold no chats.
      tokenizer: tokenizer that made the ids of indexed datasets; None if there are
        none.
      start: index in `sources` of the first file to read, and the first line or row to
        read in that file.
      on_read: called after each read from a file, with the number of bytes read.
    Raises:
      ValueError: a file cannot be read, is truncated, is not text, or lacks the field;
        the message names the file and the line.
    """
    for source_index, source in enumerate(sources):
        if source_index < start[0]:
            continue
        first = start[1] if source_index == start[0] else 0
        if chats is not None:
            found = _read_chats(source, chats, first, on_read)
        elif source.kind == "text":
            found = iter(
                [Document(source, None, formats.read_text(source.path, on_read))]
            )
        elif source.kind == "megatron":
            assert tokenizer is not None
            assert isinstance(source.path, pathlib.Path)
            read = megatron.read_documents(source.path, tokenizer, first, on_read)
            found = (Document(source, i, pieces) for i, pieces in read)
        else:
            texts = formats.read_texts(
                source.path, source.kind, text_field, first, on_read
            )
            found = (Document(source, i, formats.split_text(text)) for i, text in texts)
        for document in found:
            yield dataclasses.replace(document, source_index=source_index)


def _read_chats(
    source: Source, rules: ChatRules, first: int, on_read: Callable[[int], None]
) -> Iterator[Document]:
    if source.kind in ("text", "megatron"):
        raise ValueError(
            f"{source.path} is read as {source.kind}, but --data.format chat reads "
            "records; give files that end in .jsonl or .parquet"
        )
    found = formats.read_records(
        source.path, source.kind, first, on_read, is_unique=rules.version > 1
    )
    for index, record in found:
        where = f"{source.path}:{index}"
        if source.kind == "parquet" and rules.version > 1:
            record = without_nulls(record)
        chat = read_chat(
            record,
            rules.template,
            where,
            ignored=rules.ignored_fields,
            version=rules.version,
        )
        yield Document(source, index, iter([chat.text]), chat)


def _find_under(path: str, remote: RemoteFiles | None) -> list[Source]:
    if path == STDLIB:
        return _find_stdlib()
    if remote is not None and path in remote:
        return _sorted(
            [
                Source(name, file, _hub_kind(file), origin=remote.origin(path))
                for name, file in remote.files(path)
                if file.num_bytes > 0
            ]
        )
    if path.startswith(hub.PREFIX):
        fetched = hub_datasets.fetch(path)
        files = [(name, fetched.folder / name) for name in fetched.files]
        return _sorted(
            [
                Source(name, file, _hub_kind(file), origin=fetched.origin)
                for name, file in files
                if file.stat().st_size > 0
            ]
        )
    if path == SYNTHETIC:
        raise ValueError(
            "--data.path synthetic is generated and cannot be joined with files; "
            "give it alone"
        )
    root = _local_path(path)
    if not root.is_dir():
        if root.stat().st_size == 0:
            raise ValueError(f"--data.path {path!r} is empty; give a file with text")
        return _sorted([Source(root.name, root, _kind(root))])
    sources = [
        Source(file.relative_to(root).as_posix(), file, _kind(file))
        for file in _without_others(root, _walk(root, lambda f: f == "__pycache__"))
        if file.stat().st_size > 0 and not megatron.has_tokens(file)
    ]
    if not sources:
        raise ValueError(
            f"--data.path {path!r} is a folder that holds no file with text; "
            "give a folder with text, JSONL or parquet files"
        )
    return _sorted(sources)


def check_exists(paths: Iterable[str]) -> None:
    """Refuse files and folders that are absent, before slow imports.

    Args:
      paths: as for `find_sources`; only local paths are looked at.
    Raises:
      ValueError: a path does not exist or cannot be read.
    """
    for path in paths:
        if path not in (STDLIB, SYNTHETIC) and "://" not in path:
            _local_path(path)


def _local_path(path: str) -> pathlib.Path:
    """Return an existing file or folder.

    Raises:
      ValueError: the path does not exist or cannot be read.
    """
    root = pathlib.Path(path)
    try:
        root = root.expanduser()
        root.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"--data.path {path!r} does not exist{_suggest(root)}"
        ) from None
    except OSError as error:
        raise ValueError(
            f"--data.path {path!r} cannot be read: {error.strerror}"
        ) from None
    except RuntimeError as error:  # ~user for a user that does not exist
        raise ValueError(f"--data.path {path!r} cannot be read: {error}") from None
    return root


def _find_stdlib() -> list[Source]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = [
        Source(file.relative_to(root).as_posix(), file, "text")
        for file in _walk(root, _is_not_source)
        if file.suffix == ".py" and file.is_file() and file.stat().st_size > 0
    ]
    if not sources:
        raise ValueError(
            f"--data.path stdlib found no .py files in {root}: this Python was "
            "installed without its sources; give --data.path a file or folder of text"
        )
    return _sorted(sources)


def _is_not_source(folder: str) -> bool:
    return folder in _STDLIB_SKIP or folder.endswith(_STDLIB_SKIP_ENDS)


def _walk(root: pathlib.Path, skip: Callable[[str], bool]) -> Iterator[pathlib.Path]:
    """Yield every path under root that is not a folder, hidden or skipped.

    Links to folders, broken links and special files are yielded but not followed.
    """
    for folder, subfolders, files in os.walk(root, onerror=_refuse_folder):
        subfolders[:] = [s for s in subfolders if not (s.startswith(".") or skip(s))]
        links = [s for s in subfolders if os.path.islink(os.path.join(folder, s))]
        for name in [*links, *files]:
            if not name.startswith("."):
                yield pathlib.Path(folder, name)


def _without_others(
    root: pathlib.Path, found: Iterator[pathlib.Path]
) -> Iterator[pathlib.Path]:
    """Yield the files of a folder, and log the names of everything else in it."""
    others = []
    for path in found:
        if path.is_file():
            yield path
        elif path.is_dir():
            others.append(f"{path} (link to a folder; give it as a path of its own)")
        elif path.is_symlink():
            others.append(f"{path} (broken link to {os.readlink(path)})")
        else:
            others.append(f"{path} (neither a file nor a folder)")
    for other in sorted(others)[:_MAX_NAMED]:
        _log.warning("--data.path: left out of %s: %s", root, other)
    if len(others) > _MAX_NAMED:
        more = len(others) - _MAX_NAMED
        _log.warning("--data.path: left out of %s: %d more of these", root, more)


def _refuse_folder(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}")


def _sorted(sources: list[Source]) -> list[Source]:
    for source in sources:
        try:
            source.name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"--data.path: the name of {str(source.path)!r} is not UTF-8; rename "
                "the file, because held-out text is chosen by name"
            ) from None
    return sorted(sources, key=lambda source: source.name)


def _kind(path: File) -> Kind:
    plain = pathlib.Path(plain_name(path.name))
    match plain.suffix.lower():
        case ".jsonl" | ".ndjson":
            return "jsonl"
        case ".csv" | ".tsv":
            return "csv"
        case ".parquet" if plain.name != path.name:
            raise ValueError(
                f"--data.path {str(path)!r}: parquet is compressed inside, and is not "
                f"read from {' or '.join(SUFFIXES)}; decompress the file"
            )
        case ".parquet":
            return "parquet"
        case megatron.TOKENS | megatron.INDEX:
            assert isinstance(path, pathlib.Path)  # remote listings omit both suffixes
            megatron.check_pair(path)
            return "megatron"
        case _:
            return "text"


def _hub_kind(path: File) -> Kind:
    """Return the format of a file of a hub data set, where .json files hold records."""
    is_json = pathlib.Path(plain_name(path.name)).suffix.lower() == ".json"
    return "json" if is_json else _kind(path)


def _suggest(missing: pathlib.Path) -> str:
    """Return a hint that names the most similar existing path."""
    parent = missing.parent
    try:
        siblings = os.listdir(parent)
    except OSError:  # the parent may be missing, not a folder, or not readable
        siblings = []
    near = difflib.get_close_matches(str(missing), [STDLIB, SYNTHETIC], n=1)
    near += [
        str(parent / name)
        for name in difflib.get_close_matches(missing.name, siblings, n=1)
    ]
    if near:
        return f"; did you mean {near[0]!r}?"
    hint = "; give stdlib, synthetic, or existing files and folders"
    if _DATA_SET.fullmatch(str(missing)) and not parent.exists():
        hint += f"; for the data set of a hub, give {hub.PREFIX}datasets/{missing}@main"
    return hint

"""The cache of tokenized corpora; each is built once, atomically.

A corpus is tokenized into a temporary folder that is renamed when it is complete, so a
killed process leaves nothing that looks finished. The next process continues in that
folder, and writes the same files as an uninterrupted process. If several processes of a
machine need the same corpus, one builds it and the others wait at a file lock. Files
that are found damaged when they are opened are built again. Damage that is found later,
when a token is first read, raises `cache_files.DamagedFileError`.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int64

import mjax
from mjax.data import cache_files, left_over, prepare, unfinished
from mjax.data.cache_files import DamagedFileError, MappedTokens
from mjax.data.chats import ChatRules
from mjax.data.contents import check_unchanged
from mjax.data.corpora import Source, documents
from mjax.data.documents import index_documents
from mjax.data.file_hashes import TouchedError, Unchanged
from mjax.data.files import UnreadableError, size_of
from mjax.data.names import trained_vocab_size
from mjax.data.prepare import SIDES, Place, Side, SideCounts, Survey
from mjax.data.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from mjax.data.unfinished import Meter, Unfinished

# Part of every key; increase it if the files or their meaning change.
_FORMAT = 2
_MANIFEST = "manifest.json"
_TRAINED = "tokenizer.json"
_BPE_CHARS = 1 << 27  # BPE is trained on about this many characters, 30 s on 2 cores
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """A tokenized corpus, mapped into memory."""

    folder: pathlib.Path
    tokenizer: Tokenizer
    survey: Survey
    counts: dict[Side, SideCounts]
    tokens: dict[Side, MappedTokens]
    """Side (training or held-out) -> token ids. The tokenizer's eos_id follows every
    document except a chat."""
    flags: dict[Side, MappedTokens]
    """For chats: side -> flags of each token, see `chat_samples`."""

    @property
    def trained_tokenizer(self) -> pathlib.Path | None:
        """Path of the tokenizer.json trained on this corpus; None if there is none."""
        path = self.folder / _TRAINED
        return path if path.exists() else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that determines the content of token files, except the text itself."""

    text_field: str
    tokenizer: str
    eos_token: str | None
    held_out_fraction: float
    chats: ChatRules | None = None
    """How chats are read and rendered; None if the data are not chats."""


def open_token_files(
    sources: list[Source], settings: Settings, cache_dir: pathlib.Path
) -> TokenFiles:
    """Open the token files of a corpus; tokenize it first if they do not exist.

    Args:
      sources: result of `contents.hash_sources`; the hashes identify the token files.
      settings: everything else that determines the tokens.
      cache_dir: folder of all token files.
    Raises:
      ValueError: the text or the tokenizer is bad, files change while they are read, or
        the cache folder cannot be read or written.
    """
    tokenizer = None
    if trained_vocab_size(settings.tokenizer) is None:
        tokenizer = load_tokenizer(settings.tokenizer, eos_token=settings.eos_token)
    folder = cache_dir / _key(sources, settings, tokenizer)
    with contextlib.suppress(DamagedFileError):
        return _open(folder, tokenizer)
    _build_once(folder, sources, settings, tokenizer)
    return _open(folder, tokenizer)


def open_documents(
    files: TokenFiles, side: Side, seq_len: int, *, has_starts: bool
) -> Int64[np.ndarray, "2 _"]:
    """Map the index of a side's documents; build it first if it is missing.

    Returns:
      The array that `documents.index_documents` returns.
    Raises:
      ValueError: the cache folder cannot be read or written.
      DamagedFileError: the tokens of this side are damaged.
    """
    name = f"{side}.documents-{seq_len}{'-started' if has_starts else ''}.npy"
    path = files.folder / name
    with contextlib.suppress(DamagedFileError):
        return _map_index(path)
    with cache_files.locked(files.folder):
        if path.exists():
            try:
                return _map_index(path)  # another process was first
            except DamagedFileError as error:
                _log.warning("%s; it is built again", error)
        index = index_documents(
            files.tokens[side], files.tokenizer.eos_id, seq_len, has_starts=has_starts
        )
        with (
            cache_files.written_whole(path) as temporary,
            temporary.open("wb") as file,
        ):
            np.save(file, index)
            file.write(_checksum(index))
    return _map_index(path)


def _map_index(path: pathlib.Path) -> Int64[np.ndarray, "2 _"]:
    """Map an index of documents.

    Raises:
      DamagedFileError: the index is missing, truncated or altered.
      ValueError: the index cannot be read.
    """
    try:
        index = np.load(path, mmap_mode="r").view(np.ndarray)
        with path.open("rb") as file:
            file.seek(-len(_checksum(index)), os.SEEK_END)
            if file.read() == _checksum(index):
                return index
    except (ValueError, EOFError, FileNotFoundError):
        pass  # missing, truncated, or not an array any more
    except OSError as error:
        raise cache_files.unreadable(path, error) from None
    raise DamagedFileError(f"{path} is missing or damaged")


def _checksum(array: np.ndarray) -> bytes:
    return zlib.crc32(memoryview(array).cast("B")).to_bytes(4, "little")


def name_of_chat(
    sources: list[Source], settings: Settings, found: Survey, side: Side, number: int
) -> str:
    """Return file and line of chat `number` of a side; this reads the corpus."""

    def read():
        return documents(sources, settings.text_field, settings.chats)

    pieces = prepare.split_pieces(read, found, settings.held_out_fraction)
    names = (p.name for p in pieces if p.side == side and p.chat is not None)
    return next(itertools.islice(names, number, None))


def _key(sources: list[Source], settings: Settings, tokenizer: Tokenizer | None) -> str:
    """Return a hash of everything that determines the content of the files."""
    files = [(s.name, s.kind, s.digest, s.first_name) for s in sources]
    tokenizer_id = tokenizer.digest if tokenizer else settings.tokenizer
    parts = [
        _FORMAT,
        files,
        tokenizer_id,
        settings.text_field,
        settings.held_out_fraction,
    ]
    if settings.chats is not None:
        parts.append(["chats", *settings.chats.key])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _build_once(
    folder: pathlib.Path,
    sources: list[Source],
    settings: Settings,
    tokenizer: Tokenizer | None,
) -> None:
    """Build the folder unless another process does so first.

    Raises:
      ValueError: see `open_token_files`.
    """
    prefix = cache_files.temporary_prefix(folder.name)
    with cache_files.locked(folder):
        if _is_whole(folder, tokenizer):  # another process was first
            return
        temporary = folder.with_name(f"{prefix}unfinished")
        try:
            for abandoned in folder.parent.glob(f"{prefix}*"):
                if abandoned != temporary:
                    shutil.rmtree(abandoned)
            if folder.exists():  # damaged
                shutil.rmtree(folder.rename(folder.with_name(f"{prefix}damaged")))
            temporary.mkdir(exist_ok=True)
            _tell_of_others(folder.parent, temporary)
            noted = Unchanged([path for source in sources for path in source.files])

            def check() -> None:
                noted.check(lambda: check_unchanged(sources, folder.parent))

            try:
                check_unchanged(sources, folder.parent)
                _build(temporary, sources, settings, tokenizer, check)
                check()
                check_unchanged(sources, folder.parent)
            except (cache_files.UnwritableError, UnreadableError, TouchedError):
                raise  # the next process continues from the saved progress
            except ValueError:  # bad input: no progress worth keeping
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            _rename(temporary, folder)
        except OSError as error:
            raise cache_files.unwritable(folder.parent, error) from None


def _tell_of_others(cache_dir: pathlib.Path, own: pathlib.Path) -> None:
    """Log the folders of other unfinished preparations."""
    others = [left for left in left_over.find(cache_dir) if left.folder != own]
    if others:
        _log.info(
            "%d unfinished preparations take %.2f GB in %s; python -m mjax.data "
            "unfinished lists and removes them",
            *(len(others), sum(left.num_bytes for left in others) / 1e9, cache_dir),
        )


def _build(
    folder: pathlib.Path,
    sources: list[Source],
    settings: Settings,
    tokenizer: Tokenizer | None,
    check: Callable[[], None],
) -> None:
    """Write the token files into a folder, continuing from the files in it.

    Args:
      folder: folder of the files.
      sources: files to tokenize.
      settings: everything else that determines the tokens.
      tokenizer: the tokenizer; None trains one.
      check: function that raises if a source was changed since it was hashed.
    """
    progress = Unfinished(folder, _versions(), check)
    found = _survey(sources, settings, tokenizer, progress)
    _log.info(
        "tokenizing %d documents, %d bytes, with %s into %s",
        *(found.num_documents, found.num_bytes, settings.tokenizer, folder.parent),
    )

    def pieces(place: Place | None) -> Iterator[prepare.Piece]:
        # In a split by position, the side of a piece depends on all text before it.
        start = place[:2] if place and found.split == "document" else (0, 0)

        def read():
            return documents(
                *(sources, settings.text_field, settings.chats),
                tokenizer=tokenizer,
                start=start,
            )

        fraction = settings.held_out_fraction
        from_start = prepare.split_pieces(read, found, fraction)
        return prepare.pieces_behind(place, from_start)

    if tokenizer is None:
        tokenizer = _trained(folder, settings, pieces(None), progress)
    is_chats = settings.chats is not None
    write = prepare.write_chats if is_chats else prepare.write_streams
    meter = Meter("tokenizing", found.num_bytes, num_bytes=_num_done(progress))
    streams = write(pieces, tokenizer, folder, progress, meter)
    paths = [prepare.stream_path(folder, side) for side in SIDES]
    paths += [prepare.flags_path(folder, side) for side in SIDES] if is_chats else []
    small = [cache_files.checksums_path(path) for path in paths]
    small += [folder / _TRAINED] if (folder / _TRAINED).exists() else []
    manifest = {
        "tokenizer": tokenizer.digest,
        "survey": dataclasses.asdict(found),
        "origins": sorted({source.origin for source in sources if source.origin}),
        "streams": {side: dataclasses.asdict(streams[side]) for side in SIDES},
        "crc32": {path.name: zlib.crc32(path.read_bytes()) for path in small},
    }
    cache_files.write_json(folder / _MANIFEST, manifest)


def _versions() -> list[str]:
    """Return the versions of the software that determines tokens."""
    try:
        library = importlib.metadata.version("tokenizers")
    except importlib.metadata.PackageNotFoundError:
        library = "absent"
    return [f"format {_FORMAT}", f"mjax {mjax.__version__}", f"tokenizers {library}"]


def _survey(
    sources: list[Source],
    settings: Settings,
    tokenizer: Tokenizer | None,
    progress: Unfinished,
) -> Survey:
    """Return the survey of the corpus, which an earlier process may have made."""
    if (known := progress.get("survey")) is not None:
        return Survey(**known)
    meter = Meter("reading", sum(size_of(source.path) for source in sources))

    def read():
        return documents(
            *(sources, settings.text_field, settings.chats),
            tokenizer=tokenizer,
            on_read=meter.add,
        )

    found = prepare.survey(
        read, settings.held_out_fraction, lambda: meter.add(0, documents=1)
    )
    progress.put("survey", dataclasses.asdict(found))
    return found


def _num_done(progress: Unfinished) -> int:
    """Return the bytes of text that an earlier process has tokenized."""
    state = progress.get("streams")
    return sum(state["counts"][s]["num_bytes"] for s in SIDES) if state else 0


def _trained(
    folder: pathlib.Path,
    settings: Settings,
    pieces: Iterator[prepare.Piece],
    progress: Unfinished,
) -> Tokenizer:
    """Return a tokenizer trained on the corpus, perhaps by an earlier process."""
    path = folder / _TRAINED
    known = progress.get("trained")
    if known is None or not path.exists() or _sha256(path) != known:
        texts = _first_chars(p.text for p in pieces if p.side == "train" and p.text)
        num_tokens = trained_vocab_size(settings.tokenizer)
        assert num_tokens is not None
        _log.info("training a tokenizer of %d tokens", num_tokens)
        trained = train_bpe(texts, num_tokens)
        with cache_files.written_whole(path) as temporary:
            temporary.write_text(trained, "utf-8")
        if known not in (None, _sha256(path)):
            progress.put("streams", None)  # streams have ids of the old tokenizer
        progress.put("trained", _sha256(path))
    return _load_trained(folder)


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _first_chars(texts: Iterator[str]) -> Iterator[str]:
    """Yield the start of the corpus only: BPE training holds its words in memory."""
    num_chars = 0
    for text in texts:
        yield text
        num_chars += len(text)
        if num_chars >= _BPE_CHARS:
            return


def _rename(temporary: pathlib.Path, folder: pathlib.Path) -> None:
    """Rename the complete folder to its final name, atomically."""
    for file in temporary.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # a power cut cannot keep the name without data
    unfinished.remove(temporary)  # last, so a kill while files are synced loses little
    temporary.chmod(0o755)  # whatever the umask: a shared cache must be readable
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        # Another machine has renamed first; its files are the same.


def _load_trained(folder: pathlib.Path) -> Tokenizer:
    path = folder / _TRAINED
    return HuggingFaceTokenizer(path.read_text("utf-8"), origin=str(path))


def _is_whole(folder: pathlib.Path, tokenizer: Tokenizer | None) -> bool:
    if not folder.exists():
        return False
    try:
        _open(folder, tokenizer)
    except DamagedFileError as error:
        _log.warning("%s; %s is built again", error, folder)
        return False
    return True


def _open(folder: pathlib.Path, tokenizer: Tokenizer | None) -> TokenFiles:
    """Open a folder of token files.

    Raises:
      DamagedFileError: a file is missing, has another size, or is a small file that was
        altered.
      ValueError: a file cannot be read.
    """
    manifest = cache_files.read_json(folder / _MANIFEST)
    small = {name: cache_files.read_bytes(folder / name) for name in manifest["crc32"]}
    for name, content in small.items():
        if zlib.crc32(content) != manifest["crc32"][name]:
            raise DamagedFileError(f"{folder / name} does not match its checksum")
    tokenizer = tokenizer or _load_trained(folder)
    counts: dict[Side, SideCounts] = {}
    tokens: dict[Side, MappedTokens] = {}
    flags: dict[Side, MappedTokens] = {}
    for side in SIDES:
        counts[side] = SideCounts(**manifest["streams"][side])
        path = prepare.stream_path(folder, side)
        tokens[side] = MappedTokens(
            path,
            prepare.token_dtype(tokenizer),
            counts[side].num_tokens,
            small[cache_files.checksums_path(path).name],
        )
        path = prepare.flags_path(folder, side)
        checksums = small.get(cache_files.checksums_path(path).name)
        if checksums is not None:
            dtype, num_tokens = np.dtype(np.uint8), counts[side].num_tokens
            flags[side] = MappedTokens(path, dtype, num_tokens, checksums)
    found = Survey(**manifest["survey"])
    return TokenFiles(folder, tokenizer, found, counts, tokens, flags)

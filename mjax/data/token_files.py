"""The cache of tokenized corpora: built once, whole or not at all.

A corpus is tokenized into a temporary folder that is renamed when it is complete, so a
process that is killed leaves nothing that looks finished. Processes of one machine that
want the same corpus wait for the first one by a file lock, which the operating system
releases when its holder dies.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64, UInt

from mjax.data import prepare
from mjax.data.corpora import Source, documents
from mjax.data.documents import index_documents
from mjax.data.prepare import SIDES, Side, SideCounts, Survey
from mjax.data.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
    trained_vocab_size,
)

# Part of every key: raise it when the files or their meaning change.
_FORMAT = 1
_MANIFEST = "manifest.json"
_TRAINED = "tokenizer.json"
_BPE_CHARS = 1 << 27  # BPE is trained on about this much text, 30 s on 2 cores
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """A tokenized corpus, mapped into memory."""

    folder: pathlib.Path
    tokenizer: Tokenizer
    survey: Survey
    counts: dict[Side, SideCounts]
    tokens: dict[Side, UInt[np.ndarray, "_"]]
    """The ids of each side; every document is followed by the tokenizer's eos_id."""

    @property
    def trained_tokenizer(self) -> pathlib.Path | None:
        """The tokenizer.json that was trained on this corpus, if one was."""
        path = self.folder / _TRAINED
        return path if path.exists() else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the content of token files, except the text itself."""

    text_field: str
    tokenizer: str
    eos_token: str | None
    held_out_fraction: float


def open_token_files(
    sources: list[Source], settings: Settings, cache_dir: pathlib.Path
) -> TokenFiles:
    """Open the token files of a corpus, tokenizing it if this was not done before.

    The cache is found by the names, sizes and times of change of the source files, not
    by their content, so that a large corpus is not read again at every start.

    Raises:
      ValueError: bad text, a bad tokenizer, or a cache folder that cannot be written.
      RuntimeError: the cached files are damaged.
    """
    tokenizer = None
    if trained_vocab_size(settings.tokenizer) is None:
        tokenizer = load_tokenizer(settings.tokenizer, eos_token=settings.eos_token)
    folder = cache_dir / _key(sources, settings, tokenizer)
    if not folder.exists():
        _build_once(folder, sources, settings, tokenizer)
    return _open(folder, tokenizer or _load_trained(folder))


def open_documents(
    files: TokenFiles, side: Side, seq_len: int
) -> Int64[np.ndarray, "2 _"]:
    """Map the documents of a side, finding them first if this was not done before.

    Returns:
      what `documents.index_documents` returns.
    Raises:
      ValueError: the cache folder cannot be written.
      RuntimeError: the cached file is damaged.
    """
    path = files.folder / f"{side}.documents-{seq_len}.npy"
    tokens = files.tokens[side]
    if not path.exists():
        with _locked(files.folder):
            if not path.exists():
                index = index_documents(tokens, files.tokenizer.eos_id, seq_len)
                _write_whole(path, index)
    try:
        index = np.load(path, mmap_mode="r").view(np.ndarray)
    except (ValueError, EOFError):  # cut off
        index = None
    if index is None or index[0, -1] != len(tokens):
        raise RuntimeError(f"{path} is damaged; delete it, it will be built again")
    return index


def default_cache_dir() -> pathlib.Path:
    """Return the folder of token files in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "mjax" / "tokens"


def _key(sources: list[Source], settings: Settings, tokenizer: Tokenizer | None) -> str:
    """Hash what decides the content of the files."""
    stats = [(source.name, source.kind, source.path.stat()) for source in sources]
    files = [(name, kind, s.st_size, s.st_mtime_ns) for name, kind, s in stats]
    tokenizer_id = tokenizer.digest if tokenizer else settings.tokenizer
    parts = [
        _FORMAT,
        files,
        tokenizer_id,
        settings.text_field,
        settings.held_out_fraction,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _build_once(
    folder: pathlib.Path,
    sources: list[Source],
    settings: Settings,
    tokenizer: Tokenizer | None,
) -> None:
    """Build the folder unless another process does so first."""
    # The name of the host keeps machines that share the cache out of each other's way
    # even where locks do not reach across the file system.
    prefix = f"{folder.name}.tmp-{socket.gethostname()}-"
    with _locked(folder):
        if folder.exists():
            return
        for abandoned in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(abandoned)
        temporary = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            _build(temporary, sources, settings, tokenizer)
            _rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Keep other processes of the machine from writing a folder of token files."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_suffix(".lock").open("w")
    except OSError as error:
        raise _unwritable(folder.parent, error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _unwritable(folder: pathlib.Path, error: OSError) -> ValueError:
    return ValueError(
        f"data.cache_dir: {folder} cannot be written ({error.strerror}); set "
        "--data.cache-dir to a folder that can"
    )


def _write_whole(path: pathlib.Path, array: np.ndarray) -> None:
    """Write an array, under the lock: the file is there whole or not at all."""
    suffix = f".tmp-{socket.gethostname()}"  # see _build_once
    temporary = path.with_suffix(f"{suffix}-{os.getpid()}")
    try:
        for abandoned in path.parent.glob(f"*{suffix}-*"):
            abandoned.unlink()
        with temporary.open("wb") as file:
            np.save(file, array)
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def _build(
    folder: pathlib.Path,
    sources: list[Source],
    settings: Settings,
    tokenizer: Tokenizer | None,
) -> None:
    def read():
        return documents(sources, settings.text_field)

    fraction = settings.held_out_fraction
    found = prepare.survey(read, fraction)
    _log.info(
        "tokenizing %d documents, %d bytes, with %s into %s",
        *(found.num_documents, found.num_bytes, settings.tokenizer, folder.parent),
    )
    if tokenizer is None:
        pieces = prepare.split_pieces(read, found, fraction)
        texts = _first_chars(p.text for p in pieces if p.side == "train" and p.text)
        num_tokens = trained_vocab_size(settings.tokenizer)
        assert num_tokens is not None
        trained = train_bpe(texts, num_tokens)
        (folder / _TRAINED).write_text(trained, "utf-8")
        tokenizer = _load_trained(folder)
    pieces = prepare.split_pieces(read, found, fraction)
    streams = prepare.write_streams(pieces, tokenizer, folder)
    manifest = {
        "tokenizer": tokenizer.digest,
        "survey": dataclasses.asdict(found),
        "streams": {side: dataclasses.asdict(streams[side]) for side in SIDES},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")


def _first_chars(texts: Iterator[str]) -> Iterator[str]:
    """Pass on the beginning of the corpus: BPE training holds its words in memory."""
    num_chars = 0
    for text in texts:
        yield text
        num_chars += len(text)
        if num_chars >= _BPE_CHARS:
            return


def _rename(temporary: pathlib.Path, folder: pathlib.Path) -> None:
    """Let the complete folder appear under its name, in one step."""
    for file in temporary.iterdir():
        with file.open("rb") as opened:
            os.fsync(
                opened.fileno()
            )  # else a power cut may keep the name, not the data
    temporary.chmod(0o755)  # mkdtemp makes it private; a shared cache must be readable
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        # Another machine was first; its files are the same.


def _load_trained(folder: pathlib.Path) -> Tokenizer:
    path = folder / _TRAINED
    return HuggingFaceTokenizer(path.read_text("utf-8"), origin=str(path))


def _open(folder: pathlib.Path, tokenizer: Tokenizer) -> TokenFiles:
    manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
    dtype = prepare.token_dtype(tokenizer)
    counts: dict[Side, SideCounts] = {}
    tokens: dict[Side, np.ndarray] = {}
    for side in SIDES:
        counts[side] = SideCounts(**manifest["streams"][side])
        path = prepare.stream_path(folder, side)
        expected = counts[side].num_tokens * dtype.itemsize
        size = path.stat().st_size
        if size != expected:
            raise RuntimeError(
                f"{path} has {size} bytes instead of {expected}; delete {folder}, it "
                "will be built again"
            )
        # A plain array over the map: slices of np.memmap itself are slow. An empty file
        # cannot be mapped.
        mapped = np.memmap(path, dtype, "r") if expected else np.zeros(0, dtype)
        tokens[side] = mapped.view(np.ndarray)
    return TokenFiles(folder, tokenizer, Survey(**manifest["survey"]), counts, tokens)

"""Inspect and copy saved steps: `python -m mjax.ckpt
ls|verify|show|fetch|reshard|export PATH`.

In the first four commands PATH may be the --ckpt.remote of a run, an s3:// or gs://
URL. The commands work on any machine, whatever mesh wrote the steps, and use only the
CPU. Exit codes: 0 success; 1 a checkpoint is damaged or belongs to another run; 2 bad
input, or the store refuses access.
"""

if __name__ == "__main__":
    from mjax.cli import environment

    environment.check()  # before the imports of packages

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from etils import epath

from mjax.ckpt import places
from mjax.ckpt.boxes import size_of
from mjax.ckpt.manifest import DamagedError, Leaf, Manifest, Piece
from mjax.ckpt.remote import listing
from mjax.ckpt.store import Store, located
from mjax.cli import flags, interrupts
from mjax.cli.exit_codes import BAD_INPUT, DONE, FAILED
from mjax.stores import address

Path = Annotated[str, flags.Positional("PATH")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ls:
    """List the steps; only their manifests are read."""

    path: Path
    """Work dir, folder of checkpoints, one checkpoint, or a URL."""
    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """Read everything and compare it with the checksums; change nothing."""

    path: Path
    """Work dir, folder of checkpoints, one checkpoint, or a URL."""
    step: int | None = None
    """Step to read; None: all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
    """Print what a step holds, and the run that wrote it."""

    path: Path
    """Work dir, folder of checkpoints, one checkpoint, or a URL."""
    step: int | None = None
    """Step to show; None: the newest."""
    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch:
    """Copy a step from an object store into a folder of checkpoints."""

    path: Annotated[str, flags.Positional("URL")]
    """The --ckpt.remote of a run, or one step below it."""
    out: Annotated[str, flags.Positional("OUT")]
    """Folder of checkpoints to copy to; no run may write there."""
    step: int | None = None
    """Step to copy; None: the newest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reshard:
    """Copy a step to another folder of checkpoints and verify its checksums."""

    path: Path
    """Work dir, folder of checkpoints, or one checkpoint."""
    out: Annotated[str, flags.Positional("OUT")]
    """Folder of checkpoints to copy to; no run may write there."""
    step: int | None = None
    """Step to copy; None: the newest."""
    max_piece_mib: int | None = None
    """Largest piece of an array in the copy, in MiB; None: pieces as saved."""

    def __post_init__(self) -> None:
        if self.max_piece_mib is not None and self.max_piece_mib < 1:
            raise ValueError(
                f"--max-piece-mib must be at least 1, got {self.max_piece_mib}"
            )


Family = Literal[
    "gptj",
    "cohere2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt2",
]
"""Names of the families of `hugging_face.families`, a module imported only by
export."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a step as a folder that `transformers` loads, with tokenizer and card."""

    path: Path
    """Work dir, folder of checkpoints, or one checkpoint."""
    out: Annotated[str, flags.Positional("OUT")]
    """Folder to write; it must be absent or empty."""
    step: int | None = None
    """Step to write; None: the newest."""
    family: Family | None = None
    """Architecture; None: the first that can express the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored tensors."""
    tokenizer: str | None = None
    """Folder, tokenizer.json or hf://NAME@REVISION; None: the run's tokenizer."""
    without_tokenizer: bool = False
    """Write no tokenizer files."""
    eos_token_id: int | None = None
    """Token that ends a document; None: the tokenizer's."""
    positions: int | None = None
    """Maximum sequence length (n_positions, max_position_embeddings), the size of the
    tables of GPT-J and GPT-2 in transformers; None: the run's --data.seq-len."""

    def __post_init__(self) -> None:
        if self.positions is not None and self.positions < 1:
            raise ValueError(f"--positions must be at least 1, got {self.positions}")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        has_out = words[:1] in (["fetch"], ["reshard"], ["export"])
        flags.check_one_run(words[1:], num_after=int(has_out))
        command: Ls | Verify | Show | Fetch | Reshard | Export = flags.read(
            Ls | Verify | Show | Fetch | Reshard | Export,
            words,
            prog="python -m mjax.ckpt",
        )
        match command:
            case Ls():
                return _ls(command)
            case Verify():
                return _verify(command)
            case Show():
                return _show(command)
            case Fetch():
                return _fetch(command)
            case Reshard():
                return _reshard(command)
            case Export():
                return _export(command)
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:  # an unfinished copy has been deleted
        return interrupts.told()
    except DamagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


# --- ls


def _ls(command: Ls) -> int:
    if address.is_url(command.path):
        remote, only = listing.find(command.path)
        found, where = listing.entries(remote, only), command.path
    else:
        place = places.find(command.path)
        found = places.entries(place)
        where = place.store.directory if place.only is None else place.only
    if command.json:
        steps = [dataclasses.asdict(entry) for entry in found]
        print(json.dumps({"path": str(where), "steps": steps}, indent=1))
    else:
        _print([str(where), *_table(_HEADER, [_row(entry) for entry in found])])
    if any(entry.state in ("damaged", "foreign") for entry in found):
        return FAILED
    return BAD_INPUT if any(entry.state == "unreadable" for entry in found) else DONE


_HEADER = ("step", "MB", "leaves", "written", "eval_loss", "state")


def _row(entry: places.Entry | listing.RemoteEntry) -> tuple[str, ...]:
    return (
        entry.name,
        _or_dash(entry.num_bytes, lambda n: f"{n / 1e6:.1f}"),
        _or_dash(entry.num_leaves, str),
        _or_dash(entry.written_at, _time),
        _or_dash(entry.eval_loss, lambda loss: f"{loss:.4f}"),
        entry.state if entry.reason is None else f"{entry.state}: {entry.reason}",
    )


def _or_dash(value: Any, shown: Any) -> str:
    return "-" if value is None else shown(value)


def _time(seconds: float) -> str:
    return time.strftime("%F %T", time.localtime(seconds))


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield lines of aligned columns: the last to the left, all others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    for line in lines:
        cells = [cell.rjust(n) for cell, n in zip(line, widths, strict=False)]
        yield "  ".join([*cells, line[-1]])


# --- verify


def _verify(command: Verify) -> int:
    if address.is_url(command.path):
        return _verify_remote(command)
    place = places.find(command.path)
    if place.only is not None or command.step is not None:
        folders = [places.choose(place, command.step)]
    else:
        folders = [place.store.path(step) for step in places.committed(place)]
    code = DONE
    for folder in folders:
        line, found = _verified(place, folder)
        print(f"{folder.name}: {line}", flush=True)
        code = FAILED if FAILED in (code, found) else max(code, found)
    return code


def _verify_remote(command: Verify) -> int:
    """Verify the steps of an object store; return the exit code."""
    remote, only = listing.find(command.path)
    code = DONE
    for step in listing.choose(remote, only, command.step):
        try:
            line = f"OK, {listing.verify(remote, step) / 1e6:.1f} MB read"
        except DamagedError as error:
            line, code = f"damaged: {error}", FAILED
        print(f"{step}: {line}", flush=True)
    return code


def _verified(place: places.Place, folder: epath.Path) -> tuple[str, int]:
    """Verify one step; return a line about it and the exit code."""
    # Imported here because it imports jax, which `ls` and `show` do not need.
    import jax

    from mjax.ckpt.saved_step import SavedStep

    # Orbax asks for the number of processes, which starts a backend of jax.
    jax.config.update("jax_platforms", "cpu")
    try:
        saved = SavedStep(folder)
        if why := places.why_foreign(place, saved.manifest):
            return f"not of this run: {why}", FAILED
        saved.verify()
    except DamagedError as error:
        return f"damaged: {error}", FAILED
    except (ValueError, OSError, RuntimeError) as error:
        return f"not verified: {error}", BAD_INPUT
    return f"OK, {saved.bytes_read / 1e6:.1f} MB read", DONE


# --- show


def _show(command: Show) -> int:
    if address.is_url(command.path):
        return _show_remote(command)
    if places.is_hugging_face(command.path):
        return _show_hugging_face(command)
    folder = places.choose(places.find(command.path), command.step)
    manifest, pieces = places.describe(folder)
    if command.json:
        print(json.dumps(_as_json(folder, manifest, pieces), indent=1))
    else:
        _print(_described(folder, manifest, pieces))
    return DONE


def _show_remote(command: Show) -> int:
    """Print commit and manifest of a step of an object store; return the exit code."""
    remote, only = listing.find(command.path)
    step = listing.choose(remote, only, command.step)[-1]
    commit, manifest = listing.described(remote, step)
    if command.json:
        body = {
            "path": command.path,
            "step": step,
            "save_id": commit.save_id,
            "written_at": remote.written_at(step),
            "num_bytes": manifest.num_bytes,
            "num_processes": len(manifest.part_sums),
            "files": {n: dataclasses.asdict(f) for n, f in commit.files.items()},
            "leaves": {n: dataclasses.asdict(x) for n, x in manifest.leaves.items()},
            "run": manifest.run,
        }
        print(json.dumps(body, indent=1))
        return DONE
    print(f"path {remote.url}/{step}")
    print(f"step {step}")
    print(f"written {_time(remote.written_at(step))}")
    print(f"bytes {manifest.num_bytes} in {len(manifest.leaves)} leaves")
    for name, value in _flat(manifest.run):
        print(f"{name} {value if isinstance(value, str) else json.dumps(value)}")
    rows = [(f"{f.num_bytes / 1e6:.3f}", n) for n, f in commit.files.items()]
    _print(_table(("MB", "file"), rows))
    return DONE


def _show_hugging_face(command: Show) -> int:
    """Print the flags of a model in Hugging Face format; return the exit code."""
    from mjax.hugging_face.params import flags_of  # as in `_verified`

    if command.json or command.step is not None:
        raise ValueError(
            f"{command.path} is a model in the form of Hugging Face, not a checkpoint; "
            "leave out --json and --step"
        )
    print(flags_of(command.path))
    return DONE


def _as_json(
    folder: epath.Path, manifest: Manifest, pieces: dict[str, list[Piece]]
) -> dict[str, Any]:
    leaves = {
        name: {
            "shape": leaf.shape,
            "dtype": leaf.dtype,
            "num_bytes": leaf.num_bytes,
            "num_pieces": len(pieces[name]),
        }
        for name, leaf in manifest.leaves.items()
    }
    return {
        "path": str(folder),
        "step": manifest.step,
        "save_id": manifest.save_id,
        "written_at": places.written_at(folder),
        "num_bytes": manifest.num_bytes,
        "num_processes": len(manifest.part_sums),
        "leaves": leaves,
        "run": manifest.run,
    }


def _described(
    folder: epath.Path, manifest: Manifest, pieces: dict[str, list[Piece]]
) -> Iterator[str]:
    """Yield lines that describe a step: `name value`, then a table of its leaves."""
    num_processes = len(manifest.part_sums)
    yield f"path {folder}"
    yield f"step {manifest.step}"
    yield f"written {_time(places.written_at(folder))}, by {num_processes} process(es)"
    yield f"bytes {manifest.num_bytes} in {len(manifest.leaves)} leaves"
    for name, value in _flat(manifest.run):
        yield f"{name} {value if isinstance(value, str) else json.dumps(value)}"
    rows = [
        (
            str(len(pieces[name])),
            f"{_largest(leaf, pieces[name]) / 2**20:.3f}",
            f"{leaf.num_bytes / 1e6:.3f}",
            f"{name} {leaf}",
        )
        for name, leaf in manifest.leaves.items()
    ]
    yield from _table(("pieces", "largest MiB", "MB", "leaf"), rows)


def _largest(leaf: Leaf, pieces: Iterable[Piece]) -> float:
    """Return the bytes of the largest piece of a leaf."""
    share = max(size_of(piece.box) for piece in pieces) / max(1, leaf.size)
    return share * leaf.num_bytes


def _flat(facts: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for each value of nested mappings."""
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# --- fetch


def _fetch(command: Fetch) -> int:
    remote, only = listing.find(command.path)
    step = listing.choose(remote, only, command.step)[-1]
    store = Store(_checked_out(command.out))
    with interrupts.raised():
        commit = listing.fetch(remote, step, store)
    print(
        f"{remote.url}/{step} -> {store.path(step)}: {commit.num_bytes / 1e6:.1f} MB "
        f"in {len(commit.files)} files, all SHA-256 as uploaded"
    )
    return DONE


# --- reshard


def _reshard(command: Reshard) -> int:
    import jax  # imported here, and set to the CPU, as in `_verified`

    from mjax.ckpt.reshard import copy_step
    from mjax.ckpt.saved_step import SavedStep

    jax.config.update("jax_platforms", "cpu")
    folder = places.choose(places.find(command.path), command.step)
    store = Store(_checked_out(command.out))
    max_mib = command.max_piece_mib
    source = SavedStep(folder)
    with interrupts.raised():
        copied = copy_step(source, store, None if max_mib is None else max_mib << 20)
    pieces = sum(len(some) for some in source.pieces.values())
    written = sum(
        len(some) for some in SavedStep(store.path(copied.step)).pieces.values()
    )
    print(
        f"{folder} -> {store.path(copied.step)}: {copied.num_bytes / 1e6:.1f} MB, "
        f"{pieces} pieces -> {written}, all checksums as saved"
    )
    return DONE


def _export(command: Export) -> int:
    from mjax.run.export import Wanted, export  # as in `_verified`

    wanted = Wanted(
        family=command.family,
        dtype=command.dtype,
        tokenizer=command.tokenizer,
        without_tokenizer=command.without_tokenizer,
        eos_token_id=command.eos_token_id,
        positions=command.positions,
    )
    with interrupts.raised():
        print(export(command.path, command.out, command.step, wanted))
    return DONE


def _checked_out(path: str) -> epath.Path:
    """Create the output folder; refuse one that is not a folder of checkpoints."""
    folder = located(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
    except OSError as error:
        raise ValueError(
            f"OUT must be a folder that can be created and read, got {path}: "
            f"{error.strerror}; give another OUT"
        ) from error
    if is_used:
        place = places.find(path)
        if place.journal is not None or place.only is not None:
            raise ValueError(
                f"{path} is a work dir or one checkpoint; give a folder of checkpoints "
                f"to copy to, like {place.store.directory}"
            )
    return folder


if __name__ == "__main__":
    sys.exit(main())

"""Keep copies of the state on each host, between the checkpoints.

Every few steps each process writes all boxes (parts of arrays) that its devices hold to
a folder on its host (a RAM disk, an SSD), without waiting for other processes:

    <local dir>/<run>/process-<i>/<step>/

A copy is lost with its host. At a restart on the same mesh, each process reads its own
copy if it is intact. Otherwise it receives each box over the devices' network from a
process with a replica of that box. If no process has some box, the copies of this step
are useless, and older copies or the newest step of the store are used instead.
"""

import contextlib
import dataclasses
import json
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from mjax.ckpt import arrays, manifest
from mjax.ckpt.boxes import Box
from mjax.ckpt.host_copy import HostCopy, HostMemory, why_unusable
from mjax.ckpt.manifest import DamagedError, Leaf, Piece, Pieces
from mjax.ckpt.saved_step import read_checked
from mjax.ckpt.store import delete, kind_of, read_file, write_file

_FILE = "copy.json"
_KEPT = 2
_UNFINISHED = ".unfinished-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """A copy that a process has, as its copy.json describes it."""

    step: int
    copy_id: str
    """Id of the copy, equal on all processes that copied this state together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Copy:
    """Content of copy.json."""

    copy_id: str
    sum: int
    """CRC32C of the text of the list of pieces."""
    leaves: Mapping[str, Leaf]
    run: Mapping[str, Any]
    step: int | None = None
    """This field and those below are None in copies of older versions of mjax."""
    run_name: str | None = None


class LocalCopies:
    """The copies of one process."""

    def __init__(self, directory: str, run: str, rank: int) -> None:
        """Store the path of the folder; nothing is created.

        Args:
          directory: folder on this host, --ckpt.local-dir.
          run: name of the run; copies of other runs are ignored.
          rank: rank of this process.
        """
        self._folder = epath.Path(directory).absolute() / run / f"process-{rank}"
        self._rank, self._run_name = rank, run
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None

    @property
    def is_writing(self) -> bool:
        """Whether the previous copy is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        offer: Offer,
        make_leaves: Callable[[], Mapping[str, Any]],
        run: Mapping[str, Any],
    ) -> None:
        """Copy the state off the devices, and write it in the background.

        Errors are printed to stderr and the run continues: it does not need every copy.

        Args:
          offer: step and id of the copy.
          make_leaves: returns global arrays by leaf name.
          run: JSON metadata to store with the state.
        """
        self.wait()
        self._guarded("copy the state to", lambda: self._start(offer, make_leaves, run))

    def _start(
        self,
        offer: Offer,
        make_leaves: Callable[[], Mapping[str, Any]],
        run: Mapping[str, Any],
    ) -> None:
        copy = self._memory.copy(make_leaves(), replicas=True)
        self._thread = threading.Thread(
            target=self._guarded,
            args=("copy the state to", lambda: self._write(offer, copy, run)),
            name="mjax-ckpt-local",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last copy is written, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def discard_after(self, step: int) -> None:
        """Delete copies that are newer than the step from which the run resumes.

        Otherwise a later restart would prefer them to the copies of this start. Copies
        that cannot be deleted are reported on stderr.
        """
        self._guarded("delete abandoned copies in", lambda: self._discard_after(step))

    def offers(self) -> list[Offer]:
        """List the copies whose copy.json is readable and intact, oldest first."""
        found = []
        for step in self._steps():
            with contextlib.suppress(ValueError, RuntimeError):
                body = self._manifest(step)
                found.append(Offer(step=step, copy_id=body.copy_id))
        return found

    def read(
        self, offer: Offer, wanted: Mapping[str, tuple[Leaf, list[Box]]]
    ) -> tuple[dict[str, dict[Box, np.ndarray]], Mapping[str, Any]]:
        """Read boxes of a copy, and compare each with its checksum.

        Args:
          offer: step and id of the copy, from any process that took part in it.
          wanted: leaf name -> its description and the boxes to read.
        Returns:
          Leaf name -> box -> values, and the JSON metadata that was saved with them.
        Raises:
          DamagedError: a box is missing, or differs from its checksum.
          RuntimeError: the file system does not answer.
        """
        body = self._manifest(offer.step)
        folder = self._folder / str(offer.step)
        name = manifest.part_name(self._rank)
        text = read_file(folder / name)
        if body.copy_id != offer.copy_id or manifest.text_crc32c(text) != body.sum:
            raise DamagedError(f"{folder}: not the copy that was offered")
        pieces = manifest.read_pieces(text, str(folder / name))
        reader = arrays.Reader(folder, part=self._rank)
        out: dict[str, dict[Box, np.ndarray]] = {}
        for name, (leaf, boxes) in wanted.items():
            have = {piece.box: piece for piece in pieces.get(name, ())}
            if body.leaves.get(name) != leaf or not {*boxes} <= {*have}:
                raise DamagedError(f"{folder} has no such part of {name}")
            out[name] = {
                box: read_checked(reader, name, leaf, have[box], str(folder))
                for box in boxes
            }
        return out, body.run

    def _steps(self) -> list[int]:
        if not self._folder.exists():
            return []
        names = [path.name for path in self._folder.iterdir()]
        return sorted(int(name) for name in names if kind_of(name) == "step")

    def _manifest(self, step: int) -> _Copy:
        """Return the content of a step's copy.json; refuse another step or run."""
        path = self._folder / str(step) / _FILE
        found: _Copy = manifest.unseal(read_file(path), str(path), _Copy)
        if found.step not in (None, step) or found.run_name not in (
            None,
            self._run_name,
        ):
            raise DamagedError(
                f"{path.parent} holds step {found.step} of run {found.run_name}: it "
                "was copied, renamed or linked"
            )
        return found

    def _guarded(self, what: str, act: Callable[[], None]) -> None:
        """Run an action and report its errors; the run continues without a copy."""
        try:
            act()
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            with contextlib.suppress(OSError):  # nobody reads stderr
                print(
                    f"warning: process {self._rank} could not {what} "
                    f"{self._folder}: {reason}",
                    file=sys.stderr,
                    flush=True,
                )

    def _discard_after(self, step: int) -> None:
        for newer in self._steps():
            if newer > step:
                doomed = self._unfinished(newer)
                (self._folder / str(newer)).rename(doomed)
                delete(doomed)

    def _unfinished(self, step: int) -> epath.Path:
        return self._folder / f"{step}{_UNFINISHED}{secrets.token_hex(4)}"

    def _write(self, offer: Offer, copy: HostCopy, run: Mapping[str, Any]) -> None:
        if why := why_unusable(copy.leaves):
            raise ValueError(why)
        target = self._folder / str(offer.step)
        unfinished = self._unfinished(offer.step)
        self._make_room(offer.step)
        (unfinished / arrays.STATE).mkdir(parents=True)
        pieces: Pieces = {
            name: [Piece(p.box, manifest.crc32c(p.array())) for p in value.pieces]
            for name, value in copy.leaves.items()
        }
        text = manifest.write_pieces(pieces)
        arrays.write_part(unfinished, copy.leaves, self._rank)
        write_file(unfinished / manifest.part_name(self._rank), text)
        body = _Copy(
            copy_id=offer.copy_id,
            sum=manifest.text_crc32c(text),
            leaves={name: x.leaf for name, x in copy.leaves.items()},
            run=dict(run),
            step=offer.step,
            run_name=self._run_name,
        )
        write_file(unfinished / _FILE, manifest.seal(dataclasses.asdict(body)))
        unfinished.rename(target)

    def _make_room(self, step: int) -> None:
        """Delete unfinished copies, this step's copy, and all others but the newest."""
        if not self._folder.exists():
            return
        for path in self._folder.iterdir():
            if _UNFINISHED in path.name or path.name == str(step):
                delete(path)
        for old in self._steps()[: -(_KEPT - 1)]:
            delete(self._folder / str(old))


def to_text(offers: list[Offer]) -> str:
    """Return offers as a text, to send to other processes."""
    return json.dumps([dataclasses.asdict(offer) for offer in offers])


def from_text(text: str) -> list[Offer]:
    """Return the offers in a text that `to_text` returned."""
    return [Offer(**offer) for offer in json.loads(text)]

"""Find the newest intact state and load it onto the devices.

All processes agree on the step. A damaged step of the store is put aside (quarantined):
it is renamed, or if that is impossible, recorded in the journal and ignored from then
on. The same happens to a step from which the run cannot continue (`Unfit`).
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from mjax.ckpt import local, manifest, placing
from mjax.ckpt.journal import QUARANTINED, Journal
from mjax.ckpt.local import LocalCopies, Offer
from mjax.ckpt.manifest import DamagedError, Leaf, Manifest
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import Store
from mjax.processes.agreement import Agreement

_NAMED_DIFFERENCES = 5

Unfit = Callable[[int, Mapping[str, Any]], str]
"""Maps a step and its JSON metadata to the reason why the run cannot continue from it,
or "". The result must be the same on all processes."""


class LostError(RuntimeError):
    """The saved state is missing or damaged; the user must decide how to go on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A state from a saved step, its metadata and its source."""

    step: int
    state: PyTree
    run: Mapping[str, Any]
    """JSON metadata that was saved with the state."""
    source: str
    """Text that says where the state was read from."""
    bytes_read: int
    """Bytes of the pieces that this process read."""
    put_aside: tuple[str, ...]
    """One text per damaged or unfit step: where it is now, and why."""
    store_step: int
    """The newest step of the store that may be restored; 0 if there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """The part of a step that one process has read, or why it could not be read."""

    host: placing.Host
    run: Mapping[str, Any]
    bytes_read: int = 0
    damage: str = ""
    """What is damaged or missing; "" if nothing is."""
    trouble: Exception | None = None
    """Any other error; None if there was none."""


class Recovery:
    """Restores the state; every process must make the same calls in the same order."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        agreement: Agreement,
        copies: LocalCopies | None,
        unfit: Unfit,
    ) -> None:
        """Store the arguments; `copies` are the copies on the host of this process."""
        self._store, self._journal = store, journal
        self._agreement, self._copies = agreement, copies
        self._unfit = unfit

    def newest(self) -> Manifest | None:
        """Return the manifest of the newest usable step of the store.

        Unfit steps, and steps whose manifest is damaged, are skipped and stay where
        they are. Arrays are not read.

        Raises:
          LostError: the run has saved steps, but the store has none of them.
          ValueError: a newer version of mjax wrote the step, or another run saved it;
            or all steps are unfit.
        """

        def find() -> str:
            unfit = ""
            for step in reversed(self._steps()):
                with contextlib.suppress(DamagedError):
                    found = self._store.manifest(step)
                    self._check_own(found)
                    unfit = self._unfit(step, found.run)
                    if not unfit:
                        return manifest.write_manifest(found)
            if unfit:
                raise ValueError(
                    f"no step of {self._store.directory} is of use: {unfit}"
                )
            return ""

        text = self._agreement.decide(find)
        return manifest.read_manifest(text, "the newest step") if text else None

    def restore(self, abstract_state: PyTree) -> Restored | None:
        """Read the newest intact state into the given shardings.

        Args:
          abstract_state: pytree of `jax.ShapeDtypeStruct` with NamedShardings.
        Returns:
          The state, with the same structure, shapes, dtypes and shardings; None if
          nothing was ever saved.
        Raises:
          ValueError: the step holds other leaves; see `check_matches`.
          LostError: steps were saved, but none is left or none is intact.
          RuntimeError: the store does not answer.
        """
        wanted = by_path(abstract_state)
        structure = jax.tree.structure(abstract_state)
        offers = self._offers()
        put_aside = self._roll_back()
        while True:
            step = self._newest_step(has_copies=bool(offers))
            if offers and offers[-1].step > (step or 0):
                restored = self._from_copies(
                    offers.pop(), wanted, put_aside, store_step=step or 0
                )
            elif step is not None:
                restored = self._from_store(step, wanted, put_aside)
            else:
                break
            if restored is not None:
                arrays = restored.state
                state = jax.tree.unflatten(structure, [arrays[name] for name in wanted])
                return dataclasses.replace(restored, state=state)
        if put_aside:
            raise LostError(
                "the store was never written, and no copy is of use:\n  "
                + "\n  ".join(put_aside)
                + "\nBegin anew with --restart-from-scratch"
            )
        return None

    def _roll_back(self) -> list[str]:
        """Put aside unfit steps; return one text for each: where it is now, and why."""

        def move() -> str:
            unfit: dict[int, str] = {}
            with contextlib.suppress(LostError):  # reported later, if no copy is usable
                for step in self._steps():
                    with contextlib.suppress(DamagedError, ValueError):
                        found = self._store.manifest(step)
                        if why := self._unfit(step, found.run):
                            unfit[step] = why
            moved = [self._move(s, why, is_damaged=False) for s, why in unfit.items()]
            return json.dumps(moved)

        return json.loads(self._agreement.decide(move))

    def _newest_step(self, *, has_copies: bool) -> int | None:
        """Return the newest step of the store that may be restored, or None."""
        try:
            text = self._agreement.decide(lambda: json.dumps(self._own_newest()))
        except LostError:
            if not has_copies:
                raise
            return None
        return max(json.loads(text), default=None)

    def _own_newest(self) -> list[int]:
        """Return a list of the newest step that may be restored, or an empty list.

        Raises:
          ValueError: another run saved the step.
          LostError: as in `_steps`.
        """
        newest = self._steps()[-1:]
        for step in newest:
            with contextlib.suppress(DamagedError):  # reported when the step is read
                self._check_own(self._store.manifest(step))
        return newest

    def _check_own(self, found: Manifest) -> None:
        """Refuse a step that another run saved, without reading or renaming it."""
        if why := self._journal.records().why_foreign(found.step, found.save_id):
            path = self._store.path(found.step)
            raise ValueError(
                f"{path} is not of this run: {why}. Move it away, or give the "
                f"--ckpt.dir of this run; --init-from {path} begins a new run with "
                "its parameters"
            )

    # ----------------------------------------------------------------------- the store

    def _from_store(
        self, step: int, wanted: Mapping[str, Any], put_aside: list[str]
    ) -> Restored | None:
        found = self._read_step(step, wanted)
        damages = self._agree_on(found)
        if damages:
            put_aside.append(self._put_aside(step, damages[0]))
            return None
        return Restored(
            step=step,
            state=placing.place(found.host, wanted),
            run=found.run,
            source=str(self._store.path(step)),
            bytes_read=found.bytes_read,
            put_aside=tuple(put_aside),
            store_step=step,
        )

    def _read_step(self, step: int, wanted: Mapping[str, Any]) -> _Found:
        """Read this process's part of a step."""
        try:
            saved = SavedStep(self._store.path(step))
            _check_leaves(saved.manifest, wanted)
            host = placing.read(saved.read_boxes, wanted)
        except DamagedError as damage:
            return _Found(host={}, run={}, damage=str(damage))
        except (ValueError, RuntimeError, OSError) as error:
            return _Found(host={}, run={}, trouble=error)
        return _Found(host=host, run=saved.manifest.run, bytes_read=saved.bytes_read)

    def _agree_on(self, found: _Found) -> list[str]:
        """Return the damage that each process found; raise if any had another error."""
        other = "" if found.trouble is None else str(found.trouble)
        texts = self._agreement.all_of(json.dumps([found.damage, other]))
        if found.trouble is not None:
            raise found.trouble
        answers = [json.loads(text) for text in texts]
        for rank, (_, other) in enumerate(answers):
            if other:
                raise RuntimeError(f"process {rank} cannot restore: {other}")
        return [damage for damage, _ in answers if damage]

    def _steps(self) -> list[int]:
        """List the steps of the store that may be restored, oldest first.

        Raises:
          LostError: there were steps, but none is left.
        """
        records = self._journal.records()
        refused = records.quarantined
        steps = [s for s in self._store.steps() if (s, self._id(s)) not in refused]
        if steps:
            return steps
        if lost := self._lost():
            raise LostError(
                f"no intact checkpoint is left in {self._store.directory}:\n  "
                + "\n  ".join(lost)
                + "\nPut back a copy of one, or begin anew with --restart-from-scratch"
            )
        last = records.last_saved
        if last is not None:
            raise LostError(
                f"step {last} of this run was saved, and {self._store.directory} has "
                "no checkpoint at all; mount it, or give the --ckpt.dir of before, or "
                "begin anew with --restart-from-scratch"
            )
        return steps

    def _lost(self) -> list[str]:
        """Return one text per step that may not be restored: where it is, and why."""
        refused = self._journal.records().quarantined
        found = [
            f"{self._store.path(step)}: {refused[step, self._id(step)]}"
            for step in self._store.steps()
            if (step, self._id(step)) in refused
        ]
        for name, reason in self._store.quarantined().items():
            found.append(f"{self._store.directory / name}: {reason}")
        return found

    def _id(self, step: int) -> str:
        try:
            return self._store.manifest(step).save_id
        except (DamagedError, ValueError):
            return ""

    def _put_aside(self, step: int, reason: str) -> str:
        """Put a damaged step aside; return a text: where it is now, and why."""
        return self._agreement.decide(lambda: self._move(step, reason))

    def _move(self, step: int, reason: str, *, is_damaged: bool = True) -> str:
        save_id = self._id(step)
        try:
            where = str(self._store.quarantine(step, reason, is_damaged=is_damaged))
        except OSError as error:
            where = f"{self._store.path(step)} (not renamed: {error.strerror})"
            self._journal.write(QUARANTINED, step, save_id=save_id, reason=reason)
        return f"{where}: {reason}"

    # -------------------------------------------------------------- copies on hosts

    def _offers(self) -> list[Offer]:
        """List the copies of all processes, oldest first; equal on every process."""
        copies = self._copies
        if copies is None:
            return []
        own = self._agreement.together(copies.offers)
        texts = self._agreement.all_of(local.to_text(own))
        found = {offer for text in texts for offer in local.from_text(text)}
        return sorted(found, key=lambda offer: (offer.step, offer.copy_id))

    def _from_copies(
        self,
        offer: Offer,
        wanted: Mapping[str, Any],
        put_aside: list[str],
        *,
        store_step: int,
    ) -> Restored | None:
        """Restore from copies on the hosts; None if some box is on no host."""
        found = self._read_copy(offer, wanted)
        damages = [
            json.loads(t) for t in self._agreement.all_of(json.dumps(found.damage))
        ]
        holders = {rank for rank, damage in enumerate(damages) if not damage}
        is_whole = all(placing.plan(leaf, holders) for leaf in wanted.values())
        if not holders or not is_whole:
            first = next(damage for damage in damages if damage)
            put_aside.append(f"the copies of step {offer.step} on the hosts: {first}")
            return None
        text = self._agreement.from_rank(min(holders), json.dumps(dict(found.run)))
        run = json.loads(text)
        if why := self._unfit(offer.step, run):
            put_aside.append(f"the copies of step {offer.step} on the hosts: {why}")
            return None
        lost = sorted({*range(self._agreement.num)} - holders)
        peers = f"; processes {lost} had no copy and received one" if lost else ""
        return Restored(
            step=offer.step,
            state=placing.place(found.host, wanted, holders),
            run=run,
            source=f"copies on the hosts{peers}",
            bytes_read=found.bytes_read,
            put_aside=tuple(put_aside),
            store_step=store_step,
        )

    def _read_copy(self, offer: Offer, wanted: Mapping[str, Any]) -> _Found:
        """Read all boxes of this process from the copy on its host."""
        if self._copies is None:
            return _Found(host={}, run={}, damage="no --ckpt.local-dir")
        own = {
            name: (leaf_of(leaf), placing.own_boxes(leaf))
            for name, leaf in wanted.items()
        }
        try:
            host, run = self._copies.read(offer, own)
        except (DamagedError, ValueError, RuntimeError, OSError) as damage:
            return _Found(host={}, run={}, damage=str(damage))
        num_bytes = sum(x.nbytes for some in host.values() for x in some.values())
        return _Found(host=host, run=run, bytes_read=num_bytes)


def check_matches(saved: Manifest, abstract_state: PyTree) -> None:
    """Check that a step holds exactly the leaves of a state.

    Args:
      saved: manifest of the step.
      abstract_state: pytree of `jax.ShapeDtypeStruct`.
    Raises:
      ValueError: leaves are absent, additional, or of another shape or dtype.
    """
    _check_leaves(saved, by_path(abstract_state))


def _check_leaves(saved: Manifest, abstract: Mapping[str, Any]) -> None:
    wanted = {path: leaf_of(leaf) for path, leaf in abstract.items()}
    differing = [
        f"  {path}: saved {saved.leaves.get(path) or 'absent'}, "
        f"this run {wanted.get(path) or 'absent'}"
        for path in [*wanted, *(path for path in saved.leaves if path not in wanted)]
        if saved.leaves.get(path) != wanted.get(path)
    ]
    if not differing:
        return
    more = len(differing) - _NAMED_DIFFERENCES
    if more > 0:
        differing[_NAMED_DIFFERENCES:] = [f"  and {more} more"]
    raise ValueError(
        f"the checkpoint at step {saved.step} is of another model or optimizer:\n"
        + "\n".join(differing)
        + "\nGive the flags it was saved with, or another --work-dir, or "
        "--restart-from-scratch"
    )


def leaf_of(array: Any) -> Leaf:
    """Return the manifest's description of an array or a `jax.ShapeDtypeStruct`."""
    return Leaf(shape=tuple(array.shape), dtype=str(array.dtype))


def by_path(tree: PyTree) -> dict[str, Any]:
    """Return path -> leaf, in the order of `jax.tree.leaves`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }

"""Damage every file of a checkpoint in every way, and check what is restored.

    python -m scripts.faults.checkpoint_damage

Saves two steps of a small state, and for each file of the newer one and each damage
restores from a copy. Then it does the same with the command, in a few cases. Writes
docs/benchmarks/checkpoint_damage.md, and ends with 1 if a damage led to a wrong state
or to no state.
"""

import argparse
import collections
import dataclasses
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mjax.ckpt.manager import Checkpoints, CkptConfig
from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.saved_step import SavedStep
from mjax.mesh.devices import simulate_devices
from scripts.evidence import (
    REPOSITORY,
    Table,
    commit,
    run_training,
    train_command,
    write_page,
)

OLD, NEW = 1, 2
"""The steps that are saved; the newer one is damaged."""
NOTICED, HARMLESS, SILENT = "noticed", "harmless", "SILENT"
FACTS = {"next_step": NEW, "config": {"seed": 1}}

State = dict[str, jax.Array]


def truncate_to_half(path: Path) -> None:
    """Keep the first half of the bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def truncate_to_nothing(path: Path) -> None:
    """Remove all bytes; the file remains."""
    path.write_bytes(b"")


def zero(path: Path) -> None:
    """Replace all bytes by zeros."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path, bit: int) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


WHOLE_FILE: Mapping[str, Callable[[Path], None]] = {
    "half": truncate_to_half,
    "empty": truncate_to_nothing,
    "zeros": zero,
    "deleted": Path.unlink,
}
FLIPPED = "one bit"


@dataclasses.dataclass(frozen=True)
class Case:
    """One damage of one file."""

    file: str
    """Path of the file, relative to the folder of the step."""
    damage: str
    apply: Callable[[Path], None]


def make_state(seed: int) -> State:
    """Draw a state with several dtypes, on the shards of all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(seed)
    values = {
        "weights": rng.normal(size=(8, 24)).astype(np.float32),
        "embed": rng.normal(size=(16, 8)).astype(jnp.bfloat16),
        "norm": rng.normal(size=(6,)).astype(np.float32),
        "step": np.int32(seed),
    }
    return {
        name: jax.device_put(
            value,
            NamedSharding(mesh, PartitionSpec("x" if value.ndim == 2 else None)),
        )
        if value.ndim
        else jax.device_put(value, NamedSharding(mesh, PartitionSpec()))
        for name, value in values.items()
    }


def save_two_steps(work_dir: Path) -> None:
    """Save steps OLD and NEW, each with its own values."""
    checkpoints = Checkpoints(work_dir, CkptConfig())
    for step in (OLD, NEW):
        checkpoints.save(step, lambda step=step: make_state(step), FACTS)
        assert checkpoints.wait()
    checkpoints.attempts()  # which writes the journal
    checkpoints.close()


def cases(step_dir: Path, *, num_bits: int, seed: int) -> Iterator[Case]:
    """List the damages of every file of a step.

    Args:
      step_dir: folder of the step.
      num_bits: number of random bits to flip in each file, besides the first and last.
      seed: seed of the random bits.
    """
    rng = random.Random(seed)
    for path in sorted(path for path in step_dir.rglob("*") if path.is_file()):
        file = str(path.relative_to(step_dir))
        for damage, apply in WHOLE_FILE.items():
            yield Case(file, damage, apply)
        size = 8 * path.stat().st_size
        drawn = rng.sample(range(size), min(size, num_bits))
        for bit in sorted({0, size - 1, *drawn}):
            yield Case(file, FLIPPED, lambda path, bit=bit: flip(path, bit))


def kind(file: str) -> str:
    """Return the kind of a file, without its number or random name."""
    file = re.sub(r"\bd/[0-9a-f]+$", "d/*", file)
    return re.sub(r"(pieces\.|process_)\d+", r"\1<i>", file)


def outcome(saved: Path, case: Case) -> tuple[str, str]:
    """Restore from a copy of a damaged work dir.

    Args:
      saved: the work dir of `save_two_steps`; it stays as it is.
      case: what is damaged.
    Returns:
      NOTICED, HARMLESS or SILENT; and what was said.
    """
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder) / "run"
        shutil.copytree(saved, work_dir)
        case.apply(work_dir / "checkpoints" / str(NEW) / case.file)
        wanted = make_state(NEW)
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in wanted.items()
        }
        checkpoints = Checkpoints(work_dir, CkptConfig())
        checkpoints.newest()
        restored = checkpoints.restore(abstract)
        checkpoints.close()
        assert restored is not None
        is_right = restored.run == FACTS and same_bits(
            restored.state, make_state(restored.step)
        )
        if not is_right:
            return SILENT, f"step {restored.step} came back with other values"
        if restored.step == NEW:
            return HARMLESS, ""
        aside = work_dir / "checkpoints" / f"{NEW}.damaged" / "damaged.json"
        if not aside.exists():
            return SILENT, "the step was left out without a reason"
        [said] = restored.put_aside
        return NOTICED, said.partition(": ")[2]


def verify_outcome(saved: Path, case: Case) -> tuple[str, str]:
    """Verify a copy of a damaged step; if that finds nothing, read it with Orbax alone.

    Args:
      saved: the work dir of `save_two_steps`; it stays as it is.
      case: what is damaged.
    Returns:
      NOTICED, HARMLESS or SILENT; and what was said.
    """
    with tempfile.TemporaryDirectory() as folder:
        step_dir = Path(folder) / str(NEW)
        shutil.copytree(saved / "checkpoints" / str(NEW), step_dir)
        case.apply(step_dir / case.file)
        try:
            SavedStep(epath.Path(step_dir)).verify()
        except DamagedError as damage:
            return NOTICED, str(damage)
        wanted = make_state(NEW)
        as_numpy = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
        try:
            with ocp.PyTreeCheckpointer() as orbax:
                got = orbax.restore(step_dir / "state", restore_args=as_numpy)
        except Exception as error:  # any exception: Orbax does not check its files
            return SILENT, f"verify found nothing, Orbax raises {error!r}"
        if not same_bits(got, wanted):
            return SILENT, "verify found nothing, Orbax restores other values"
        return HARMLESS, ""


def same_bits(got: State, wanted: State) -> bool:
    """Compare every byte of two states."""
    return got.keys() == wanted.keys() and all(
        np.asarray(got[name]).tobytes() == np.asarray(wanted[name]).tobytes()
        and got[name].dtype == wanted[name].dtype
        for name in wanted
    )


def main() -> int:
    """Try all damages, write the page, return 1 if one was silent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bits", type=int, default=30, help="flipped in each file")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn bits")
    args = parser.parse_args()
    simulate_devices(4)
    at = commit()
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "run"
        save_two_steps(saved)
        found, said, num_silent = try_all(saved, args.bits, args.seed)
        found = dataclasses.replace(found, text=f"On commit {at}: {found.text}")
        verified, num_unseen = try_verify(saved, args.bits, args.seed)
        num_silent += num_unseen
        by_command, num_wrong = try_command(Path(folder))
    command = f"python -m scripts.faults.checkpoint_damage --bits {args.bits}"
    tables = [found, said, verified, by_command]
    print(write_page("checkpoint_damage", "Damaged checkpoints", command, tables))
    return int(num_silent + num_wrong > 0)


def try_all(saved: Path, num_bits: int, seed: int) -> tuple[Table, Table, int]:
    """Try every case; return counts, messages, and how many were silent."""
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    messages: dict[str, str] = {}
    step_dir = saved / "checkpoints" / str(NEW)
    for case in cases(step_dir, num_bits=num_bits, seed=seed):
        verdict, message = outcome(saved, case)
        counts[kind(case.file), case.damage, verdict] += 1
        if message:
            messages.setdefault(f"{kind(case.file)}, {case.damage}", message)
        if verdict == SILENT:
            print(f"SILENT: {case.file}, {case.damage}: {message}", flush=True)
    total = _totals(counts)
    table = Table(
        title="Every file, every damage",
        text=(
            "a state of 4 leaves (float32, bfloat16, int32) on 4 simulated devices, "
            "saved twice; the newer step is damaged and `Checkpoints.restore` called. "
            "*Noticed*: it is quarantined with the reason, and the older step comes "
            "back bit for bit. *Harmless*: the newer step comes back bit for bit. "
            f"*Silent*: anything else. In all {total.total()} cases: {total[NOTICED]} "
            f"noticed, {total[HARMLESS]} harmless, {total[SILENT]} silent. The flipped "
            f"bits are drawn at random (seed {seed}), plus the first and the last bit. "
            "Harmless damage is in files that only Orbax reads, or in information "
            "that is stored twice."
        ),
        header=("file", *_DAMAGES),
        rows=_rows(counts),
    )
    said = Table(
        title="What is said",
        text="The first message of each kind.",
        header=("file, damage", "reason"),
        rows=[[f"`{name}`", _in_cell(text)] for name, text in messages.items()],
    )
    return table, said, total[SILENT]


def try_verify(saved: Path, num_bits: int, seed: int) -> tuple[Table, int]:
    """Try every case with `verify`; return counts, and how many were silent."""
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    step_dir = saved / "checkpoints" / str(NEW)
    for case in cases(step_dir, num_bits=num_bits, seed=seed):
        verdict, message = verify_outcome(saved, case)
        counts[kind(case.file), case.damage, verdict] += 1
        if verdict == SILENT:
            print(f"SILENT: {case.file}, {case.damage}: {message}", flush=True)
    total = _totals(counts)
    table = Table(
        title="`mjax.ckpt verify`, and Orbax without mjax",
        text=(
            "The same damages of the newer step. *Noticed*: `verify` calls it damaged. "
            "*Harmless*: `verify` does not, and "
            "`ocp.PyTreeCheckpointer().restore` gives every leaf back bit for bit. "
            f"*Silent*: anything else. In all {total.total()} cases: "
            f"{total[NOTICED]} noticed, {total[HARMLESS]} harmless, {total[SILENT]} "
            "silent."
        ),
        header=("file", *_DAMAGES),
        rows=_rows(counts),
    )
    return table, total[SILENT]


def _totals(counts: Mapping[tuple[str, str, str], int]) -> collections.Counter[str]:
    total = collections.Counter[str]()
    for (_, _, verdict), number in counts.items():
        total[verdict] += number
    return total


def _rows(counts: Mapping[tuple[str, str, str], int]) -> list[list[str]]:
    """Return a table row for each kind of file, with a cell for each damage."""
    return [
        [f"`{file}`", *(_cell(counts, file, damage) for damage in _DAMAGES)]
        for file in dict.fromkeys(file for file, _, _ in counts)
    ]


def _cell(counts: Mapping[tuple[str, str, str], int], file: str, damage: str) -> str:
    found = [(verdict, counts.get((file, damage, verdict), 0)) for verdict in _VERDICTS]
    return ", ".join(f"{verdict} {n}" for verdict, n in found if n) or "-"


_DAMAGES = (*WHOLE_FILE, FLIPPED)
_VERDICTS = (NOTICED, HARMLESS, SILENT)


def _in_cell(text: str) -> str:
    """Shorten a text for a cell, without random names."""
    text = re.sub(r"[0-9a-f]{32}", "(name)", re.sub(r"/tmp/\S*/", "(folder)/", text))
    text = text.replace("|", "\\|")
    return text if len(text) < 300 else f"{text[:300]}..."


RUN = (
    *("--recipe", "debug", "--simulate-devices", "2", "--model.layers", "2"),
    *("--model.window", "16", "--model.rope", "True", "--ckpt.every", "4"),
)
FIRST, SECOND = 4, 8
BY_COMMAND: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "one bit of the largest file": ("*", lambda path: flip(path, 4 * _size(path))),
    "checkpoint.json deleted": ("checkpoint.json", Path.unlink),
    "pieces.0.json cut to half": ("pieces.0.json", truncate_to_half),
}


def _size(path: Path) -> int:
    return path.stat().st_size


def try_command(folder: Path) -> tuple[Table, int]:
    """Damage steps of a real run; return its messages and the number of failures."""
    original = folder / "command"
    run_training(*RUN, "--steps", str(SECOND), "--work-dir", str(original))
    rows, num_wrong = [], 0
    for name, (pattern, apply) in BY_COMMAND.items():
        work_dir = folder / f"command-{name.replace(' ', '-')}"
        shutil.copytree(original, work_dir)
        step_dir = work_dir / "checkpoints" / str(SECOND)
        found = [path for path in step_dir.rglob(pattern) if path.is_file()]
        apply(max(found, key=_size))
        flags = (*RUN, "--steps", str(SECOND), "--work-dir", str(work_dir))
        done = subprocess.run(
            train_command(*flags), cwd=REPOSITORY, capture_output=True, text=True
        )
        lines = [
            line
            for line in done.stdout.splitlines()
            if line.startswith(("warning: a checkpoint was put aside", "resuming"))
        ]
        text = " / ".join(lines).replace(str(work_dir), "WORK_DIR")
        is_right = done.returncode == 0 and f"after step {FIRST}, " in text
        is_right &= f"checkpoints/{SECOND}.damaged" in text
        num_wrong += not is_right
        rows.append([name, str(done.returncode), _in_cell(text), _verdict(is_right)])
        print(" | ".join(rows[-1]), flush=True)
    table = Table(
        title="By the command",
        text=(
            f"`python -m mjax.train {' '.join(RUN)} --steps {SECOND}` saved steps "
            f"{FIRST} and {SECOND}; step {SECOND} is damaged, and the same command "
            "runs again."
        ),
        header=("damage", "exit code", "printed", "verdict"),
        rows=rows,
    )
    return table, num_wrong


def _verdict(is_right: bool) -> str:
    return f"goes on from step {FIRST}" if is_right else "WRONG"


if __name__ == "__main__":
    sys.exit(main())

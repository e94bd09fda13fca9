"""Show the answers to damaged, foreign and missing checkpoints.

    python -m scripts.faults.checkpoint_errors

Makes a run with two checkpoints, damages copies of it, runs the commands on them, and
records exit codes and messages. Checks that each command ends with the expected code
and without a traceback. To test a full disk, a small file system is mounted, which
needs root. Writes docs/benchmarks/checkpoint_errors.md and ends with 1 if a command
does not behave.
"""

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from mjax.ckpt import manifest
from scripts.evidence import Table, run_training, write_page
from scripts.faults.bad_inputs import START, run_command, shown_command

LIMIT_S = 300
"""Time limit of a command. It is generous, because a command may compile and train on a
busy machine."""
DEBUG = "--recipe debug --data.path synthetic"
TRAIN = f"mjax.train {DEBUG} --steps 4 --ckpt.every 2 --work-dir"
SHOWN = ("warning:", "gave up:", "error:", "resuming after")
"""First words of the lines of a training run that a table shows."""

# Heading -> explanation, and commands, each after its expected exit code.
GROUPS = {
    "Another model": (
        "The checkpoints of a run without its config.json.",
        "2 {train} {dir}/no-config --model.d-ff 128",
    ),
    "A file of the arrays is missing": (
        "Deleted from the newest step. Training goes on from the step before.",
        """
1 mjax.ckpt verify {dir}/shard
1 mjax.ckpt reshard {dir}/shard {dir}/copy
0 {train} {dir}/shard
0 mjax.ckpt ls {dir}/shard
""",
    ),
    "One bit is flipped": (
        "In the largest file of the arrays of the newest step.",
        """
1 mjax.ckpt verify {dir}/bit
0 {train} {dir}/bit
""",
    ),
    "The manifest is missing": (
        "checkpoint.json of the newest step was deleted.",
        """
1 mjax.ckpt ls {dir}/manifest
1 mjax.ckpt show {dir}/manifest
0 {train} {dir}/manifest
""",
    ),
    "A folder that holds another step": (
        "Step 2 was copied to 8 by hand; step 4 was renamed to 6, with 2 deleted.",
        """
1 mjax.ckpt ls {dir}/copied
1 mjax.ckpt verify {dir}/copied
1 mjax.ckpt show {dir}/copied
0 {train} {dir}/copied
93 {train} {dir}/renamed
""",
    ),
    "A step of another run": (
        "Step 4 was replaced by that of a run with the same flags.",
        """
1 mjax.ckpt ls {dir}/foreign
1 mjax.ckpt verify {dir}/foreign
2 mjax.ckpt show {dir}/foreign
2 {train} {dir}/foreign
0 mjax.ckpt verify {dir}/foreign/checkpoints/4
""",
    ),
    "What is no file, or of another form": (
        "pieces.0.json of the newest step is a folder; config.json is `[]`; a line of "
        "the journal has no save id; a URL of which no library is installed.",
        """
1 mjax.ckpt ls {dir}/folder
0 {train} {dir}/folder
2 {train} {dir}/list
2 mjax.ckpt ls {dir}/list
0 mjax.ckpt ls {dir}/record
0 {train} {dir}/record
2 mjax.ckpt ls gs://bucket/run
2 {train} {dir}/url --ckpt.dir s3://bucket/run
""",
    ),
    "No step is left": (
        "A bit is flipped in both steps; the folder of the checkpoints is not there.",
        """
93 {train} {dir}/all
93 {train} {dir}/all
2 mjax.ckpt show {dir}/all
93 {train} {dir}/lost
2 mjax.ckpt ls {dir}/lost
""",
    ),
    "A newer format": (
        "The newest step has the format after the present one. It is left as it is.",
        """
2 {train} {dir}/newer
0 mjax.ckpt ls {dir}/newer
2 mjax.ckpt verify {dir}/newer
2 mjax.ckpt show {dir}/newer
2 mjax.ckpt reshard {dir}/newer {dir}/copy
""",
    ),
    "Folders of others": (
        "photos holds a picture, hf a model in the form of Hugging Face.",
        """
2 mjax.ckpt ls {dir}/missing
2 mjax.ckpt ls {dir}/photos/cat.jpeg
2 mjax.ckpt ls {dir}/photos
2 mjax.ckpt verify {dir}/hf
2 mjax.ckpt show {dir}/empty
2 mjax.ckpt show {dir}/run --step 3
2 mjax.ckpt reshard {dir}/run {dir}/photos
2 mjax.ckpt reshard {dir}/run {dir}/run/checkpoints
2 mjax.ckpt reshard {dir}/run {dir}/copy --max-piece-mib 0
""",
    ),
    "No space": (
        "small is a file system of 256 kB.",
        """
2 mjax.ckpt reshard {dir}/run {dir}/small/copy
93 mjax.train {debug} --work-dir {dir}/full --ckpt.dir {dir}/small/steps """
        "--ckpt.every 1 --ckpt.max-unsaved 2",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Result of one command."""

    command: str
    code: int | None
    """Exit code; None if the command was killed."""
    message: str
    faults: list[str]
    """What is wrong with the result; empty if nothing is."""


def main() -> int:
    """Run every command, write the page, return 1 if one misbehaves."""
    START.set_forkserver_preload(["mjax.trainer", "mjax.ckpt.saved_step"])
    tables, num_faults = [], 0
    with tempfile.TemporaryDirectory() as folder, _small(Path(folder) / "small"):
        make_files(Path(folder))
        for title, (text, lines) in GROUPS.items():
            answers = [ask(line, folder) for line in lines.strip().splitlines()]
            for answer in answers:
                num_faults += bool(answer.faults)
                print(*dataclasses.astuple(answer), sep=" | ", flush=True)
            tables.append(_table(title, text, answers))
    command = "python -m scripts.faults.checkpoint_errors"
    print(write_page("checkpoint_errors", "Checkpoint errors", command, tables))
    print(f"commands that misbehave: {num_faults}")
    return int(num_faults > 0)


def ask(line: str, folder: str) -> Answer:
    """Run one command and judge its answer.

    Args:
      line: expected exit code, module, flags.
      folder: folder of the runs.
    """
    line = line.replace("{train}", TRAIN).replace("{debug}", DEBUG)
    expected, _, line = line.partition(" ")
    code, stdout, stderr = run_command(line, folder, LIMIT_S)
    faults = [] if str(code) == expected else [f"exit code {code}, not {expected}"]
    if "Traceback" in stderr:
        faults.append("traceback")
    if line.startswith("mjax.train"):
        said = [part for part in stdout.splitlines() if part.startswith(SHOWN)]
        stdout = "\n".join(said)
    lines = [" ".join(part.split()) for part in f"{stdout}\n{stderr}".splitlines()]
    message = "<br>".join(part for part in lines if part).replace(folder, "DIR")
    if not message:
        faults.append("no message")
    command = shown_command(line)
    return Answer(command=command, code=code, message=message, faults=faults)


def make_files(folder: Path) -> None:
    """Make a run with two checkpoints, damaged copies, and folders without a run."""
    flags = TRAIN.removeprefix("mjax.train ").split()
    run = folder / "run"
    run_training(*flags, str(run))
    shutil.copytree(run / "checkpoints", folder / "no-config" / "checkpoints")
    spoiled = ("shard", "bit", "manifest", "all", "lost", "newer")
    moved = ("copied", "renamed", "foreign", "folder", "list", "record")
    for name in (*spoiled, *moved):
        shutil.copytree(run, folder / name)
    _move(folder, flags)
    _largest(folder / "shard", 4).unlink()
    _flip(_largest(folder / "bit", 4))
    (folder / "manifest" / "checkpoints" / "4" / manifest.MAIN_FILE).unlink()
    for step in (2, 4):
        _flip(_largest(folder / "all", step))
    shutil.rmtree(folder / "lost" / "checkpoints")
    _make_newer(folder / "newer" / "checkpoints" / "4" / manifest.MAIN_FILE)
    for name in ("photos/cat.jpeg", "hf/config.json", "hf/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "empty" / "checkpoints").mkdir(parents=True)


def _move(folder: Path, flags: Sequence[str]) -> None:
    """Move steps and files to wrong places."""
    copied, renamed = folder / "copied/checkpoints", folder / "renamed/checkpoints"
    shutil.copytree(copied / "2", copied / "8")
    shutil.rmtree(renamed / "2")
    (renamed / "4").rename(renamed / "6")
    run_training(*flags, str(folder / "other"))
    foreign = folder / "foreign/checkpoints/4"
    shutil.rmtree(foreign)
    shutil.copytree(folder / "other/checkpoints/4", foreign)
    pieces = folder / "folder/checkpoints/4" / manifest.part_name(0)
    pieces.unlink()
    pieces.mkdir()
    (folder / "list/config.json").write_text("[]")
    with (folder / "record/checkpoints.jsonl").open("a") as journal:
        journal.write('{"event": "quarantined", "step": 4}\n')


def _largest(work_dir: Path, step: int) -> Path:
    """Return the largest file of the arrays of a step."""
    files = work_dir.glob(f"checkpoints/{step}/state/ocdbt.process_*/d/*")
    return max(files, key=lambda path: path.stat().st_size)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _make_newer(path: Path) -> None:
    """Rewrite a manifest in the next format."""
    body = manifest.unseal(path.read_text(), path.name)
    with mock.patch.object(manifest, "VERSION", manifest.VERSION + 1):
        path.write_text(manifest.seal(body))


@contextlib.contextmanager
def _small(folder: Path) -> Iterator[None]:
    """Mount a file system of 256 kB."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        # Unmount lazily: a killed process may still use the file system.
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _table(title: str, text: str, answers: list[Answer]) -> Table:
    return Table(
        title=title,
        text=text,
        header=("command", "exit code", "message"),
        rows=[
            [f"`{answer.command}`", str(answer.code), answer.message]
            for answer in answers
        ],
    )


if __name__ == "__main__":
    sys.exit(main())

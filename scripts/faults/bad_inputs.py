"""Show the answer to every bad input: command, exit code, message.

    python -m scripts.faults.bad_inputs

Runs each command and checks that it ends with exit code 2, within a minute, without a
traceback and before anything is compiled. Writes docs/benchmarks/bad_inputs.md and ends
with 1 if a command does not behave.
"""

import dataclasses
import multiprocessing
import os
import runpy
import shlex
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from scripts.evidence import Table, run_training, write_page

BAD_INPUT = 2
LIMIT_S = 60
"""Time limit of a command. It is generous, because a start takes seconds and the
machine may be busy."""

# Each command runs in a separate process, forked from one that has imported the
# modules: imports take most of the time and are the same for all commands.
START = multiprocessing.get_context("forkserver")

SMALL = "--recipe debug --data.path synthetic"

# In the order in which inputs are checked: flags, devices, data, work dir. {dir} is a
# scratch folder; `make_files` makes its contents.
FLAGS = """
--recipe dbug
--optim.nam lamb
--lr 0.1
--optim.name sgd
--model.block parralel
--model.attention flash
--precision.compute float16
--steps many
--steps 0
--steps
--seed -1
--zero 4
--zero 3 --mesh.pp 2
--simulate-devices 0
--peak-tflops 0
--peak-tflops nan
--mesh.tp 0
--mesh.tp -1
--mesh.dp-shard 0
--batch.size 0
--batch.microbatches 0
--batch.size 9 --batch.microbatches 2
--model.window 0
--model.window 4 -1
--model.window 4 4 4
--model.window wide
--model.layers 0
--model.heads 3
--model.heads 8 --model.kv-heads 3
--model.kv-heads 0
--model.d-ff 0
--model.d-model -64
--model.dropout 1.0
--model.rope-base 0
--model.rope-scaling 0
--model.rope-fraction 2
--model.norm-eps -1
--model.init-std nan
--model.logit-scale nan
--optim.lr -1
--optim.lr nan
--optim.lr inf
--optim.beta2 1.0
--optim.clip-norm 0
--optim.clip-norm nan
--optim.warmup-steps 21
--data.seq-len 0
--data.held-out-fraction 1
--data.tokenizer train:10
--ckpt.every 0
--ckpt.keep 0
--eval.every 0
--log.every 0
--distributed.process-id 1
--distributed.timeout-s 0
--work-dir=
--steps --seed 3
--steps 10k
--optim.lr 0,1
--seed= 3
--keep-compiled=true
--keep-compiled false
--learning-rate 0.1
--tensor-model-parallel-size 2
--hybrid_shard_degree 2
--resume
--epochs 3
--mesh.tp2
-lr 0.1
—steps 3
steps 3
optim.lr=0.1
--
-- --steps 3
--x.y.z
"""
CONFIG_FILES = """
--config {dir}/absent.toml
--config {dir}/empty.txt
--config {dir}/image.txt
--config {dir}/unknown.toml
--config {dir}/meant.toml
--config {dir}/type.toml
--config {dir}/twice.json
--config {dir}/cut.json
--config {dir}/range.toml
--recipe {dir}/absent.py:mine
--recipe {dir}/own.py:mien
--recipe {dir}/own.py:fails
--recipe {dir}/own.py:other
"""
SIZES = """
--simulate-devices 4 --mesh.tp 8
--simulate-devices 8 --mesh.tp 3
--simulate-devices 8 --mesh.dp 4
--simulate-devices 8 --mesh.dp-shard 3
--simulate-devices 2 --mesh.pp 2
--simulate-devices 4 --mesh.tp 4 --model.heads 6 --model.head-dim 8
--simulate-devices 4 --mesh.tp 4 --model.d-ff 510
--simulate-devices 4 --mesh.tp 4 --model.kv-heads 2 --data.seq-len 62
--simulate-devices 4 --mesh.tp 4 --model.heads 12 --model.kv-heads 6 --model.head-dim 8
--simulate-devices 2 --mesh.tp 2 --model.vocab-multiple 1
--simulate-devices 8 --batch.size 12
--simulate-devices 4 --batch.size 8 --batch.microbatches 4
--model.attention cudnn
"""
DATA = """
--data.path {dir}/missing
--data.path {dir}/empty.txt
--data.path {dir}/empty
--data.path {dir}/image.txt
--data.path {dir}/broken.jsonl
--data.path {dir}/other.jsonl
--data.path {dir}/broken.parquet
--data.path {dir}/short.txt
--data.path synthetic {dir}/text.txt
--data.path {dir}/text.txt --data.tokenizer byte
--data.path {dir}/text.txt --data.tokenizer {dir}/missing/tokenizer.json
--data.path {dir}/text.txt --data.tokenizer {dir}/empty.txt
--data.path {dir}/text.txt --data.tokenizer train:100000
--data.path {dir}/text.txt --data.vocab model --model.vocab-size 100
--data.path {dir}/text.txt --data.cache-dir {dir}/text.txt
"""
WORK_DIRS = """
--work-dir {dir}/text.txt
--work-dir {dir}/text.txt/run
--work-dir /proc/run
--work-dir {dir}/run --seed 5
--work-dir {dir}/run --model.d-ff 128
--work-dir {dir}/run --optim.name adamw
--work-dir {dir}/run --steps 3
--work-dir {dir}/run --data.path stdlib
--work-dir {dir}/no-config --model.d-ff 128
--work-dir {dir}/no-json
"""
CONFIGS = {
    "unknown.toml": "steps = 3\n\n[mesh]\ntpp = 2\n",
    "meant.toml": "[optim]\nlearning_rate = 0.1\n",
    "type.toml": 'steps = "3"\n',
    "twice.json": '{"steps": 3,\n "steps": 4}',
    "cut.json": '{"steps": 3',
    "range.toml": "[mesh]\ntp = 0\n",
    "own.py": "def mine(): ...\ndef fails(): 1 / 0\ndef other(): return 3\n",
}
"""Texts of the files that CONFIG_FILES names."""
OTHERS = """
mjax.mesh --mesh.tq 2
mjax.mesh --simulate-devices 4 --mesh.tp 3
mjax.mesh --simulate-devices 0
mjax.data show --step -1
mjax.data show --batch-size 0
mjax.data info --data.path {dir}/missing
mjax.data info --data.seq-len 0
mjax.data shwo
"""


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
    START.set_forkserver_preload(
        ["mjax.trainer", "mjax.mesh.build", "mjax.data.dataset"]
    )
    tables, num_faults = [], 0
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        for title, lines in _groups().items():
            answers = [ask(line, folder) for line in lines]
            for answer in answers:
                num_faults += bool(answer.faults)
                print(
                    answer.code,
                    answer.command,
                    answer.message,
                    *answer.faults,
                    sep=" | ",
                    flush=True,
                )
            tables.append(_table(title, answers))
    print(
        write_page(
            "bad_inputs", "Bad input", "python -m scripts.faults.bad_inputs", tables
        )
    )
    print(f"commands that misbehave: {num_faults}")
    return int(num_faults > 0)


def ask(line: str, folder: str) -> Answer:
    """Run one command and judge its answer."""
    code, stdout, stderr = run_command(line, folder, LIMIT_S)
    if code is None:
        return Answer(command=line, code=None, message="", faults=["does not end"])
    faults = []
    if code != BAD_INPUT:
        faults.append(f"exit code {code}")
    if "Traceback" in stderr:
        faults.append("traceback")
    if "start-up: compile" in stdout:
        faults.append("compiled before")
    if not stderr.strip():
        faults.append("no message")
    shown = plain(stderr).replace(folder, "DIR")
    return Answer(command=shown_command(line), code=code, message=shown, faults=faults)


def run_command(line: str, folder: str, limit_s: float) -> tuple[int | None, str, str]:
    """Run one command in a separate process.

    Args:
      line: module and flags; {dir} stands for the folder.
      folder: folder for the files of stdout and stderr.
      limit_s: seconds after which the process is killed.
    Returns:
      the exit code (None if the process was killed), stdout, and stderr.
    """
    words = shlex.split(line.format(dir=folder))
    out, err = Path(folder) / "stdout", Path(folder) / "stderr"
    process = START.Process(target=_run_module, args=(words, str(out), str(err)))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        return None, out.read_text(), err.read_text()
    return process.exitcode, out.read_text(), err.read_text()


def shown_command(line: str) -> str:
    """Return the command line as a page shows it."""
    return shlex.join(["python", "-m", *shlex.split(line.format(dir="DIR"))])


def _run_module(words: list[str], out_path: str, err_path: str) -> None:
    """Run like `python -m WORDS`, with the output in files."""
    for path, number in ((out_path, 1), (err_path, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def make_files(folder: Path) -> None:
    """Make the files and the finished run that the commands name."""
    (folder / "empty").mkdir()
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too short")
    (folder / "text.txt").write_text("Some words, again and again. " * 400)
    (folder / "image.txt").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff" * 100)
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "other.jsonl").write_text('{"body": "a"}\n')
    (folder / "broken.parquet").write_bytes(b"PAR1 but nothing else")
    run = folder / "run"
    run_training(*shlex.split(SMALL), "--steps", "4", "--work-dir", str(run))
    shutil.copytree(run / "checkpoints", folder / "no-config" / "checkpoints")
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    (folder / "no-json").mkdir()
    (folder / "no-json" / "config.json").write_text("{")


def _groups() -> dict[str, list[str]]:
    """Return heading -> command lines, each with its module first."""

    def train(recipe: str, lines: str) -> list[str]:
        return [f"mjax.train {recipe} {line}" for line in lines.strip().splitlines()]

    unnamed, _, named = FLAGS.strip().partition("\n")
    return {
        "Flags": [
            f"mjax.train {unnamed}",
            *train("--recipe debug", named),
        ],
        "Config files and own recipes": [
            f"mjax.train {line}" for line in CONFIG_FILES.strip().splitlines()
        ],
        "Sizes and devices": train(SMALL, SIZES),
        "Data": train("--recipe debug", DATA),
        "Work dir": train(SMALL + " --steps 4", WORK_DIRS),
        "Other commands": list(OTHERS.strip().splitlines()),
    }


def plain(text: str) -> str:
    """Remove the line breaks of a message."""
    return " ".join(text.split())


def _table(title: str, answers: list[Answer]) -> Table:
    return Table(
        title=title,
        text="Each command ends by itself before anything is compiled.",
        header=("command", "exit code", "message"),
        rows=[
            [f"`{answer.command}`", str(answer.code), answer.message]
            for answer in answers
        ],
    )


if __name__ == "__main__":
    sys.exit(main())

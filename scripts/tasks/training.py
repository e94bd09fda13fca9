"""Tasks 7 to 10, 17 and 25: train, stop, resume, inspect."""

import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

from scripts.tasks.place import Place, Task, losses, rows, wait_for

DEBUG = ("train", "--recipe", "debug")
MAKE_TOKENIZER = """import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=400, special_tokens=["<|endoftext|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
made.train_from_iterator(open(sys.argv[1]).read().splitlines(), trainer)
made.save("tokenizer.json")
print("0")
"""


def library() -> list[Path]:
    """Return some source files that every machine has."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("[a-f]*.py"))


def demo(place: Place) -> None:
    """Task 7: train the demo; other tasks use its run."""
    run = place.shared / "demo"
    shutil.rmtree(run, ignore_errors=True)
    done = place.mjax("train", "--work-dir", str(run))
    found = re.search(r"([\d.]+) bits per byte, ([\d.]+)% of the entropy", done.out)
    place.need(found is not None and float(found[2]) < 60, "held-out loss",
               found[0] if found else done.out[-500:])  # fmt: skip
    place.need(sorted(rows(run)) == [*range(1, 1501)], "1,500 steps are trained")


def resume(place: Place) -> None:
    """Task 8: kill a run without a warning; the same command resumes it."""
    words = [*DEBUG, "--steps", "60", "--ckpt.every", "10", "--work-dir", "run"]
    straight = [sys.executable, "-m", "mjax", *words[:-1], "straight"]
    place.run(straight, shown=None)
    run = place.folder / "run"
    process = place.start(*words)
    wait_for(
        lambda: (run / "metrics.jsonl").exists()
        and len((run / "metrics.jsonl").read_text().splitlines()) >= 25,
        120, "25 steps of the run",
    )  # fmt: skip
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = max(rows(run))
    place.need(before < 60, "killed with SIGKILL after step", before)
    place.show("kill -9 PID")
    said = place.mjax(*words).out
    place.need("resum" in said, "the same command resumes")
    place.need(
        losses(run) == losses(place.folder / "straight"),
        "all 60 losses equal those of an undisturbed run bit for bit",
    )


def own_text(place: Place) -> None:
    """Task 9: a folder of text files, and JSONL."""
    for path in library()[:30]:
        place.write(f"text/{path.stem}.txt", path.read_text("utf-8", "replace"))
    lines = [
        json.dumps({"text": path.read_text("utf-8", "replace")}) for path in library()
    ]
    place.write("text.jsonl", "\n".join(lines[:30]) + "\n")
    for name in ("text", "text.jsonl"):
        run = f"run-{Path(name).suffix[1:] or 'folder'}"
        place.mjax(*DEBUG, "--data.path", name, "--work-dir", run)
        summary = json.loads((place.folder / run / "summary.json").read_text())
        bits = summary["eval_bits_per_byte"]
        place.need(0 < bits < 8.1, f"{name}: held-out bits per byte", f"{bits:.2f}")


def own_tokenizer(place: Place) -> None:
    """Task 10: a custom BPE tokenizer, in training, generation and export."""
    place.write(
        "text.txt", "\n".join(p.read_text("utf-8", "replace") for p in library()[:9])
    )
    place.ask(sys.executable, MAKE_TOKENIZER, "text.txt")
    words = [*DEBUG, "--data.path", "text.txt", "--data.tokenizer", "tokenizer.json"]
    place.mjax(*words, "--work-dir", "run")
    config = json.loads((place.folder / "run" / "config.json").read_text())
    place.need(
        config["model"]["vocab_size"] == 400,
        "the vocabulary has the size of the tokenizer",
    )
    place.mjax("generate", "run", "--prompt", "def ", "--tokens", "5")
    (place.folder / "tokenizer.json").rename(place.folder / "moved.json")
    place.run(
        [sys.executable, "-m", "mjax", "generate", "run", "--prompt", "def "],
        shown=None,
    )
    place.need(True, "generation needs only the run")
    merged = (place.folder / "run" / "tokenizer" / "tokenizer.json").read_text()
    place.need(
        json.loads(merged)["model"]["merges"] != [], "the run contains its merges"
    )
    place.write("other.txt", "other text " * 400 + place_text(place)[::-1])
    place.ask(sys.executable, MAKE_TOKENIZER, "other.txt")
    again = [*DEBUG, "--data.tokenizer", "tokenizer.json", "--data.path", "text.txt"]
    refused = [
        sys.executable,
        "-m",
        "mjax",
        *again,
        "--steps",
        "30",
        "--work-dir",
        "run",
    ]
    said = place.run(refused, shown=None, code=2).err
    place.need("tokenizer" in said, "another tokenizer is refused", said.strip()[-300:])


def place_text(place: Place) -> str:
    """Return the text from which the first tokenizer was made."""
    return (place.folder / "text.txt").read_text()


def inspect(place: Place) -> None:
    """Task 17: inspect a running run."""
    words = (*DEBUG, "--steps", "4000", "--ckpt.every", "20", "--work-dir", "run")
    run = place.folder / "run"
    training = place.start(*words, shown=False)
    try:
        wait_for(lambda: any((run / "checkpoints").glob("[0-9]*")), 120, "a checkpoint")
        listed = place.mjax("ckpt", "ls", "run").out
        place.need(
            re.search(r"^\s*\d+\b", listed, re.M) is not None, "the steps are listed"
        )
        held = place.mjax("ckpt", "show", "run").out
        place.need("embed" in held, "the arrays of a checkpoint are shown")
        page = place.start(
            "observe", "serve", "--work-dir", "run", "--listen", "127.0.0.1:0"
        )
        try:
            look(place, page)
        finally:
            page.terminate()
            page.communicate()
        place.need(training.poll() is None, "the run continues meanwhile")
    finally:
        training.terminate()
        training.communicate()


def look(place: Place, page: subprocess.Popen[str]) -> None:
    """Request the data of the page, as a browser does: the token becomes a cookie."""
    assert page.stdout is not None
    address = next(
        found[0]
        for line in page.stdout
        if (found := re.search(r"http://127\.0\.0\.1:\d+\S*", line))
    )
    cookies = urllib.request.HTTPCookieProcessor()
    with urllib.request.build_opener(cookies).open(address) as answer:
        place.need("<html" in answer.read().decode(), "the page responds")


def meshes(place: Place) -> None:
    """Task 25: half a run on tp 2, the other half on a pipeline, and on one device."""
    first = (*DEBUG, "--model.layers", "4", "--optim.schedule", "constant")
    straight = [sys.executable, "-m", "mjax", *first, "--work-dir", "straight"]
    place.run(straight, shown=None)
    more = ("--steps", "40")
    resumed = ["train", "--work-dir", "straight", *more]
    place.run([sys.executable, "-m", "mjax", *resumed], shown=None)
    place.mjax(*first, "--simulate-devices", "4", "--mesh.tp", "2", "--work-dir", "run")
    place.mjax(
        *("train", "--work-dir", "run", *more, "--simulate-devices", "2"),
        *("--mesh.tp", "1", "--mesh.pp", "2", "--batch.microbatches", "2"),
    )
    pair = losses(place.folder / "run"), losses(place.folder / "straight")
    place.need(len(pair[0]) == len(pair[1]) == 40, "both have 40 steps")
    worst = max(abs(a - b) / b for a, b in zip(*pair, strict=True))
    place.need(worst < 1e-4, "largest relative difference of a loss", f"{worst:.1e}")
    samples = [
        place.run(
            [
                sys.executable,
                "-m",
                "mjax",
                "data",
                "show",
                "--step",
                "30",
                "--work-dir",
                name,
            ],
            shown=None,
        ).out
        for name in ("run", "straight")
    ]
    place.need(samples[0] == samples[1], "step 30 reads the same samples")


TASKS = (
    Task(number=7, do=demo),
    Task(number=8, do=resume),
    Task(number=9, do=own_text),
    Task(number=10, do=own_tokenizer),
    Task(number=17, do=inspect),
    Task(number=25, do=meshes),
)

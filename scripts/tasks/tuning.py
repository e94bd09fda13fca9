"""Tasks 21 to 23: fine-tune on chats, with all parameters and with adapters.

The base and the chats are those of `scripts.tune.chats`: docstrings of the standard
library. Learning rates and numbers of steps are near the best ones of
docs/benchmarks/fine_tuning.md.
"""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np

from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from scripts.tasks.folders import LARGEST
from scripts.tasks.place import HF_PYTHON, Place, Task, TaskFailedError, losses
from scripts.tune import docstrings
from scripts.tune.chats import BASE, MODEL

SEQ_LEN, HELD_OUT = 256, 0.2
DATA = (
    *("--init-from", "base", "--data.format", "chat", "--data.path", "chats.jsonl"),
    *("--data.chat-template", "chat.jinja", "--data.held-out-fraction", str(HELD_OUT)),
    *("--data.seq-len", str(SEQ_LEN), "--batch.size", "8", "--eval.batches", "5"),
    *("--optim.name", "adamw", "--optim.schedule", "constant"),
    *("--optim.warmup-steps", "10", "--precision.compute", "float32"),
)
FULL = ("--optim.lr", "1e-4", "--steps", "80", "--ckpt.every", "40")
ADAPTERS = ("--lora.rank", "5", "--optim.lr", "1e-3", "--steps", "80")
LOGITS = """import json, sys, numpy, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
tokens = torch.tensor(json.loads(sys.argv[4]))
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
merged = AutoModelForCausalLM.from_pretrained(sys.argv[3], dtype=torch.float32)
with torch.no_grad():
    plain = base(input_ids=tokens).logits
    adapted = PeftModel.from_pretrained(base, sys.argv[2]).eval()
    found = adapted(input_ids=tokens).logits
    wanted = merged(input_ids=tokens).logits
largest = wanted.abs().max()
print(json.dumps([((found - wanted).abs().max() / largest).item(),
                  ((found - plain).abs().max() / largest).item()]))
"""


def prepare(place: Place) -> None:
    """Put the base, the chats and their template into the place."""
    base, text = place.shared / "base", place.shared / "base.jsonl"
    found = docstrings.entries()
    if not base.is_dir():
        lines = [json.dumps({"text": t}) + "\n" for t in docstrings.base_texts(found)]
        text.write_text("".join(lines))
        run = place.shared / "base-run"
        words = [
            "train",
            *MODEL,
            *BASE,
            "--data.path",
            str(text),
            "--work-dir",
            str(run),
        ]
        for command in (words, ["ckpt", "export", str(run), str(base)]):
            place.run([sys.executable, "-m", "mjax", *command], shown=None)
    shutil.copytree(base, place.folder / "base")
    chats = docstrings.chats(found, "lines", 0)["training"]
    place.write("chats.jsonl", "".join(json.dumps(chat) + "\n" for chat in chats))
    place.write("chat.jinja", docstrings.TEMPLATE)
    place.need(len(chats) == 200, "200 chats")


def tune(place: Place, *words: str, run: str, shown: bool = True) -> str:
    """Train on the chats; return the output."""
    model = shlex.split(place.mjax("ckpt", "show", "base").out)
    place.shown.pop()
    command = ["train", *model, *DATA, *words, "--work-dir", run]
    said = "mjax train $(mjax ckpt show base) " + shlex.join(command[1 + len(model) :])
    python = [sys.executable, "-m", "mjax"]
    return place.run([*python, *command], shown=said if shown else None).out


def held_out(run: Path) -> float:
    """Return the loss on held-out answers at the end of a run."""
    return json.loads((run / "summary.json").read_text())["eval_loss"]


def fully(place: Place) -> None:
    """Task 21: all parameters."""
    prepare(place)
    run = place.shared / "tuned"
    shutil.rmtree(run, ignore_errors=True)
    tune(place, *FULL, run=str(run))
    nothing = ("--optim.lr", "1e-12", "--steps", "11")
    tune(place, *nothing, run="untouched", shown=False)
    before, after = held_out(place.folder / "untouched"), held_out(run)
    fell = after < 0.95 * before
    place.need(fell, "loss on held-out answers", f"{before:.3f} -> {after:.3f}")
    learned = answers_learned(place)
    place.need(learned, "only the answers and their end tokens are targets")
    tune(place, *FULL[:2], "--steps", "40", *FULL[4:], run="half", shown=False)
    resumed = ["train", "--work-dir", "half", "--steps", "80"]
    place.run([sys.executable, "-m", "mjax", *resumed], shown=None)
    same = losses(place.folder / "half") == losses(run)
    place.need(
        same, "stopped after 40 of 80 steps and resumed: the same losses, bit for bit"
    )


def answers_learned(place: Place) -> bool:
    """Return whether the targets of all samples are the answers, each with its end
    token.
    """
    data = DataConfig(
        path=(str(place.folder / "chats.jsonl"),),
        format="chat",
        chat_template=str(place.folder / "chat.jinja"),
        seq_len=SEQ_LEN,
        held_out_fraction=HELD_OUT,
        cache_dir=str(place.folder / "cache"),
    )
    dataset = open_dataset(data, seed=0)
    train, held = dataset.train, dataset.held_out
    learned: list[str] = []
    # The first epoch, in one batch, and all held-out samples.
    for rows in (train.rows(0, train.num_samples), held.rows(np.arange(len(held)))):
        ids = rows["targets"][rows["targets"] >= 0]
        ends = np.flatnonzero(ids == dataset.tokenizer.eos_id)
        pieces = np.split(ids, ends + 1)[:-1]
        learned += [dataset.tokenizer.decode(piece[:-1]) for piece in pieces]
    lines = (place.folder / "chats.jsonl").read_text().splitlines()
    answers = [json.loads(line)["messages"][1]["content"] for line in lines]
    return sorted(learned) == sorted(answers)


def adapters(place: Place) -> None:
    """Task 22: LoRA."""
    prepare(place)
    run = place.shared / "lora"
    shutil.rmtree(run, ignore_errors=True)
    said = tune(place, *ADAPTERS, run=str(run))
    found = re.search(r"are trained \(([\d.]+)% of the model\)", said)
    if found is None:
        raise TaskFailedError(f"the number of trained parameters is not told:\n{said}")
    is_small = float(found[1]) <= 10
    place.need(is_small, "trained share of the parameters", f"{found[1]}%")
    ratio = held_out(run) / held_out(place.shared / "tuned")
    place.need(ratio < 1.05, "held-out loss, LoRA / task 21", f"{ratio:.3f}")
    python = [sys.executable, "-m", "mjax", "train", *MODEL, *DATA]
    wrong = ["--lora.rank", "4", "--lora.targets", "nothing", "--work-dir", "wrong"]
    refused = place.run([*python, *wrong], shown=None, code=2).err
    place.need("nothing" in refused, "a pattern without a match is refused")


def adapter_files(place: Place) -> None:
    """Task 23: the adapter for PEFT, and merged."""
    run = str(place.shared / "lora")
    place.mjax("tune", "export", run, "adapter", "--family", "llama")
    place.mjax("ckpt", "export", run, "merged")
    tokens = np.random.default_rng(0).integers(0, 256, (2, 64)).tolist()
    folders = [str(place.shared / "base")]
    folders += [str(place.folder / name) for name in ("adapter", "merged")]
    difference, changed = place.ask(HF_PYTHON, LOGITS, *folders, json.dumps(tokens))
    place.need(
        changed > 0.01, "change of the logits by the adapter", f"by {changed:.0%}"
    )
    is_same = difference < 1e-5
    place.need(is_same, f"PEFT against merged: {LARGEST}", f"{difference:.1e}")


TASKS = (
    Task(number=21, do=fully),
    Task(number=22, do=adapters, needs=(21,)),
    Task(number=23, do=adapter_files, needs=(21, 22)),
)

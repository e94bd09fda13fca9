"""Tune a small imported model on 200 chats: `python -m scripts.tune.chats`.

Enters: nothing; a base is trained on the standard library and exported to a Hugging
Face folder, and chats are made by a rule from a seed. Leaves:
docs/benchmarks/fine_tuning.md. 2 CPU cores, below 10 CPU-minutes.

The rule: a question holds a word and a digit, and the answer is the name of the next
digit, then one of two words at random. Nobody can know the second, so that the least
loss is not zero.
"""

import dataclasses
import json
import math
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from mjax.ckpt import __main__ as ckpt_command
from mjax.ckpt import places
from mjax.ckpt.saved_step import SavedStep
from mjax.config.lora import LoraConfig
from mjax.config.train import TrainConfig, from_json, with_tokenizer
from mjax.data.dataset import Dataset, open_dataset
from mjax.data.loader import held_out_batches
from mjax.hugging_face.source import TensorSource
from mjax.layers.adapters import ADAPTERS
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.step.program import Program
from mjax.step.traced import program_of
from mjax.tune.merged import Merged
from scripts.evidence import Table, commit, run_training, write_page

NUM_CHATS = 200
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = [
    "bag",
    "cup",
    "dog",
    "egg",
    "fan",
    "gem",
    "hat",
    "ink",
    "jar",
    "key",
    "lid",
    "map",
    "net",
    "oar",
    "pen",
    "rug",
]
LAST = ("please", "thanks")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
MODEL = [
    "--recipe",
    "debug",
    "--model.window",
    "None",
    "--model.layers",
    "2",
    "--model.d-model",
    "64",
    "--model.heads",
    "4",
    "--model.d-ff",
    "128",
    "--model.block",
    "serial",
    "--model.norm",
    "rmsnorm",
    "--model.activation",
    "swiglu",
    "--model.remat",
    "none",
    "--precision.compute",
    "float32",
    "--log.sample-tokens",
    "0",
]
STEPS, HALF = 300, 150
TUNED = f"--steps {STEPS} --batch.size 8 --data.seq-len 64 --data.format chat".split()
TUNED += ["--data.held-out-fraction", "0.2", "--data.packing", "documents"]
TUNED += f"--eval.every {STEPS} --eval.batches 10 --ckpt.every {HALF}".split()
TUNED += ["--optim.name", "adamw", "--optim.warmup-steps", "10", "--seed", "3"]
RANK = 6


def chats(seed: int) -> list[dict[str, Any]]:
    """Make the chats; a pair of word and digit appears once at most."""
    draw = random.Random(seed)
    pairs = [(word, digit) for word in WORDS for digit in range(10)]
    extra = [(f"{word}s", digit) for word, digit in pairs]
    found = []
    for word, digit in draw.sample(pairs + extra, NUM_CHATS):
        answer = f"{NAMES[(digit + 1) % 10]} {draw.choice(LAST)}"
        turns = (("user", f"{word} {digit}"), ("assistant", answer))
        found.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    return found


def least_loss(dataset: Dataset) -> float:
    """Return the nats a token that the word at random costs on average."""
    counts = dataset.corpora[0].counts["held_out"]
    return counts.num_documents * math.log(2) / counts.num_targets


class Opened:
    """One saved run: its program, its data and its newest parameters."""

    def __init__(self, work_dir: Path, config: TrainConfig | None = None) -> None:
        """Open a run; `config` reads its parameters as another run's."""
        folder = places.choose(places.find(str(work_dir)), None)
        self.saved = SavedStep(epath.Path(folder))
        self.config = config or from_json(self.saved.config())
        self.dataset = open_dataset(self.config.data, seed=self.config.seed)
        self.config = with_tokenizer(self.config, self.dataset.tokenizer.vocab_size)
        sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
        self.mesh = build_mesh(sizes)
        self.program = program_of(self.config, self.mesh)
        self.params = read_params(self.saved, self.program)

    def merged(self) -> tuple[Program, Any]:
        """Return the plain program, and the parameters with adapters merged."""

        assert self.config.adapters is not None
        plain = dataclasses.replace(self.config, lora=LoraConfig())
        program = program_of(plain, self.mesh)
        source = Merged(self.saved, self.config.adapters)
        return program, read_params(source, program)


def read_params(source: TensorSource, program: Program) -> Any:
    """Read the parameters of a program from a source."""

    def read(path: Any, leaf: Any) -> jax.Array:
        name = "params." + jax.tree_util.keystr(path, simple=True, separator=".")
        return jnp.asarray(source.read(name), leaf.dtype)

    return jax.tree_util.tree_map_with_path(read, program.abstract_state.params)


def held_out_loss(program: Program, params: Any, dataset: Dataset) -> float:
    """Return nats a token of the answers of all held-out chats."""
    nll = tokens = 0.0
    for batch in held_out_batches(
        dataset.held_out, program.batch_sharding, batch_size=8, num_batches=10**6
    ):
        found = program.eval_step(params, batch)
        nll, tokens = nll + float(found["nll"]), tokens + int(found["tokens"])
    return nll / tokens


def num_trained(params: Any, only_adapters: bool) -> int:
    """Count the trained parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(
        leaf.size
        for path, leaf in leaves
        if not only_adapters or ADAPTERS in jax.tree_util.keystr(path)
    )


def first_loss(work_dir: Path) -> float:
    """Return the training loss of the first step of a run."""
    lines = (work_dir / "metrics.jsonl").read_text().splitlines()
    return next(row["loss"] for row in map(json.loads, lines) if "loss" in row)


def last_loss(work_dir: Path) -> float:
    """Return the training loss of the last step of a run."""
    lines = (work_dir / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row][-1]


def train_all(folder: Path) -> None:
    """Train the base, export it, and tune it in both ways; resume one of them."""
    run_training(
        *MODEL,
        *[
            "--steps",
            "400",
            "--batch.size",
            "8",
            "--data.seq-len",
            "64",
            "--eval.batches",
            "20",
        ],
        *[
            "--data.path",
            "stdlib",
            "--optim.lr",
            "1e-2",
            "--eval.every",
            "400",
            "--ckpt.every",
            "400",
        ],
        *("--work-dir", str(folder / "base")),
    )
    code = ckpt_command.main(["export", str(folder / "base"), str(folder / "hf")])
    assert code == 0
    lines = [json.dumps(chat) + "\n" for chat in chats(7)]
    (folder / "chats.jsonl").write_text("".join(lines))
    (folder / "chat.jinja").write_text(TEMPLATE)
    read = ["--data.path", str(folder / "chats.jsonl")]
    read += ["--data.chat-template", str(folder / "chat.jinja")]
    shared = [*MODEL, *TUNED, *read, "--init-from", str(folder / "hf")]
    run_training(*shared, "--optim.lr", "2e-3", "--work-dir", str(folder / "full"))
    lora = [*shared, "--optim.lr", "5e-3", "--lora.rank", str(RANK)]
    run_training(*lora, "--work-dir", str(folder / "lora"))
    again = folder / "again"
    shutil.copytree(folder / "lora", again)
    place = places.find(str(again))
    shutil.rmtree(place.store.path(STEPS))
    run_training(*lora, "--work-dir", str(again))


def main() -> None:
    """Train, compare and write the page."""
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_all(folder)
        full, lora = Opened(folder / "full"), Opened(folder / "lora")
        again = Opened(folder / "again")
        base = Opened(folder / "base", full.config)
        data = lora.dataset
        losses = {
            kind: held_out_loss(run.program, run.params, data)
            for kind, run in (("base", base), ("full", full), ("lora", lora))
        }
        plain, merged = lora.merged()
        tokens = np.stack([data.held_out[i]["tokens"] for i in range(8)])
        logits = [
            np.asarray(program.next_token_logits(params, tokens, 40))[:, :257]
            for program, params in ((lora.program, lora.params), (plain, merged))
        ]
        difference = float(np.abs(logits[0] - logits[1]).max())
        pairs = zip(
            jax.tree.leaves(lora.params), jax.tree.leaves(again.params), strict=True
        )
        is_same = all(bool((a == b).all()) for a, b in pairs)
        trained = {
            "base": 0,
            "full": num_trained(full.params, False),
            "lora": num_trained(lora.params, True),
        }
        rows = []
        for kind, label in (
            ("base", "base, untouched (null model)"),
            ("full", "all parameters"),
            ("lora", f"LoRA, rank {RANK}, all linear layers"),
        ):
            fall = (losses["base"] - losses[kind]) / (losses["base"] - losses["full"])
            seen = "" if kind == "base" else f"{first_loss(folder / kind):.3f}"
            end = "" if kind == "base" else f"{last_loss(folder / kind):.3f}"
            share = trained[kind] / trained["full"]
            count = f"{trained[kind]} ({share:.1%})"
            ratio = losses[kind] / losses["full"]
            rows.append(
                (
                    label,
                    count,
                    seen,
                    end,
                    f"{losses[kind]:.4f}",
                    f"{ratio:.3f}",
                    f"{fall:.1%}",
                )
            )
        num_chats = data.corpora[0].counts
        sides = num_chats["train"].num_documents, num_chats["held_out"].num_documents
        write_page(
            "fine_tuning",
            "Fine-tuning a small imported model on 200 chats",
            "python -m scripts.tune.chats",
            [
                Table(
                    title="Loss on answers",
                    text=(
                        f"At {commit()}. {sides[0]} chats are trained on, {sides[1]} "
                        "are held out. Nats a token of the answers, the end of the "
                        f"turn included. The least possible is {least_loss(data):.4f}: "
                        "one word of each answer is drawn at random. Of full: loss on "
                        "held-out answers against that of training all parameters; the "
                        "bound is 1.05 with a tenth of the parameters. Fall: what is "
                        "gained on the untouched base, likewise."
                    ),
                    header=(
                        *("trained", "parameters", "first step", "last step"),
                        *("held out", "of full", "fall"),
                    ),
                    rows=rows,
                ),
                Table(
                    title="Merged and resumed",
                    text="Of the LoRA run.",
                    header=("what", "found", "bound"),
                    rows=[
                        (
                            "largest difference of logits, merged and not",
                            f"{difference:.1e}",
                            "1e-5",
                        ),
                        (
                            f"parameters after step {STEPS}, resumed at {HALF}",
                            "the same bits" if is_same else "other bits",
                            "the same bits",
                        ),
                    ],
                ),
            ],
        )
        print(rows, difference, is_same)


if __name__ == "__main__":
    main()

"""Tune a small imported model on 200 chats: `python -m scripts.tune.chats`.

Input: the standard library. A base is trained on the docstrings of some modules and
exported to a Hugging Face folder; chats are about functions of other modules, in the
two tasks of `docstrings`. Full training and LoRA both use the learning rate and the
number of passes that are best on validation chats. Output:
docs/benchmarks/fine_tuning.md and docs/figures/fine_tuning.png. It takes 2 CPU cores
and about 30 CPU-minutes; --for-s 300 stops after 300 s, and the same command resumes.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mjax.ckpt import __main__ as ckpt_command
from mjax.config.lora import LoraConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from mjax.hugging_face.params import open_params, read_config
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.step.traced import program_of
from scripts.evidence import run_training
from scripts.tune import curves, docstrings, report, resumed

SEQ_LEN, BATCH, PASSES, RANK = 256, 8, 60, 5
TASKS = {
    "lines": report.Task(
        seeds=(0, 1, 2),
        grid={
            "full": (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
            "lora": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        },
    ),
    "kinds": report.Task(
        seeds=(0, 1, 2, 3, 4),
        grid={
            "full": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
            "lora": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
        },
    ),
}
_MODEL = "--recipe debug --model.window None --model.rope True"
_MODEL += " --model.no-rope-interleaved --model.layers 3 --model.d-model 64"
_MODEL += " --model.heads 4 --model.d-ff 192 --model.block serial --model.norm rmsnorm"
_MODEL += " --model.activation swiglu --model.remat none --precision.compute float32"
_MODEL += f" --log.sample-tokens 0 --batch.size {BATCH} --data.seq-len {SEQ_LEN}"
MODEL = [*_MODEL.split(), "--optim.name", "adamw"]
_BASE = "--steps 2200 --optim.lr 5e-3 --optim.warmup-steps 100 --eval.every 1100"
BASE = [*_BASE.split(), "--eval.batches", "20", "--ckpt.every", "2200"]


def make_base(folder: Path, found: list[docstrings.Entry]) -> Path:
    """Train the base, unless it exists, and export it; return the export."""
    text, run, out = folder / "base.jsonl", folder / "base", folder / "hf"
    if not out.is_dir():
        lines = [json.dumps({"text": t}) + "\n" for t in docstrings.base_texts(found)]
        text.write_text("".join(lines))
        paths = ["--data.path", str(text), "--work-dir", str(run)]
        run_training(*MODEL, *BASE, *paths)
        code = ckpt_command.main(["export", str(run), str(out)])
        assert code == 0, "the base cannot be exported"
    return out


class Case:
    """One way to train: a compiled program, and the imported base in its form."""

    def __init__(self, base: Path, rank: int | None) -> None:
        """Import the base; compile nothing yet.

        Args:
          base: Hugging Face folder.
          rank: of the adapters; None trains all parameters.
        """
        _, model = read_config(base)
        config = TrainConfig(
            model=dataclasses.replace(model, remat="none"),
            precision=PrecisionConfig(compute="float32"),
            batch=BatchConfig(size=BATCH),
            data=DataConfig(seq_len=SEQ_LEN),
            init_from=str(base),
            lora=LoraConfig(rank=rank),
        )
        sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
        self._config, self._mesh = config, build_mesh(sizes)
        self._source = open_params(base, config.model)
        program = program_of(config, self._mesh)
        self.program, self.trainings = program, curves.Trainings(program)
        self.num_trained = _size(program.trained.of(program.abstract_state.params))

    def params(self, seed: int) -> Any:
        """Return the base, with adapters initialised from a seed."""
        config = dataclasses.replace(self._config, seed=seed)
        drawn = program_of(config, self._mesh).init().params
        return resumed.read_params(self._source, drawn)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


class Results:
    """Results, saved in a folder after each training."""

    def __init__(self, folder: Path) -> None:
        """Read the results of an earlier call."""
        self._folder, self._path = folder, folder / "results.json"
        exists = self._path.exists()
        self.found: dict[str, Any] = (
            json.loads(self._path.read_text()) if exists else {}
        )

    def add(self, key: str, value: Any) -> None:
        """Save one result."""
        self.found[key] = value
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")

    def keep(self, name: str, params: Any) -> None:
        """Save parameters."""
        np.savez(
            self._folder / f"{name}.npz", *map(np.asarray, jax.tree.leaves(params))
        )

    def params(self, name: str, like: Any) -> Any:
        """Return saved parameters, in the structure of others."""
        with np.load(self._folder / f"{name}.npz") as file:
            leaves = [file[f"arr_{i}"] for i in range(len(file.files))]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Chats of one task, drawn with one seed."""

    key: str
    """TASK/SEED, the prefix of the names of its results."""
    seed: int
    grid: Mapping[str, Sequence[float]]
    """Learning rates of each kind of training."""


class Experiment:
    """All trainings, one draw of chats at a time."""

    def __init__(self, folder: Path, for_s: float | None) -> None:
        """Prepare; the base is made if it does not exist.

        Args:
          folder: keeps base and results.
          for_s: seconds after which nothing new is started.
        """
        self._end_s = None if for_s is None else time.monotonic() + for_s
        self._entries = docstrings.entries()
        self.folder, self.base = folder, make_base(folder, self._entries)
        self.results = Results(folder)
        self.cases = {"full": Case(self.base, None), "lora": Case(self.base, RANK)}

    def run(self) -> bool:
        """Run the missing trainings; return whether all are done."""
        for name, task in TASKS.items():
            for seed in task.seeds:
                chats = docstrings.chats(self._entries, name, seed)
                draw = Draw(key=f"{name}/{seed}", seed=seed, grid=task.grid)
                for step in (self._grid, self._shuffled, self._held_out):
                    for _ in step(draw, chats):
                        if self._end_s is not None and time.monotonic() > self._end_s:
                            return False
        return True

    def _samples(self, chats: Any) -> Any:
        return curves.samples_of(chats, docstrings.TEMPLATE, SEQ_LEN)

    def _batches(self, chats: Any) -> curves.Batches:
        samples = self._samples(chats)
        return curves.batches_of(samples, np.arange(len(samples)), BATCH, padded=True)

    def _train(self, draw: Draw, chats: Any, kind: str, lr: float, way: str) -> None:
        case, beginning = self.cases[kind], f"{draw.key}/{way}"
        started = time.process_time()
        curve, params = case.trainings.train(
            case.params(draw.seed),
            self._samples(chats["training"]),
            self._batches(chats["validation"]),
            lr=lr,
            passes=PASSES,
            seed=draw.seed,
            batch_size=BATCH,
        )
        least = min(curve.validation)
        others = [
            min(value["validation"])
            for other, value in self.results.found.items()
            if other.startswith(f"{beginning}/")
        ]
        if least < min(others, default=np.inf):
            self.results.keep(beginning.replace("/", "-"), params)
        cpu_s = round(time.process_time() - started, 1)
        key = f"{beginning}/{lr:g}"
        self.results.add(key, {**dataclasses.asdict(curve), "cpu_s": cpu_s})
        print(
            f"{key}: {least:.4f} after {curve.best} passes, {cpu_s} CPU-s", flush=True
        )

    def _grid(self, draw: Draw, chats: Any) -> Any:
        for kind, rates in draw.grid.items():
            for lr in reversed(rates):
                if f"{draw.key}/{kind}/{lr:g}" not in self.results.found:
                    yield self._train(draw, chats, kind, lr, kind)

    def _shuffled(self, draw: Draw, chats: Any) -> Any:
        lr, _ = report.chosen(self.results.found, draw.key, "full")
        if f"{draw.key}/shuffled/{lr:g}" not in self.results.found:
            wrong = docstrings.shuffled(chats["training"], draw.seed)
            shuffled = {**chats, "training": wrong}
            yield self._train(draw, shuffled, "full", lr, "shuffled")

    def _held_out(self, draw: Draw, chats: Any) -> Any:
        """Evaluate the held-out chats, after all choices are made."""
        key = f"{draw.key}/held-out"
        if key in self.results.found:
            return
        batches = self._batches(chats["held-out"])
        full = self.cases["full"]
        losses = {"base": full.trainings.loss(full.params(draw.seed), batches)}
        for way in ("full", "lora", "shuffled"):
            case = self.cases["lora" if way == "lora" else "full"]
            like = case.program.abstract_state.params
            name = f"{draw.key}/{way}".replace("/", "-")
            losses[way] = case.trainings.loss(self.results.params(name, like), batches)
        training = self._batches(chats["training"])
        losses["unigram"] = curves.unigram_loss(training["targets"], batches["targets"])
        yield self.results.add(key, losses)


def main() -> None:
    """Run the experiment or a part of it; write the page when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="keeps results")
    parser.add_argument("--for-s", type=float, help="stop after so many seconds")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    options.work_dir.mkdir(parents=True, exist_ok=True)
    experiment = Experiment(options.work_dir, options.for_s)
    if not experiment.run():
        print("not done; the same command goes on from here")
        return
    found = experiment.results.found
    if "resumed" not in found:
        chats = docstrings.chats(docstrings.entries(), "lines", 0)["training"]
        lr, _ = report.chosen(found, "lines/0", "lora")
        flags = [*MODEL, "--init-from", str(experiment.base), "--optim.lr", str(lr)]
        flags += ["--lora.rank", str(RANK)]
        experiment.results.add(
            "resumed", resumed.compare(options.work_dir, chats, flags)
        )
    params = {kind: case.num_trained for kind, case in experiment.cases.items()}
    report.write(found, TASKS, params, RANK, PASSES)


if __name__ == "__main__":
    main()

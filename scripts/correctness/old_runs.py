"""Make five small runs, and continue, generate from, export and evaluate them.

    python -m scripts.correctness.old_runs make FOLDER
    python -m scripts.correctness.old_runs use FOLDER > results.json
    python -m scripts.correctness.old_runs compare OTHER_CHECKOUT

`tests/old_runs` holds the runs that mjax f0052866 made (`make`), and what f0052866
computed from them (`use`). A test repeats `use` with the present code. `compare`
repeats it with both checkouts in one environment and expects the same bits.

`--root CHECKOUT` runs the code of another checkout. Each run is used in a process of
its own, with the fewest optimisations of XLA, because compiling takes most of the time.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OLD_RUNS = ROOT / "tests" / "old_runs"
NUM_STEPS, NUM_MORE = 10, 5
TINY = (
    "--recipe debug --model.d-model 16 --model.heads 2 --model.d-ff 32 "
    "--data.seq-len 64 --log.sample-tokens 4 --no-keep-compiled "
    f"--eval.every {NUM_STEPS} --ckpt.every {NUM_STEPS}"
)
TEXT = "--data.path data"
CHATS = "--data.path chats.jsonl --data.chat-template chat.jinja --data.format chat"
RUNS = {
    "plain": (1, f"{TINY} {TEXT}"),
    "chat": (1, f"{TINY} {CHATS}"),
    "lora": (1, f"{TINY} {CHATS} --init-from base --lora.rank 2"),
    "launcher": (1, f"{TINY} {TEXT}"),
    "pipeline": (
        4,
        f"{TINY} {TEXT} --model.layers 4 --mesh.pp 2 --mesh.tp 2 "
        "--batch.microbatches 2",
    ),
}
"""Name -> number of simulated devices, flags of the trainer."""
LAUNCH = ["--hosts", "2", "--"]
UNREAD = ("plots", "starts", "training.lock", "launch")
"""What `make` removes from a run: pictures, and names of the machine."""


def make(folder: Path, root: Path) -> None:
    """Make the runs and their data in a new folder with the checkout at root."""
    (folder / "data").mkdir(parents=True)
    _write_data(folder)
    _train(["--steps", "2", *f"{TINY} {TEXT}".split()], "base_run", 1, folder, root)
    _run(["-m", "mjax.ckpt", "export", "runs/base_run", "base"], folder, root)
    for name, (num_devices, flags) in RUNS.items():
        words = ["--steps", str(NUM_STEPS), *flags.split()]
        _train(words, name, num_devices, folder, root)
        for unread in UNREAD:
            path = folder / "runs" / name / unread
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(folder / "runs" / "base_run")
    shutil.rmtree(folder / "cache")


def use(folder: Path, root: Path, names: list[str]) -> dict[str, Any]:
    """Continue each run in a copy of folder; return what was computed.

    Returns:
      By run: losses of the next steps, in hexadecimal, and SHA-256 of their batches;
      tokens of a greedy continuation; mean loss of the held-out batches; SHA-256 of
      each exported tensor.
    """
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory() as parent:
            copy = Path(parent) / "copy"
            shutil.copytree(folder, copy)
            if name == "launcher":
                more = ["--steps", str(NUM_STEPS + NUM_MORE)]
                _train(more, name, RUNS[name][0], copy, root)
            words = [str(Path(__file__)), "worker", str(copy), "--run", name]
            results[name] = json.loads(_run(words, copy, root).splitlines()[-1])
    return results


def compare(folder: Path, root: Path) -> list[str]:
    """Return the results that differ between this checkout and the one at root."""
    names = list(RUNS)
    old, new = (use(folder, r, names) for r in (root.resolve(), ROOT))
    return [
        f"{name}: {key}: {old[name][key]} there, {new[name].get(key)} here"
        for name in names
        for key in old[name]
        if old[name][key] != new[name].get(key)
    ]


def _train(
    words: list[str], name: str, num_devices: int, folder: Path, root: Path
) -> None:
    words = [*words, "--work-dir", f"runs/{name}"]
    words += ["--simulate-devices", str(num_devices)]
    program = ["-m", "mjax.launch", *LAUNCH] if name == "launcher" else None
    _run([*(program or ["-m", "mjax.train"]), *words], folder, root)


def _run(words: list[str], folder: Path, root: Path) -> str:
    env = os.environ | {
        "PYTHONPATH": str(root),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True
    )
    if result.returncode != 0:
        raise RuntimeError(
            f"{' '.join(words)} ended with {result.returncode}:\n"
            f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        )
    return result.stdout


def _write_data(folder: Path) -> None:
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "red birds"]
    for index in range(24):
        text = " ".join(rng.choices(words, k=rng.randint(5, 120)))
        (folder / "data" / f"{index:02}.txt").write_text(text + ".\n")
    with (folder / "chats.jsonl").open("w") as file:
        for n in range(60):
            question, answer = f"{n} + {n % 7}", str(n + n % 7)
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    (folder / "chat.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )


def worker(name: str) -> dict[str, Any]:
    """Use one run of the working directory; in a process of its own."""
    import jax

    jax.config.update("jax_num_cpu_devices", RUNS[name][0])
    from mjax import train
    from mjax.ckpt import __main__ as ckpt
    from mjax.evaluate import __main__ as evaluate
    from mjax.generate import __main__ as generate
    from mjax.tune import __main__ as tune

    run, step = f"runs/{name}", ["--step", str(NUM_STEPS)]
    last = NUM_STEPS + NUM_MORE
    if name != "launcher":
        _call(train.main, ["--work-dir", run, "--steps", str(last)])
    rows = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    prompt = ["--prompt", "12 + 5 the ", "--tokens", "16", "--temperature", "0"]
    text = _call(generate.main, [run, *step, *prompt, "--json"])
    score = _call(evaluate.main, [run, *step, "--held-out", "--json"])
    _call(ckpt.main, ["export", run, "exported", *step])
    if name == "lora":
        _call(tune.main, ["export", run, "adapters", *step])
    return {
        "losses": [losses[n].hex() for n in range(NUM_STEPS + 1, last + 1)],
        "batches": _batches(Path(run)),
        "generated": json.loads(text)["answers"][0]["tokens"],
        "held_out_loss": json.loads(score)["loss"],
        "tensors": _tensors(Path("exported")) | _tensors(Path("adapters")),
    }


def _call(main: Any, words: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    if code not in (0, None):
        raise RuntimeError(f"{words} ended with {code}: {out.getvalue()}")
    return out.getvalue()


def _batches(run: Path) -> list[str]:
    """SHA-256 of the arrays of each of the next batches."""
    from mjax.config.train import from_json
    from mjax.data.dataset import open_dataset

    config = from_json((run / "config.json").read_text())
    stream = open_dataset(config.data, seed=config.seed).train
    digests = []
    for step in range(NUM_STEPS, NUM_STEPS + NUM_MORE):
        rows = stream.rows(step, config.batch.size)
        arrays = b"".join(rows[key].tobytes() for key in sorted(rows))
        digests.append(hashlib.sha256(arrays).hexdigest())
    return digests


def _tensors(folder: Path) -> dict[str, str]:
    """SHA-256 of each tensor of the safetensors files in a folder, by file and name."""
    digests = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items()):
            first, end = tensor["data_offsets"]
            piece = data[start + first : start + end]
            digests[f"{path.name} {name}"] = hashlib.sha256(piece).hexdigest()
    return digests


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.correctness.old_runs")
    parser.add_argument("command", choices=("make", "use", "compare", "worker"))
    parser.add_argument("path", type=Path, help="folder; compare: other checkout")
    parser.add_argument("--root", type=Path, default=ROOT, help="of another checkout")
    parser.add_argument("--run", choices=list(RUNS), action="append", help="only this")
    args = parser.parse_args(argv)
    names = args.run or list(RUNS)
    if args.command == "make":
        make(args.path, args.root.resolve())
    elif args.command == "use":
        print(json.dumps(use(args.path, args.root.resolve(), names), indent=1))
    elif args.command == "worker":
        print(json.dumps(worker(names[0])))
    else:
        differences = compare(OLD_RUNS, args.path)
        print("\n".join(differences) or "the same bits")
        return int(bool(differences))
    return 0


if __name__ == "__main__":
    sys.exit(main())

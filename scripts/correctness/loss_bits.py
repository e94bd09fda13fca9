"""Print the losses of the debug recipe on four meshes, to the last bit.

    python -m scripts.correctness.loss_bits [--root CHECKOUT] [--json]

The proof of a change that must not change a number: run it before and after, compare
the output. Each mesh is a command of its own, with simulated devices; a loss is printed
as the hexadecimal float of its row in metrics.jsonl.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MESHES = {
    "one device": (1, ""),
    "dp8": (8, "--mesh.dp 8"),
    "tp8": (8, "--mesh.tp 8"),
    "pp2 x dp2 x tp2": (
        8,
        "--mesh.pp 2 --mesh.dp 2 --mesh.tp 2 --batch.microbatches 2 --model.layers 4",
    ),
}


def losses(root: Path, num_devices: int, flags: str, num_steps: int) -> list[str]:
    """Train with the checkout at root; return the loss of each step.

    Raises:
      RuntimeError: the run failed; the message has its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = (
            f"-m mjax.train --recipe debug --steps {num_steps} --seed 0 "
            f"--simulate-devices {num_devices} {flags} --work-dir {folder}/run"
        )
        # Nothing compiled by another checkout: its cache is left aside.
        env = os.environ | {"XDG_CACHE_HOME": folder, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=root,
            env=env,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
        rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(row)["loss"].hex() for row in rows]
    if len(found) != num_steps:
        raise RuntimeError(f"{command} wrote {len(found)} rows for {num_steps} steps")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.correctness.loss_bits")
    parser.add_argument("--root", type=Path, default=ROOT, help="of another checkout")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    if not (args.root / "mjax").is_dir():
        parser.error(f"--root {args.root} has no folder mjax; name a checkout of it")
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    found = {}
    for name, (num_devices, flags) in MESHES.items():
        found[name] = losses(args.root.resolve(), num_devices, flags, args.steps)
        if not args.json:
            print(f"{name:16} {' '.join(found[name])}", flush=True)
    if args.json:
        print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

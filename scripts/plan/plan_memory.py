"""Compare the planned memory of a compiled step with that of a process.

    python -m scripts.plan.plan_memory

The planner's figure is the compiler's: arguments, outputs that do not alias an
argument, temporaries and code. Here the step of a recipe is compiled for one CPU device
and run, each case in a fresh process, and the growth of that process is measured: from
before the state is created to its peak. Writes docs/benchmarks/plan_memory.md; exits
with 1 if a growth differs by more than 10% from the figure. Linux only: it reads
/proc/self.
"""

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mjax.config.command_line import parse
from mjax.config.train import TrainConfig
from mjax.mesh.axes import resolve
from mjax.mesh.build import build_mesh
from mjax.plan.compile import CompiledMemory, read_memory
from mjax.recipes import RECIPES
from mjax.step.program import Program
from mjax.step.traced import program_of
from scripts.evidence import REPOSITORY, Table, write_page

MAX_ERROR = 0.1
NUM_STEPS = 3
FREED_S = 2.0
"""Wait for the runtime, which frees arrays on its own threads after their release."""
CASES = (
    "--recipe gpt-125m --batch.size 1 --data.seq-len 256",
    "--recipe gpt-125m --batch.size 4 --data.seq-len 512 --model.remat none",
)
"""Small batches, so that a step takes seconds. The peak is the parameter update in the
first case and the activations in the second.
"""

# ------------------------------------------------------------------- what is measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """Memory of a process in bytes, and the compiler's figure."""

    figure: CompiledMemory
    birth: CompiledMemory
    """Memory of the program that makes the state; it is freed before the first step."""
    before: int
    """Resident memory after compilation, before the state."""
    peak: int
    """Peak resident memory from then to the end of the last step."""
    after: int
    """Resident memory after the state is deleted."""

    @property
    def ratio(self) -> float:
        """Growth over figure."""
        return (self.peak - self.before) / self.figure.total_bytes


def measure(config: TrainConfig) -> Growth:
    """Run steps in this process, which must not have run anything else.

    The step is compiled before the state exists: the compiler's memory is not the
    step's, and its freed memory is returned first, or the state would reuse it unseen.
    """
    mesh = build_mesh(resolve(config.mesh, 1), jax.devices("cpu")[:1])
    program = program_of(config, mesh)
    step = program.trace().lower().compile()
    make_state = jax.jit(program.init).lower().compile()
    batch = jax.block_until_ready(_batch(program, config.model.vocab_size))
    _release()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is reset here
    _take_steps(make_state, step, batch)
    peak = _resident("VmHWM")
    time.sleep(FREED_S)
    _release()
    return Growth(
        figure=read_memory(step),
        birth=read_memory(make_state),
        before=before,
        peak=peak,
        after=_resident("VmRSS"),
    )


def measure_alone(flags: str) -> Growth:
    """Measure the run that flags of the trainer describe, in a fresh process.

    Raises:
      RuntimeError: it failed; the message has what it said.
    """
    done = subprocess.run(
        [sys.executable, "-m", "scripts.plan.plan_memory", *flags.split()],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{flags} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    figures = {name: CompiledMemory(**found.pop(name)) for name in ("figure", "birth")}
    return Growth(**figures, **found)


def _take_steps(make_state: Any, step: Any, batch: Mapping[str, jax.Array]) -> None:
    """Make a state, train it, and release it."""
    state = jax.block_until_ready(make_state())
    for _ in range(NUM_STEPS):
        state, metrics = jax.block_until_ready(step(state, batch))
        if not np.isfinite(metrics["loss"]):
            raise RuntimeError(f"the loss must be finite, got {metrics['loss']}")


def _batch(program: Program, vocab_size: int) -> Mapping[str, jax.Array]:
    """Draw tokens; every row is one document."""
    rows, length = program.abstract_batch["tokens"].shape
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, length + 1))
    fields = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": np.zeros((rows, length)),
        "positions": np.broadcast_to(np.arange(length), (rows, length)),
    }
    return {
        name: jax.device_put(x.astype(np.int32), program.batch_sharding)
        for name, x in fields.items()
    }


def _release() -> None:
    """Return the C library's free memory to the system."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _resident(name: str) -> int:
    """Read resident memory of this process: VmRSS is current, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this needs Linux")


# --------------------------------------------------------------------------- the page

HEADER = (
    *("flags", "state and batch", "temporaries", "figure", "state's birth"),
    *("resident before", "at the peak", "growth", "growth / figure", "left at the end"),
)


def row(flags: str, found: Growth) -> tuple[str, ...]:
    """Write a row, in MB."""
    sizes = (
        *(
            found.figure.argument_bytes,
            found.figure.temporary_bytes,
            found.figure.total_bytes,
        ),
        *(found.birth.total_bytes, found.before, found.peak, found.peak - found.before),
    )
    left = _mb(found.after - found.before)
    return (f"`{flags}`", *map(_mb, sizes), f"{found.ratio:.3f}", left)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f}"


def write(results: Mapping[str, Growth]) -> Path:
    """Write the page."""
    table = Table(
        title="One CPU device",
        text=f"""MB (10^6 bytes), one fresh process a row. *Figure* is what the planner
counts of an executable: arguments (state and batch) + outputs - what of them is written
in the place of arguments + temporaries + code, from the compiler's memory analysis.
*Growth* is resident memory at its peak less that before the state's birth. The step and
the program that makes the state are compiled before, and what the compiler has freed is
given back to the system (`malloc_trim`); then the kernel's peak counter is reset, the
state is made, and {NUM_STEPS} steps are taken. Bound: within {MAX_ERROR:.0%}
of the figure.

In the growth and not in the figure: what the matrix library packs while it multiplies,
stacks of threads, pages of programs and libraries that are read when they first run.
*Left at the end* is what of these stays when the state is gone; the rest is given back.
The program that makes the state needs less than a step, so the peak is a step's.""",
        header=HEADER,
        rows=[row(flags, found) for flags, found in results.items()],
    )
    return write_page(
        "plan_memory",
        "The memory of a step: what is planned, what a process takes",
        "python -m scripts.plan.plan_memory",
        [table],
    )


def main(argv: Sequence[str]) -> int:
    """Measure one run in this process if flags are given, or all; write the page."""
    if argv:
        config, _ = parse(argv, RECIPES, "python -m scripts.plan.plan_memory")
        print(json.dumps(dataclasses.asdict(measure(config))))
        return 0
    results: dict[str, Growth] = {}
    for flags in CASES:
        results[flags] = found = measure_alone(flags)
        print(f"{flags}: growth {found.ratio:.3f} of the figure", flush=True)
    print(f"wrote {write(results)}")
    return any(abs(found.ratio - 1) > MAX_ERROR for found in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

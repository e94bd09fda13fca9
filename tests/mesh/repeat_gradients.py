"""Call the gradients of a step again and again; run by test_simulated_devices.

python -m tests.mesh.repeat_gradients CLIENT USED CALLS [FLAGS]: on the first USED of
CLIENT simulated devices, with a pipeline unless FLAGS ask for another mesh. Prints the
number of different results. A collective that meets the wrong partner aborts the
process, blocks it, or changes a result.
"""

import sys

import jax
import numpy as np

from mjax.config.command_line import parse
from mjax.mesh.axes import resolve
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import simulate_devices
from mjax.recipes import RECIPES
from mjax.step.traced import program_of
from tests.mesh.unordered import unordered

FLAGS = """--recipe debug --model.layers 7 --model.window 3 --model.rope True
--model.d-model 36 --model.heads 6 --model.kv-heads 2 --model.head-dim 6
--model.d-ff 30 --model.norm rmsnorm --model.remat none --model.vocab-size 257
--data.path synthetic --data.seq-len 18 --batch.size 24 --batch.microbatches 2
--precision.compute float32 --mesh.pp 2 --mesh.dp -1 --zero 2 --pipeline.chunks 3
--pipeline.schedule interleaved-1f1b --pipeline.stash input --pipeline.idle compute
--pipeline.uneven-layers"""
"""A program whose backward loop has a permute and six reduce-scatters, independent of
each other: unordered, it fails in the first two calls."""


def main(client: int, used: int, calls: int, flags: list[str]) -> None:
    simulate_devices(client)
    config, _ = parse([*FLAGS.split(), *flags], RECIPES, "repeat_gradients")
    mesh = build_mesh(resolve(config.mesh, used), jax.devices()[:used])
    program = program_of(config, mesh)
    state = program.init()
    size = config.batch.size
    stream = np.random.default_rng(0).integers(0, 257, (size, 19), np.int32)
    rows = {
        "tokens": stream[:, :-1],
        "targets": stream[:, 1:],
        "segments": np.zeros((size, 18), np.int32),
        "positions": np.tile(np.arange(18, dtype=np.int32), (size, 1)),
    }
    batch = jax.device_put(rows, program.batch_sharding)
    arguments = (state.params, state.rng, state.step, batch)
    text = program.gradients.lower(*arguments).compile().as_text()
    pairs = unordered(str(text))
    seen = set()
    for _ in range(calls):
        result = program.gradients(*arguments)
        seen.add(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(result)))
    print(f"{calls} calls, {len(seen)} results, {len(pairs)} pairs without an order")


if __name__ == "__main__":
    client, used, calls = map(int, sys.argv[1:4])
    main(client, used, calls, sys.argv[4:])

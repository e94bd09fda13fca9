"""Compare the layout of every recipe with the layouts that the search finds.

    python -m scripts.plan.tune_recipes

Prints step time, MFU and memory of the recipe, and of the fastest layouts that the
search finds with the same batch, model and precision, for the GPUs of
`mjax.recipes.TUNED_FOR`. All are modelled by the closed form: nothing is compiled, and
no device is touched. The fastest layouts were compiled too (`python -m mjax.plan` with
the flags that are printed). Those that save less than `MARGIN` of the recipe's step by
replay are in `COMPILED` and do not count. `tests/scripts/test_tune_recipes.py` fails if
another layout saves more, or if a recipe no longer fits.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from mjax.config.train import TrainConfig
from mjax.plan import closed_form
from mjax.plan.options import Topology
from mjax.plan.result import JAX_SHARE
from mjax.plan.search import Candidate, assumed, search
from mjax.plan.topology import settle, with_vocabulary
from mjax.recipes import RECIPES, TUNED_FOR

COMPILED_MEMORY = {"plain": 1.15, "pipeline": 1.55}
"""Largest ratio of the memory of a compiled program to that of the closed form, read
from programs of these recipes (2026-11, jax 0.11.2)."""
MARGIN = 0.03
"""Share of the step: a recipe keeps its simpler mesh if the search gains less."""
FIXED: dict[str, Mapping[str, Any]] = {
    "megascale-175b": {"mesh.pp": 8, "mesh.tp": 8, "pipeline.chunks": 6},
    "megascale-530b": {"mesh.pp": 35, "mesh.tp": 8, "pipeline.chunks": 3},
}
"""Settings that the paper gives for these models and the search does not change."""


type Mesh = tuple[int, int, str, int]
"""pp, tp, --mesh.tp-overlap and --zero; dp is what is left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Compiled result of the best layout of a mesh that the closed form ranks first."""

    flags: str
    """Flags that the mesh does not determine."""
    step_s: float
    """Step time by replay."""
    memory_gib: float


COMPILED: dict[str, dict[Mesh, Compiled]] = {
    "gpt-13b": {
        (1, 4, "chunks", 2): Compiled(
            flags="--batch.microbatches 4 --mesh.dp-shard 16 --model.remat core",
            step_s=4.65,
            memory_gib=51.8,
        ),
        (2, 2, "chunks", 2): Compiled(
            flags="--pipeline.chunks 5 --batch.microbatches 16 --mesh.dp-shard 16 "
            "--model.remat core",
            step_s=4.73,
            memory_gib=58.4,
        ),
        (2, 2, "off", 2): Compiled(
            flags="--pipeline.chunks 5 --batch.microbatches 16 --mesh.dp-shard 16 "
            "--model.remat core",
            step_s=4.81,
            memory_gib=58.7,
        ),
    },
    "megascale-530b": {
        (35, 8, "chunks", 2): Compiled(
            flags="--pipeline.chunks 3 --batch.microbatches 70 --model.remat core",
            step_s=12.2,
            memory_gib=71.4,
        ),
        (35, 8, "off", 2): Compiled(
            flags="--pipeline.chunks 3 --batch.microbatches 140 --mesh.dp-shard 1 "
            "--model.remat core",
            step_s=12.9,
            memory_gib=74.0,
        ),
    },
}
"""2026-11, jax 0.11.2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """A recipe on its GPUs, and the best layouts found; modelled."""

    recipe: str
    topology: Topology
    step_s: float
    mfu: float
    memory_bytes: float
    usable_bytes: int
    """Most bytes, by the closed form, of a layout of its kind."""
    found: tuple[Candidate, ...]
    """Fastest layout of each mesh that is not in `COMPILED`, fastest first."""

    @property
    def gain(self) -> float:
        """Share of the recipe's step that the best layout saves."""
        best_s = min((c.step_s for c in self.found), default=self.step_s)
        return 1 - best_s / self.step_s


def usable_bytes(topology: Topology, *, is_pipeline: bool) -> int:
    """Return the most bytes by the closed form with which a compiled program fits.

    jax takes `JAX_SHARE` of a GPU. XLA schedules a step that needs more for less memory
    and overlaps less: gpt-13b with 64.5 GiB on an H100 overlaps nothing over dp.
    """
    ratio = COMPILED_MEMORY["pipeline" if is_pipeline else "plain"]
    return round(JAX_SHARE * topology.description.memory_bytes / ratio)


def compare(recipe: str) -> Tuned:
    """Model a recipe, and search for a faster layout of the same run.

    Args:
      recipe: a name in `TUNED_FOR`.
    Raises:
      ValueError: the recipe does not divide over its GPUs.
    """
    gpu, nodes = TUNED_FOR[recipe]
    topology = Topology(gpu=gpu, nodes=nodes)
    config, sizes = settle(RECIPES[recipe](), topology)
    now = closed_form.estimate(config, sizes, topology, assumed(sizes))
    found = [
        candidate
        for candidate in _candidates(config, topology, FIXED.get(recipe, {}))
        if mesh_of(candidate) not in COMPILED.get(recipe, {})
    ]
    return Tuned(
        recipe=recipe,
        topology=topology,
        step_s=now.time.total_s,
        mfu=now.mfu,
        memory_bytes=now.memory.total_bytes,
        usable_bytes=usable_bytes(topology, is_pipeline=sizes.pp > 1),
        found=tuple(sorted(found, key=lambda candidate: candidate.step_s)),
    )


def _candidates(
    config: TrainConfig, topology: Topology, fixed: Mapping[str, Any]
) -> Iterator[Candidate]:
    """Search with and without a pipeline, ZeRO-3, and chunks over tp."""
    kinds = itertools.product((False, True), (2, 3), ("off", "chunks"))
    for is_pipeline, zero, overlap in kinds:
        if is_pipeline and zero == 3:
            continue

        def keep(
            fields: Mapping[str, Any],
            is_pipeline: bool = is_pipeline,
            is_chunked: bool = overlap == "chunks",
        ) -> bool:
            is_kind = (fields["mesh.pp"] > 1) == is_pipeline
            is_new = fields["mesh.tp"] > 1 or not is_chunked
            return is_kind and is_new and fixed.items() <= fields.items()

        usable = usable_bytes(topology, is_pipeline=is_pipeline)
        changed = dataclasses.replace(
            config,
            zero=zero,
            mesh=dataclasses.replace(
                config.mesh, pp=1, tp_overlap=overlap, tp_chunks=None
            ),
            pipeline=dataclasses.replace(config.pipeline, chunks=1),
            device_memory_gib=usable / 2**30,
        )
        yield from search(with_vocabulary(changed), topology, keep=keep)


def mesh_of(candidate: Candidate) -> Mesh:
    """Return the entry of a layout in `COMPILED`."""
    config, sizes = candidate.config, candidate.sizes
    return sizes.pp, sizes.tp, config.mesh.tp_overlap, config.zero


def describe(tuned: Tuned, count: int = 3) -> str:
    """Write the recipe and the best layouts, one per line."""
    top = tuned.topology
    lines = [
        f"{tuned.recipe}, {top.num_gpus} x {top.gpu}, closed form: "
        f"{tuned.step_s:.4g} s, MFU {tuned.mfu:.1%}, "
        f"{tuned.memory_bytes / 2**30:.1f} of {tuned.usable_bytes / 2**30:.1f} GiB; "
        f"the search saves {tuned.gain:.1%}"
    ]
    for c in tuned.found[:count]:
        lines.append(
            f"  {c.step_s:.4g} s, {c.mfu:.1%}, {c.memory_bytes / 2**30:.1f} GiB: "
            f"{c.flags} --mesh.tp-overlap {c.config.mesh.tp_overlap} "
            f"--zero {c.config.zero}"
        )
    for (pp, tp, overlap, zero), compiled in COMPILED.get(tuned.recipe, {}).items():
        lines.append(
            f"  compiled: {compiled.step_s:.4g} s by replay, {compiled.memory_gib:.1f} "
            f"GiB: --mesh.pp {pp} --mesh.tp {tp} {compiled.flags} "
            f"--mesh.tp-overlap {overlap} --zero {zero}"
        )
    return "\n".join(lines)


def main() -> int:
    """Print all recipes; return 1 if any is too slow for the margin or does not fit."""
    worse = 0
    for recipe in TUNED_FOR:
        tuned = compare(recipe)
        print(describe(tuned))
        worse += tuned.gain > MARGIN or tuned.memory_bytes > tuned.usable_bytes
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())

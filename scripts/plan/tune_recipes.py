"""Compare the layout of every recipe with those that the search finds.

    python -m scripts.plan.tune_recipes

Prints step time, MFU and memory of the recipe, and of the fastest layouts that the
search finds with the same batch, model and precision, for the GPUs of
`mjax.recipes.TUNED_FOR`. All are modelled by the closed form: nothing is compiled, and
no device is touched. `tests/scripts/test_tune_recipes.py` fails for a tuned recipe if
the search is faster by more than `MARGIN`, or if the recipe no longer fits.
"""

import dataclasses
import sys

from mjax.plan import closed_form
from mjax.plan.options import Topology
from mjax.plan.result import usable_bytes
from mjax.plan.search import HIDDEN, Candidate, search
from mjax.plan.topology import settle, with_vocabulary
from mjax.recipes import RECIPES, TUNED_FOR

HEADROOM = 0.15
"""Share of a run's GPU memory to leave free: compiled programs of these recipes took
1.0 to 1.3 times the memory of the closed form."""
MARGIN = 0.03
"""Share of the step: a recipe keeps its simpler mesh if the search gains less."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """A recipe on its GPUs, and the best layouts that were found; modelled."""

    recipe: str
    topology: Topology
    step_s: float
    mfu: float
    memory_bytes: float
    usable_bytes: int
    """Bytes of a GPU that a run may take, less the headroom."""
    found: tuple[Candidate, ...]
    """The fastest first."""

    @property
    def gain(self) -> float:
        """Share of the recipe's step that the best layout saves."""
        return 1 - self.found[0].step_s / self.step_s


def compare(recipe: str) -> Tuned:
    """Model a recipe, and search for a faster layout of the same run.

    Args:
      recipe: a name in `TUNED_FOR`.
    Raises:
      ValueError: the recipe does not divide over its GPUs.
    """
    gpu, nodes = TUNED_FOR[recipe]
    topology = Topology(gpu=gpu, nodes=nodes)
    usable = round((1 - HEADROOM) * usable_bytes(topology, None))
    run = dataclasses.replace(RECIPES[recipe](), device_memory_gib=usable / 2**30)
    config, sizes = settle(run, topology)
    now = closed_form.estimate(config, sizes, topology, HIDDEN)
    found = [
        candidate
        for overlap in ("off", "chunks")
        for candidate in search(
            with_vocabulary(
                dataclasses.replace(
                    config,
                    mesh=dataclasses.replace(
                        config.mesh, tp_overlap=overlap, tp_chunks=None
                    ),
                )
            ),
            topology,
        )
    ]
    return Tuned(
        recipe=recipe,
        topology=topology,
        step_s=now.time.total_s,
        mfu=now.mfu,
        memory_bytes=now.memory.total_bytes,
        usable_bytes=usable,
        found=tuple(sorted(found, key=lambda candidate: candidate.step_s)),
    )


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
        overlap = c.config.mesh.tp_overlap
        lines.append(
            f"  {c.step_s:.4g} s, {c.mfu:.1%}, {c.memory_bytes / 2**30:.1f} GiB: "
            f"{c.flags} --mesh.tp-overlap {overlap}"
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

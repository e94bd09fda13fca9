"""Flags of `python -m mjax.plan`, and the cluster that they describe; without JAX."""

import dataclasses
from pathlib import Path

from mjax.cli import flags
from mjax.hardware.gpus import GPUS, Gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A cluster of equal nodes."""

    gpu: str
    """Name of the GPU in `GPUS`."""
    nodes: int
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        """Refuse a GPU without a description, and counts below 1."""
        if self.gpu not in GPUS:
            raise ValueError(
                f"--gpu {self.gpu} is not described; the nearest is "
                f"{flags.nearest(self.gpu, GPUS)} (of {', '.join(GPUS)})"
            )
        for name in ("nodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least 1, got "
                    f"{getattr(self, name)}"
                )

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def description(self) -> Gpu:
        """The description of the GPU."""
        return GPUS[self.gpu]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the planner, besides the flags of the run."""

    gpu: str = "h200"
    """GPU of the cluster: a100-80g, h100, h200 or b200."""
    nodes: int = 1
    """Nodes of the cluster; the mesh uses all of them."""
    gpus_per_node: int = 8
    """GPUs per node."""
    json: bool = False
    """Print one JSON object, and nothing else, on stdout."""
    by_source: bool = False
    """List the step's time by source, with bytes and the least time needed."""
    html: str | None = None
    """Write an HTML page with a picture of the schedule to this file."""
    search: bool = False
    """Rank meshes, virtual stages, microbatches and remat; keep the batch size."""
    search_compile: int = 3
    """With --search: number of the best layouts to compile."""
    search_window: tuple[int, ...] = ()
    """With --search: also try these attention windows."""

    def __post_init__(self) -> None:
        """Refuse an invalid cluster, and a file in a folder that does not exist."""
        _ = self.topology
        if self.search_compile < 1:
            raise ValueError(
                f"--search-compile must be at least 1, got {self.search_compile}"
            )
        if any(window < 1 for window in self.search_window):
            raise ValueError(
                "--search-window must be at least 1 (a query sees itself), got "
                f"{' '.join(map(str, self.search_window))}"
            )
        if self.html is not None and not Path(self.html).parent.is_dir():
            folder = Path(self.html).parent
            raise ValueError(
                f"--html {self.html}: there is no folder {folder}; make it"
            )
        if self.html is not None and Path(self.html).is_dir():
            raise ValueError(
                f"--html {self.html} is a folder; name a file, for example "
                f"--html {Path(self.html) / 'plan.html'}"
            )

    @property
    def topology(self) -> Topology:
        """The cluster that the flags describe."""
        return Topology(
            gpu=self.gpu, nodes=self.nodes, gpus_per_node=self.gpus_per_node
        )

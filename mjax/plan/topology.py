"""Fit a run to a cluster that is described: checks that come before any compilation.

Enters: a config and the cluster that the user names. Leaves: the config with its
vocabulary settled and the sizes of the mesh axes, or an error with the nearest number
that fits.
"""

import dataclasses
import math

from mjax import flags
from mjax.config.sizes import check_sizes
from mjax.config.train import TrainConfig, with_tokenizer
from mjax.data.tokenizers import load_tokenizer, trained_vocab_size
from mjax.hardware.gpus import GPUS, Gpu
from mjax.mesh.axes import AxisSizes, resolve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A cluster of equal nodes."""

    gpu: str
    """Name in `GPUS`."""
    nodes: int
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        """Refuse a GPU that nobody has described, and counts below one."""
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
        """GPUs in all."""
        return self.nodes * self.gpus_per_node

    @property
    def description(self) -> Gpu:
        """What is known of the GPU."""
        return GPUS[self.gpu]


def check_plannable(config: TrainConfig, topology: Topology) -> None:
    """Refuse what train takes and a plan cannot answer for.

    Args:
      config: the run, as its flags say.
      topology: the cluster.
    Raises:
      ValueError: idle stages are skipped, or a run may take more than the GPU has.
    """
    if config.pipeline.idle == "skip":
        raise ValueError(
            "--pipeline.idle skip makes every slot of the pipeline a choice, and the "
            "planner does not count how often each is taken; plan with "
            "--pipeline.idle compute, or auto"
        )
    asked, gib = config.device_memory_gib, topology.description.memory_bytes / 2**30
    if asked is not None and asked > gib:
        raise ValueError(
            f"--device-memory-gib {asked:g} is more than the {gib:.1f} GiB of --gpu "
            f"{topology.gpu}; give less, or leave it out"
        )


def settle(config: TrainConfig, topology: Topology) -> tuple[TrainConfig, AxisSizes]:
    """Check that a run fits a cluster; no corpus is read and no device touched.

    Args:
      config: the run, as its flags say.
      topology: the cluster; the mesh takes all of it.
    Returns:
      The config with the vocabulary of its tokenizer (of one that is still to be
      trained, the size that it is to have), and the sizes of the mesh axes.
    Raises:
      ValueError: the mesh does not fill the cluster, a tensor-parallel group leaves its
        node, a size does not divide, or the tokenizer cannot be read.
    """
    config = with_vocabulary(config)
    _check_fills(config, topology)
    sizes = resolve(config.mesh, topology.num_gpus)
    _check_tp(config, sizes, topology)
    check_sizes(config, sizes)
    return config, sizes


def with_vocabulary(config: TrainConfig) -> TrainConfig:
    """Settle the vocabulary without reading a corpus.

    Args:
      config: the run; a tokenizer that it trains is taken to reach the size asked for.
    Raises:
      ValueError: the tokenizer cannot be read, or the model's vocabulary is too small.
    """
    data = config.data
    num_tokens = trained_vocab_size(data.tokenizer)
    if num_tokens is None:
        tokenizer = load_tokenizer(data.tokenizer, eos_token=data.eos_token)
        num_tokens = tokenizer.vocab_size
    return with_tokenizer(config, num_tokens)


def _check_fills(config: TrainConfig, topology: Topology) -> None:
    """Refuse a number of nodes that the mesh cannot fill exactly."""
    mesh = config.mesh
    asked = {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp}
    fixed = math.prod(size for size in asked.values() if size != -1)
    is_open = -1 in asked.values()
    num_gpus, per_node = topology.num_gpus, topology.gpus_per_node
    if num_gpus % fixed == 0 and (is_open or num_gpus == fixed):
        return
    axes = " x ".join(f"{name} {size}" for name, size in asked.items() if size != -1)
    takes = f"a multiple of {fixed}" if is_open else f"{fixed}"
    problem = (
        f"--nodes {topology.nodes} of {per_node} GPUs are {num_gpus}, and the mesh "
        f"{axes} takes {takes}"
    )
    step = math.lcm(fixed, per_node) // per_node
    if is_open:
        nodes = max(1, round(topology.nodes / step)) * step
        raise ValueError(f"{problem}; the nearest that fits: --nodes {nodes}")
    if fixed % per_node == 0:
        fix = f"--nodes {fixed // per_node}"
    else:
        fix = f"--nodes 1 --gpus-per-node {fixed}"
    raise ValueError(f"{problem}; give {fix}, or --mesh.dp -1 to take what is left")


def _check_tp(config: TrainConfig, sizes: AxisSizes, topology: Topology) -> None:
    """Refuse a tensor-parallel group across nodes, as `build_mesh` does."""
    per_node, tp = topology.gpus_per_node, sizes.tp
    if config.mesh.tp_across_hosts or per_node % tp == 0:
        return
    divisors = [d for d in range(1, per_node + 1) if per_node % d == 0]
    nearest = min(divisors, key=lambda d: abs(d - tp))
    raise ValueError(
        f"--mesh.tp {tp} puts a tensor-parallel group on several nodes of {per_node} "
        f"GPUs; the nearest that fits: --mesh.tp {nearest}, or accept slow links with "
        "--mesh.tp-across-hosts"
    )

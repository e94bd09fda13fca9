"""Model the time of a kernel and of a collective on a described GPU.

Input: counts (FLOPs, bytes). Output: seconds. Modelled, never measured: the peaks come
from the GPU's description (`hardware.gpus`, with sources). The fraction of each peak
that is reached and the cost of a launch are assumed; they are fields of `CostModel`.

- matmul: max(FLOPs / (peak x rate x efficiency), bytes / (memory x efficiency)) +
  launch (a roofline: Williams et al. 2009, doi:10.1145/1498765.1498785). The rate is 1
  for 16 bits, 1/2 for float32 (TF32) and 2 for 8 bits (NVIDIA H200 data sheet).
- kernel whose FLOPs the caller knows (attention): the same formula, with another
  efficiency.
- any other kernel: bytes / (memory x efficiency) + launch, with the bytes that it must
  read and write (`work.moved_bytes`).
- copy between GPU and host: bytes / (host link x efficiency) + launch.
- collective among n devices: launch + ceil(log2 n) x hop + max(bytes / (node link x
  efficiency), bytes / (k x network x efficiency)), where bytes is what one device sends
  and the second term counts only between nodes. k is the number of members of a group
  per node: the ring passes each node once, and k rings share the bytes, one through the
  network card of each member (Hu et al. 2025, arXiv:2507.04786, on NCCL).
"""

import dataclasses
import math

from mjax.hardware.gpus import Gpu
from mjax.plan.hlo.analysis import Collective, Tier
from mjax.plan.hlo.work import Work
from mjax.plan.host_copies import LINK_EFFICIENCY

_RATES = {"bf16": 1.0, "f16": 1.0, "f32": 0.5, "s8": 2.0}
"""Speed of a matmul relative to bfloat16, by the dtype of its operands."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Speeds of one GPU, and the fractions of them that are reached.

    The fractions are for single kernels of a schedule. In
    `mjax.estimate.formulas.case.Constants` they are for whole layers, with the work
    around their kernels, so they differ; both are assumed. A hop is a level of a tree
    here, but a step of a ring there.
    """

    peak_flops_per_s: float
    """Peak of dense bfloat16 matmuls."""
    memory_bytes_per_s: float
    node_link_bytes_per_s: float
    """Per GPU, one direction."""
    network_bytes_per_s: float
    """Per GPU, one direction."""
    host_link_bytes_per_s: float
    """Per GPU, one direction."""
    product_efficiency: float = 0.75
    """Fraction of the peak that a large matmul reaches. Assumed."""
    kernel_efficiency: float = 0.6
    """Fraction of the peak that attention reaches, forward and backward together.
    Assumed: forward alone reaches 0.75 (Shah et al. 2024, arXiv:2407.08608, figure
    5)."""
    memory_efficiency: float = 0.85
    """Fraction of the memory bandwidth. Assumed."""
    node_link_efficiency: float = 0.8
    """Fraction of the node link's bandwidth. Assumed."""
    network_efficiency: float = 0.9
    """Fraction of the network bandwidth. Assumed."""
    host_link_efficiency: float = LINK_EFFICIENCY
    """Fraction of the bandwidth of the link to the host. Assumed."""
    launch_s: float = 3e-6
    """Seconds added to each kernel. Assumed."""
    collective_launch_s: float = 4e-6
    """Seconds added to each collective. Assumed."""
    node_hop_s: float = 1e-6
    """Latency between two GPUs of a node. Assumed."""
    network_hop_s: float = 5e-6
    """Latency between two nodes. Assumed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_efficiency") and not 0 < value <= 1:
                raise ValueError(
                    f"{field.name} must be above 0 and at most 1, got {value}; it is a "
                    "share of a peak"
                )
            if field.name.endswith("_per_s") and not value > 0:
                raise ValueError(f"{field.name} must be positive, got {value}")
            if not value >= 0:
                raise ValueError(f"{field.name} must be at least 0, got {value}")

    @classmethod
    def of(cls, gpu: Gpu, **changes: float) -> "CostModel":
        """Create a cost model with the speeds of a described GPU.

        Args:
          gpu: the GPU.
          changes: fields that differ from the defaults.
        """
        speeds = {
            "peak_flops_per_s": float(gpu.peak_bf16_flops_per_s),
            "memory_bytes_per_s": float(gpu.memory_bytes_per_s),
            "node_link_bytes_per_s": float(gpu.node_link_bytes_per_s),
            "network_bytes_per_s": float(gpu.network_bytes_per_s),
            "host_link_bytes_per_s": float(gpu.host_link_bytes_per_s),
        }
        return cls(**(speeds | changes))

    def memory_s(self, num_bytes: int) -> float:
        """Return the seconds of a memory-bound kernel."""
        speed = self.memory_bytes_per_s * self.memory_efficiency
        return num_bytes / speed + self.launch_s

    def host_copy_s(self, num_bytes: int) -> float:
        """Return the seconds of a copy between GPU and host."""
        speed = self.host_link_bytes_per_s * self.host_link_efficiency
        return num_bytes / speed + self.launch_s

    def product_s(self, work: Work, num_bytes: int) -> float:
        """Return the seconds of a matmul, or of a fusion that contains one.

        Raises:
          ValueError: the matmul rate for the dtype of its operands is not known.
        """
        dtype = work.product_dtype or ""
        rate = 2.0 if dtype.startswith("f8") else _RATES.get(dtype)
        if rate is None:
            raise ValueError(
                f"the speed of matmuls in {dtype} is not known; known are "
                f"{', '.join(_RATES)} and f8*"
            )
        speed = self.peak_flops_per_s * rate * self.product_efficiency
        return max(work.flops / speed + self.launch_s, self.memory_s(num_bytes))

    def kernel_s(self, flops: int | float, num_bytes: int) -> float:
        """Return the seconds of a kernel whose FLOPs the caller knows."""
        speed = self.peak_flops_per_s * self.kernel_efficiency
        return max(flops / speed + self.launch_s, self.memory_s(num_bytes))

    def collective_s(self, collective: Collective) -> float:
        """Return the seconds of a collective that does not share its links."""
        sent = collective.wire_bytes
        steps = math.ceil(math.log2(collective.group_size))
        link_s = sent / (self.node_link_bytes_per_s * self.node_link_efficiency)
        hop_s = self.node_hop_s
        if collective.tier == "network":
            cards = collective.group_size_in_node * self.network_bytes_per_s
            link_s = max(link_s, sent / (cards * self.network_efficiency))
            hop_s = self.network_hop_s
        return self.collective_launch_s + steps * hop_s + link_s

    def links_s(self, collective: Collective) -> dict[Tier, float]:
        """Return the seconds that a collective occupies each kind of link it uses.

        A collective inside a node occupies the node links. A collective between nodes
        occupies the network for its whole duration. If members of a group share a
        node, its ring also occupies the node links, but only for the time that they
        take to carry its bytes.
        """
        seconds = self.collective_s(collective)
        if collective.tier == "node":
            return {"node": seconds}
        if collective.group_size_in_node == 1:
            return {"network": seconds}
        speed = self.node_link_bytes_per_s * self.node_link_efficiency
        return {"node": collective.wire_bytes / speed, "network": seconds}

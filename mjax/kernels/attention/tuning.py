"""Tuned sizes of the attention backends, with hardware and date."""

import dataclasses
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedTuning:
    """Sizes for the blocked backend."""

    block: int
    """Number of queries and of keys per tile; a shorter sequence is a single tile."""

    def __post_init__(self):
        if self.block < 1:
            raise ValueError(f"block must be at least 1, got {self.block}; use 64")


BLOCKED_CPU = BlockedTuning(block=64)
"""Timed on a 2-core x86 CPU (AVX2), 2026-11. Of 32, 64, 128 and 256 this size is the
fastest, or within noise of the fastest, for forward + backward with B 1-32, T 128-2048,
H 32-64, float32 and bfloat16, full causal and window T / 4."""

BLOCKED_GPU = BlockedTuning(block=256)
"""Not tuned on a GPU. The tile is larger than on a CPU, because each loop iteration
launches several kernels that need enough work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicKernel:
    """Sizes for one kernel of mosaic_gpu."""

    warpgroups: int = 2
    """Number of compute warpgroups in a thread block. Each computes 64 rows of the
    result, unless `splits_width` is set."""
    block: int
    """Number of keys (dkv and fused: of queries) in a block. The kernel loads one block
    at a time."""
    stages: int = 2
    """Number of these blocks that fit in the ring buffer in shared memory."""
    splits_width: bool = False
    """For dkv: the two warpgroups share 64 rows and split the width (`dkv_wide`)."""

    def __post_init__(self):
        if self.warpgroups not in _REGISTERS:
            raise ValueError(
                f"warpgroups must be one of {', '.join(map(str, _REGISTERS))}, "
                f"got {self.warpgroups}; use 2"
            )
        if self.block != 32 and (self.block < 64 or self.block % 64):
            raise ValueError(
                f"block must be 32 or a multiple of 64, got {self.block}; use 64 or 128"
            )
        if self.stages < 2:
            raise ValueError(
                f"stages must be at least 2, got {self.stages}; with one, nothing is "
                "loaded while the rest computes"
            )
        if self.splits_width and self.warpgroups != 2:
            raise ValueError(f"splits_width is for 2 warpgroups, got {self.warpgroups}")

    @property
    def tile(self) -> int:
        """Rows of the result that a thread block computes."""
        return 64 * (1 if self.splits_width else self.warpgroups)

    @property
    def registers(self) -> int:
        """Number of registers of a thread in a compute warpgroup."""
        return _REGISTERS[self.warpgroups]


# The compute warpgroups and the loading warpgroup, of 128 threads each, share 65,536
# registers; a loading thread keeps 24. As in FlashAttention-3
# (hopper/flash_fwd_kernel_sm90.h).
_REGISTERS = {2: 240, 3: 160}


LEAST_STAGES = MappingProxyType({"forward": 2, "dq": 3, "dkv": 2})
"""Kernel -> least number of stages. dq waits for the next block before it releases the
previous one, so with two buffer entries it would deadlock at the third block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicTuning:
    """Sizes for the kernels of mosaic_gpu."""

    forward: MosaicKernel
    dq: MosaicKernel
    dkv: MosaicKernel
    fused: MosaicKernel | None = None
    """Sizes of the fused kernel, which replaces dq and dkv and is not deterministic;
    None uses dq and dkv."""
    value_dim: int | None = None
    """Hv; None means the width of queries and keys."""

    def __post_init__(self):
        for name, least in LEAST_STAGES.items():
            if (stages := getattr(self, name).stages) < least:
                raise ValueError(
                    f"{name}.stages must be at least {least}, got {stages}; with fewer "
                    f"the kernel would never end; use {least + 1}"
                )
        # The forward kernel writes the log-sum-exp of whole tiles of queries. The last
        # block of queries of dkv must not extend beyond the last tile: it would read
        # uninitialised memory, and a NaN there would reach the gradients of every key.
        if self.forward.tile % self.dkv.block:
            raise ValueError(
                f"dkv.block must divide the {self.forward.tile} rows of a forward "
                f"tile (64 x forward.warpgroups), got {self.dkv.block}; use 64"
            )
        fused = self.fused
        if fused is not None and (fused.block, fused.warpgroups) != (64, 2):
            raise ValueError(
                "fused.block must be 64, the queries of one matrix multiplication for "
                f"dq, and fused.warpgroups 2, got {fused.block} and {fused.warpgroups}"
            )


MOSAIC_H200 = MappingProxyType(
    {
        32: MosaicTuning(
            forward=MosaicKernel(warpgroups=3, block=128),
            dq=MosaicKernel(warpgroups=3, block=64, stages=4),
            dkv=MosaicKernel(block=64, stages=3),
        ),
        64: MosaicTuning(
            forward=MosaicKernel(warpgroups=3, block=128),
            dq=MosaicKernel(warpgroups=3, block=64, stages=4),
            dkv=MosaicKernel(block=64, stages=3),
        ),
        96: MosaicTuning(
            forward=MosaicKernel(block=128),
            dq=MosaicKernel(block=64, stages=4),
            dkv=MosaicKernel(block=64, stages=3),
        ),
        128: MosaicTuning(
            forward=MosaicKernel(block=128),
            dq=MosaicKernel(block=64, stages=4),
            dkv=MosaicKernel(block=64, stages=3),
        ),
        192: MosaicTuning(
            forward=MosaicKernel(block=128),
            dq=MosaicKernel(block=64, stages=3),
            dkv=MosaicKernel(block=32, stages=3),
            value_dim=128,
        ),
        256: MosaicTuning(
            forward=MosaicKernel(block=64),
            dq=MosaicKernel(block=32, stages=3),
            dkv=MosaicKernel(block=64, splits_width=True),
        ),
    }
)
"""Head width -> sizes. Not tuned on a GPU. These are the largest blocks that compile
for an H200 without spilling registers, with jax 0.11.2, 2026-11
(scripts/kernels/kernel_table.py). dq and dkv release a buffer entry one block late, and
dq also starts the next block early. So that a load is always in flight, dkv has three
buffer entries and dq has four. Registers allow only one thread block per SM, so there
is enough shared memory for these entries.

At widths 192/128 (queries and keys / values) and 256, shared memory and registers are
scarce. So dq has only three entries, and dkv at 256 only two. At 256, blocks of 64 keys
in dq would leave room for only one buffer entry each of K and V, so the blocks have 32
keys. At 192/128, blocks of 64 queries in dkv would spill registers, so they have 32
queries.
"""

FUSED_H200 = MappingProxyType({128: MosaicKernel(block=64, stages=3)})
"""Head width -> `MosaicTuning.fused`, only for widths at which the fused kernel is
forecast to shorten the backward pass by 10% (docs/benchmarks/attention_forecast.md).
Not tuned; as many buffer entries as fit in shared memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSplit:
    """Rule for splitting the query heads of a key head over thread blocks in dkv.

    Without a split, the thread block of a tile of keys and a key head walks over all
    query heads of the group in sequence, and its sums stay in registers. With only one
    or two key heads on a GPU there are few thread blocks. The longest walk of a thread
    block then takes several times as long as the mean load of a multiprocessor, which
    is the sum of all walks divided by the number of multiprocessors. With a split, each
    part of the group has its own thread block. The float32 sums of the parts go through
    global memory, and a second pass adds them.
    """

    multiprocessors: int
    least_load: float
    """Least ratio of the mean load of a multiprocessor to the longest walk of a thread
    block."""
    least_load_documents: float
    """The same ratio with packed documents. The lengths of documents are unknown at
    compile time; walks are shorter than without documents, and differ more."""

    def __post_init__(self):
        if self.multiprocessors < 1:
            raise ValueError(
                f"multiprocessors must be at least 1, got {self.multiprocessors}; an "
                "H200 has 132"
            )
        if not 0 < self.least_load <= self.least_load_documents:
            raise ValueError(
                "least_load must be above 0 and at most least_load_documents, got "
                f"{self.least_load} and {self.least_load_documents}; use 0.9 and 1.8"
            )

    def parts(self, *, longest: int, total: int, group: int, documents: bool) -> int:
        """Return the number of equal parts of the query heads of a key head.

        This is the smallest number that reaches the ratio, because adding the parts
        costs memory and time.

        Args:
          longest: longest walk of a thread block with the whole group, in any unit.
          total: sum of the walks of all thread blocks, in the same unit.
          group: query heads of a key head.
          documents: whether there are packed documents.
        """
        least = self.least_load_documents if documents else self.least_load
        able = [n for n in range(1, group + 1) if group % n == 0]
        load = total / self.multiprocessors
        return next((n for n in able if load * n >= least * longest), group)


DKV_SPLIT = GroupSplit(multiprocessors=132, least_load=0.9, least_load_documents=1.8)
"""For H100 (SXM) and H200, not tuned on a GPU. A simulation of 2026-11
(scripts/kernels/schedule.py) compared the number of parts that this rule chooses with
all other numbers. Without documents, no other number is more than 1% faster for any of
20 shapes. With documents of log-normal lengths, the chosen number is the fastest for 9
of 11 shapes. For each of the other two shapes another number is faster, by 5% for one
and by 24% for the other (mean length of documents 256)."""

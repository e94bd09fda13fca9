"""Tuned numbers of the attention backends, with where and when they were tuned."""

import dataclasses
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedTuning:
    """Sizes for the blocked backend."""

    block: int
    """Queries, and keys, per tile; a shorter sequence is a single tile."""

    def __post_init__(self):
        if self.block < 1:
            raise ValueError(f"block must be at least 1, got {self.block}; use 64")


BLOCKED_CPU = BlockedTuning(block=64)
"""2-core x86 CPU (AVX2), 2026-11: among 32, 64, 128 and 256 the fastest forward +
backward, or within noise of it, for B 1-32, T 128-2048, H 32-64, float32 and
bfloat16, full causal and window T / 4."""

BLOCKED_GPU = BlockedTuning(block=256)
"""Not tuned: no GPU was measured. Larger than on CPU, because each loop step launches
several kernels and must give them enough work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicKernel:
    """Sizes for one kernel of mosaic_gpu."""

    warpgroups: int = 2
    """Compute warpgroups of a thread block; each has 64 rows of the result."""
    block: int
    """Rows of the other sequence (keys, for dkv queries) that are loaded at a time."""
    stages: int = 2
    """Such blocks in shared memory at a time."""
    splits_width: bool = False
    """Of dkv: the two warpgroups share 64 rows and split the width (`dkv_wide`)."""

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
        """Rows of the result of a thread block."""
        return 64 * (1 if self.splits_width else self.warpgroups)

    @property
    def registers(self) -> int:
        """Registers of a thread that computes."""
        return _REGISTERS[self.warpgroups]


# 65,536 registers for the compute warpgroups and one that loads, of 128 threads each;
# the loading one keeps 24. As in FlashAttention-3 (hopper/flash_fwd_kernel_sm90.h).
_REGISTERS = {2: 240, 3: 160}


LEAST_STAGES = MappingProxyType({"forward": 2, "dq": 3, "dkv": 2})
"""dq waits for the next block before it releases the one before, so that with two slots
it would wait for ever from the third block on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicTuning:
    """Sizes for the kernels of mosaic_gpu."""

    forward: MosaicKernel
    dq: MosaicKernel
    dkv: MosaicKernel
    fused: MosaicKernel | None = None
    """Of the kernel that takes the place of dq and dkv and is not deterministic; None:
    it does not."""
    value_dim: int | None = None
    """Hv; None is the width of queries and keys."""

    def __post_init__(self):
        for name, least in LEAST_STAGES.items():
            if (stages := getattr(self, name).stages) < least:
                raise ValueError(
                    f"{name}.stages must be at least {least}, got {stages}; with fewer "
                    f"the kernel would never end; use {least + 1}"
                )
        # The forward kernel writes the log-sum-exp of whole tiles of queries. The last
        # block of queries of dkv must end there: what it read beyond would be whatever
        # the memory holds, and a NaN goes into the gradients of every key.
        if self.forward.tile % self.dkv.block:
            raise ValueError(
                f"dkv.block must divide the {self.forward.tile} rows of a forward "
                f"tile (64 x forward.warpgroups), got {self.dkv.block}; use 64"
            )
        fused = self.fused
        if fused is not None and (fused.block, fused.warpgroups) != (64, 2):
            raise ValueError(
                "fused takes blocks of 64 queries, the rows of one product for dq, and "
                f"2 warpgroups, got {fused.block} and {fused.warpgroups}"
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
"""By head width. Not tuned on a GPU. The largest blocks that compile for an
H200 without spilling registers, jax 0.11.2, 2026-11 (scripts/kernels/kernel_table.py);
a third slot for dq and dkv, which release one a block late, and a fourth for dq, which
begins with the next block early: with fewer, nothing would be on its way meanwhile.
Registers allow one thread block on an SM, so the memory is free.

At 192/128 (queries and keys / values) and 256 memory and registers are short: blocks of
64 keys in dq at 256 would leave room for one slot of K and of V each, so they have 32;
blocks of 64 queries in dkv at 192/128 would spill, and have 32 too."""

FUSED_H200 = MappingProxyType({128: MosaicKernel(block=64, stages=3)})
"""`MosaicTuning.fused` by head width, where the forecast says that it takes 10% off the
backward pass (docs/benchmarks/attention_forecast.md). Not tuned; as many slots as
shared memory holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSplit:
    """When dkv divides the query heads of a key head among thread blocks.

    A thread block for each tile of keys and key head walks the query heads of the group
    in series, and no sum leaves it. With one or two key heads on a GPU the longest of
    these walks takes several times as long as the mean load of a multiprocessor. Parts
    of the group have thread blocks of their own; their float32 sums go through global
    memory, and another pass adds them up.
    """

    multiprocessors: int
    least_load: float
    """Mean load of a multiprocessor, over the longest walk of a thread block."""
    least_load_documents: float
    """The same where there are packed documents, whose lengths are not known when the
    kernel is compiled: walks are then shorter than without, and less equal."""

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
        """Return into how many equal parts the query heads of a key head go.

        The fewest for which the load suffices: each costs memory and time to add up.

        Args:
          longest: walk of a thread block that has the whole group, in any unit.
          total: sum of the walks of all thread blocks, same unit.
          group: query heads of a key head.
          documents: whether there are packed documents.
        """
        least = self.least_load_documents if documents else self.least_load
        able = [n for n in range(1, group + 1) if group % n == 0]
        load = total / self.multiprocessors
        return next((n for n in able if load * n >= least * longest), group)


DKV_SPLIT = GroupSplit(multiprocessors=132, least_load=0.9, least_load_documents=1.8)
"""For H100 (SXM) and H200, not tuned on a GPU. By simulation, 2026-11
(scripts/kernels/schedule.py), no other number of parts is more than 1% faster for 20
shapes without documents, and none is faster for 9 of 11 with documents of log-normal
lengths (the others: 5%, and 24% where the mean length is 256)."""

"""Forecast the speed of an attention kernel from its compiled loops.

Input: machine code, two constants. Output: clocks of a step (one
block of the loop), and microseconds of a call.

The constants are the `slowness` of a warp alone (see `sm_model`) and the share of the
data sheet's clock that the GPU sustains under this load. Both are fitted to the two
speeds of FlashAttention-3's ablation (`published`), modelled with the instructions of
our forward loop, which runs the same algorithm.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from mjax.hardware.gpus import GPUS, Gpu
from mjax.kernels.attention.tuning import MosaicKernel
from scripts.kernels import (
    attention_loops,
    block_grid,
    loop_program,
    loop_variants,
    published,
    sass,
    schedule,
    sm_model,
)
from scripts.kernels.attention_shapes import Shape
from scripts.kernels.sm_model import Counts, Program, Work

_MODEL_US = 1e-3 / sm_model.CLOCK_GHZ
"""Microseconds of a clock at the clock rate of the data sheet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """The two fitted numbers."""

    slowness: float
    sustained: float
    """Sustained clock rate over that of the data sheet."""

    def us(self, clocks: float) -> float:
        """Convert clocks to microseconds at the sustained rate."""
        return clocks * _MODEL_US / self.sustained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """Properties of a kernel that are known without running it."""

    head_dim: int
    tile: int
    block: int
    warpgroups: int
    plain: Program
    """An iteration of the loop without a mask."""
    masked: Program
    blocks: float = 1.0
    """Blocks of the other sequence in an iteration."""
    loaded_bytes: float
    """Bytes loaded by the copy engine for a block."""
    added_bytes: float = 0.0
    """Bytes that the copy engine adds to sums in global memory for a block."""

    def counts(self, program: Program) -> Counts:
        """Count the clocks of each resource of an SM for one block."""
        whole = sm_model.counts(
            program,
            warpgroups=self.warpgroups,
            loaded_bytes=self.loaded_bytes * self.blocks,
            added_bytes=self.added_bytes * self.blocks,
        )
        fields = dataclasses.asdict(whole)
        return Counts(**{name: c / self.blocks for name, c in fields.items()})

    def step_clocks(self, constants: Constants, *, masked: bool = False) -> float:
        """Return the clocks of a block, all warpgroups together."""
        program = self.masked if masked else self.plain
        own = sm_model.clocks_per_round(
            program, warpgroups=self.warpgroups, slowness=constants.slowness
        )
        return max(own / self.blocks, self.counts(program).most)

    def masked_cost(self, constants: Constants) -> float:
        """Return the clocks of a masked block over those of a plain block."""
        plain = self.step_clocks(constants)
        return max(1.0, self.step_clocks(constants, masked=True) / plain)


def causal_shape(head_dim: int, seq_len: int) -> Shape:
    """Return the shape of a published speed: a fixed number of tokens and heads x H."""
    heads = published.HIDDEN // head_dim
    return Shape(
        name=f"{head_dim}, T {seq_len}",
        batch=published.TOKENS // seq_len,
        seq_len=seq_len,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
    )


def read_kernels(printed: str, case: str) -> dict[str, Kernel]:
    """Read the kernels of a case, by name, from the output of jax."""
    width, _, *warpgroups = case.split(":")
    codes = attention_loops.kernels(printed)
    kernels = {}
    for name, code in codes.items():
        sizes = schedule.sizes_of(name, int(width))
        if warpgroups:
            sizes = dataclasses.replace(sizes, warpgroups=int(warpgroups[0]))
        kernels[name] = _read(code, name, int(width), sizes)
    return kernels


def _read(code: str, name: str, head_dim: int, sizes: MosaicKernel) -> Kernel:
    programs = [loop_program.program(body) for body in sass.loop_bodies(code)]
    by_length = sorted(programs, key=_instructions)
    rows = sizes.tile // sizes.warpgroups
    one = schedule.PRODUCTS[name] * 2.0 * rows * sizes.block * head_dim
    return Kernel(
        head_dim=head_dim,
        tile=sizes.tile,
        block=sizes.block,
        warpgroups=sizes.warpgroups,
        plain=by_length[0],
        masked=by_length[-1],
        blocks=loop_program.flops(by_length[0]) / one,
        # K and V, or queries and cotangents, in 16 bits.
        loaded_bytes=2.0 * 2 * sizes.block * head_dim,
        added_bytes=4.0 * sizes.block * head_dim if name == "fused" else 0.0,
    )


def _instructions(program: Program) -> float:
    return math.fsum(p.clocks["issue"] for p in program if isinstance(p, Work))


def call_us(
    kernel: Kernel,
    name: str,
    shape: Shape,
    constants: Constants,
    *,
    order: str = "shipped",
) -> float:
    """Return the microseconds of one of our kernels on an H200.

    Args:
      kernel: loops of the kernel.
      name: a key of `schedule.PRODUCTS`.
      shape: shape of the call.
      constants: the fitted constants.
      order: order of the thread blocks, from `schedule.ORDERS`.
    """
    sizes = schedule.sizes_of(name, shape.head_dim)
    # Tiles are those of the shipped kernel; a longer tile counts in part.
    clocks = kernel.step_clocks(constants) * sizes.tile / kernel.tile
    found = schedule.outcomes(
        shape,
        name,
        step=constants.us(clocks),
        masked_cost=kernel.masked_cost(constants),
    )
    outcome = found[order]
    return max(outcome.makespan_us, outcome.read_us)


def delta_us(shape: Shape) -> float:
    """Return the microseconds of the row sums of output times cotangent on an H200."""
    num_bytes = 2 * 2.0 * shape.batch * shape.seq_len * shape.heads * shape.head_dim
    return memory_us(num_bytes)


def memory_us(num_bytes: float, gpu: Gpu = GPUS["h200"]) -> float:
    """Return the microseconds in which an H200's memory moves these bytes."""
    return num_bytes / gpu.memory_bytes_per_s * 1e6


def flash3(forward: Kernel, dkv: Kernel, *, causal: bool, backward: bool) -> Kernel:
    """Return FlashAttention-3 of a head width, with the work per score of our loops.

    Sizes: hopper/flash_fwd_launch_template.h of 2024-07-30 (commit 5018ac6a of its
    repository) and hopper/flash_bwd_launch_template.h.
    """
    H = forward.head_dim
    if not backward:
        tile, block, warpgroups = (192, 128, 3) if H == 64 else (128, 128, 2)
        if H == 128 and not causal:
            block = 176
        plain = loop_variants.scaled(
            forward.plain, block / forward.block / forward.blocks
        )
        loaded, added = 2.0 * 2 * block * H, 0.0
    else:
        tile, warpgroups = 128, 2
        block = 128 if H == 64 else 64 if causal else 80
        plain = loop_variants.backward(
            dkv.plain,
            scores=round(dkv.blocks * 64 * dkv.block),
            queries=block,
            keys=tile,
            width=H,
            warpgroups=warpgroups,
            fused=True,
        )
        # Queries and cotangents in, float32 sums of dQ out.
        loaded, added = 2.0 * 2 * block * H, 4.0 * block * H
    return Kernel(
        head_dim=H,
        tile=tile,
        block=block,
        warpgroups=warpgroups,
        plain=plain,
        masked=plain,
        loaded_bytes=loaded,
        added_bytes=added,
    )


def flash3_us(
    kernel: Kernel,
    constants: Constants,
    *,
    batch: int,
    seq_len: int,
    heads: int,
    causal: bool,
    backward: bool,
    fixed_us: float = schedule.FIXED_US,
) -> float:
    """Return the microseconds of FlashAttention-3 on an H100.

    Its forward grid is persistent. Its backward pass has two more kernels: one reads
    output and cotangent and clears the sums of dQ, the other rounds these sums.
    """
    blocks = math.ceil(seq_len / kernel.block)
    num_tiles = math.ceil(seq_len / kernel.tile)
    steps = [blocks] * num_tiles
    if causal:
        steps = [
            min(blocks, math.ceil((t + 1) * kernel.tile / kernel.block))
            for t in reversed(range(num_tiles))
        ]
    step_us = constants.us(kernel.step_clocks(constants))
    work = [n * step_us for n in steps for _ in range(batch * heads)]
    hidden = 0.0 if backward else schedule.HIDDEN
    end_us = block_grid.makespan(work, fixed_us=fixed_us * (1 - hidden))
    entries = float(batch * seq_len * heads * kernel.head_dim)
    gpu = GPUS["h100"]
    if not backward:
        return max(end_us, memory_us(4 * 2 * entries, gpu))
    around_us = memory_us((2 + 2 + 4 + 4 + 2) * entries, gpu)
    return max(end_us, memory_us((6 * 2 + 4) * entries, gpu)) + around_us


def fitted(
    forward: Kernel, dkv: Kernel, *, fixed_us: float = schedule.FIXED_US
) -> Constants:
    """Return the constants that reproduce the ablation's two speeds.

    Args:
      forward: our forward kernel of head width 128.
      dkv: our dkv kernel of the same width.
      fixed_us: cost of a thread block that only a persistent grid overlaps.
    """
    sizes = {
        "batch": published.ABLATION_BATCH,
        "seq_len": published.ABLATION_LENGTH,
        "heads": published.ABLATION_HEADS,
    }
    flops = published.model_flops(
        **sizes, head_dim=published.ABLATION_WIDTH, causal=False, backward=False
    )
    full = flash3(forward, dkv, causal=False, backward=False)
    serial = dataclasses.replace(full, plain=loop_variants.serial(full.plain))

    def speed(kernel: Kernel, constants: Constants) -> float:
        us = flash3_us(
            kernel,
            constants,
            **sizes,
            causal=False,
            backward=False,
            fixed_us=fixed_us,
        )
        return flops / us / 1e6

    def sustained_at(slowness: float) -> Constants:
        def fast(sustained: float) -> bool:
            constants = Constants(slowness=slowness, sustained=sustained)
            return speed(full, constants) > published.ABLATION_FULL

        return Constants(slowness=slowness, sustained=_threshold(fast, 0.1, 1.5))

    def is_slow(slowness: float) -> bool:
        return speed(serial, sustained_at(slowness)) < published.ABLATION_SERIAL

    return sustained_at(_threshold(is_slow, 1.0, 2.0))


def _threshold(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least value for which a condition holds, within 0.001."""
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return (low + high) / 2


def null_share() -> float:
    """Return the published share of the peak that a constant forecast uses."""
    return published.ABLATION_FULL / peak_tflops()


def peak_tflops() -> float:
    """Return the TFLOP/s of the data sheet."""
    return sm_model.NUM_SMS * sm_model.FLOPS_PER_CLOCK * sm_model.CLOCK_GHZ / 1e3


def mean_error(forecast: Sequence[float], truth: Sequence[float]) -> float:
    """Return the mean of absolute relative errors."""
    errors = [abs(f / t - 1) for f, t in zip(forecast, truth, strict=True)]
    return math.fsum(errors) / len(errors)

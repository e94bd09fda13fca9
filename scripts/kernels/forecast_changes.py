"""Modelled gain of each change of the attention kernels.

Input: kernels as compiled before and now. Output: a table, before and after.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from scripts.evidence import Table
from scripts.kernels import kernel_speed, loop_variants, published, schedule
from scripts.kernels.attention_shapes import KERNELS, SHAPES, Shape
from scripts.kernels.kernel_speed import Constants, Kernel

LENGTHS = (2048, 16384)
_ROW_WIDTH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A kernel or a way to run it, before and after."""

    name: str
    kernel: str
    before: Kernel
    after: Kernel


def changes(
    now: Mapping[str, Kernel], before: Mapping[str, Kernel], commit: str
) -> Iterator[Change]:
    """List the changes of single kernels, for one head width."""
    H = now["dq"].head_dim
    for kernel in KERNELS:
        yield Change(
            name=f"as compiled: {commit} to now",
            kernel=kernel,
            before=before[kernel],
            after=now[kernel],
        )
    dq, dkv, forward = now["dq"], now["dkv"], now["forward"]
    serial = loop_variants.serial(forward.plain)
    yield Change(
        name="exponentials after both products, to beside the second",
        kernel="forward",
        before=dataclasses.replace(forward, plain=serial),
        after=forward,
    )
    yield Change(
        name="queries and cotangents from registers",
        kernel="dq",
        before=dq,
        after=dataclasses.replace(dq, plain=loop_variants.from_registers(dq.plain, H)),
    )
    yield Change(
        name="blocks of twice as many keys",
        kernel="dq",
        before=dq,
        after=dataclasses.replace(
            dq, plain=loop_variants.wider(dq.plain, H), blocks=2 * dq.blocks
        ),
    )
    yield Change(
        name="no barrier, dO V^T issued with the scores",
        kernel="dkv",
        before=dkv,
        after=early(dkv),
    )


def early(dkv: Kernel) -> Kernel:
    """Return dkv with both score matmuls issued at once."""
    plain = loop_variants.backward(
        dkv.plain,
        scores=round(dkv.blocks * _ROW_WIDTH * dkv.block),
        queries=dkv.block,
        keys=dkv.tile,
        width=dkv.head_dim,
        warpgroups=dkv.warpgroups,
        fused=False,
    )
    return dataclasses.replace(dkv, plain=plain, masked=plain, blocks=1.0)


def changes_table(
    now: Mapping[str, Mapping[str, Kernel]],
    before: Mapping[str, Mapping[str, Kernel]],
    constants: Constants,
    commit: str,
) -> Table:
    """Tabulate clocks per block and speed of each kernel alone, before and after."""
    rows = []
    for H in (64, 128):
        case = f"{H}:full"
        three = now.get(f"{case}:3", {})
        found = [*changes(now[case], before[case], commit)]
        found += [
            Change(
                name="three warpgroups, compiled: tiles of 192 rows",
                kernel=kernel,
                before=now[case][kernel],
                after=after,
            )
            for kernel, after in three.items()
        ]
        for change in found:
            kernels = (change.before, change.after)
            clocks = [
                kernel.step_clocks(constants) * change.before.tile / kernel.tile
                for kernel in kernels
            ]
            shared = [
                kernel.counts(kernel.plain).shared * change.before.tile / kernel.tile
                for kernel in kernels
            ]
            cells = [_pair(clocks, ".0f"), _pair(shared, ".0f")]
            for T in LENGTHS:
                shape = kernel_speed.causal_shape(H, T)
                us = [
                    kernel_speed.call_us(kernel, change.kernel, shape, constants)
                    for kernel in kernels
                ]
                cells.append(_gain(us))
            rows.append([str(H), change.kernel, change.name, *cells])
        rows += _whole_rows(H, now[case], constants)
    text = (
        "Clocks of a step, of as many rows before and after, and time of the kernel "
        "by the model, causal, 16k tokens, hidden size 2048, grid as shipped but where "
        "it says otherwise; in brackets how much less time. Changes that are not "
        "compiled are phases put together by hand, with the instructions per score of "
        "the compiled loops; whether registers suffice for them is not known. "
        "*backward*: dq, dkv and the sums of output times cotangent. *shared*: clocks "
        "of shared memory alone. A gain of 0% says that the model has the tensor cores "
        "busy either way; where shared memory is as busy (dq), a kernel will hardly "
        "reach that, and the model cannot tell what less traffic gains."
    )
    lengths = [f"us, T {T}" for T in LENGTHS]
    return Table(
        title="What changes would gain",
        text=text,
        header=["width", "kernel", "change", "clocks", "shared", *lengths],
        rows=rows,
    )


def _whole_rows(
    H: int, own: Mapping[str, Kernel], constants: Constants
) -> list[list[str]]:
    """Compare the whole backward pass, and the orders of the blocks."""
    forward_cells, backward_cells = [], []
    for T in LENGTHS:
        shape = kernel_speed.causal_shape(H, T)

        def us(name: str, is_new: bool, shape: Shape = shape) -> float:
            order = "shipped" if is_new else "by head"
            return kernel_speed.call_us(own[name], name, shape, constants, order=order)

        delta = kernel_speed.delta_us(shape)
        apart = us("dq", True) + us("dkv", True) + delta
        shipped = us("dq", False) + us("dkv", False) + delta
        forward_cells.append(_gain([us("forward", False), us("forward", True)]))
        backward_cells.append(_gain([shipped, apart]))
    return [
        [str(H), "forward", "blocks: by head to shipped", "", "", *forward_cells],
        [str(H), "backward", "blocks: by head to shipped", "", "", *backward_cells],
    ]


def fused_table(now: Mapping[str, Mapping[str, Kernel]], constants: Constants) -> Table:
    """Compare the fused backward kernel with dq and dkv, by width, length and shape."""
    shapes = [
        kernel_speed.causal_shape(H, T) for H in (64, 128) for T in published.LENGTHS
    ]
    rows = []
    for shape in (*shapes, *SHAPES):
        own = now[f"{shape.head_dim}:full"]
        kernel = now.get(f"{shape.head_dim}:fused", {}).get("fused")
        is_compiled = kernel is not None
        if kernel is None:
            kernel = by_hand(own)
        delta = kernel_speed.delta_us(shape)
        apart = delta + sum(
            kernel_speed.call_us(own[name], name, shape, constants)
            for name in ("dq", "dkv")
        )
        one = kernel_speed.call_us(kernel, "fused", shape, constants)
        around = around_us(shape)
        rows.append(
            [
                str(shape.head_dim),
                shape.name,
                "compiled" if is_compiled else "by hand",
                f"{apart:.0f}",
                f"{one:.0f}",
                f"{around:.0f}",
                f"{one + around + delta:.0f}",
                f"{1 - (one + around + delta) / apart:.0%}",
            ]
        )
    text = (
        "The backward pass with dq and dkv, grids as shipped, against one kernel that "
        "does 5 matmuls instead of 7 and adds dQ to float32 sums in global memory by "
        "the copy engine, in an order that is not fixed. *by hand*: phases put "
        "together, not compiled. Counted for it: the stores of gradients of scores and "
        "of dQ to shared memory, their transposed operand, the copy engine's reads "
        "there; the additions in the L2, read and written, at the rate of plain "
        "copies; sums that leave the L2 and come back; whole steps for blocks that one "
        "warpgroup alone sees; *clear, round*: the sums are cleared before (4 bytes an "
        "entry) and read and rounded after (4 + 2), one launch more "
        f"({schedule.LAUNCH_US:.0f} us). A thread block walks all query heads of its "
        "key head: its grid is not divided as that of dkv is. Microseconds."
    )
    return Table(
        title="What the fused backward kernel gains",
        text=text,
        header=[
            "width",
            "shape",
            "loop",
            "dq and dkv",
            "fused kernel",
            "clear, round",
            "fused, all",
            "less time",
        ],
        rows=rows,
    )


def by_hand(own: Mapping[str, Kernel]) -> Kernel:
    """Return a fused kernel that is not compiled, with blocks of 64 queries counted."""
    fused = kernel_speed.flash3(own["forward"], own["dkv"], causal=True, backward=True)
    parts = fused.block / own["dkv"].block
    return dataclasses.replace(
        fused,
        block=own["dkv"].block,
        blocks=parts,
        loaded_bytes=fused.loaded_bytes / parts,
        added_bytes=fused.added_bytes / parts,
    )


def around_us(shape: Shape) -> float:
    """Return the microseconds to clear, read and round the sums of dQ, on an H200."""
    entries = float(shape.batch * shape.seq_len * shape.heads * shape.head_dim)
    return kernel_speed.memory_us((4 + 4 + 2) * entries) + schedule.LAUNCH_US


def _pair(values: list[float], form: str) -> str:
    return " to ".join(format(value, form) for value in values)


def _gain(us: list[float]) -> str:
    return f"{_pair(us, '.0f')} ({1 - us[1] / us[0]:.0%})"

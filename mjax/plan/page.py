"""Format a plan as one page of text.

Input: a `Plan`. Output: lines; modelled figures are labelled as such.
"""

from collections.abc import Iterator

import jax

from mjax.estimate.memory import in_units
from mjax.model.counts import flops_per_token, num_params
from mjax.plan.result import (
    JAX_SHARE,
    ROLES,
    SECONDS_PER_DAY,
    Communication,
    Memory,
    Modelled,
    Plan,
    label,
)


def page(plan: Plan) -> str:
    """Return the page as text."""
    parts = [
        "\n".join(_head(plan)),
        "\n".join(memory_lines(plan.memory)),
        "\n".join(communication_lines(plan.communication)),
        "\n".join(time_lines(plan)),
        "\n".join(advice_lines(plan)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def title(plan: Plan) -> str:
    """Return a line that names the run and the cluster."""
    top = plan.topology
    return (
        f"{plan.recipe} on {top.nodes} x {top.gpus_per_node} = {top.num_gpus} "
        f"{top.description.device_kind}"
    )


def _head(plan: Plan) -> Iterator[str]:
    config, sizes = plan.config, plan.sizes
    model, batch = config.model, config.batch
    yield f"plan of {title(plan)}"
    rows = batch.size // (sizes.dp * batch.microbatches)
    v = config.pipeline.chunks
    stages = f" of {v} virtual stages" if v > 1 else ""
    shards = f"dp_shard {sizes.dp_shard}"
    if sizes.dp_node > 1:
        shards = f"dp_node {sizes.dp_node} x {shards}"
    yield (
        f"mesh: pp {sizes.pp}{stages} x dp {sizes.dp} (dp_replicate "
        f"{sizes.dp_replicate} x {shards}) x tp {sizes.tp}; "
        f"ZeRO {config.zero}, remat {model.remat}"
    )
    yield (
        f"model: {num_params(model):,} parameters, "
        f"{flops_per_token(model, config.data.seq_len, config.adapters):.4g} "
        "FLOPs per token"
    )
    yield (
        f"batch: {batch.size} sequences of {config.data.seq_len} tokens, "
        f"{batch.microbatches} microbatch{'es' * (batch.microbatches > 1)} of {rows} "
        "per dp rank"
    )
    yield from plan.notes
    if plan.compile_s is not None:
        yield (
            f"compiled by jax {jax.__version__} in {plan.compile_s:.0f} s, traced in "
            f"{plan.trace_s:.0f} s; nothing ran on a GPU"
        )


def memory_lines(memory: Memory) -> Iterator[str]:
    """Yield lines: whether the step fits in memory, and the uses of the memory."""
    source = "from XLA's memory analysis"
    if not memory.is_compiled:
        source = "estimated from the traced step"
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    yield (
        f"memory: {verdict}: {in_units(memory.total)} of {in_units(memory.gpu)} a GPU "
        f"({memory.share:.0%}), {source}"
    )
    yield from (
        f"  {label(name):<24}{in_units(n):>11}" for name, n in memory.parts.items()
    )
    if memory.within:
        yield "  part of the temporaries, from the trace (not all live at once):"
        yield from (
            f"    {label(name):<22}{in_units(n):>11}"
            for name, n in memory.within.items()
        )
    for name, size in memory.host.items():
        yield f"  in pinned host memory: {name}, {in_units(size)} a GPU"
    yield f"  limit for the run: {in_units(memory.usable)}; {_share(memory)}"


def _share(memory: Memory) -> str:
    default = f"jax uses {JAX_SHARE:.0%} of a GPU by default"
    if memory.share <= JAX_SHARE or not memory.fits:
        return f"{default} (XLA_CLIENT_MEM_FRACTION)"
    needed = min(memory.usable / memory.gpu, memory.share + 0.02)
    return f"{default}: set XLA_CLIENT_MEM_FRACTION={needed:.2f}"


def communication_lines(sent: Communication | None) -> Iterator[str]:
    """Yield lines: the bytes that one GPU sends in a step, and the overlapped part."""
    if sent is None:
        yield "communication: unknown, the step was not compiled"
        return
    if not sent.traffic:
        yield "communication: none"
        return
    yield "bytes sent by one GPU per step, from the compiled program:"
    yield (
        f"  {'role':<6}{'collective':<20}{'over':<24}{'link':<9}{'dtype':<6}"
        f"{'count':>7}{'async':>7}{'sent':>11}{'overlapped':>12}"
    )
    for row in sent.traffic:
        over = f"{'+'.join(row.axes)} ({row.group_size})"
        overlapped = row.overlapped_bytes / row.num_bytes if row.num_bytes else 0.0
        yield (
            f"  {row.role:<6}{row.kind:<20}{over:<24}{row.tier:<9}{row.dtype:<6}"
            f"{row.count:>7}{row.num_async:>7}{in_units(row.num_bytes):>11}"
            f"{overlapped:>12.0%}"
        )
    shares = ", ".join(
        f"{role} {'nothing sent' if share is None else f'{share:.0%}'}"
        for role in (*ROLES, *_mixed(sent))
        for share in [sent.overlapped_fraction(role)]
    )
    yield f"  overlapped with a matmul or a kernel, by bytes: {shares}"
    yield f"  communicators: {sent.communicators} different sets of groups"


def _mixed(sent: Communication) -> list[str]:
    """Return the role of communication over several kinds of axes, if there is any."""
    return ["mixed"] if any(row.role == "mixed" for row in sent.traffic) else []


def time_lines(plan: Plan) -> Iterator[str]:
    """Yield lines: the step time and its parts."""
    modelled = plan.modelled
    tokens_per_s = modelled.tokens_per_s
    yield f"time, MODELLED by {modelled.source}; not measured:"
    yield f"  step {modelled.step_s:.4g} s"
    for name, seconds in sorted(modelled.parts_s.items(), key=lambda item: -item[1]):
        yield (
            f"    {label(name):<28}{seconds:>10.4g} s{seconds / modelled.step_s:>8.1%}"
        )
    yield f"  {_exposed(modelled)}; bubble {modelled.bubble:.1%} of the ideal time"
    peak = plan.topology.description.peak_bf16_flops_per_s
    yield f"  MFU {modelled.mfu:.1%} of {peak / 1e12:.4g} TFLOP/s a GPU"
    yield (
        f"  {tokens_per_s:,.0f} tokens/s, {tokens_per_s / plan.sizes.num_devices:,.0f} "
        f"a GPU, {tokens_per_s * SECONDS_PER_DAY / 1e9:,.2f} billion a day"
    )


def source_lines(plan: Plan) -> Iterator[str]:
    """Yield lines: the parts of the step by the purpose of their kernels."""
    if not plan.sources:
        yield "step by source: unknown, the step was not compiled"
        return
    yield "step by source, MODELLED (GB: read and written; floor: least time needed):"
    yield f"  {'source':<36}{'seconds':>10}{'share':>8}{'GB':>10}{'floor, s':>10}"
    for row in plan.sources:
        moved = "" if row.num_bytes is None else f"{row.num_bytes / 1e9:,.1f}"
        floor = "" if row.floor_s is None else f"{row.floor_s:.4g}"
        share = row.seconds / plan.modelled.step_s
        yield (
            f"  {label(row.name):<36}{row.seconds:>10.4g}{share:>8.1%}"
            f"{moved:>10}{floor:>10}"
        )


def _exposed(modelled: Modelled) -> str:
    listed = ", ".join(f"{role} {s:.3g} s" for role, s in modelled.exposed_s.items())
    return f"exposed communication: {listed}"


def advice_lines(plan: Plan) -> Iterator[str]:
    """Yield lines: the bottleneck, and the changes most likely to help."""
    if plan.bottleneck:
        yield f"bottleneck (modelled): {plan.bottleneck}"
    if not plan.advice:
        return
    yield (
        "changes most likely to help, modelled in closed form before compilation "
        "(plan with the flags to check):"
    )
    for number, advice in enumerate(plan.advice, 1):
        gain = "" if advice.gain is None else f" [{advice.gain:.1%} of the step]"
        yield f"  {number}. {advice.flags}{gain}"
        yield f"     {advice.why}"

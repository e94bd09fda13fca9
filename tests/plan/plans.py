"""Plans for the tests, put together by hand: nothing is compiled."""

import dataclasses
from typing import Any

from mjax.config.command_line import parse
from mjax.config.train import TrainConfig
from mjax.plan.options import Topology
from mjax.plan.result import (
    IDLE,
    Communication,
    Memory,
    Modelled,
    Picture,
    Plan,
    Span,
    Traffic,
    waiting,
)
from mjax.plan.topology import settle
from mjax.recipes import RECIPES

GIB = 2**30


def gpt_tp8() -> TrainConfig:
    """Return gpt-13b with each layer split over the GPUs of a node, remat full."""
    run = RECIPES["gpt-13b"]()
    return dataclasses.replace(
        run,
        zero=2,
        mesh=dataclasses.replace(run.mesh, tp=8),
        batch=dataclasses.replace(run.batch, microbatches=1),
        model=dataclasses.replace(run.model, remat="full"),
    )


RUNS = {**RECIPES, "gpt-tp8": gpt_tp8}
"""What `--recipe` may name in these tests."""


def settled(flags: str = "--recipe gpt-tp8", nodes: int = 8, gpu: str = "h200"):
    """Return config, sizes and topology of a command line."""
    topology = Topology(gpu=gpu, nodes=nodes)
    return *settle(parse(flags.split(), RUNS, "prog")[0], topology), topology


def memory(total: int = 60 * GIB, **changes: Any) -> Memory:
    found = Memory(
        parts={"parameters": 20 * GIB, "batch and temporaries": total - 20 * GIB},
        within={"gradients": 10 * GIB},
        total=total,
        is_compiled=True,
        gpu=141 * GIB,
        usable=130 * GIB,
    )
    return dataclasses.replace(found, **changes)


def modelled(**parts_s: float) -> Modelled:
    """Model a step of a second; names as in `exposed_s`, and idle."""
    exposed = {role: parts_s.get(role, 0.0) for role in ("tp", "dp", "pp")}
    idle = parts_s.get("idle", 0.0)
    parts = {waiting(role): s for role, s in exposed.items() if s} | {IDLE: idle}
    busy = 1.0 - sum(parts.values())
    return Modelled(
        source="a test",
        parts_s={"matrix products": busy} | {n: s for n, s in parts.items() if s},
        exposed_s=exposed,
        bubble=idle / (1 - idle),
        mfu=0.4,
        tokens_per_s=1e6,
    )


SENT = Communication(
    traffic=(
        Traffic(
            kind="all-gather",
            axes=("tp",),
            role="tp",
            tier="node",
            dtype="bf16",
            group_size=8,
            count=40,
            num_async=10,
            num_bytes=40 * GIB,
            overlapped_bytes=10 * GIB,
        ),
        Traffic(
            kind="reduce-scatter",
            axes=("dp_shard",),
            role="dp",
            tier="network",
            dtype="f32",
            group_size=8,
            count=4,
            num_async=4,
            num_bytes=3 * GIB,
            overlapped_bytes=2 * GIB,
        ),
    ),
    communicators=2,
)

PICTURE = Picture(
    name="body<1>",
    where="one tick of the loop over ticks",
    passes=("forward", "head and loss"),
    runs=40,
    mean_s=8e-3,
    spans=(
        Span(stream="compute", name="gemm", kind="product", start_s=0.0, stop_s=4e-3),
        Span(stream="node", name="ag", kind="tp", start_s=0.0, stop_s=6e-3),
        Span(stream="wait", name="ag", kind="tp", start_s=4e-3, stop_s=6e-3),
        Span(stream="compute", name="sum", kind="memory", start_s=6e-3, stop_s=8e-3),
    ),
)


def make_plan(
    flags: str = "--recipe gpt-tp8", nodes: int = 8, gpu: str = "h200", **changes: Any
) -> Plan:
    config, sizes, topology = settled(flags, nodes, gpu)
    plan = Plan(
        recipe="gpt-tp8",
        config=config,
        sizes=sizes,
        topology=topology,
        memory=memory(),
        communication=SENT,
        modelled=modelled(tp=0.1),
        pictures=(PICTURE,),
        trace_s=2.0,
        compile_s=30.0,
    )
    return dataclasses.replace(plan, **changes)

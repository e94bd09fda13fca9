"""Simulate FSDP, HSDP and tp 2 over networks of different speed. No GPU is involved.

    python -m scripts.plan.network_sweep

Llama 3 8B with sequences of 8192 on 128 described H100s, by the step-time model of
`mjax.estimate.formulas` with assumed constants. Writes
docs/benchmarks/network_sweep.md.
"""

import dataclasses
import sys

from mjax.estimate.formulas.case import Case, Constants, Device
from mjax.estimate.formulas.memory import memory
from mjax.estimate.formulas.step_time import simulate
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from scripts.evidence import Table, write_page

GBIT_PER_S = (100, 400, 800, 1600, 3200)
"""Network speeds of a node of 8 GPUs. AWS p3dn and p4d have the first two, p5 the
last."""
H100 = Device.of(GPUS["h100"])
CONSTANTS = Constants(dp_overlap=0.9)
"""Assumed: the defaults, with gathers and reductions during the layers' matmuls."""
BASE = Case(
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3.
    layers=32,
    d_model=4096,
    d_ff=14336,
    heads=32,
    head_width=128,
    kv_heads=8,
    gated=True,
    parallel=False,
    vocab_size=128_256,
    seq_len=8192,
    sizes=AxisSizes(pp=1, dp_replicate=1, dp_shard=128, tp=1),
    microbatches=1,
    remat="full",
    zero=3,
)
HSDP = dataclasses.replace(
    BASE, sizes=AxisSizes(pp=1, dp_replicate=16, dp_shard=8, tp=1)
)
TP_2 = dataclasses.replace(
    BASE, sizes=AxisSizes(pp=1, dp_replicate=16, dp_shard=4, tp=2), rows=2
)
LAYOUTS = {
    "FSDP, 128 shards": BASE,
    "HSDP, 8 shards": HSDP,
    "HSDP, 4 shards, tp 2": TP_2,
    "the same, remat none": dataclasses.replace(TP_2, remat="none"),
    "FSDP, 4 microbatches": dataclasses.replace(BASE, microbatches=4),
    "HSDP, 4 microbatches": dataclasses.replace(HSDP, microbatches=4),
}


def with_network(gbit_per_s: float) -> Device:
    """Return an H100 in a node with this network."""
    num_bytes = gbit_per_s * 1e9 / 8 / H100.gpus_per_node
    return dataclasses.replace(H100, network_bytes_per_s=num_bytes)


def make_table() -> Table:
    """Simulate every layout over every network."""
    rows = []
    for name, case in LAYOUTS.items():
        cells = []
        for gbit_per_s in GBIT_PER_S:
            time = simulate(case, with_network(gbit_per_s), CONSTANTS)
            cells.append(f"{1e3 * time.total_s:.0f} ({1e3 * time.dp_s:.0f})")
        held = memory(case, logits_at_once=2**27).total_bytes
        rows.append((name, *cells, f"{held / 2**30:.0f}"))
    text = (
        "Milliseconds of a simulated step, in brackets the part in which "
        "data-parallel gathers and reductions are not overlapped; columns are Gb/s "
        "per node of 8 GPUs. 128 sequences a microbatch, ZeRO-3, remat full unless "
        "stated, gradients reduced in float32. GiB, out of 80, is the estimate of "
        "`mjax.estimate.formulas.memory`. The constants are assumed and none is "
        "fitted, so only comparisons within the table mean anything. In this model "
        "the rings of a group use every card of its nodes at full rate, whatever "
        "their length. MiCS (Zhang et al. 2022, arXiv:2205.00119) addresses the lower "
        "rates of larger groups, so this model cannot reproduce its figures (99.4% "
        "weak scaling to 512 A100s, 54.5% of the peak), and we do not claim them; we "
        "do not know their batch size either."
    )
    header = ("layout", *map(str, GBIT_PER_S), "GiB")
    return Table(
        title="Llama 3 8B on 128 H100s, simulated", text=text, header=header, rows=rows
    )


def main() -> int:
    """Write the page."""
    title = "Does a fast network make HSDP unnecessary? Simulated, not run on a GPU"
    table = make_table()
    for row in table.rows:
        print(*row, sep=" | ")
    print(
        write_page(
            "network_sweep", title, "python -m scripts.plan.network_sweep", [table]
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compute which runs of Llama 3 8B fit in an H100, and compare with a published table.

    python -m scripts.plan.aws_memory

The table is from an article on AWS: sequences of 8,192 tokens, p5.48xlarge (8 H100s of
80 GB per node), and which runs fit or ended out of memory. This script compiles the
training step of each for 16 described H100s (`mjax.hardware.described`; needs `make
env-plan`), one at a time in separate processes, and reads the compiler's bytes. Writes
docs/benchmarks/aws_memory.md; exits with 1 if a cell has neither the article's outcome
nor an explanation.
"""

import dataclasses
import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax

from mjax.config.command_line import parse
from mjax.config.train import TrainConfig
from mjax.hardware.described import described_mesh
from mjax.hardware.gpus import GPUS
from mjax.kernels.cross_entropy import tuning
from mjax.mesh.axes import AxisSizes, resolve
from mjax.model.counts import num_params
from mjax.plan.compile import CompiledMemory, read_memory
from mjax.recipes import RECIPES
from mjax.step.traced import program_of
from scripts.evidence import REPOSITORY, Table, write_page

GPU = "h100"
NUM_GPUS = 16
USABLE = 0.92
"""Share of the memory that the driver reports; the rest is for CUDA's context, NCCL and
code.
"""
DEFAULT_USABLE = 0.75
"""Share that jax takes unless XLA_CLIENT_MEM_FRACTION is set."""
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""As in `python -m mjax.plan`: XLA chooses between its own GEMMs and cuBLAS by timing
both on a GPU.
"""
COMMON = (
    "--recipe llama3-8b --batch.microbatches 1 --model.attention mosaic_gpu "
    "--precision.reduce bfloat16"
)
"""cuDNN plans its kernels on the device, so our attention replaces it."""
TP2 = "--mesh.tp 2 --mesh.dp-shard 4 --batch.size 16"
HSDP = "--mesh.dp-shard 8 --batch.size 32"
HSDP_4 = "--mesh.dp-shard 8 --batch.size 64"
FSDP = "--mesh.dp-shard 16 --batch.size 32"
NONE = "--zero 2 --model.remat none"
FULL = "--zero 3 --model.remat full"
DOTS = "--zero 3 --model.remat dots"

Outcome = Literal["fits", "out of memory"]

# ------------------------------------------------------------------------ the cells


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One training step."""

    name: str
    flags: str
    """Flags of the trainer, in addition to `COMMON`."""
    article: Outcome | None = None
    """Outcome in the article; None if it has no such run."""
    whole_loss: bool = False
    """Whether the logits of all positions are computed at once, unlike ours."""
    explained: bool = False
    """Whether the page explains a different outcome."""

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The configuration of the run."""
        flags = f"{COMMON} {self.flags}".split()
        return parse(flags, RECIPES, "python -m scripts.plan.aws_memory")[0]

    @property
    def sizes(self) -> AxisSizes:
        """Sizes of the mesh axes."""
        return resolve(self.config.mesh, NUM_GPUS)

    @property
    def sequences(self) -> int:
        """Sequences of one data-parallel rank per pass: the article's micro-batch."""
        config = self.config
        return config.batch.size // self.sizes.dp // config.batch.microbatches


ARTICLE = (
    Cell(name="SMPv2, tp 2", flags=f"{TP2} {NONE}", article="fits"),
    Cell(name="HSDP", flags=f"{HSDP} {NONE}", article="out of memory"),
    Cell(name="HSDP, recompute", flags=f"{HSDP} {FULL}", article="fits"),
    Cell(
        name="HSDP, recompute",
        flags=f"{HSDP_4} {FULL}",
        article="out of memory",
        explained=True,
    ),
    Cell(name="FSDP, recompute", flags=f"{FSDP} {FULL}", article="fits"),
)
WHOLE_LOSS = (
    Cell(
        name="HSDP, recompute, loss in one piece",
        flags=f"{HSDP} {FULL}",
        whole_loss=True,
    ),
    Cell(
        name="HSDP, recompute, loss in one piece",
        flags=f"{HSDP_4} {FULL}",
        whole_loss=True,
    ),
)
OTHERS = (
    Cell(name="SMPv2, tp 2, recompute but matmuls", flags=f"{TP2} {DOTS}"),
    Cell(name="HSDP, recompute but matmuls", flags=f"{HSDP} {DOTS}"),
    Cell(
        name="HSDP, recompute, level 2", flags=f"{HSDP_4} --zero 2 --model.remat full"
    ),
    Cell(name="HSDP, recompute", flags=f"--mesh.dp-shard 8 --batch.size 128 {FULL}"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiled memory, and the cost of compiling."""

    figure: CompiledMemory
    wall_s: float
    max_resident: int
    """Resident bytes of the process that compiled."""

    @property
    def share(self) -> float:
        """Share of the GPU's memory."""
        return self.figure.total_bytes / GPUS[GPU].memory_bytes

    @property
    def outcome(self) -> Outcome:
        """Whether it fits in a GPU."""
        return "fits" if self.share <= USABLE else "out of memory"


def loss_chunks(cell: Cell) -> tuning.ChunkedTuning:
    """Return the chunks of a cell's loss: as in training, or a single one."""
    if not cell.whole_loss:
        return tuning.CHUNKED
    config = cell.config
    num_logits = config.batch.size * config.data.seq_len * config.model.padded_vocab
    return dataclasses.replace(tuning.CHUNKED, max_logits=num_logits)


def compile_cell(cell: Cell) -> Compiled:
    """Compile the step of a cell in this process."""
    jax.config.update("jax_platforms", "cpu")  # a GPU of this machine must not be used
    started_s = time.perf_counter()
    config = cell.config
    with mock.patch.object(tuning, "CHUNKED", loss_chunks(cell)):
        program = program_of(config, described_mesh(cell.sizes, gpu=GPU))
        lowered = program.trace().lower()
    found = read_memory(lowered.compile(compiler_options=COMPILER_OPTIONS))
    return Compiled(
        figure=found,
        wall_s=time.perf_counter() - started_s,
        max_resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def compile_alone(index: int) -> Compiled:
    """Compile a cell in a separate process.

    Raises:
      RuntimeError: it failed; the message has its output.
    """
    done = subprocess.run(
        [sys.executable, "-m", "scripts.plan.aws_memory", str(index)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"cell {index} ended with {done.returncode}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return Compiled(figure=CompiledMemory(**found.pop("figure")), **found)


# --------------------------------------------------------------------------- the page

Results = Mapping[Cell, Compiled]
HEADER = (
    *("run", "sequences", "flags", "state", "temporaries", "in all", "of the GPU"),
    *("at 0.92", "at 0.75"),
)


def row(cell: Cell, found: Compiled) -> tuple[str, ...]:
    """Write a row, in GB."""
    sizes = (
        found.figure.argument_bytes,
        found.figure.temporary_bytes,
        found.figure.total_bytes,
    )
    default = "fits" if found.share <= DEFAULT_USABLE else "out of memory"
    return (
        *(cell.name, str(cell.sequences), f"`{cell.flags}`"),
        *(f"{size / 1e9:.1f}" for size in sizes),
        *(f"{found.share:.0%}", found.outcome, default),
    )


def is_right(cell: Cell, found: Compiled) -> bool:
    """Return whether a cell has the article's outcome."""
    return found.outcome == cell.article


def article_table(results: Results) -> Table:
    """Write the article's cells and ours side by side."""

    def verdict(cell: Cell) -> str:
        return "same" if is_right(cell, results[cell]) else "other, see below"

    seconds = sum(found.wall_s for found in results.values())
    resident = max(found.max_resident for found in results.values())
    params = num_params(ARTICLE[0].config.model)
    no_remat, memory = results[ARTICLE[1]], GPUS[GPU].memory_bytes
    rest = (1 - USABLE) * memory
    level_3 = no_remat.figure.total_bytes - 2 * params * 7 / 8
    return Table(
        title="The article's runs",
        text=f"""GB (10^9 bytes) of one GPU, from the compiler's memory analysis of the
training step, compiled for {NUM_GPUS} described H100s; nothing ran. Every step has
`{COMMON}`.
*At {USABLE}*: whether that part of the {memory / 1e9:.1f} GB of an H100 holds it
(`XLA_CLIENT_MEM_FRACTION={USABLE}`; the rest, {rest / 1e9:.1f} GB, is assumed to
be enough for CUDA's context, NCCL's buffers and programs); *at {DEFAULT_USABLE}*: the
default of jax. *Outcome* is the one at {USABLE}.

The article states the model, 8,192 tokens without padding, p5.48xlarge, tensor
parallelism of degree 2, the sequences, whether it recomputes, and what fitted. Assumed:
two nodes, the fewest on which HSDP and FSDP differ; state sharded over a node for HSDP
(with tp 2, over 4 GPUs) and over all GPUs for FSDP. As AWS's published script for SMPv2
sets it (train_lib.py of model_parallel_v2 in aws/amazon-sagemaker-examples):
float32 parameters and AdamW, bfloat16 compute and reduction, a batch counted by
data-parallel rank. FP8, which that script can use, is off.

*Recompute* is `--model.remat full` with `--zero 3`, which is what FSDP does. Without
recompute mjax refuses level 3, which would keep all gathered weights: these rows are
`--zero 2`, with a bfloat16 copy of all parameters. HSDP without recompute runs out of
memory either way: with that copy sharded it would take {level_3 / 1e9:.0f} GB
(modelled: less 7/8 of 2 bytes a parameter).

{len(results)} compilations, one after the other: {seconds / 60:.0f} minutes, at most
{resident / 1e9:.2f} GB of memory.""",
        header=(*HEADER, "article", "outcome"),
        rows=[
            (*row(cell, results[cell]), str(cell.article), verdict(cell))
            for cell in ARTICLE
        ],
    )


def loss_table(results: Results) -> Table:
    """Describe the memory of whole logits, which our loss never holds."""
    cells = [(cell, results[cell]) for cell in (*ARTICLE[2:4], *WHOLE_LOSS)]
    modelled = {n: _least_of_article(ARTICLE[2].config, n) / 1e9 for n in (2, 4)}
    chunk = tuning.CHUNKED.max_logits
    left = GPUS[GPU].memory_bytes / 1e9 - modelled[4]
    return Table(
        title="Why four sequences fit here",
        text=f"""The largest difference is the loss. mjax computes logits in chunks of
at most 2^{chunk.bit_length() - 1} ({4 * chunk / 1e9:.1f} GB in float32)
together with their gradient. *In one piece* is the same step with one chunk:
float32 logits of all positions, and their gradient in bfloat16.

The modelling code that AWS's script wraps (Hugging Face transformers,
models/llama/modeling_llama.py, of early 2024) casts all logits to float32, copies them
without the last position, and PyTorch's cross-entropy makes their log-softmax of the
same size: 12 bytes per logit at a time. With the sharded state, the inputs of all
layers, and embedding and head gathered, that is at least
{modelled[2]:.0f} GB for two sequences
and {modelled[4]:.0f} GB for four (modelled, not measured; PyTorch's own reserve, NCCL's
buffers and gathered layers come on top). Two fit; four leave {left:.0f} GB for all
memory that is not counted. So the article's outcome is plausible for its stack,
and does not follow from these numbers alone: it is unknown what filled the memory.""",
        header=HEADER,
        rows=[row(cell, found) for cell, found in cells],
    )


def _least_of_article(config: TrainConfig, sequences: int) -> float:
    """Count the bytes that FSDP with whole logits needs at least, state in 8 shards."""
    model = config.model
    tokens = sequences * config.data.seq_len
    state = 3 * 4 * num_params(model) / 8
    inputs = 2 * model.layers * model.d_model * tokens
    ends = 2 * 2 * model.vocab_size * model.d_model
    return state + inputs + ends + 12 * model.vocab_size * tokens


def others_table(results: Results) -> Table:
    """Write the cells that the article does not have."""
    return Table(
        title="Other policies",
        text="""As above. *Recompute but matmuls* keeps the results of matmuls with
weights. *Level 2* keeps a bfloat16 copy of all parameters.""",
        header=HEADER,
        rows=[row(cell, results[cell]) for cell in OTHERS],
    )


def write(results: Results) -> Path:
    """Write the page."""
    return write_page(
        "aws_memory",
        "Llama 3 8B with 8,192 tokens on H100s: what fits",
        "python -m scripts.plan.aws_memory",
        [article_table(results), loss_table(results), others_table(results)],
    )


def main(argv: Sequence[str]) -> int:
    """Compile the cell of a given number in this process, or all; write the page."""
    cells = (*ARTICLE, *WHOLE_LOSS, *OTHERS)
    if argv:
        print(json.dumps(dataclasses.asdict(compile_cell(cells[int(argv[0])]))))
        return 0
    results: dict[Cell, Compiled] = {}
    for index, cell in enumerate(cells):
        results[cell] = found = compile_alone(index)
        print(
            f"{cell.name}, {cell.sequences} sequences: "
            f"{found.figure.total_bytes / 1e9:.1f} GB, {found.outcome} "
            f"({found.wall_s:.0f} s, {found.max_resident / 1e9:.2f} GB here)",
            flush=True,
        )
    print(f"wrote {write(results)}")
    wrong = [c for c in ARTICLE if not is_right(c, results[c]) and not c.explained]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

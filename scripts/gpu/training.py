"""Whole training steps of gpt-1b3 on one GPU, with MFU: a base, and one change each.

Tokens are random: they do not change the cost of a step. No tokenizer, loader or
command line is needed, so jax, flax and optax are enough. The sizes are those of
`recipes.gpt.gpt_1b3`; a test compares them.
"""

import dataclasses
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.gpus import peak_flops_per_s
from mjax.model.config import ModelConfig
from mjax.model.counts import flops_per_pair, flops_per_token, num_params, row_pairs
from mjax.step.program import Program as StepProgram
from mjax.step.program import build_program
from scripts.evidence import Table
from scripts.gpu.cells import fixed, outcome
from scripts.gpu.setting import Row, Setting, SkippedError

GPT_1B3 = ModelConfig(
    layers=24,
    d_model=2048,
    heads=16,
    vocab_size=32_768,
    rope_interleaved=True,
    mlp_bias=True,
    norm_bias=True,
    head_bias=True,
    remat="core",
)
ADAMW = OptimConfig(name="adamw", lr=2e-4, beta2=0.95, eps=1e-8, warmup_steps=2000)
NUM_STEPS = 26_000
WARM_UP_STEPS = 2
TIMED_STEPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of the step."""

    model: ModelConfig
    optimizer: OptimConfig
    seq_len: int = 8192
    tokens: int = 32_768
    """Tokens of a step, in one microbatch."""
    isolate_documents: bool = True
    """Whether the two documents of each sequence are isolated in attention."""


BASE = Case(
    model=dataclasses.replace(GPT_1B3, window=(1024,), remat="none"),
    optimizer=dataclasses.replace(ADAMW, name="lamb", lr=2e-3, eps=1e-6),
)
_SMALL_SIZES: dict[str, Any] = {
    "layers": 2,
    "d_model": 32,
    "heads": 2,
    "vocab_size": 97,
    "vocab_multiple": 8,
}


def cases(small: bool) -> dict[str, Case]:
    """List the base and the changes; cuDNN has no segments, so it has its own base."""

    def model(case: Case = BASE, **changes: Any) -> Case:
        return dataclasses.replace(
            case, model=dataclasses.replace(case.model, **changes)
        )

    whole = dataclasses.replace(BASE, isolate_documents=False)
    found = {
        "base": BASE,
        "full window": model(window=(None,)),
        "one document a row": whole,
        "one document a row, cudnn": model(whole, attention="cudnn"),
        "serial block": model(block="serial"),
        "sequence 2048": dataclasses.replace(BASE, seq_len=2048),
        "AdamW": dataclasses.replace(BASE, optimizer=ADAMW),
        "remat dots": model(remat="dots"),
        "remat full": model(remat="full"),
    }
    if not small:
        return found
    return {
        name: dataclasses.replace(
            case,
            seq_len=case.seq_len // 128,
            tokens=case.tokens // 128,
            model=dataclasses.replace(
                case.model,
                window=tuple(w and w // 128 for w in case.model.window),
                **_SMALL_SIZES,
            ),
        )
        for name, case in found.items()
        if name in ("base", "one document a row, cudnn")
    }


def process_of(case: Case) -> str:
    """Run each case in its own process, which then has all of the memory."""
    return repr(case)


def kind_of(case: Case) -> str:
    """Make each case its own kind: running out of memory in one predicts nothing of
    others."""
    return repr(case)


def programs(case: Case, setting: Setting) -> dict[str, Any]:
    """Return the training step, as in a run, and the initialisation."""
    if setting.mode != "gpu" and case.model.attention == "cudnn":
        raise SkippedError("cuDNN plans its kernels with its library, on the device")
    return {"step": Step(program=step_program(case, setting))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The step of a training program, for compile-only."""

    program: StepProgram

    def lower(self) -> jax.stages.Lowered:
        """Trace it."""
        return self.program.trace().lower()


def step_program(case: Case, setting: Setting, *, stamps: bool = False) -> StepProgram:
    """Build the program of a case."""
    attention = case.model.attention
    attention = setting.ours if attention == "auto" else attention
    return build_program(
        model=dataclasses.replace(case.model, attention=attention),
        optimizer=case.optimizer,
        batch=BatchConfig(size=case.tokens // case.seq_len),
        precision=PrecisionConfig(),
        seq_len=case.seq_len,
        num_steps=NUM_STEPS,
        seed=0,
        zero_level=2,
        isolate_documents=case.isolate_documents,
        mesh=setting.mesh,
        stamps=stamps,
    )


def random_batch(
    program: StepProgram, vocab_size: int, seed: int
) -> dict[str, jax.Array]:
    """Draw a batch: each sequence has two documents, split at a random position."""
    rows, length = program.abstract_batch["tokens"].shape
    tokens, cuts = _draw(rows, length, vocab_size, seed)
    column = np.arange(length)
    segments = column >= cuts
    fields = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": segments.astype(np.int32),
        "positions": np.where(segments, column - cuts, column).astype(np.int32),
    }
    return {k: jax.device_put(v, program.batch_sharding) for k, v in fields.items()}


def _draw(
    rows: int, length: int, vocab_size: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens [rows, length + 1], and the ends of first documents [rows, 1]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (rows, length + 1), dtype=np.int32)
    return tokens, rng.integers(1, length, (rows, 1))


def visible_share(case: Case) -> float:
    """Return the model FLOPs of the measured batches over those of whole rows.

    If documents are isolated, pairs between the two of a row are not computed.
    """
    if not case.isolate_documents:
        return 1.0
    model, length = case.model, case.seq_len
    rows = case.tokens // length
    drawn = (_draw(rows, length, model.vocab_size, seed)[1] for seed in range(2))
    cuts = np.concatenate(list(drawn)).ravel().tolist()
    pairs = sum(row_pairs(model, n) for cut in cuts for n in (cut, length - cut))
    hidden = row_pairs(model, length) - pairs / len(cuts)
    whole = flops_per_token(model, length) * length
    return 1 - flops_per_pair(model) * hidden / whole


def measure(case: Case, setting: Setting) -> Row:
    """Time steps one by one, each from its call until its metrics are on the host."""
    program = programs(case, setting)["step"].program
    batches = [random_batch(program, case.model.vocab_size, seed) for seed in range(2)]
    start = time.perf_counter()
    state = jax.block_until_ready(program.init())
    step = program.trace().lower().compile()
    compile_s = time.perf_counter() - start
    memory = step.memory_analysis()
    times, losses = [], []
    for i in range(WARM_UP_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        state, metrics = step(state, batches[i % 2])
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    if not np.isfinite(losses).all():
        raise RuntimeError(f"losses must be finite, got {losses}")
    step_s = statistics.median(times[WARM_UP_STEPS:])
    tokens_per_s = case.tokens / step_s
    flops = flops_per_token(case.model, case.seq_len)
    device = jax.devices()[0]
    peak = peak_flops_per_s(device.device_kind)
    used = device.memory_stats() or {}
    return {
        "step_ms": 1e3 * step_s,
        "spread": (max(times[WARM_UP_STEPS:]) - min(times[WARM_UP_STEPS:])) / step_s,
        "tokens_per_s": tokens_per_s,
        "tflops": flops * tokens_per_s / 1e12,
        "mfu": None if peak is None else flops * tokens_per_s / peak,
        "losses": losses,
        "compile_s": compile_s,
        "peak_bytes": used.get("peak_bytes_in_use"),
        "planned_bytes": None if memory is None else memory.peak_memory_in_bytes,
    }


def tables(rows: Mapping[str, Row], small: bool) -> list[Table]:
    """Return one table."""

    def gib(row: Row, field: str) -> str:
        count = row.get(field)
        return "-" if count is None else f"{count / 2**30:.1f}"

    lines = []
    for name, case in cases(small).items():
        row = rows.get(name, {})
        mfu, spread, compile_s = (row.get(f) for f in ("mfu", "spread", "compile_s"))
        lines.append(
            [
                name,
                outcome(row, "step_ms", 1),
                fixed(row.get("tokens_per_s"), 0),
                fixed(row.get("tflops"), 0),
                "-" if mfu is None else f"{100 * mfu:.1f}",
                "-" if mfu is None else f"{100 * mfu * visible_share(case):.1f}",
                "-" if spread is None else f"{100 * spread:.1f}",
                gib(row, "peak_bytes"),
                fixed(compile_s, 1),
            ]
        )
    params = num_params(GPT_1B3)
    return [
        Table(
            title="Steps of gpt-1b3 on one GPU",
            text=(
                f"{params / 1e9:.3f} billion parameters; {BASE.tokens} tokens a step "
                "in one microbatch, bfloat16 compute, float32 state. The base: "
                f"sequence {BASE.seq_len}, parallel block, window 1024, LAMB, two "
                "documents a row kept apart, nothing recomputed. Every other row has "
                "one change. "
                "MFU is over the data sheet's dense bfloat16 peak. Like the TFLOP/s it "
                "counts all pairs of the window in a row; visible MFU leaves out the "
                "pairs between the two documents, which are not computed."
            ),
            header=(
                *("step", "ms", "tokens/s", "model TFLOP/s", "MFU %", "visible MFU %"),
                *("spread %", "peak GiB", "compiled in s"),
            ),
            rows=lines,
        )
    ]

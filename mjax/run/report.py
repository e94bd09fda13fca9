"""Lines that a run prints: a description before its steps, the results after them.

Input: the config, dataset and rows of the run. Output: lines of text, summary.json,
plots/curves.png, sample.txt.
"""

import math
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

import mjax
from mjax.cli import exit_codes
from mjax.config.command_line import Command
from mjax.config.step import CombineConfig
from mjax.config.train import TrainConfig
from mjax.data.dataset import Dataset
from mjax.estimate import memory
from mjax.hardware import gpus
from mjax.hardware.fp8 import describe_fp8
from mjax.hardware.utilization import Utilization
from mjax.kernels.attention.api import choose
from mjax.kernels.cross_entropy.tuning import CHUNKED
from mjax.kernels.layer_norm import api as layer_norm
from mjax.kernels.target import Target, target
from mjax.mesh.axes import AxisSizes, tp_chunks
from mjax.model.counts import (
    flops_per_pair,
    flops_per_token,
    num_adapter_params,
    num_params,
    row_pairs,
)
from mjax.processes import distributed
from mjax.run import loop, metrics, plots, sampling, terminal
from mjax.run.host_reads import read_numbers
from mjax.run.json_files import write_json
from mjax.step.optim import learning_rate
from mjax.step.program import Program

ENDINGS_SHORT = {
    exit_codes.DONE: "done",
    exit_codes.PREEMPTED: "stopped",
    exit_codes.GAVE_UP: "gave up",
}
"""Endings reported to trackers; any other exit code is "failed"."""
_BRIEF = ("model:", "adapters:", "data:", "warm-up:", "pipeline:", "bubble:")
_BRIEF += ("projections:", "warning:")
"""Prefixes of the lines shown in a terminal without -v."""
_ENDINGS = {
    exit_codes.DONE: "done",
    exit_codes.FAILED: "failed",
    exit_codes.PREEMPTED: "stopped and saved; the same command resumes",
    exit_codes.GAVE_UP: "gave up; do not restart it as it is",
}


def describe_run(config: TrainConfig, dataset: Dataset) -> str:
    """Describe the run: model, data, and which kernels run and why.

    Raises:
      ValueError: the requested attention backend cannot run this model.
    """
    model, seq_len = config.model, config.data.seq_len
    lines = [
        f"model: {num_params(model):,} parameters, "
        f"{flops_per_token(model, seq_len, config.adapters):.4g} FLOPs per token",
        *_describe_adapters(config),
        f"data: {dataset.num_documents:,} documents, {dataset.num_bytes:,} bytes, "
        f"{dataset.bytes_per_token:.2f} bytes per token, "
        f"hash {dataset.corpus_hash[:12]}",
    ]
    if not config.data.one_batch:
        sizes, weights = map(len, dataset.train.corpora), dataset.train.weights
        read = describe_epochs(config.steps * config.batch.size, [*sizes], weights)
        lines[-1] += f"; {config.steps:,} steps read {read}"
    lines += describe_warmup(config.optim.warmup_steps, config.steps)
    for skip in dataset.train.skips:
        lines.append(
            f"data: {skip.batches} batches after step {skip.after} are skipped"
        )
    lines += describe_attention(config, target())
    norm = layer_norm.choose(
        target=target(),
        dtype=config.precision.compute,
        width=model.d_model,
        use_bias=model.norm_bias,
    )
    lines.append(f"norm, backward: {norm} ({layer_norm.NEEDS})")
    return "\n".join(lines)


def describe_warmup(num_warmup: int, num_steps: int) -> list[str]:
    """Return a line if the warm-up takes more than half of the steps of a run.

    Args:
      num_warmup: steps of the warm-up.
      num_steps: optimizer steps of the whole run.
    """
    if 2 * num_warmup <= num_steps:
        return []
    return [
        f"warm-up: {num_warmup:,} of {num_steps:,} steps; in these the learning rate "
        "rises to --optim.lr; a lower --optim.warmup-steps shortens the warm-up"
    ]


def describe_epochs(
    num_samples: int, sizes: Sequence[int], weights: Sequence[float]
) -> str:
    """Say how often a run reads its data.

    Args:
      num_samples: samples that the run reads, over all corpora.
      sizes: number of different samples of each corpus.
      weights: share of each corpus in the samples, in any unit.
    """
    per_weight = num_samples / sum(weights)
    read = [
        f"{per_weight * weight / size:.3g}"
        for size, weight in zip(sizes, weights, strict=True)
    ]
    return f"{' and '.join(read)} epochs{' of its corpora' if len(read) > 1 else ''}"


def describe_attention(config: TrainConfig, device: Target) -> list[str]:
    """Say for each window which attention backend runs and why not the others.

    Raises:
      ValueError: the requested backend cannot run on the device.
    """
    model, lines = config.model, list[str]()
    for window in dict.fromkeys(model.window):
        choice = choose(
            target=device,
            dtype=config.precision.compute,
            head_dim=model.head_width,
            seq_len=config.data.seq_len,
            window=window,
            segments=config.data.isolate_documents,
            soft_cap=model.attn_soft_cap,
            backend=model.attention,
            backward=model.attention_backward,
        )
        others = "".join(
            f"; not {name}: {why}" for name, why in choice.rejected.items()
        )
        cap = model.attn_soft_cap
        capped = "" if cap is None else f", soft cap {cap:g}"
        if model.attention_backward == "fused":
            capped += ", fused backward (not deterministic)"
        lines.append(
            f"attention, window {window or 'full'}{capped}: {choice.name} "
            f"({choice.reason}{others})"
        )
    return lines


def describe_tp(config: TrainConfig, sizes: AxisSizes) -> str:
    """Describe the tensor-parallel communication."""
    if sizes.tp == 1:
        return "over tp: no communication, its size is 1"
    num = tp_chunks(config.mesh, sizes.tp)
    if num == 1:
        return (
            f"over tp {sizes.tp}: the sequence is gathered before each branch and "
            "scattered after it, in one piece and not overlapped (--mesh.tp-overlap "
            "off)"
        )
    shards = -(-(sizes.tp - 1) // (num - 1))
    return (
        f"over tp {sizes.tp}: the sequence is sent in shards of "
        f"{config.data.seq_len // sizes.tp} positions, overlapped with {num} matmuls "
        f"of up to {shards} shards each (--mesh.tp-overlap chunks)"
    )


def describe_combine(
    combine: CombineConfig, options: Iterable[str], sizes: AxisSizes, zero: int
) -> Iterator[str]:
    """Yield warnings about limits of combined collectives that have no effect.

    Limits without an effect are not refused, because a run may be resumed on devices
    on which its limits have none.

    Args:
      combine: limits that the user sets.
      options: names of the XLA options that the step is compiled with.
      sizes: sizes of the mesh axes.
      zero: ZeRO level.
    """
    shards = f"weights are not sharded with --zero {zero} and dp_shard {sizes.shards}"
    limits = (
        (
            *("gather-bytes", combine.gather_bytes, "all_gather"),
            "" if zero and sizes.shards > 1 else f"{shards}, so none are gathered",
        ),
        (
            *("reduce-bytes", combine.reduce_bytes, "all_reduce"),
            "" if sizes.dp > 1 else "dp is 1, so no gradients are reduced over it",
        ),
    )
    for name, limit, kind, why in limits:
        if f"xla_gpu_{kind}_combine_threshold_bytes" not in options:
            why = why or "XLA has no such limit for these devices"
        if limit is not None and why:
            yield f"warning: --combine.{name} {limit} has no effect: {why}"


def describe_gather_first(program: Program) -> Iterator[str]:
    """Yield a line about weights that are gathered before a step has its batch."""
    if program.gather_first is None:
        return
    num_bytes = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program.abstract_first)
    )
    yield (
        "order of a step on the host: gather, data, dispatch; embedding and first "
        f"layer, {memory.in_units(num_bytes)} on each device, are gathered before the "
        "batch arrives (--mesh.gather-first)"
    )


def describe_matmul(config: TrainConfig, mesh: Mesh | AbstractMesh) -> list[str]:
    """Describe the matmuls of the projections if they do not use the compute dtype."""
    if config.precision.matmul == "compute":
        return []
    return [
        "projections: FP8, activations and weights e4m3, gradients e5m2, each tensor "
        f"scaled by its largest value; {describe_fp8(mesh)}; embedding, head and "
        f"attention {config.precision.compute}; MFU is a share of the bfloat16 peak "
        "(--precision.matmul fp8)"
    ]


def describe_memory(
    config: TrainConfig, sizes: AxisSizes, found: memory.Estimate
) -> str:
    """Show the estimated memory of a device, and the available memory if known."""
    lines = [memory.table(found, available=device_memory_bytes(config))]
    rows = config.batch.size // (sizes.dp * config.batch.microbatches)
    positions = rows * config.data.seq_len
    vocab = config.model.padded_vocab // sizes.tp
    chunks = CHUNKED.num_chunks(positions, vocab)
    logits = memory.in_units(-(-positions // chunks) * vocab * 4)
    lines.append(
        f"  (working set: includes the logits of one chunk of the head, {logits})"
    )
    return "\n".join(lines)


def _describe_adapters(config: TrainConfig) -> list[str]:
    """Say which parameters are trained, if not all are."""
    if config.adapters is None:
        return []
    num_trained = num_adapter_params(config.model, config.adapters)
    share = num_trained / num_params(config.model)
    targets = ", ".join(config.adapters.targets)
    return [
        f"adapters: {num_trained:,} parameters are trained ({share:.2%} of the model), "
        f"rank {config.adapters.rank}, in every block at {targets}; the rest is frozen"
    ]


def device_memory_bytes(config: TrainConfig) -> int | None:
    """Return the memory of one device that a run may use; None if unknown."""
    if config.device_memory_gib is not None:
        return int(config.device_memory_gib * 2**30)
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def utilization(config: TrainConfig, sizes: AxisSizes) -> Utilization:
    """Return the inputs of MFU; the peak is looked up unless given."""
    if config.peak_tflops is not None:
        peak = config.peak_tflops * 1e12
    else:
        peak = gpus.peak_flops_per_s(jax.devices()[0].device_kind)
    return Utilization(
        flops_per_token=flops_per_token(
            config.model, config.data.seq_len, config.adapters
        ),
        peak_flops_per_s=peak,
        num_devices=sizes.num_devices,
        flops_per_pair=flops_per_pair(config.model),
        pairs_per_token=row_pairs(config.model, config.data.seq_len)
        / config.data.seq_len,
    )


def describe_new_steps(
    saved: Mapping[str, Any], config: TrainConfig, step: int, opt_state: Any
) -> Iterator[str]:
    """Yield a line if another --steps changes the learning rate of a resumed run.

    Other flags of the schedule may not change.

    Args:
      saved: config of the checkpoint, as JSON.
      config: config of this start.
      step: optimizer steps of the state.
      opt_state: optimizer state of the checkpoint; counts the accepted steps.
    """
    before, now, optim = saved["steps"], config.steps, config.optim
    if before == now or step == now or optim.schedule == "constant":
        return
    count = read_numbers({"count": opt_state["schedule"].count})["count"]
    rates = [np.asarray(learning_rate(optim, n)(count)).item() for n in (before, now)]
    yield (
        f"learning rate: --steps was {before} when this checkpoint was saved and is "
        f"{now} now, and the {optim.schedule} schedule ends with the run: step "
        f"{step + 1} had {rates[0]:.4e} and has {rates[1]:.4e}"
    )


def shows_details(command: Command) -> bool:
    """Return whether to print all startup lines: in logs, and in terminals with -v."""
    return command.verbose or not sys.stdout.isatty()


def device_memory() -> terminal.Memory | None:
    """Return peak and available memory of a device of this process, or None."""
    stats = jax.local_devices()[0].memory_stats() or {}
    used, available = stats.get("peak_bytes_in_use"), stats.get("bytes_limit")
    if used is None or available is None:
        return None
    return terminal.Memory(used=used, available=available)


def brief(
    lines: Iterable[str], config: TrainConfig, needed: memory.Estimate
) -> Iterator[str]:
    """Yield the lines of a description that a terminal shows without -v.

    Args:
      lines: texts of the description, each of one or more lines.
      config: config of the run.
      needed: memory of one device; only its total is shown.
    """
    yield from (x for x in "\n".join(lines).splitlines() if x.startswith(_BRIEF))
    available = device_memory_bytes(config)
    of = "" if available is None else f" of {memory.in_units(available)}"
    yield f"memory: {memory.in_units(needed.total)}{of} a device, estimated"


def say(text: str) -> None:
    """Print on rank 0 only; touch no device."""
    if distributed.rank() == 0:
        metrics.say(text)


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "mjax_version": mjax.__version__,
        "jax_version": jax.__version__,
        "python_version": platform.python_version(),
    }


def sample(
    program: loop.Program,
    params: Any,
    dataset: Dataset,
    recorder: metrics.Recorder,
    *,
    path: Path,
    num_rows: int,
    num_tokens: int,
    end_ids: Set[int],
    seed: int,
    is_stopped: Callable[[], bool],
) -> bool:
    """Let the model continue a held-out text; return whether it finished.

    If the data are chats, the prompt is a chat up to its first answer, and the sample
    ends with the first token that ends an answer.

    All processes compute. The file has the exact text; in the terminal, control
    characters are escaped.

    Args:
      program: program of the run.
      params: parameters of the last state.
      dataset: dataset of the run; the prompt is the beginning of a held-out sample.
      recorder: prints the text, on the process that writes.
      path: path of the file.
      num_rows: copies of the text, a multiple of the data-parallel size.
      num_tokens: maximum number of tokens to draw; with 0 nothing is written.
      end_ids: tokens that end an answer of a chat.
      seed: seed of the sampling.
      is_stopped: called before each token; True ends the sampling.
    """
    if not num_tokens:
        return True
    prompt, ends = dataset.held_out_prompt()
    drawn = sampling.generate(
        program,
        params,
        prompt,
        num_rows=num_rows,
        seq_len=dataset.held_out.seq_len,
        num_tokens=num_tokens,
        vocab_size=dataset.tokenizer.vocab_size,
        seed=seed,
        end_ids=ends | end_ids if ends else ends,
        is_stopped=is_stopped,
    )
    if drawn is not None and jax.process_index() == 0:
        decode = dataset.tokenizer.decode
        text = (
            f"prompt:\n{decode(prompt)}\n\ncontinued by the model:\n{decode(drawn)}\n"
        )
        recorder.say(mjax.printable(text))
        recorder.guarded(path.name, lambda: _write_text(path, text))
    return drawn is not None


def write_summary(
    work_dir: Path,
    config: TrainConfig,
    dataset: Dataset,
    recorder: metrics.Recorder,
    *,
    exit_code: int,
    is_saved: Callable[[], bool],
    wall_s: float,
) -> int:
    """Write summary.json and the figure from all rows of the run; return the exit code.

    If another start has taken over the work dir, nothing is written and the run gives
    up. A stopped run must exit soon, and the figure takes seconds, so it is not drawn
    then. A run that is otherwise done fails if rows, summary or last checkpoint are
    missing.

    Args:
      work_dir: work dir with metrics.jsonl.
      config: config of the run.
      dataset: dataset of the run.
      recorder: prints the result, and reports failed writes.
      exit_code: exit code so far.
      is_saved: returns whether the last checkpoint is in the store.
      wall_s: seconds since this process began to restore or initialise the state.
    """
    if recorder.is_taken_over():
        recorder.say(
            f"{work_dir}: taken over by another start; its files are left as they are"
        )
        return exit_codes.GAVE_UP
    recorder.sync()
    owed = recorder.owed
    if exit_code == exit_codes.DONE and not is_saved():
        owed.append("the last checkpoint")
    if exit_code == exit_codes.DONE and owed:
        exit_code = exit_codes.FAILED
    rows: list[metrics.Row] = []
    recorder.guarded(
        "summary.json",
        lambda: rows.extend(metrics.read_rows(work_dir / "metrics.jsonl")),
    )
    unigram_bits = dataset.unigram_bits_per_byte
    summary = {
        **metrics.summarize(rows),
        "unigram_bits_per_byte": unigram_bits,
        "params": num_params(config.model),
        "wall_s": wall_s,
        "exit": exit_code,
        "corpus_hash": dataset.corpus_hash,
        "data_origins": list(dataset.origins),
        **versions(),
    }
    path, figure = work_dir / "summary.json", work_dir / "plots" / "curves.png"
    recorder.guarded("summary.json", lambda: write_json(path, summary))
    if exit_code != exit_codes.PREEMPTED:
        recorder.guarded(
            "plots/curves.png",
            lambda: plots.draw(rows, figure, unigram_bits=unigram_bits),
        )
    if summary["eval_bits_per_byte"] is not None:
        recorder.say(
            f"held-out text: {summary['eval_bits_per_byte']:.4f} bits per byte, "
            f"{summary['eval_bits_per_byte'] / unigram_bits:.1%} of its unigram "
            f"entropy, {unigram_bits:.4f} (corpus {dataset.corpus_hash[:12]}, Python "
            f"{platform.python_version()})"
        )
    if exit_code == exit_codes.DONE and recorder.owed:
        owed, exit_code = recorder.owed, exit_codes.FAILED
    missing = f"; missing: {', '.join(owed)}" if owed else ""
    recorder.say(f"{work_dir}: {_ENDINGS[exit_code]}{missing}")
    return exit_code


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")

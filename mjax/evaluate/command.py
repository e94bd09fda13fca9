"""What `python -m mjax.evaluate` does: flags in, one loss out."""

import dataclasses
import json
import math
from typing import Any

import jax
import numpy as np

from mjax.ckpt import places
from mjax.ckpt.store import manifest_in
from mjax.config.train import TrainConfig, from_json
from mjax.data import corpora
from mjax.data.dataset import open_dataset
from mjax.data.loader import held_out_num_bytes
from mjax.evaluate import loss, texts, windows
from mjax.evaluate.options import Evaluate
from mjax.evaluate.windows import Window
from mjax.generate.opened import Opened, open_model
from mjax.mesh.axes import MeshConfig, resolve
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import (
    keep_compiled_programs,
    load_plugin_without_gpu,
    simulate_devices,
)

_MAX_SEQ_LEN = 4096
"""Chosen: windows of a Hugging Face folder are no longer than this by default."""


def run(command: Evaluate) -> dict[str, Any]:
    """Evaluate, and return what is reported.

    Raises:
      ValueError: bad input.
      RuntimeError: files are damaged, or the loss is not finite.
    """
    config, facts = _run_of(command)
    load_plugin_without_gpu()
    keep_compiled_programs()
    if command.simulate_devices is not None:
        simulate_devices(command.simulate_devices)
    wish = MeshConfig(tp=command.mesh.tp, dp=command.mesh.dp)
    mesh = build_mesh(resolve(wish, jax.device_count()))
    dtype = command.precision or (config.precision.compute if config else "float32")
    opened = open_model(
        command.model,
        mesh,
        dtype=dtype,
        step=command.step,
        tokenizer=command.tokenizer,
    )
    if command.held_out:
        if config is None:
            raise ValueError(
                f"--held-out needs a run, and {command.model} is a Hugging Face "
                "folder; give --data.path"
            )
        found = _held_out(command, config, facts, opened)
    else:
        found = _text(command, config, opened)
    return {"model": opened.name, **found, "dtype": dtype}


def _run_of(command: Evaluate) -> tuple[TrainConfig | None, dict[str, Any]]:
    """Return config and facts of the run; None for a Hugging Face folder."""
    if places.is_hugging_face(command.model):
        return None, {}
    folder = places.choose(places.find(command.model), command.step)
    facts = dict(manifest_in(folder).run)
    return from_json(json.dumps(facts["config"])), facts


def _text(
    command: Evaluate, config: TrainConfig | None, opened: Opened
) -> dict[str, Any]:
    """Score the documents under --data.path."""
    most = opened.seq_len if config else min(opened.seq_len, _MAX_SEQ_LEN)
    length = command.seq_len or most
    if length > opened.seq_len:
        raise ValueError(
            f"--seq-len must be at most {opened.seq_len}, the longest sequence of the "
            f"model, got {length}"
        )
    stride = command.stride or length
    windows.check(length, stride)
    isolate = config is None or config.data.isolate_documents
    start = command.start_token or ("none" if isolate else "eos")
    end = config is not None if command.end_token is None else command.end_token
    layout = texts.Layout(
        isolate=isolate,
        start_id=opened.tokenizer.eos_id if start == "eos" else None,
        end_id=opened.tokenizer.eos_id,
        score_end=end,
    )
    counts = texts.Counts()
    sources = corpora.find_sources(command.data.path)
    pieces = texts.pieces_of(
        corpora.documents(sources, command.data.text_field),
        opened.tokenizer,
        layout,
        vocab_size=opened.model.vocab_size,
        counts=counts,
    )
    scorer = loss.make_scorer(
        opened.model,
        opened.params,
        opened.mesh,
        length=length,
        batch_size=command.batch_size,
    )
    cut = windows.windows_of(pieces, length=length, stride=stride)
    result = loss.total(scorer, cut)
    assert result.tokens == counts.tokens, (result.tokens, counts.tokens)
    return {
        **_numbers(result, counts.scored_bytes),
        "documents": counts.documents,
        "empty_documents": counts.empty_documents,
        "unscored_tokens": counts.unscored_tokens,
        "seq_len": length,
        "stride": stride,
        "start_token": start,
        "end_token": end,
    }


def _held_out(
    command: Evaluate, config: TrainConfig, facts: dict[str, Any], opened: Opened
) -> dict[str, Any]:
    """Score the held-out samples that the run's own evaluation reads."""
    cache_dir = command.data.cache_dir or config.data.cache_dir
    data = dataclasses.replace(config.data, cache_dir=cache_dir)
    dataset = open_dataset(data, seed=config.seed)
    if facts["data_fingerprint"] != dataset.fingerprint:
        raise ValueError(
            f"the data are not those of {opened.name}: fingerprint "
            f"{facts['data_fingerprint'][:12]} there, {dataset.fingerprint[:12]} now; "
            "put back the same files, or give --data.path"
        )
    num = min(config.batch.size * config.eval.batches, len(dataset.held_out))
    scorer = loss.make_scorer(
        opened.model,
        opened.params,
        opened.mesh,
        length=config.data.seq_len,
        batch_size=command.batch_size,
    )
    cut = (
        Window(tokens=part["tokens"], targets=part["targets"])
        for index in range(num)
        for part in _documents(dataset.held_out.rows(np.array([index])))
    )
    result = loss.total(scorer, cut)
    return {
        **_numbers(result, held_out_num_bytes(dataset, num)),
        "samples": num,
        "run_eval_loss": facts.get("eval_loss"),
    }


def _documents(rows: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Cut a sample into its segments: attention does not cross them."""
    ends = np.flatnonzero(np.diff(rows["segments"][0])) + 1
    parts = {name: np.split(array[0], ends) for name, array in rows.items()}
    return [
        {name: pieces[i] for name, pieces in parts.items()}
        for i in range(len(ends) + 1)
    ]


def _numbers(result: loss.Result, num_bytes: int) -> dict[str, Any]:
    """Return loss, bits per byte (null if no byte was scored) and their counts."""
    bits = result.nll / math.log(2) / num_bytes if num_bytes else None
    finite = math.isfinite(result.perplexity)
    return {
        "loss": result.loss,
        "bits_per_byte": bits,
        "perplexity": result.perplexity if finite else None,
        "tokens": result.tokens,
        "bytes": num_bytes,
    }

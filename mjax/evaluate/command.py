"""Implementation of `python -m mjax.evaluate`: compute one loss from flags."""

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np

from mjax.config.train import TrainConfig
from mjax.data import corpora, hub_tokenizers, remote
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.loader import held_out_num_bytes
from mjax.evaluate import loss, texts, windows
from mjax.evaluate.opening import Run, length_of, open_on_mesh, run_of
from mjax.evaluate.options import Evaluate
from mjax.evaluate.windows import Window
from mjax.generate.opened import Opened
from mjax.mesh.axes import MeshConfig


def run(command: Evaluate) -> dict[str, Any]:
    """Evaluate, and return the report as JSON values.

    Raises:
      ValueError: bad input.
      RuntimeError: files are damaged, or the loss is not finite.
    """
    if command.seq_len is not None and command.stride is not None:
        windows.check(command.seq_len, command.stride)
    made = run_of(command.model, command.step)
    if command.held_out and made.config is None:
        raise ValueError(
            f"--held-out needs a run, and {command.model} is a Hugging Face folder; "
            "give --data.path"
        )
    with contextlib.ExitStack() as stack:
        sources = []
        if paths := command.data.path:
            data = DataConfig(path=paths, cache_dir=command.data.cache_dir)
            files = stack.enter_context(remote.alone(data))
            sources = corpora.find_sources(paths, files)
            corpora.check_text(sources)
        return _run(command, made, sources)


def _run(command: Evaluate, made: Run, sources: list[corpora.Source]) -> dict[str, Any]:
    """Open the model and score."""
    precision = made.precision(command.precision)
    opened = open_on_mesh(
        command.model,
        precision=precision,
        step=command.step,
        tokenizer=command.tokenizer,
        mesh=MeshConfig(tp=command.mesh.tp, dp=command.mesh.dp),
        simulated=command.simulate_devices,
    )
    if command.held_out and made.config is not None:
        found = _held_out(command, made.config, made.facts, opened)
    else:
        found = _text(command, made, opened, sources)
    digest = opened.tokenizer.digest
    return {
        "model": opened.name,
        **found,
        "tokenizer_digest": digest,
        "dtype": precision,
    }


def _text(
    command: Evaluate,
    made: Run,
    opened: Opened,
    sources: list[corpora.Source],
) -> dict[str, Any]:
    """Score the documents of some files."""
    config = made.config
    length = length_of(made, opened, command.seq_len, flag="--seq-len")
    stride = command.stride or length
    windows.check(length, stride)
    isolate = config is None or config.data.isolate_documents
    start, start_ids = _start(command, opened, isolate)
    end = config is not None if command.end_token is None else command.end_token
    layout = texts.Layout(
        isolate=isolate,
        start_ids=start_ids,
        end_id=opened.tokenizer.eos_id,
        score_end=end,
    )
    counts = texts.Counts()
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
        "start_ids": list(start_ids),
        "end_token": end,
        "text_digest": counts.digest.hexdigest(),
    }


def _start(
    command: Evaluate, opened: Opened, isolate: bool
) -> tuple[str, tuple[int, ...]]:
    """Return the name of the start token, and the tokens before each sequence."""
    eos, own = (opened.tokenizer.eos_id,), opened.start_ids
    default = "bos" if own and own != eos else "eos" if own or not isolate else "none"
    start = command.start_token or default
    if start == "bos":
        bos = () if opened.bos_id is None else (opened.bos_id,)
        ids = bos if own == eos else own or bos
        if not ids:
            raise ValueError(
                f"--start-token bos: {opened.name} names no beginning-of-text token; "
                "give eos or none"
            )
        return start, ids
    return start, eos if start == "eos" else ()


def _held_out(
    command: Evaluate, config: TrainConfig, facts: dict[str, Any], opened: Opened
) -> dict[str, Any]:
    """Score the held-out samples of the run's own evaluation."""
    cache_dir = command.data.cache_dir or config.data.cache_dir
    name = config.data.tokenizer_name
    if opened.folder is not None and hub_tokenizers.is_gone(name):
        name = str(opened.folder)
    data = dataclasses.replace(config.data, cache_dir=cache_dir, tokenizer=name)
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
        "data_fingerprint": dataset.fingerprint,
        "run_eval_loss": facts.get("eval_loss"),
    }


def _documents(rows: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Split the arrays of a sample into those of its segments.

    Attention does not cross the boundaries of segments.
    """
    ends = np.flatnonzero(np.diff(rows["segments"][0])) + 1
    parts = {name: np.split(array[0], ends) for name, array in rows.items()}
    return [
        {name: pieces[i] for name, pieces in parts.items()}
        for i in range(len(ends) + 1)
    ]


def _numbers(result: loss.Result, num_bytes: int) -> dict[str, Any]:
    """Return loss, bits per byte, perplexity, and numbers of tokens and bytes.

    Bits per byte are None if no byte was scored; perplexity is None if it overflows.
    """
    bits = result.nll / math.log(2) / num_bytes if num_bytes else None
    finite = math.isfinite(result.perplexity)
    return {
        "loss": result.loss,
        "bits_per_byte": bits,
        "perplexity": result.perplexity if finite else None,
        "tokens": result.tokens,
        "bytes": num_bytes,
    }

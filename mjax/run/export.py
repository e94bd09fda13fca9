"""Export a saved step to a folder that `transformers` loads.

Input: the path of a run or of a checkpoint. Output: a folder with weights, tokenizer
and model card, complete or absent. The tokenizer is the run's, checked against the
digest saved with the step.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mjax import checked_json
from mjax.ckpt import places
from mjax.ckpt.places import Place
from mjax.ckpt.saved_step import SavedStep
from mjax.cli import flags
from mjax.config.command_line import Command
from mjax.config.train import TrainConfig, from_json
from mjax.data import hub_tokenizers
from mjax.data.config import DataConfig
from mjax.data.corpora import STDLIB, SYNTHETIC
from mjax.data.hub_tokenizers import is_gone
from mjax.data.names import BYTES, trained_vocab_size
from mjax.data.tokenizer_files import TokenizerFiles, read_files, with_start
from mjax.hugging_face import families
from mjax.hugging_face.export import write
from mjax.hugging_face.model_card import Card, write_card
from mjax.model.counts import num_params
from mjax.run.base import find_tokenizer
from mjax.tune.merged import Merged

_CARD = "README.md"
_OURS = {
    STDLIB: "the source of Python's standard library",
    SYNTHETIC: "synthetic text",
}
"""Descriptions of the corpora that are not files of the user."""
_DIGITS = 12
"""Number of digits of a hash in messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of an export."""

    family: str | None = None
    """Architecture; None for the first that can express the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the stored tensors."""
    tokenizer: str | None = None
    """Folder, tokenizer.json or hf://NAME@REVISION; None for the run's tokenizer."""
    without_tokenizer: bool = False
    """Write no tokenizer files."""
    eos_token_id: int | None = None
    """Id of the end-of-document token; None for the tokenizer's. Other end tokens of
    the run, such as that of a turn, are kept."""
    positions: int | None = None
    """Longest sequence of the exported model, in tokens; None for the run's."""

    def __post_init__(self) -> None:
        """Refuse flags that contradict each other.

        Raises:
          ValueError: `tokenizer` is given together with `without_tokenizer`.
        """
        if self.without_tokenizer and self.tokenizer is not None:
            raise ValueError(
                f"--tokenizer {self.tokenizer} and --without-tokenizer contradict "
                "each other; leave one out"
            )


def export(path: str, out: str, step: int | None, wanted: Wanted) -> str:
    """Write a step to a folder that transformers loads.

    Args:
      path: a work dir, a folder of checkpoints, or one checkpoint.
      out: folder to create; it may exist if it is empty.
      step: step to export; None for the newest.
      wanted: the options.
    Returns:
      a description of what was written, as lines of text.
    Raises:
      ValueError: no family can express the model, the tokenizer is unknown or differs
        from the run's, or `out` is not empty.
      RuntimeError: a disk failed or the step is damaged.
    """
    place = places.find(path)
    folder = places.choose(place, step)
    source = SavedStep(folder)
    config = from_json(source.config())
    model, facts = config.model, source.manifest.run
    positions = config.data.seq_len if wanted.positions is None else wanted.positions
    family, _ = families.hf_config(model, seq_len=positions, family=wanted.family)
    tokenizer, lines = None, []
    if not wanted.without_tokenizer:
        tokenizer = tokenizer_files(path, place, config, facts, wanted)
        unused = model.vocab_size - tokenizer.vocab_size
        if unused:
            lines.append(
                f"the model has {unused} more ids than the tokenizer; no text contains "
                "them"
            )
    end_ids = _end_ids(wanted, tokenizer, model.vocab_size)
    card = _card(out, place, source, config, family.name, wanted, tokenizer)
    tensors = source if config.adapters is None else Merged(source, config.adapters)
    write(
        tensors,
        model,
        out,
        seq_len=positions,
        family=family.name,
        dtype=wanted.dtype,
        end_ids=end_ids,
        files={
            **({} if tokenizer is None else tokenizer.contents),
            _CARD: write_card(card).encode(),
        },
    )
    ends = " ".join(map(str, end_ids))
    named = "without a tokenizer" if tokenizer is None else f"end of text {ends}"
    return "\n".join(
        [f"{folder} -> {out}: {family.name}, {wanted.dtype}, {named}", *lines]
    )


# --------------------------------------------------------------------------- tokenizer


def tokenizer_files(
    path: str,
    place: Place,
    config: TrainConfig,
    facts: Mapping[str, Any],
    wanted: Wanted,
) -> TokenizerFiles:
    """Return the tokenizer files of a run, with its chat template if it has one.

    The tokenizer puts before a text what precedes the documents of the run.

    Args:
      path: the path given for the run.
      place: where the run is.
      config: config of the run.
      facts: metadata saved with the step, including the digest of its tokenizer.
      wanted: options, which may name the tokenizer.
    Raises:
      ValueError: the tokenizer is unknown or differs from the run's.
    """
    files = _files_of_run(path, place, config, facts, wanted)
    return with_start(files) if config.data.has_starts else files


def _files_of_run(
    path: str,
    place: Place,
    config: TrainConfig,
    facts: Mapping[str, Any],
    wanted: Wanted,
) -> TokenizerFiles:
    """Return the files of `tokenizer_files` as the run has them."""
    given = wanted.tokenizer
    if given is not None and (is_gone(given) or trained_vocab_size(given) is not None):
        raise ValueError(
            f"--tokenizer {wanted.tokenizer} does not exist; give a tokenizer.json, "
            "the folder of one or hf://NAME@REVISION, or omit it to use the run's"
        )
    name = wanted.tokenizer or find_tokenizer(path, place, config.data)
    if name is None:
        raise ValueError(_missing(path, config.data))
    if wanted.tokenizer is not None:
        name = hub_tokenizers.pinned(name, flag="--tokenizer")
    is_bytes = config.data.tokenizer_name == BYTES
    files = read_files(name, eos=None if is_bytes else config.data.eos_token)
    if wanted.eos_token_id is not None and files.eos_id is None:
        files = read_files(name, eos=wanted.eos_token_id)
    if files.eos_id is None:
        raise ValueError(
            f"{name} does not say which token ends a document; give its id as "
            "--eos-token-id"
        )
    saved = facts.get("tokenizer_digest", files.digest)  # absent in older steps
    if saved != files.digest:
        raise ValueError(
            f"the tokenizer in {name} is not that of the run: digest "
            f"{str(files.digest)[:_DIGITS]} there, {str(saved)[:_DIGITS]} saved with "
            f"the step; give the run's as --tokenizer"
        )
    if files.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer in {name} has {files.vocab_size} ids, the model "
            f"{config.model.vocab_size}; give the run's as --tokenizer"
        )
    if wanted.eos_token_id in (None, files.eos_id):
        return files
    if files.digest == BYTES:
        raise ValueError(
            f"--eos-token-id must be {files.eos_id} with the tokenizer bytes, got "
            f"{wanted.eos_token_id}; leave it out"
        )
    if wanted.eos_token_id >= config.model.vocab_size:
        raise ValueError(_outside(wanted.eos_token_id, config.model.vocab_size))
    kept = [i for i in files.end_ids if i != files.eos_id]
    return dataclasses.replace(
        read_files(name, eos=wanted.eos_token_id), end_ids=()
    ).with_end_ids([wanted.eos_token_id, *kept])


def _missing(path: str, data: DataConfig) -> str:
    trained = trained_vocab_size(data.tokenizer_name) is not None
    why = "was trained for the run" if trained else "is not on this machine"
    return (
        f"{path} has no tokenizer/ beside its checkpoints, and the run's "
        f"--data.tokenizer {data.tokenizer_name} {why}; give the folder of its "
        "tokenizer.json as --tokenizer, or --without-tokenizer to write the weights "
        "alone"
    )


def _end_ids(
    wanted: Wanted, tokenizer: TokenizerFiles | None, vocab_size: int
) -> list[int]:
    """Return the end tokens that the model has, that of a document first."""
    chosen = wanted.eos_token_id
    if chosen is not None and not 0 <= chosen < vocab_size:
        raise ValueError(_outside(chosen, vocab_size))
    if tokenizer is None:
        return [] if chosen is None else [chosen]
    return [i for i in tokenizer.end_ids if 0 <= i < vocab_size]


def _outside(token_id: int, vocab_size: int) -> str:
    return f"--eos-token-id must be from 0 to {vocab_size - 1}, got {token_id}"


# -------------------------------------------------------------------------- model card


def _card(
    out: str,
    place: Place,
    source: SavedStep,
    config: TrainConfig,
    family: str,
    wanted: Wanted,
    tokenizer: TokenizerFiles | None,
) -> Card:
    """Gather the contents of the model card."""
    manifest, model = source.manifest, config.model
    facts, steps = manifest.run, manifest.step
    return Card(
        name=Path(out).absolute().name,
        family=family,
        num_params=num_params(dataclasses.replace(model, vocab_multiple=1)),
        dtype=wanted.dtype,
        layers=model.layers,
        d_model=model.d_model,
        vocab_size=model.vocab_size,
        seq_len=config.data.seq_len,
        tokenizer=None if tokenizer is None else _tokenizer_words(tokenizer, config),
        recipe=_recipe(place),
        steps=steps,
        tokens=steps * config.batch.size * config.data.seq_len,
        optimizer=f"{config.optim.name}, learning rate {config.optim.lr:g}, batches of "
        f"{config.batch.size} sequences",
        data=tuple(_corpora(config.data)),
        corpus_hash=facts.get("corpus_hash"),
        init_from=None if config.init_from is None else _last(config.init_from),
        eval_loss=facts.get("eval_loss"),
        version=facts.get("versions", {}).get("mjax_version"),
    )


def _tokenizer_words(tokenizer: TokenizerFiles, config: TrainConfig) -> str:
    name, size = config.data.tokenizer_name, f"{tokenizer.vocab_size:,} ids"
    if name == BYTES:
        return f"UTF-8 bytes, {size}"
    if trained_vocab_size(name) is not None:
        return f"byte-level BPE trained on the data, {size}"
    return f"{_last(name)}, {size}"


def _corpora(data: DataConfig) -> list[str]:
    """Name the corpora without their folders, each with its weight in a mixture."""
    names = [" ".join(_OURS.get(p, _last(p)) for p in paths) for paths in data.paths]
    if not data.mixture:
        return names
    return [
        f"{weight:g} x {name}" for weight, name in zip(data.weights, names, strict=True)
    ]


def _last(path: str) -> str:
    """Return the last part of a path."""
    return os.path.basename(path.rstrip("/")) or path


def _recipe(place: Place) -> str | None:
    """Return the recipe of the first start of a run; None if unknown."""
    path = place.store.directory.parent / "starts" / "0001.json"
    try:
        argv = checked_json.read(path.read_bytes(), dict[str, Any])["argv"]
        words = checked_json.check(argv, list[str], "argv")
    except (OSError, ValueError, KeyError):
        return None  # no run folder, or a run without records
    if flags.given(words, "--config") is not None:
        return None
    name = _last(flags.given(words, "--recipe") or Command.recipe)
    own = {word.partition("=")[0] for word in words if word.startswith("--")}
    return f"{name}, with other flags" if own - {"--recipe", "--work-dir"} else name

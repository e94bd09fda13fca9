"""What a run takes from the model of --init-from, apart from parameters.

Input: the config of the flags. Output: the tokenizer, the vocabulary and the end tokens
of the run. They are those of the model unless a flag gives others. A recipe or a config
file cannot replace the tokenizer or the chat template of the model: its ids would get
another meaning without a message.
"""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

from etils import epath

from mjax.ckpt import places
from mjax.ckpt.places import Place
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import located
from mjax.cli import flags
from mjax.config.train import TrainConfig, from_json
from mjax.data import chat_template, hub_tokenizers
from mjax.data.config import DataConfig
from mjax.data.hub_tokenizers import is_gone
from mjax.data.names import BYTES, trained_vocab_size
from mjax.data.tokenizer_files import SPEC, TokenizerFiles, read_files
from mjax.hugging_face.params import read_config
from mjax.run.init_from import choose

_FLAGS = (
    *("--data.tokenizer", "--data.eos-token", "--data.chat-template"),
    *("--data.vocab", "--model.vocab-size"),
)
"""Flags for what comes with a base."""
_DIGITS = 12
"""Number of digits of a digest in messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """Fields of a run's config that its base determines, and what else it does."""

    tokenizer: str
    eos_token: str | None
    vocab: Literal["tokenizer", "model"]
    vocab_size: int
    end_ids: Sequence[int] = ()
    """End tokens of the base; none if the run has another tokenizer."""
    lines: Sequence[str] = ()
    """Messages for the user."""

    def applied(self, config: TrainConfig) -> TrainConfig:
        """Return a config with these fields."""
        data = dataclasses.replace(
            config.data,
            tokenizer=self.tokenizer,
            eos_token=self.eos_token,
            vocab=self.vocab,
        )
        model = dataclasses.replace(config.model, vocab_size=self.vocab_size)
        return dataclasses.replace(config, data=data, model=model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A model, apart from its parameters."""

    where: str
    """Flag and path of the model."""
    tokenizer: str | None
    """Name of the tokenizer; None if it is unknown."""
    eos_token: str | None = None
    """Token that ends a document, if the files of the tokenizer do not name it."""
    files: TokenizerFiles | None
    """Files of the tokenizer; None if it is unknown."""
    digest: str | None
    """Digest of the tokenizer; None if it is unknown."""
    vocab_size: int
    problem: str = f"it has no {SPEC}"
    """Why the tokenizer is unknown, if it is."""


def settle(
    config: TrainConfig, argv: Sequence[str], recorded: Mapping[str, Any] | None
) -> Settled:
    """Choose the tokenizer and the vocabulary of a run. Called on process 0.

    Args:
      config: config of the flags.
      argv: the flags.
      recorded: config.json of the work dir if the run has begun; None for a new run. A
        run that has begun keeps its tokenizer and its vocabulary.
    Raises:
      ValueError: there is no such model; its tokenizer is unknown; its vocabulary is
        too small for a given tokenizer; or a recipe or a config file gives another
        tokenizer or chat template.
      RuntimeError: files are damaged.
    """
    name, typed = config.data.tokenizer, {f for f in _FLAGS if flags.given(argv, f)}
    # A tokenizer that a recipe trains on its data is not that of the base.
    is_trained = name is not None and trained_vocab_size(name) is not None
    if is_trained and "--data.tokenizer" not in typed and config.init_from is not None:
        name = None
    if config.init_from is None:
        return Settled(
            tokenizer=name or BYTES,
            eos_token=config.data.eos_token,
            vocab=config.data.vocab,
            vocab_size=config.model.vocab_size,
        )
    if recorded is not None:
        return _recorded(config, name, typed, recorded)
    if "--data.tokenizer" in typed and not located(config.init_from).exists():
        # The run may have saved steps elsewhere; without them it is refused later.
        return _recorded(config, name, typed, {})
    base = _with_adapters(read_base(config.init_from), config, typed)
    return _of_base(base, config, name, typed)


def _settled(
    config: TrainConfig,
    name: str,
    typed: Set[str],
    *,
    vocab: Literal["tokenizer", "model"],
    vocab_size: int,
    **other: Any,
) -> Settled:
    """Return fields of a config; those of flags that are typed keep their values."""
    model = config.model
    return Settled(
        tokenizer=name,
        vocab=config.data.vocab if "--data.vocab" in typed else vocab,
        vocab_size=model.vocab_size if "--model.vocab-size" in typed else vocab_size,
        **other,
    )


def _recorded(
    config: TrainConfig, name: str | None, typed: Set[str], recorded: Mapping[str, Any]
) -> Settled:
    """Return what a run began with, unless a flag or a recipe gives a value.

    Another value is refused later, with the other differences of the two configs.
    """
    data, model = _group(recorded, "data"), _group(recorded, "model")
    eos_token = config.data.eos_token
    if name is None:
        name = str(data.get("tokenizer") or BYTES)
        eos_token = eos_token or data.get("eos_token")
    return _settled(
        *(config, name, typed),
        eos_token=eos_token,
        vocab=data.get("vocab", config.data.vocab),
        vocab_size=model.get("vocab_size", config.model.vocab_size),
    )


def _group(recorded: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a group of a config; an empty one if it is damaged, which is refused."""
    group = recorded.get(name)
    return group if isinstance(group, Mapping) else {}


def _of_base(
    base: Base, config: TrainConfig, name: str | None, typed: Set[str]
) -> Settled:
    """Return what a new run takes from its base.

    Raises:
      ValueError: as `settle`.
    """
    eos_token = config.data.eos_token
    if name is None:
        if base.tokenizer is None:
            raise ValueError(
                f"the tokenizer of {base.where} is unknown: {base.problem}; give the "
                "one that it was trained with as --data.tokenizer (bytes if its tokens "
                "are bytes)"
            )
        name, eos_token = base.tokenizer, eos_token or base.eos_token
    files, num_tokens = None, trained_vocab_size(name)
    if num_tokens is None and not is_gone(name):
        files = read_files(name, eos=eos_token)
        num_tokens = files.vocab_size
    if num_tokens is not None and num_tokens > base.vocab_size:
        raise ValueError(
            f"--data.tokenizer {name} has {num_tokens} ids, but the model of "
            f"{base.where} only {base.vocab_size}; give a tokenizer with fewer ids, or "
            "omit it to use that of the model"
        )
    is_same = files is not None and files.digest == base.digest
    return _settled(
        *(config, name, typed),
        eos_token=eos_token,
        vocab="tokenizer" if num_tokens == base.vocab_size else "model",
        vocab_size=base.vocab_size,
        end_ids=base.files.end_ids if base.files is not None and is_same else (),
        lines=[
            *_compared(base, name, files, typed),
            *_compared_templates(base, name, config.data, typed),
        ],
    )


# ------------------------------------------------------------------------- comparisons


def _compared(
    base: Base, name: str, files: TokenizerFiles | None, typed: Set[str]
) -> list[str]:
    """Return a message about the tokenizer; refuse another one that no flag gives.

    Raises:
      ValueError: as `settle`.
    """
    digest = None if files is None else files.digest
    if base.digest is None:
        return [] if base.tokenizer else [f"the tokenizer of {base.where} is unknown"]
    if digest == base.digest:
        return [f"tokenizer: that of {base.where}"]
    other = f"digest {_short(digest)}, there {_short(base.digest)}"
    if typed & {"--data.tokenizer", "--data.eos-token"}:
        return [
            f"warning: the tokenizer {name} is not that of {base.where} ({other}), so "
            "ids have another meaning than in the training of that model"
        ]
    raise ValueError(
        f"the recipe or the --config file gives the tokenizer {name}, which is not "
        f"that of {base.where} ({other}); remove it there to use that of the model, or "
        f"give --data.tokenizer {name} to use it anyway"
    )


def _compared_templates(
    base: Base, name: str, data: DataConfig, typed: Set[str]
) -> list[str]:
    """Return a message about another chat template; refuse one that no flag gives.

    Raises:
      ValueError: as `settle`, or a template cannot be read.
    """
    theirs = None if base.tokenizer is None else _template_beside(base.tokenizer)
    if data.format != "chat" or theirs is None:
        return []
    if data.chat_template is not None:
        ours = chat_template.read_file(Path(data.chat_template).expanduser())
        flag, value = "--data.chat-template", data.chat_template
    else:
        ours, flag, value = _template_beside(name), "--data.tokenizer", name
    if ours is None or ours == theirs:
        return []
    if flag in typed:
        return [f"note: {flag} {value} replaces the chat template of {base.where}"]
    raise ValueError(
        f"the recipe or the --config file gives {flag} {value}, whose chat template is "
        f"not that of {base.where}; remove it there to use that of the model, or give "
        f"{flag} {value} to use it anyway"
    )


def _template_beside(tokenizer: str) -> str | None:
    """Return the chat template of a tokenizer; None if it has none."""
    is_file = trained_vocab_size(tokenizer) is None and tokenizer != BYTES
    if not is_file or is_gone(tokenizer):
        return None
    found = chat_template.read_beside(hub_tokenizers.local(tokenizer).parent)
    return None if found is None else found.text


def _short(digest: str | None) -> str:
    return "unknown" if digest is None else digest[:_DIGITS]


# ------------------------------------------------------------------------------ a base


def read_base(path: str) -> Base:
    """Read what comes with the model of --init-from.

    Args:
      path: a Hugging Face folder, or a path of a run's checkpoints.
    Raises:
      ValueError: there is no model.
      RuntimeError: files are damaged.
    """
    where, folder = f"--init-from {path}", choose(path)
    if places.is_hugging_face(path):
        _, model = read_config(path)
        files = read_files(path) if (Path(path) / SPEC).is_file() else None
        return Base(
            where=where,
            tokenizer=None if files is None else _plain(path, files),
            files=files,
            digest=None if files is None else files.digest,
            vocab_size=model.vocab_size,
        )
    saved = SavedStep(epath.Path(folder))
    config = from_json(saved.config())
    name = find_tokenizer(path, places.find(path), config.data)
    eos_token = config.data.eos_token
    files = None if name is None else read_files(name, eos=eos_token)
    digest = saved.manifest.run.get("tokenizer_digest", files and files.digest)
    problem = f"there is no tokenizer/{SPEC} beside its checkpoints"
    if files is not None and files.digest != digest:
        problem = f"that in {name} has another digest than the checkpoint records"
        name, files = None, None
    return Base(
        where=where,
        tokenizer=name if name is None or files is None else _plain(name, files),
        eos_token=eos_token,
        files=files,
        digest=digest,
        vocab_size=config.model.vocab_size,
        problem=problem,
    )


def _plain(name: str, files: TokenizerFiles) -> str:
    """Return the name of a tokenizer; `bytes` for a copy of it without a template."""
    is_bytes = files.digest == BYTES and _template_beside(name) is None
    return BYTES if is_bytes else name


def _with_adapters(base: Base, config: TrainConfig, typed: Set[str]) -> Base:
    """Return the base with the tokenizer of its adapters, if their folder has one.

    Raises:
      ValueError: the tokenizer of the adapters is not that of the base.
    """
    folder = config.lora.init_from
    if folder is None or not (Path(folder) / SPEC).is_file():
        return base
    files = read_files(folder)
    if base.digest not in (None, files.digest):
        if "--data.tokenizer" in typed:
            return base
        raise ValueError(
            f"the tokenizer in --lora.init-from {folder} is not that of {base.where} "
            f"(digest {_short(files.digest)}, there {_short(base.digest)}); give the "
            "one to train with as --data.tokenizer"
        )
    if base.files is not None:
        files = files.with_end_ids(base.files.end_ids)
    return dataclasses.replace(
        base,
        where=f"--lora.init-from {folder}",
        tokenizer=_plain(folder, files),
        files=files,
        digest=files.digest,
    )


# ---------------------------------------------------------------- tokenizers of a run


def find_tokenizer(path: str, place: Place, data: DataConfig) -> str | None:
    """Return the name of a run's tokenizer: beside the checkpoints, or from its config.

    None if it is not beside the checkpoints, and the config names a tokenizer that is
    not on this machine or that was trained for the run.

    Args:
      path: the path given for the run.
      place: where the run is.
      data: the data of the run.
    """
    for folder in (epath.Path(path), place.store.directory.parent):
        if "://" not in str(folder) and (folder / "tokenizer" / SPEC).is_file():
            return str(folder / "tokenizer")
    name = data.tokenizer_name
    if name == BYTES:
        return BYTES
    if trained_vocab_size(name) is not None:
        return None
    return None if is_gone(name) else name

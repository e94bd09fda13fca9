"""Open a model for use: parameters on a mesh, tokenizer, end tokens.

Input: a path (a work dir, a folder of checkpoints, one checkpoint, or a Hugging Face
folder) and a mesh. Output: an `Opened`. Whatever mesh wrote the parameters, each
part of an array is read once and goes straight to the devices that hold it.
"""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mjax import checked_json
from mjax.ckpt import places
from mjax.ckpt.boxes import Box, slices
from mjax.ckpt.recovery import by_path
from mjax.ckpt.saved_step import SavedStep
from mjax.config.train import TrainConfig, from_json
from mjax.data import end_tokens, hub_tokenizers
from mjax.data.chat_template import CONFIG_FILE, ChatTemplate, read_beside
from mjax.data.names import BYTES, trained_vocab_size
from mjax.data.tokenizer_files import read_files
from mjax.data.tokenizers import Tokenizer, load_tokenizer, start_of
from mjax.hugging_face.params import (
    CONFIG,
    LENGTHS,
    open_params,
    read_config,
    read_positions,
)
from mjax.layers.config import AdapterConfig
from mjax.mesh.axes import AXES, AxisSizes
from mjax.model.config import ModelConfig
from mjax.model.transformer import Params, abstract_params, map_params
from mjax.processes.agreement import Agreement
from mjax.run.init_from import Weights, initial_params
from mjax.step.state import param_specs
from mjax.tune.merged import Merged

TOKENIZER_DIR = "tokenizer"
"""Folder in a work dir with the tokenizer of the run, in transformers' format."""
DIGEST = "tokenizer_digest"
"""Key in the metadata of a saved step: digest of the tokenizer of the run."""

_log = logging.getLogger(__name__)

_FLAG = "--tokenizer"
_SPEC = "tokenizer.json"
_NAMED_LEAVES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A model that is ready for use."""

    name: str
    """Description of the source for people."""
    model: ModelConfig
    params: Params
    """Parameters on the mesh, in canonical form (layers stacked in order) and compute
    dtype."""
    mesh: Mesh
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """The chat template of the tokenizer; None if it has none."""
    seq_len: int
    """Longest sequence that the model was made for, in tokens."""
    end_ids: tuple[int, ...]
    """Tokens at which generation ends."""
    folder: Path | None = None
    """Folder with the chat template and end tokens; of a run, its tokenizer too."""
    start_ids: tuple[int, ...] = ()
    """Tokens before a text: the start token of a run's documents, or those that the
    tokenizer of a Hugging Face folder adds."""
    bos_id: int | None = None
    """The beginning-of-text token, whether or not it is added."""

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt.

        The prompt begins as a document does in training. Without start tokens, an empty
        prompt becomes the end-of-document token.
        """
        ids = (*self.start_ids, *self.tokenizer.encode(text).tolist())
        return ids or (self.tokenizer.eos_id,)


class Starts(NamedTuple):
    """Beginnings of texts, as in `Opened`."""

    ids: tuple[int, ...] = ()
    bos_id: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """A model whose parameters are not yet read."""

    name: str
    model: ModelConfig
    seq_len: int
    read_boxes: Callable[[str, list[Box]], list[np.ndarray]]
    tokenizer: Tokenizer
    folder: Path | None
    """Folder with the chat template and end tokens, beside the tokenizer; or None."""
    starts: Starts


def open_model(
    path: str,
    mesh: Mesh,
    *,
    dtype: Literal["float32", "bfloat16"],
    step: int | None = None,
    tokenizer: str | None = None,
) -> Opened:
    """Open a model for generation or evaluation.

    Args:
      path: a work dir or folder of checkpoints (the newest is used), one checkpoint, or
        a Hugging Face folder.
      mesh: mesh with all axes; parameters are split over tp and replicated over dp.
      dtype: dtype of the parameters and of the computation.
      step: step of the checkpoint; None for the newest.
      tokenizer: bytes, a tokenizer.json or hf://NAME@REVISION; None for the tokenizer
        of the run or folder.
    Raises:
      ValueError: there is no such model, it does not divide over the mesh, or the
        tokenizer belongs to another model.
      RuntimeError: files are missing or damaged.
    """
    if mesh.shape["pp"] > 1:
        raise ValueError(
            f"--mesh.pp must be 1 to use a model, got {mesh.shape['pp']}: generation "
            f"does not pipeline layers; use --mesh.tp {mesh.shape['pp']} to split each "
            "layer instead"
        )
    if tokenizer is not None:
        tokenizer = hub_tokenizers.pinned(tokenizer, flag=_FLAG)
    if places.is_hugging_face(path):
        if step is not None:
            raise ValueError(
                f"{path} is a Hugging Face model, which has no steps; leave out --step "
                f"{step}"
            )
        found = _find_folder(Path(path), tokenizer)
    else:
        found = _find_checkpoint(path, step, tokenizer)
    _check_vocab(found)
    folder = found.folder
    template = None if folder is None else read_beside(folder)
    listed = () if folder is None else end_tokens.listed(folder)
    tokens = found.tokenizer
    end_ids = end_tokens.end_ids(tokens.eos_id, tokens.added, listed, template)
    params = _read(found, mesh, dtype)
    return Opened(
        name=found.name,
        model=found.model,
        params=params,
        mesh=mesh,
        tokenizer=found.tokenizer,
        chat_template=template,
        seq_len=found.seq_len,
        end_ids=tuple(i for i in end_ids if 0 <= i < found.model.vocab_size),
        folder=folder,
        start_ids=found.starts.ids,
        bos_id=found.starts.bos_id,
    )


# -------------------------------------------------------------------------- parameters


def _find_folder(folder: Path, tokenizer: str | None) -> _Found:
    """Open the config and tokenizer of a Hugging Face folder."""
    family, model = read_config(folder)
    source = open_params(folder, model)
    seq_len = read_positions(folder)
    if seq_len is None:
        raise ValueError(
            f"{folder / CONFIG} does not give the longest sequence; add {LENGTHS[0]}"
        )
    if tokenizer is None and not (folder / _SPEC).is_file():
        raise ValueError(
            f"{folder} has no {_SPEC}; give the model's as --tokenizer PATH, or "
            "--tokenizer bytes for a byte-level model"
        )
    loaded = load_tokenizer(tokenizer or str(folder), flag=_FLAG)
    if tokenizer is not None and (folder / _SPEC).is_file():
        digest = read_files(str(folder)).digest
        if digest not in (None, loaded.digest):
            _log.warning(
                "--tokenizer %s is not the tokenizer of %s (digest %s, there %s), so "
                "ids have another meaning than in the training of the model",
                *(tokenizer, folder, loaded.digest[:12], str(digest)[:12]),
            )
    spec = hub_tokenizers.local(tokenizer or str(folder), flag=_FLAG)
    return _Found(
        name=f"{folder} ({family.name})",
        model=model,
        seq_len=seq_len,
        read_boxes=lambda name, boxes: [source.read(name, slices(b)) for b in boxes],
        tokenizer=loaded,
        folder=folder,
        starts=find_starts(loaded, spec.parent),
    )


def _find_checkpoint(path: str, step: int | None, tokenizer: str | None) -> _Found:
    """Open the config and tokenizer of a saved step."""
    place = places.find(path)
    saved = SavedStep(places.choose(place, step))
    config = from_json(saved.config())
    folder = _tokenizer_folder(place, path)
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer, flag=_FLAG)
    elif config.data.tokenizer_name == BYTES:
        loaded = load_tokenizer(BYTES)
    elif folder is not None and (folder / _SPEC).is_file():
        loaded = load_tokenizer(
            str(folder), eos_token=config.data.eos_token, flag=_FLAG
        )
    else:
        name, eos_token = config.data.tokenizer_name, config.data.eos_token
        loaded = _tokenizer_of_run(name, eos_token, path)
    digest = saved.manifest.run.get(DIGEST)
    if digest is not None and digest != loaded.digest:
        raise ValueError(
            f"the tokenizer is not that of {saved.path}: its digest is "
            f"{loaded.digest[:12]}, the checkpoint was trained with {str(digest)[:12]} "
            f"(--data.tokenizer {config.data.tokenizer_name}); give that one as "
            "--tokenizer"
        )
    return _Found(
        name=str(saved.path),
        model=config.model,
        seq_len=config.data.seq_len,
        read_boxes=_checked_boxes(saved, config.model, config.adapters),
        tokenizer=loaded,
        folder=folder,
        starts=_starts_of_run(config, loaded),
    )


def _checked_boxes(
    saved: SavedStep, model: ModelConfig, adapters: AdapterConfig | None
) -> Callable[[str, list[Box]], list[np.ndarray]]:
    """Return a function that reads parts of arrays of a step.

    The names and shapes of the parameters are checked first. Adapters are merged into
    the weights.
    """
    source = saved if adapters is None else Merged(saved, adapters)
    pure = _pure(abstract_params(model)[1])
    wanted = {name: tuple(x.shape) for name, x in by_path({"params": pure}).items()}
    held = {n: source.shape(n) for n in source.names() if n.startswith("params.")}
    wrong = [
        f"{name}: {held.get(name, 'absent')}, by its config {wanted.get(name, 'none')}"
        for name in sorted(wanted | held)
        if wanted.get(name) != held.get(name)
    ]
    if wrong:
        raise ValueError(
            f"{saved.path} holds parameters other than those that its config "
            "describes: " + "; ".join(wrong[:_NAMED_LEAVES])
        )
    if source is saved:
        return saved.read_boxes
    return lambda name, boxes: [source.read(name, slices(b)) for b in boxes]


def _read(found: _Found, mesh: Mesh, dtype: str) -> Params:
    """Read the parameters onto the mesh."""
    sizes = AxisSizes(**{axis: mesh.shape[axis] for axis in AXES})
    _check_sizes(found.model, sizes.tp)
    _, abstract = abstract_params(found.model)
    specs = param_specs(abstract, sizes, shard_over_dp=False)
    wanted = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec)
        ),
        _pure(abstract),
        specs,
    )
    weights = Weights(
        described=found.name,
        read_boxes=found.read_boxes,
        names=frozenset(by_path({"params": wanted})),
    )
    return initial_params(weights, wanted, wanted, Agreement("open a model"))


def _pure(abstract: Any) -> Params:
    """Return the shapes of parameters as a tree of dicts."""
    return map_params(lambda v, _: jax.ShapeDtypeStruct(v.shape, v.dtype), abstract)


def _check_sizes(model: ModelConfig, tp: int) -> None:
    """Refuse a tp size that does not divide the model."""
    split = {"heads": model.heads, "feed-forward width": model.ffn_width}
    for what, size in split.items():
        if size % tp:
            raise ValueError(
                f"--mesh.tp must divide the model's {what}, which is {size}, got {tp}; "
                f"use --mesh.tp {_divisor(size, tp)}"
            )
    kv_heads = model.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            "--mesh.tp must be a multiple or a divisor of the model's key/value heads, "
            f"which are {kv_heads}, got {tp}; use --mesh.tp {_divisor(kv_heads, tp)}"
        )
    if model.padded_vocab % tp:
        raise ValueError(
            f"--mesh.tp must divide the model's padded vocabulary, which is "
            f"{model.padded_vocab}, got {tp}; use --mesh.tp "
            f"{_divisor(model.padded_vocab, tp)}"
        )


def _divisor(size: int, most: int) -> int:
    """Return the largest divisor of `size` that is at most `most`."""
    return next(n for n in range(most, 0, -1) if size % n == 0)


# --------------------------------------------------------------------------- tokenizer


def _tokenizer_folder(place: places.Place, path: str) -> Path | None:
    """Return the tokenizer folder of the work dir of checkpoints, if it has one."""
    # The checkpoints of a work dir may be in another folder.
    work_dir = place.store.directory.parent if place.journal is None else path
    if "://" in str(work_dir):
        return None
    folder = Path(str(work_dir)) / TOKENIZER_DIR
    return folder if folder.is_dir() else None


def _tokenizer_of_run(name: str, eos_token: str | None, path: str) -> Tokenizer:
    """Load the tokenizer named by the config of a run, if this machine has it."""
    if trained_vocab_size(name) is not None:
        raise ValueError(
            f"the run of {path} trained its tokenizer ({name}) on its data, and there "
            f"is no {TOKENIZER_DIR}/{_SPEC} beside its checkpoints; give the file that "
            "`python -m mjax.data info` names as --tokenizer PATH"
        )
    try:
        return load_tokenizer(name, eos_token=eos_token)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer of the run of {path} cannot be used: {error}; give its "
            "present path as --tokenizer PATH"
        ) from None


def _starts_of_run(config: TrainConfig, tokenizer: Tokenizer) -> Starts:
    """Return the token that begins the documents of a run; none for older runs."""
    start = start_of(config.data, tokenizer)
    if start is None:
        return Starts()
    return Starts((start,), None if start == tokenizer.eos_id else start)


def find_starts(tokenizer: Tokenizer, folder: Path) -> Starts:
    """Find the tokens that begin texts, as transformers does.

    Args:
      tokenizer: tokenizer of the folder.
      folder: folder whose tokenizer_config.json, if any, names the token.
    Raises:
      RuntimeError: tokenizer_config.json is damaged.
    """
    bos, path = None, folder / CONFIG_FILE
    if path.is_file():
        try:
            bos = checked_json.read(path.read_bytes(), dict[str, Any]).get("bos_token")
            bos = bos.get("content") if isinstance(bos, dict) else bos
            bos = checked_json.check(bos, str | None, "bos_token")
        except ValueError as error:
            raise RuntimeError(f"{path} is damaged: {error}") from error
    ids = [] if bos is None else tokenizer.encode_special(bos).tolist()
    bos_id = ids[0] if len(ids) == 1 else None
    return Starts(tokenizer.start_ids, bos_id)


def _check_vocab(found: _Found) -> None:
    """Refuse a tokenizer with ids that the model lacks."""
    have, need = found.model.vocab_size, found.tokenizer.vocab_size
    if need > have:
        raise ValueError(
            f"the tokenizer has {need} tokens but {found.name} only {have}, so it "
            "belongs to another model; give the model's own as --tokenizer PATH"
        )

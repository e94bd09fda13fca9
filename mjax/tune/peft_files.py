"""Write and read adapters as a folder in PEFT format.

Input: the tensors of a tuned run, or a folder with adapter_config.json and
adapter_model.safetensors. Output: such a folder, or a source of such tensors. Each
layer and weight has a pair of matrices, A [r, inputs] and B [outputs, r], named by its
module in the model.

Source: PEFT 0.21, `utils/save_and_load.py` (names) and `tuners/lora/config.py`.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mjax import checked_json
from mjax.hugging_face.families import Family
from mjax.hugging_face.keys import Keys
from mjax.hugging_face.new_folder import new_folder
from mjax.hugging_face.params import ADAPTERS
from mjax.hugging_face.safetensors import ONE_FILE, Files, Writer
from mjax.hugging_face.source import Index, TensorSource
from mjax.hugging_face.tensors import Tensor, our_shapes
from mjax.layers.config import AdapterConfig
from mjax.model.config import ModelConfig
from mjax.tune.merged import adapter_names

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAMED = 5

_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that leave the weights of the base as they are."""

_OTHER_KINDS = (
    # Another computation than W + scale A B, or a base that PEFT changes as it loads.
    *("use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config"),
    *("loftq_config", "corda_config", "lora_ga_config", "megatron_config"),
    # Other weights, layers, ranks or scales.
    *("lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("layer_replication", "layers_to_transform", "rank_pattern", "alpha_pattern"),
    "enable_lora",
)

_WITHOUT_EFFECT = frozenset(
    (
        # Metadata of the folder and its writer.
        *("auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", "megatron_core", "merge_weights"),
        # How the former training found its weights; the names of the tensors remain.
        *("target_modules", "exclude_modules", "layers_pattern", "lora_dropout"),
        *("eva_config", "ensure_weight_tying", "qalora_group_size"),
        # PEFT corrects this one by the class of the layer.
        "fan_in_fan_out",
    )
)


def module_of(family: Family, target: str) -> str:
    """Return the name of a weight's module in a family, with {} for the layer number.

    Raises:
      ValueError: the family has no separate module for the weight.
    """
    tensor = family.tensors.get(f"blocks.{target}")
    suffix = ".weight"
    names = [other.name for other in family.tensors.values()]
    is_plain = type(tensor) is Tensor and tensor.name.endswith(suffix)
    if tensor is None or not is_plain or names.count(tensor.name) > 1:
        raise ValueError(
            f"{family.name} has no separate linear layer for {target}, so PEFT cannot "
            "store its adapter; export the merged model with python -m mjax.ckpt "
            "export"
        )
    return tensor.name.removesuffix(suffix)


def write(
    source: TensorSource,
    model: ModelConfig,
    adapters: AdapterConfig,
    family: Family,
    out_dir: str | os.PathLike[str],
    *,
    alpha: float,
    base: str | None,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write the adapters of a run to a folder that PEFT loads, atomically.

    Args:
      source: source of the tensors of the adapters.
      model: the architecture.
      adapters: adapters of the run.
      family: family of the base model.
      out_dir: absent, or an empty folder.
      alpha: numerator of the scale, alpha / rank.
      base: folder or name of the base model, for people and for PEFT.
      files: further files of the folder by name, such as those of the tokenizer.
    Raises:
      ValueError: the family has no layer for a weight, or out_dir is not empty.
      RuntimeError: the disk failed.
    """
    modules = {target: module_of(family, target) for target in adapters.targets}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": [_suffix(module, family) for module in modules.values()],
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "use_rslora": False,
        "inference_mode": True,
    }
    matrices = {
        name: matrix
        for target, module in modules.items()
        for name, matrix in _matrices(source, target, module)
    }
    with new_folder(out_dir) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / ADAPTERS).write_text(json.dumps(config, indent=2) + "\n")
        shapes = {name: matrix.shape for name, matrix in matrices.items()}
        with Writer(folder, shapes, np.dtype(np.float32), file_bytes=2**62) as writer:
            for name, matrix in matrices.items():
                writer.write(name, matrix)
        (folder / ONE_FILE).rename(folder / WEIGHTS)


def _suffix(module: str, family: Family) -> str:
    """Return the end of a module's name that no other module of the family has.

    PEFT gives an adapter to every module with such an end; GPT-2 has two c_proj.
    """
    names = {t.name.removesuffix(".weight") for t in family.tensors.values()}
    parts = module.split(".")
    ends = (".".join(parts[place:]) for place in range(len(parts) - 1, -1, -1))
    return next(e for e in ends if sum(n.endswith(f".{e}") for n in names) == 1)


def _matrices(
    source: TensorSource, target: str, module: str
) -> list[tuple[str, np.ndarray]]:
    """Return (name in the file, matrix) for A and B of one weight in every layer."""
    a_name, b_name = adapter_names(target)
    a, b = source.read(a_name), source.read(b_name)
    num_layers, rank = a.shape[0], a.shape[-1]
    a, b = a.reshape(num_layers, -1, rank), b.reshape(num_layers, rank, -1)
    return [
        (f"{_PREFIX}{module.format(layer)}.lora_{letter}.weight", matrix[layer].T)
        for letter, matrix in (("A", a), ("B", b))
        for layer in range(num_layers)
    ]


class PeftAdapters:
    """The adapters of a folder in PEFT format: a `source.TensorSource`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: ModelConfig,
        adapters: AdapterConfig,
        family: Family,
    ) -> None:
        """Check that the folder holds exactly these adapters.

        Args:
          folder: folder with adapter_config.json.
          model: model of the run.
          adapters: adapters of the run.
          family: family of the base model, whose modules the files name.
        Raises:
          ValueError: rank, scale or layers differ, an option is unknown, or the folder
            is not in PEFT format.
          RuntimeError: a file is absent or damaged.
        """
        if not (Path(folder) / ADAPTERS).is_file():
            raise ValueError(
                f"--lora.init-from {folder} has no {ADAPTERS}; give a folder that PEFT "
                "or python -m mjax.tune export has written"
            )
        self._files = Files(folder, WEIGHTS)
        self._rank = adapters.rank
        _check_config(Path(folder), adapters)
        shapes = our_shapes(model)
        self._modules: dict[str, tuple[str, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        wanted = set()
        for target in adapters.targets:
            module = module_of(family, target)
            shape = shapes[f"blocks.{target}"]
            inputs = family.tensors[f"blocks.{target}"].inputs
            a_name, b_name = adapter_names(target)
            self._shapes[a_name] = (*shape[: 1 + inputs], adapters.rank)
            self._shapes[b_name] = (shape[0], adapters.rank, *shape[1 + inputs :])
            for name, letter in ((a_name, "A"), (b_name, "B")):
                self._modules[name] = module, letter
                wanted |= {self._key(name, layer) for layer in range(shape[0])}
        held = set(self._files.names())
        if held != wanted:
            missing, more = sorted(wanted - held), sorted(held - wanted)
            lines = [f"  {n}: missing in the folder" for n in missing[:_NAMED]]
            lines += [f"  {n}: not in this run" for n in more[:_NAMED]]
            raise ValueError(
                f"--lora.init-from {folder} holds the adapters of other layers:\n"
                + "\n".join(lines)
                + "\nSet --lora.targets to target_modules of its adapter_config.json"
            )

    def _key(self, name: str, layer: int) -> str:
        module, letter = self._modules[name]
        return f"{_PREFIX}{module.format(layer)}.lora_{letter}.weight"

    def names(self) -> list[str]:
        """Return the names of all matrices as in a checkpoint."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a matrix, stacked over the layers."""
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        """Return float32."""
        return np.dtype(np.float32)

    def read(self, name: str, index: Index = ...) -> np.ndarray:
        """Return the part of a stacked matrix at an index.

        Raises:
          ValueError: a matrix of the file has another shape.
        """
        shape = self._shapes[name]
        layers = []
        for layer in range(shape[0]):
            theirs = self._files.view(self._key(name, layer))
            if theirs.size != np.prod(shape[1:]) or theirs.ndim != 2:
                raise ValueError(
                    f"{self._files.folder}: {self._key(name, layer)} is "
                    f"{list(theirs.shape)}, which does not fit {list(shape[1:])}"
                )
            layers.append(theirs.T.astype(np.float32).reshape(shape[1:]))
        return np.stack(layers)[index]


def _check_config(folder: Path, adapters: AdapterConfig) -> None:
    """Refuse another rank or scale, and adapters that are not (x A) B of the base.

    Raises:
      ValueError: the adapters differ, or a key is unknown.
      RuntimeError: the file is absent or damaged.
    """
    path = folder / ADAPTERS
    try:
        config = checked_json.read(path.read_bytes(), dict[str, Any])
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{path} cannot be read: {error}") from error
    keys = Keys(config, file=str(path), without_effect=_WITHOUT_EFFECT)
    keys.expect("peft_type", "LORA")
    keys.expect("task_type", "CAUSAL_LM")
    keys.expect("bias", "none")
    start = keys.take("init_lora_weights", True)
    kind = start.lower() if isinstance(start, str) else start
    if kind is not None and kind not in _STARTS:
        raise ValueError(
            f"{path}: init_lora_weights={start!r} is not supported: such adapters "
            "belong to a base whose weights their start has changed; convert them with "
            "path_initial_model_for_weight_conversion of PEFT's save_pretrained, or "
            "merge them into the base with PEFT"
        )
    for key in _OTHER_KINDS:
        keys.expect_empty(key)
    rank, alpha = keys.size("r"), keys.number("lora_alpha")
    is_stabilised = keys.flag("use_rslora", False)
    keys.check_empty()
    if rank != adapters.rank:
        raise ValueError(
            f"{path} has rank {rank}, this run --lora.rank {adapters.rank}; give "
            f"--lora.rank {rank}"
        )
    scale = alpha / (math.sqrt(rank) if is_stabilised else rank)
    if not math.isclose(scale, adapters.scale, rel_tol=1e-12):
        rslora = " with use_rslora" if is_stabilised else ""
        raise ValueError(
            f"{path} has lora_alpha {alpha:g}{rslora}, this run --lora.alpha "
            f"{adapters.scale * rank!r}; give --lora.alpha {scale * rank!r}"
        )

"""What transformers makes of models; run by the interpreter of `.venv-hf`.

Nothing of mjax is imported here. Input: a JSON file with a precision and jobs. A job
has a folder and tokens; with a config, a model with random parameters is saved there
first. Output: the logits of each folder in FOLDER.npy, in that precision.
"""

import json
import sys
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForCausalLM,
)

_AROUND_ZERO = ("gemma2", "gemma3_text")
"""Families whose norms multiply by 1 + the stored scale."""


def main(path: str) -> None:
    with open(path) as file:
        work = json.load(file)
    for job in work["jobs"]:
        if "config" in job:
            make(job["folder"], job["config"], job["seed"])
    models = [loaded(job["folder"]) for job in work["jobs"]]
    if work["precision"] == "float64":
        compute_in_float64()
        models = [in_float64(model) for model in models]
    for job, model in zip(work["jobs"], models, strict=True):
        tokens = torch.tensor(job["tokens"])
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens).logits
        np.save(job["folder"] + ".npy", logits.numpy())


def make(folder: str, config: dict[str, Any], seed: int) -> None:
    """Save a model whose parameters are all random: biases and norms as well."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    generator = torch.Generator().manual_seed(seed)
    centre = float(config["model_type"] not in _AROUND_ZERO)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("weight") and parameter.ndim == 1
            # A Conv1D of GPT-2 is [inputs, outputs].
            inputs = parameter.shape[0 if ".c_" in name else -1]
            std = inputs**-0.5 if parameter.ndim > 1 else 0.15
            parameter.normal_(centre * is_norm, std, generator=generator)
    model.save_pretrained(folder)


def loaded(folder: str) -> Any:
    """Load a folder in float32; all that it means must be there."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    # What it does not find, transformers draws at random, with no more than a note.
    unmatched = {kind: names for kind, names in loading.items() if names}
    assert not unmatched, (folder, unmatched)
    return model


def compute_in_float64() -> None:
    """Let what transformers computes in float32 whatever the dtype be float64.

    These are norms, softmax and rotary frequencies. Nothing can be loaded after this.
    """
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)


def in_float64(model: Any) -> Any:
    """Make the model anew, so that what it computes from its config is float64 too."""
    made = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64)
    made.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    return made


if __name__ == "__main__":
    main(sys.argv[1])

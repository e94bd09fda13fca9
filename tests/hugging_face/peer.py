"""Results of transformers for a folder; run by the interpreter of `.venv-hf`.

Nothing of mjax is imported here. Input: a JSON file of jobs, each with a folder and
tokens. If a job has a config, a model with random parameters is first saved to its
folder. Output: the model of the folder computes the logits of the tokens, FOLDER.npy.
"""

import json
import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForCausalLM,
)


def make(folder: str, config: dict, file_size: str) -> None:
    """Save a model with all parameters random, including biases and norms.

    Norms of Gemma multiply by 1 + the stored scale, so these scales are drawn around 0.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("weight") and parameter.ndim == 1
            is_norm = is_norm and not config["model_type"].startswith("gemma")
            inputs = parameter.shape[-1] if parameter.ndim > 1 else 40
            parameter.normal_(float(is_norm), inputs**-0.5, generator=generator)
    model.save_pretrained(folder, max_shard_size=file_size)


def main(path: str) -> None:
    with open(path) as file:
        jobs = json.load(file)
    tokens = torch.from_numpy(np.load(jobs["tokens"]).astype(np.int64))
    for job in jobs["jobs"]:
        if "config" in job:
            make(job["folder"], job["config"], job["file_size"])
        model, loading = AutoModelForCausalLM.from_pretrained(
            job["folder"], dtype=torch.float32, output_loading_info=True
        )
        # transformers initialises missing tensors at random, with only a notice.
        unmatched = {kind: names for kind, names in loading.items() if names}
        assert not unmatched, (job["folder"], unmatched)
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens).logits
        np.save(job["folder"] + ".npy", logits.numpy())


if __name__ == "__main__":
    main(sys.argv[1])

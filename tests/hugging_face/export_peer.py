"""Results of transformers for exported folders; run by the interpreter of `.venv-hf`.

Nothing of mjax is imported here. Input: a JSON file of folders, tokens and texts.
Output for each folder: FOLDER.npy with the logits of the tokens, and FOLDER.json with
the results of its tokenizer and of `generate`.
"""

import json
import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)


def main(path: str) -> None:
    with open(path) as file:
        job = json.load(file)
    tokens = torch.tensor(job["tokens"])
    for folder in job["folders"]:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        # transformers initialises missing tensors at random, with only a notice.
        unmatched = {kind: names for kind, names in loading.items() if names}
        assert not unmatched, (folder, unmatched)
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens).logits
        np.save(folder + ".npy", logits.numpy())
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer("def ", return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        fast = PreTrainedTokenizerFast.from_pretrained(folder)
        found = {
            "class": type(model).__name__,
            "size": len(tokenizer),
            "eos": [
                tokenizer.eos_token_id,
                model.config.eos_token_id,
                model.generation_config.eos_token_id,
            ],
            "ids": [tokenizer(text)["input_ids"] for text in job["texts"]],
            "fast_ids": [fast(text)["input_ids"] for text in job["texts"]],
            "texts": [tokenizer.decode(ids) for ids in job["ids"]],
            "prompt": inputs["input_ids"][0].tolist(),
            "made": made[0].tolist(),
        }
        with open(folder + ".json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])

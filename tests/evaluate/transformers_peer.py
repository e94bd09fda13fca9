"""Results of transformers for texts; run by the interpreter of `.venv-hf`.

Nothing of mjax is imported here. Input: a JSON file with folders, pairs of context and
continuation, whole texts, and prompts. Output: FOLDER.json with log-likelihoods and
greedy continuations, as lm-eval's documentation defines them, and log-likelihoods of
the texts without the tokens that the tokenizer adds.
"""

import json
import sys
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
)


def main(path: str) -> None:
    with open(path) as file:
        job = json.load(file)
    for folder in job["folders"]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prefix = tokenizer.bos_token_id
        prefix = tokenizer.eos_token_id if prefix is None else prefix
        found: dict[str, Any] = {"pairs": [], "texts": [], "bare": [], "made": []}
        for context, continuation in job["pairs"]:
            whole = tokenizer(context + continuation)["input_ids"]
            scored = len(whole) - len(tokenizer(context)["input_ids"])
            found["pairs"].append(score(model, whole, scored))
        for text in job["texts"]:
            ids = tokenizer(text)["input_ids"]
            found["texts"].append(score(model, [prefix, *ids], len(ids))[0])
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            found["bare"].append(score(model, [prefix, *ids], len(ids))[0])
        for prompt in job["prompts"]:
            ids = tokenizer(prompt, return_tensors="pt")
            made = model.generate(
                **ids, max_new_tokens=job["max_new_tokens"], do_sample=False
            )
            new = made[0][ids["input_ids"].shape[1] :]
            text = tokenizer.decode(new, skip_special_tokens=True)
            found["made"].append(text.split(job["stop"])[0])
        with open(folder + ".json", "w") as file:
            json.dump(found, file)


def score(model: Any, ids: list[int], num_scored: int) -> tuple[float, bool]:
    """Return the log-likelihood of the last tokens, and whether greedy decoding gives
    them."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([ids])).logits[0].double()
    before = logits[len(ids) - num_scored - 1 : -1]
    targets = torch.tensor(ids[len(ids) - num_scored :])
    picked = before.log_softmax(-1).gather(1, targets[:, None])
    return float(picked.sum()), bool((before.argmax(-1) == targets).all())


if __name__ == "__main__":
    main(sys.argv[1])

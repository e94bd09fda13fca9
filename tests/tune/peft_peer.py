"""Logits of PEFT and transformers for folders; run by the interpreter of `.venv-hf`.

Nothing of mjax is imported here. Arguments: the folder of a base model, the folder of
adapters, a file of tokens, and a file for the logits.
"""

import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from peft import PeftModel  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
)


def main(base: str, adapters: str, tokens: str, out: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapters).eval()
    named = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert named, "PEFT has found no adapter"
    ids = torch.from_numpy(np.load(tokens).astype(np.int64))
    with torch.no_grad():
        np.save(out, model(input_ids=ids).logits[:, -1].numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])

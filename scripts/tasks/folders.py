"""Tasks 18 to 20 and 24: models as folders of Hugging Face."""

import json
from pathlib import Path

import numpy as np

from mjax.hugging_face.params import open_params, read_config
from mjax.mesh.devices import load_plugin_without_gpu
from scripts.hugging_face.models import BOUNDS, our_logits, relative_difference
from scripts.tasks.place import HF_PYTHON, Place, Task

LOGITS = """import json, sys, numpy, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokens = numpy.load(sys.argv[2])
with torch.no_grad():
    numpy.save(sys.argv[3], model(input_ids=torch.tensor(tokens)).logits.numpy())
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(json.dumps(tokenizer("def main(")["input_ids"]))
"""
MAKE = """import json, sys, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
for kind, config in json.loads(sys.argv[1]).items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(kind)
    words = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>"
                            ).save_pretrained(kind)
print("0")
"""
_SIZES = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "head_dim": 16,
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}  # fmt: skip
LLAMAS = {
    "llama-3.1": {"model_type": "llama", **_SIZES, "rope_parameters": _LLAMA3},
    "llama-3.2": {"model_type": "llama", **_SIZES, "tie_word_embeddings": True,
                  "rope_parameters": {**_LLAMA3, "factor": 32.0}},
}  # fmt: skip
LARGEST = "largest relative difference of a logit"
OTHERS = {
    "qwen2": {"model_type": "qwen2", **_SIZES},
    "qwen3": {"model_type": "qwen3", **_SIZES},
    "gemma2": {"model_type": "gemma2", **_SIZES, "sliding_window": 16},
    "gemma3": {"model_type": "gemma3_text", **_SIZES, "sliding_window": 16},
    "gpt2": {"model_type": "gpt2", "vocab_size": 257, "n_embd": 64, "n_layer": 2,
             "n_head": 4, "n_positions": 128, "bos_token_id": None,
             "eos_token_id": 256},
}  # fmt: skip


def export(place: Place) -> None:
    """Task 18: the demo in transformers."""
    place.mjax("ckpt", "export", str(place.shared / "demo"), "out")
    code = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    place.show(f"{code}; AutoModelForCausalLM.from_pretrained('out')")
    ids, difference = agree(place, "out")
    place.need(ids == list(b"def main("), "the tokenizer loads too")
    place.need(difference < 1e-5, LARGEST, f"{difference:.1e}")


def agree(place: Place, name: str) -> tuple[list[int], float]:
    """Return transformers' tokens of a text, and its logits' error against ours."""
    folder, files = place.folder / name, place.folder / f"{name}-{{}}.npy"
    _, model = read_config(folder)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 100), dtype=np.int32)
    load_plugin_without_gpu()
    ours = our_logits(model, open_params(folder, model), tokens)
    asked, answer = str(files).format("tokens"), str(files).format("logits")
    np.save(asked, tokens)
    ids = place.ask(HF_PYTHON, LOGITS, str(folder), asked, answer)
    return ids, relative_difference(ours, np.load(answer))


def load(place: Place, configs: dict[str, dict[str, object]]) -> None:
    """Load random models of some families, and continue a text with each."""
    place.ask(HF_PYTHON, MAKE, json.dumps(configs))
    for kind in configs:
        place.mjax("generate", kind, "--prompt", "def main(", "--tokens", "8")
        _, difference = agree(place, kind)
        is_good = difference < BOUNDS["float32"]
        place.need(is_good, f"{kind}: {LARGEST}", f"{difference:.1e}")


def llama(place: Place) -> None:
    """Task 19: Llama 3.1 and 3.2."""
    load(place, LLAMAS)


def others(place: Place) -> None:
    """Task 20: Qwen2 and 3, Gemma 2 and 3, GPT-2."""
    load(place, OTHERS)


def vllm(place: Place) -> None:
    """Task 24: every file that vLLM reads, and a page."""
    place.mjax("ckpt", "export", str(place.shared / "demo"), "out")
    place.show("vllm serve out --max-model-len 128")
    out = place.folder / "out"
    needed = ("config.json", "generation_config.json", "model.safetensors",
              "tokenizer.json", "tokenizer_config.json")  # fmt: skip
    missing = [name for name in needed if not (out / name).exists()]
    place.need(missing == [], "all files are there", ", ".join(needed))
    config = json.loads((out / "config.json").read_text())
    place.need(
        config["architectures"] == ["Cohere2ForCausalLM"], "vLLM supports the class"
    )
    place.need(
        config["tie_word_embeddings"] is True,
        "the tensors have the form that its loader expects",
    )
    page = Path(__file__).parents[2] / "docs" / "serving_elsewhere.md"
    place.need(
        "vllm serve" in page.read_text(),
        "docs/serving_elsewhere.md explains it; vLLM was not run",
    )


TASKS = (
    Task(number=18, do=export, needs=(7,)),
    Task(number=19, do=llama),
    Task(number=20, do=others),
    Task(number=24, do=vllm, needs=(7,)),
)

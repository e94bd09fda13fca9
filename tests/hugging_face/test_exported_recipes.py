"""Every recipe with a Hugging Face family, exported and used by transformers.

`python -m mjax.ckpt export` writes a step of each, of reduced width and depth;
transformers alone loads the folders, in the environment of `.venv-hf`.
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mjax.ckpt.__main__ import main
from mjax.data.tokenizer_files import read_files
from mjax.data.tokenizers import (
    END_OF_TEXT,
    BytesTokenizer,
    load_tokenizer,
    train_bpe,
)
from mjax.hugging_face.params import open_params, read_config
from mjax.recipes import RECIPES
from tests.hugging_face.saved_runs import make_run, reduced
from tests.hugging_face.test_transformers import (
    PYTHON,
    largest_difference,
    our_logits,
)
from tests.training import LENGTH

pytestmark = pytest.mark.hf

CLASSES = {
    "debug": "Cohere2ForCausalLM",
    "demo": "Cohere2ForCausalLM",
    "gpt-125m": "GPTJForCausalLM",
    "gpt-350m": "GPTJForCausalLM",
    "gpt-1b3": "GPTJForCausalLM",
    "gpt-13b": "GPTJForCausalLM",
    "llama3-8b": "LlamaForCausalLM",
}
# No names of special tokens, which are tokens in transformers and text in a run.
TEXTS = (
    "",
    "def f(x):\n    return x  # \ttwo  spaces .",
    "é 😀 \U0001f468\u200d\U0001f469 \u202e \ufffd \ufeff",
    "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "don't , isn 't . ! ?",
)
# Half a character, before the end of a document and at the end.
IDS = ([0xF0, 0x9F, 256, 0x80, 65, 0xE2, 0x82], [256, 256], list(range(257)))
BOUND = 1e-5
"""Float32 sums of at most 96 terms, in another order."""


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 257, (2, LENGTH), dtype=np.int32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tokens: np.ndarray) -> Path:
    """A folder of each recipe, one with BPE, and results of transformers."""
    folder = tmp_path_factory.mktemp("exported")
    for name in CLASSES:
        config = reduced(RECIPES[name]())
        run = make_run(folder / "runs" / name, config, read_files("bytes"))
        words = [str(run), str(folder / name), "--tokenizer", "bytes"]
        assert main(["export", *words]) == 0
    (folder / "tokenizer.json").write_text(train_bpe([TEXTS[1] * 9, "don't"], 270))
    config = reduced(RECIPES["demo"]())
    model = dataclasses.replace(config.model, vocab_size=270)
    config = dataclasses.replace(config, model=model)
    files = read_files(str(folder))
    run = make_run(folder / "runs" / "bpe", config, files)
    words = ["--tokenizer", str(run / "tokenizer")]
    assert main(["export", str(run), str(folder / "bpe"), *words]) == 0
    job = {
        "folders": [str(folder / name) for name in [*CLASSES, "bpe"]],
        "tokens": tokens.tolist(),
        "texts": TEXTS,
        "ids": IDS,
    }
    (folder / "job.json").write_text(json.dumps(job))
    peer = Path(__file__).with_name("export_peer.py")
    done = subprocess.run(
        [PYTHON, str(peer), str(folder / "job.json")],
        # No request to the hub, and no packages of this process in the peer.
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def said(exported: Path, name: str) -> dict:
    return json.loads((exported / f"{name}.json").read_text())


@pytest.mark.parametrize("name", CLASSES)
def test_the_export_of_a_recipe_has_the_same_logits_in_transformers(
    exported: Path, tokens: np.ndarray, name: str
):
    family, model = read_config(exported / name)
    assert said(exported, name)["class"] == family.architecture == CLASSES[name]
    ours = our_logits(model, open_params(exported / name, model), tokens)
    difference = largest_difference(ours, np.load(exported / f"{name}.npy"))
    print(f"{name}: largest difference of a logit {difference:.1e}")
    assert difference < BOUND


@pytest.mark.parametrize("name", CLASSES)
def test_transformers_encodes_as_the_run_and_stops_where_a_document_ends(
    exported: Path, name: str
):
    found = said(exported, name)
    start = [256] * RECIPES[name]().data.has_starts
    wanted = [[*start, *BytesTokenizer().encode(text).tolist()] for text in TEXTS]
    assert found["ids"] == found["fast_ids"] == wanted
    decode = BytesTokenizer().decode
    assert found["texts"] == [decode(np.array(ids)) for ids in IDS]
    assert (found["size"], found["eos"]) == (257, [256] * 3)
    assert found["prompt"] == [*start, *b"def "]
    # Greedy, so that the continuation depends only on the logits.
    assert found["made"][: len(start) + 4] == found["prompt"]
    assert len(start) + 4 < len(found["made"]) < len(start) + 13


def test_transformers_encodes_as_the_bpe_of_a_run(exported: Path):
    found, tokenizer = said(exported, "bpe"), load_tokenizer(str(exported / "bpe"))
    start = tokenizer.eos_id
    assert found["ids"] == [[start, *tokenizer.encode(text).tolist()] for text in TEXTS]
    assert (found["size"], found["eos"]) == (270, [tokenizer.eos_id] * 3)
    assert END_OF_TEXT in tokenizer.decode(np.array([tokenizer.eos_id]))

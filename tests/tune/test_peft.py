"""PEFT computes with our adapters what we do; `make test-hf`."""

import dataclasses
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mjax.hugging_face import families
from mjax.hugging_face.export import write
from mjax.layers.config import AdapterConfig
from mjax.tune import peft_files
from tests.hugging_face.small import small_model
from tests.training import ONE_DEVICE, VOCAB, make_batch, make_program
from tests.tune.test_merged import ADAPTERS as LORA
from tests.tune.test_merged import MODEL, SAVED_BY_PEFT, Source, random_params

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-hf" / "bin" / "python"
GPT2 = dataclasses.replace(small_model("gpt2"), vocab_size=VOCAB, vocab_multiple=8)


@pytest.mark.hf
@pytest.mark.parametrize(
    ("model", "adapters"),
    [
        (MODEL, LORA),
        (GPT2, dataclasses.replace(LORA, targets=("mlp.w_in", "mlp.w_out"))),
    ],
)
def test_peft_loads_exported_adapters_and_computes_the_same_logits(
    tmp_path, model, adapters: AdapterConfig
):
    program = make_program(ONE_DEVICE, model, adapters=adapters)
    params = random_params(program)
    base, out = Source(params), tmp_path / "adapters"
    alpha, family = (
        adapters.scale * adapters.rank,
        families.hf_config(model, seq_len=16),
    )
    peft_files.write(base, model, adapters, family[0], out, alpha=alpha, base="there")
    base.tensors = {n: x for n, x in base.tensors.items() if ".adapters." not in n}
    write(base, model, tmp_path / "base", seq_len=16)
    tokens = make_batch(program, 0)["tokens"]
    np.save(tmp_path / "tokens.npy", np.asarray(tokens))
    files = [tmp_path / n for n in ("base", "adapters", "tokens.npy", "logits.npy")]
    peer = Path(__file__).with_name("peft_peer.py")
    subprocess.run([PYTHON, peer, *files], check=True, timeout=300)
    ours = np.asarray(program.next_token_logits(params, tokens, tokens.shape[1]))
    theirs = np.load(tmp_path / "logits.npy")
    # float32, sums of at most 64 products in another order
    np.testing.assert_allclose(ours[:, :VOCAB], theirs, atol=1e-5)


@pytest.mark.hf
def test_the_keys_that_are_read_are_those_that_this_peft_saves():
    code = "import json, peft; print(json.dumps([*peft.LoraConfig().to_dict()]))"
    done = subprocess.run(
        [PYTHON, "-c", code], check=True, timeout=300, capture_output=True, text=True
    )
    assert {*json.loads(done.stdout)} == SAVED_BY_PEFT.keys()

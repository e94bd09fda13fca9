"""PEFT computes with our adapters what we do; `make test-hf`."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from mjax.hugging_face.export import write
from tests.training import ONE_DEVICE, make_batch, make_program
from tests.tune.test_merged import ADAPTERS as LORA
from tests.tune.test_merged import MODEL, Source, exported, random_params

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-hf" / "bin" / "python"


@pytest.mark.hf
def test_peft_loads_exported_adapters_and_computes_the_same_logits(tmp_path):
    program = make_program(ONE_DEVICE, MODEL, adapters=LORA)
    params = random_params(program)
    exported((program, params), tmp_path / "adapters")
    base = Source(params)
    base.tensors = {n: x for n, x in base.tensors.items() if ".adapters." not in n}
    write(base, MODEL, tmp_path / "base", seq_len=16)
    tokens = make_batch(program, 0)["tokens"]
    np.save(tmp_path / "tokens.npy", np.asarray(tokens))
    files = [tmp_path / n for n in ("base", "adapters", "tokens.npy", "logits.npy")]
    peer = Path(__file__).with_name("peft_peer.py")
    subprocess.run([PYTHON, peer, *files], check=True, timeout=300)
    ours = np.asarray(program.next_token_logits(params, tokens, tokens.shape[1]))
    theirs = np.load(tmp_path / "logits.npy")
    # float32, sums of at most 64 products in another order
    np.testing.assert_allclose(ours[:, :97], theirs, atol=1e-5)

"""Logits of transformers and of mjax, from the same files, in both directions.

    make test-hf ARGS=-s

prints the largest difference of each family. The other side runs with torch in its own
environment, `$MJAX_HF_PYTHON` or `.venv-hf`: one process for each direction.
"""

import dataclasses
import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from jax.sharding import PartitionSpec

from mjax.hugging_face.export import write
from mjax.hugging_face.families import model_config
from mjax.hugging_face.params import open_params
from mjax.hugging_face.source import TensorSource
from mjax.model.config import ModelConfig
from mjax.model.transformer import abstract_params
from tests.hugging_face.small import (
    CONFIGS,
    LLAMA3,
    VOCAB,
    WINDOW,
    Arrays,
    random_params,
    small_model,
)
from tests.training import LENGTH, Layout, make_mesh, make_program

pytestmark = pytest.mark.hf

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("MJAX_HF_PYTHON", str(ROOT / ".venv-hf" / "bin" / "python"))
ROWS = 4
UNSCALED = {
    "rope_original_len": None,
    "rope_slow_turns": None,
    "rope_fast_turns": None,
}
by_family = pytest.mark.parametrize("family", CONFIGS)


def ask_peer(jobs: list[dict[str, Any]], folder: Path, tokens: np.ndarray) -> None:
    assert Path(PYTHON).exists(), f"{PYTHON} is missing: make env-hf"
    np.save(folder / "tokens.npy", tokens)
    path = folder / "jobs.json"
    path.write_text(json.dumps({"tokens": str(folder / "tokens.npy"), "jobs": jobs}))
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("peer.py")), str(path)],
        # No request to the hub, and no packages of this process in the peer.
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    assert LENGTH > 2 * WINDOW
    return np.random.default_rng(7).integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, tokens: np.ndarray) -> Path:
    """Folders that transformers wrote, each with its logits; mistral in many files."""
    folder = tmp_path_factory.mktemp("theirs")
    jobs = [
        {
            "folder": str(folder / family),
            "config": config | {"pad_token_id": None, "eos_token_id": None},
            "file_size": "20KB" if family == "mistral" else "5GB",
        }
        for family, config in [*CONFIGS.items(), ("llama3", LLAMA3)]
    ]
    ask_peer(jobs, folder, tokens)
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, tokens: np.ndarray) -> Path:
    """Folders that mjax wrote, each with the logits of transformers."""
    folder = tmp_path_factory.mktemp("ours")
    for family in CONFIGS:
        source = Arrays(random_params(small_model(family)))
        size = 20_000 if family == "cohere2" else 10**9
        written = write(
            source, small_model(family), folder / family, seq_len=64, file_bytes=size
        )
        assert written == family
    source = Arrays(random_params(small_model("gptj")))
    write(source, small_model("gptj"), folder / "bf16", seq_len=64, dtype="bfloat16")
    llama3 = model_config(LLAMA3)
    write(Arrays(random_params(llama3)), llama3, folder / "llama3", seq_len=64)
    names = [*CONFIGS, "bf16", "llama3"]
    jobs = [{"folder": str(folder / name)} for name in names]
    ask_peer(jobs, folder, tokens)
    return folder


@functools.cache
def compiled_logits(model: ModelConfig) -> Any:
    graph, _ = abstract_params(model)

    def per_device(params: Any, tokens: jax.Array) -> jax.Array:
        bound = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        context = bound.context(positions, None)
        return bound.logits_of(
            bound.run_layers(bound.start(tokens, positions), context)
        )

    return jax.jit(
        jax.shard_map(
            per_device,
            mesh=make_mesh((1, 1, 1, 1)),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def our_logits(
    model: ModelConfig, source: TensorSource, tokens: np.ndarray
) -> np.ndarray:
    """Float32, on one device, with the reference attention."""
    flat = {name: source.read(name) for name in source.names()}
    params = traverse_util.unflatten_dict(flat, sep=".")["params"]
    model = dataclasses.replace(model, attention="reference", remat="none")
    logits = np.asarray(compiled_logits(model)(params, tokens))
    assert np.isneginf(logits[..., model.vocab_size :]).all()
    return logits[..., : model.vocab_size]


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    assert a.dtype == b.dtype == np.float32
    assert b.std() > 0.1  # Otherwise any logits would agree.
    return float(np.abs(a - b).max())


# 1e-4: float32 sums of up to 48 terms through five layers, logits of up to about 5.
@by_family
def test_a_folder_of_transformers_has_the_same_logits_here(
    family: str, theirs: Path, tokens: np.ndarray
) -> None:
    source = open_params(theirs / family, small_model(family))
    got = our_logits(small_model(family), source, tokens)
    difference = largest_difference(got, np.load(theirs / f"{family}.npy"))
    print(f"\n{family}: transformers to mjax, largest difference {difference:.2g}")
    assert difference <= 1e-4


@by_family
def test_transformers_alone_loads_our_folder_with_the_same_logits(
    family: str, ours: Path, tokens: np.ndarray
) -> None:
    source = Arrays(random_params(small_model(family)))
    got = our_logits(small_model(family), source, tokens)
    difference = largest_difference(got, np.load(ours / f"{family}.npy"))
    print(f"\n{family}: mjax to transformers, largest difference {difference:.2g}")
    assert difference <= 1e-4


def test_scaled_positions_of_llama_3_are_those_of_transformers(
    theirs: Path, ours: Path, tokens: np.ndarray
) -> None:
    """Twice as many positions as before the scaling."""
    model = model_config(LLAMA3)
    read = our_logits(model, open_params(theirs / "llama3", model), tokens)
    written = our_logits(model, Arrays(random_params(model)), tokens)
    want = [np.load(folder / "llama3.npy") for folder in (theirs, ours)]
    pairs = zip((read, written), want, strict=True)
    differences = [largest_difference(got, wanted) for got, wanted in pairs]
    print(f"\nllama3: largest differences {differences}")
    assert max(differences) <= 1e-4


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama3", {"rope_type": "linear", **UNSCALED, "rope_scaling": 1.0}),
        ("llama3", {"rope_type": "linear", **UNSCALED}),
        ("qwen2", {"rope_type": "linear", **UNSCALED, "rope_scaling": 1.0}),
        ("qwen2", {"rope_magnitude": 1.0}),
        ("qwen2", {"rope_type": "llama3"}),
        ("gemma3_text", {"rope_windowed_base": None}),
        ("gemma3_text", {"rope_scaling": 1.0}),
        ("gemma3_text", {"logit_soft_cap": None}),
        ("gemma2", {"attn_soft_cap": None}),
        ("gemma2", {"attn_scale_width": None}),
        ("gemma2", {"embed_scale": 1.0}),
        ("gemma2", {"norm_zero_centred": False}),
        ("gemma2", {"activation": "swiglu"}),
    ],
    ids=str,
)
def test_a_model_without_an_option_has_other_logits(
    family: str, change: dict[str, Any], theirs: Path, tokens: np.ndarray
) -> None:
    """The agreement above would fail if an option were not read."""
    model = model_config(LLAMA3 if family == "llama3" else CONFIGS[family])
    source = open_params(theirs / family, model)
    got = our_logits(dataclasses.replace(model, **change), source, tokens)
    assert largest_difference(got, np.load(theirs / f"{family}.npy")) > 1e-2


def test_transformers_reads_the_bfloat16_that_we_write(
    ours: Path, tokens: np.ndarray
) -> None:
    source = open_params(ours / "bf16", small_model("gptj"))
    got = our_logits(small_model("gptj"), source, tokens)
    want = np.load(ours / "bf16.npy")
    assert largest_difference(got, want) <= 1e-4
    assert largest_difference(np.load(ours / "gptj.npy"), want) > 1e-3


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_window_that_is_off_by_one_key_shows(
    window: int, theirs: Path, tokens: np.ndarray
) -> None:
    source = open_params(theirs / "mistral", small_model("mistral"))
    other = dataclasses.replace(small_model("mistral"), window=(window,))
    got = our_logits(other, source, tokens)
    want = np.load(theirs / "mistral.npy")
    np.testing.assert_allclose(got[:, : WINDOW - 1], want[:, : WINDOW - 1], atol=1e-4)
    assert largest_difference(got, want) > 1e-2


def test_a_folder_goes_straight_onto_a_mesh_of_stages_and_tensor_parallelism(
    theirs: Path, tokens: np.ndarray
) -> None:
    model = dataclasses.replace(small_model("mistral"), attention="reference")
    layout = Layout((2, 1, 2, 2), zero=1, microbatches=2)
    program = make_program(layout, model, rows=ROWS)
    source = open_params(theirs / "mistral", model)
    state = program.to_saved(program.init())
    flat, structure = jax.tree_util.tree_flatten_with_path(
        program.abstract_saved.params
    )
    leaves = []
    for path, leaf in flat:
        name = "params." + jax.tree_util.keystr(path, simple=True, separator=".")

        def read(index: Any, name: str = name) -> np.ndarray:
            return source.read(name, index)

        assert source.shape(name) == leaf.shape
        leaves.append(jax.make_array_from_callback(leaf.shape, leaf.sharding, read))
    params = jax.tree.unflatten(structure, leaves)
    params = program.from_saved(dataclasses.replace(state, params=params)).params
    got = program.next_token_logits(params, tokens, LENGTH)
    want = np.load(theirs / "mistral.npy")[:, -1]
    assert largest_difference(np.asarray(got)[:, :VOCAB], want) <= 1e-4

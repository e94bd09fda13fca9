"""Folders written and read back without transformers: exact, in parts, refused."""

import dataclasses
import json
import math
import shutil
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import train as config
from mjax.config.command_line import parse
from mjax.hugging_face import families, params
from mjax.hugging_face.export import write
from mjax.hugging_face.params import flags_of, open_params
from mjax.hugging_face.safetensors import INDEX, ONE_FILE, Files, Writer
from mjax.hugging_face.source import TensorSource
from mjax.hugging_face.tensors import our_shapes, their_shapes
from mjax.model.config import ModelConfig
from tests.hugging_face.small import CONFIGS, Arrays, random_params, small_model

by_family = pytest.mark.parametrize("family", CONFIGS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per family, each in many files."""
    folder = tmp_path_factory.mktemp("folders")
    for family in CONFIGS:
        model = small_model(family)
        source = Arrays(random_params(model))
        write(source, model, folder / family, seq_len=64, file_bytes=30_000)
        assert (folder / family / INDEX).exists()
    return folder


@pytest.fixture
def mistral(folders: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folders / "mistral", tmp_path / "mistral"))


@by_family
def test_what_is_exported_is_read_back_bit_for_bit(family: str, folders: Path) -> None:
    model = small_model(family)
    source = open_params(folders / family, model)
    assert isinstance(source, TensorSource)
    want = random_params(model)
    assert set(source.names()) == set(want)
    for name, leaf in want.items():
        assert source.shape(name) == leaf.shape
        assert source.dtype(name) == leaf.dtype
        np.testing.assert_array_equal(source.read(name), leaf, strict=True)


@by_family
def test_any_box_is_that_of_the_whole(family: str, folders: Path) -> None:
    model = small_model(family)
    source = open_params(folders / family, model)
    rng = np.random.default_rng(3)
    for name, leaf in random_params(model).items():
        for _ in range(5):
            ends = [sorted(rng.integers(0, n + 1, 2)) for n in leaf.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            np.testing.assert_array_equal(source.read(name, index), leaf[index])


def test_the_vocabulary_is_padded_with_zeros_as_this_run_pads_it(folders: Path) -> None:
    model = dataclasses.replace(small_model("gptj"), vocab_multiple=100)
    source = open_params(folders / "gptj", model)
    for name in ("params.embed.table", "params.head.table", "params.head.bias"):
        leaf = source.read(name)
        assert leaf.shape[0] == 100
        assert (leaf[61:] == 0).all()
        assert (leaf[:61] != 0).all()
        np.testing.assert_array_equal(
            source.read(name, (slice(60, 63), *(slice(None) for _ in leaf.shape[1:]))),
            leaf[60:63],
        )


def test_bfloat16_costs_the_rounding_and_nothing_else(tmp_path: Path) -> None:
    model = small_model("gptj")
    want = random_params(model)
    write(Arrays(want), model, tmp_path / "out", seq_len=64, dtype="bfloat16")
    files = Files(tmp_path / "out")
    dtypes = {files.view(name).dtype for name in files.names()}
    assert dtypes == {np.dtype(jnp.bfloat16)}
    source = open_params(tmp_path / "out", model)
    for name, leaf in want.items():
        rounded = leaf.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(source.read(name), rounded, strict=True)


def test_slabs_do_not_change_what_is_written(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for only one layer, or three rows of the embedding."""
    monkeypatch.setattr("mjax.hugging_face.export._SLAB_BYTES", 400)
    model = small_model("cohere2")
    source = Arrays(random_params(model))
    write(source, model, tmp_path / "out", seq_len=64, file_bytes=30_000)
    for path in (folders / "cohere2").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_box_of_a_model_larger_than_memory_is_read_without_the_rest(
    tmp_path: Path,
) -> None:
    """The shape of Llama 2 70B in float32, as a sparse file."""
    model = ModelConfig(
        layers=80,
        d_model=8192,
        heads=64,
        kv_heads=8,
        d_ff=28672,
        vocab_size=32000,
        block="serial",
        norm="rmsnorm",
        activation="swiglu",
    )
    family, config = families.hf_config(model, seq_len=4096)
    (tmp_path / "config.json").write_text(json.dumps(config))
    offset, header = 0, {}
    for name, shape in their_shapes(model, family.tensors).items():
        end = offset + math.prod(shape) * 4
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    assert offset > 250 * 2**30
    text = json.dumps(header).encode()
    name = "model.layers.79.self_attn.q_proj.weight"
    row = 8192 * 4
    with (tmp_path / ONE_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # Output 3 of head 63, all of its inputs.
        start = 8 + len(text) + header[name]["data_offsets"][0]
        file.seek(start + (63 * 128 + 3) * row)
        file.write(np.arange(8192, dtype=np.float32).tobytes())
        file.truncate(8 + len(text) + offset)
    source = open_params(tmp_path, model)
    index = (slice(78, 80), slice(100, 104), slice(62, 64), slice(0, 8))
    tracemalloc.start()
    box = source.read("params.blocks.attention.wq", index)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    want = np.zeros((2, 4, 2, 8))
    want[1, :, 1, 3] = range(100, 104)
    np.testing.assert_array_equal(box, want)
    assert peak_bytes < 100_000


@by_family
def test_the_flags_of_a_folder_make_its_model(family: str, folders: Path) -> None:
    words = flags_of(folders / family).split()
    parsed, _ = parse(words, {"demo": config.TrainConfig}, "test")
    assert parsed.data.vocab == "model"
    assert families.differences(parsed.model, small_model(family)) == {}
    open_params(folders / family, parsed.model)


@pytest.mark.parametrize(("family", "says"), [("gptj", True), ("llama", False)])
def test_the_flags_of_a_folder_hold_the_positions_that_end(
    family: str, says: bool, folders: Path
) -> None:
    """Rotary positions of Llama are unlimited; transformers gives GPT-J a table."""
    assert ("--data.seq-len 64" in flags_of(folders / family)) == says
    assert params.read_positions(folders / family) == 64


@pytest.mark.parametrize(
    ("value", "says"),
    [(0, "must be at least 1, got 0"), ("many", "n_positions must be a whole number")],
)
def test_positions_that_cannot_be_are_refused(
    value: object, says: str, folders: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders / "gptj", tmp_path / "gptj"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": value}))
    with pytest.raises(ValueError, match=rf"gptj: config.json: .*{says}"):
        flags_of(folder)


def test_a_run_with_another_model_is_told_which_flags_to_give(folders: Path) -> None:
    model = dataclasses.replace(
        small_model("mistral"), window=(None,), layers=2, norm_eps=1e-5
    )
    with pytest.raises(
        ValueError, match=r"mistral \(mistral\) holds a different"
    ) as told:
        open_params(folders / "mistral", model)
    assert [line.strip() for line in str(told.value).splitlines()[1:-1]] == [
        "--model.layers 4; this run has --model.layers 2",
        "--model.norm-eps 0.02; this run has --model.norm-eps 1e-05",
        "--model.window 5; this run has --model.window None",
    ]


def test_what_changes_no_maths_may_differ(folders: Path) -> None:
    model = dataclasses.replace(
        small_model("mistral"),
        attention="blocked",
        remat="none",
        dropout=0.1,
        init="uniform-depth",
        init_std=0.5,
        vocab_multiple=8,
    )
    source = open_params(folders / "mistral", model)
    assert source.shape("params.embed.table") == (64, 32)


# -------------------------------------------------------------------- what is refused


def rewrite(folder: Path, change) -> None:
    """Rewrite a folder after changing the mapping of its tensors."""
    files = Files(folder)
    tensors = change({name: np.array(files.view(name)) for name in files.names()})
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    shapes = {name: array.shape for name, array in tensors.items()}
    dtype = np.dtype(np.float32)
    with Writer(folder, shapes, dtype, file_bytes=10**9) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


def test_a_tensor_that_is_absent_is_named(mistral: Path) -> None:
    rewrite(mistral, lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"model.norm.weight: stored absent"):
        open_params(mistral, small_model("mistral"))


def test_a_tensor_that_the_model_has_not_is_named(mistral: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    rewrite(mistral, lambda t: t | {bias: np.zeros(48)})
    with pytest.raises(ValueError, match=rf"{bias}: stored \[48\], .* absent"):
        open_params(mistral, small_model("mistral"))


def test_a_tensor_of_another_shape_is_named(mistral: Path) -> None:
    rewrite(mistral, lambda t: {k: v[:60] for k, v in t.items()})
    with pytest.raises(ValueError, match=r"stored \[60, 32\], .* \[61, 32\]"):
        open_params(mistral, small_model("mistral"))


def test_frequencies_that_older_files_hold_are_passed_over(mistral: Path) -> None:
    stored = "model.layers.1.self_attn.rotary_emb.inv_freq"
    rewrite(mistral, lambda t: t | {stored: np.zeros(6)})
    source = open_params(mistral, small_model("mistral"))
    assert source.read("params.final_norm.scale").shape == (32,)


def test_adapters_beside_the_model_are_not_passed_over(mistral: Path) -> None:
    """transformers would load them with the model."""
    (mistral / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds adapter_config.json .*--lora.init-fr"):
        open_params(mistral, small_model("mistral"))


def test_a_folder_in_place_of_the_weights_is_named(mistral: Path) -> None:
    path = next(mistral.glob("*.safetensors"))
    path.unlink()
    path.mkdir()
    with pytest.raises(RuntimeError, match=rf"{path} cannot be read: Is a directory"):
        open_params(mistral, small_model("mistral"))


def test_a_missing_file_is_named(mistral: Path) -> None:
    next(mistral.glob("model-00002*")).unlink()
    with pytest.raises(
        RuntimeError, match=r"model-00002-of-\d+.safetensors is missing"
    ):
        open_params(mistral, small_model("mistral"))


def test_a_damaged_config_is_refused(mistral: Path) -> None:
    (mistral / "config.json").write_text('{"model_type": "mist')
    with pytest.raises(RuntimeError, match=r"config.json is damaged"):
        open_params(mistral, small_model("mistral"))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json is missing: give a folder"):
        params.flags_of(tmp_path)


def test_an_option_that_mjax_has_not_is_refused_with_the_folder(mistral: Path) -> None:
    path = mistral / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "relu"}))
    with pytest.raises(ValueError, match=r"mistral: config.json: .*hidden_act='relu'"):
        flags_of(mistral)


def test_a_source_of_another_model_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    source = Arrays(random_params(small_model("llama")))
    with pytest.raises(ValueError, match=r"attention.bk: there \(2, 2, 8\), .* None"):
        write(source, small_model("mistral"), tmp_path / "out", seq_len=64)
    assert list(tmp_path.iterdir()) == []


def test_the_other_leaves_of_a_checkpoint_are_not_looked_at(tmp_path: Path) -> None:
    model = small_model("mistral")
    state = random_params(model) | {"step": np.int32(3), "opt_state.0.mu": np.ones(2)}
    write(Arrays(state), model, tmp_path / "out", seq_len=64, end_ids=[7])
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["bos_token_id"]) == (7, None)


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    class Broken(Arrays):
        def read(self, name, index=...):
            if name.endswith("w_out"):
                raise OSError(5, "Input/output error")
            return super().read(name, index)

    model = small_model("mistral")
    source = Broken(random_params(model))
    with pytest.raises(RuntimeError, match="Input/output error"):
        write(source, model, tmp_path / "out", seq_len=64)
    assert list(tmp_path.iterdir()) == []


def test_every_parameter_of_every_family_has_a_name() -> None:
    for family in families.FAMILIES:
        model = small_model(family.name)
        assert set(our_shapes(model)) <= set(family.tensors)

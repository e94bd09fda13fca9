"""Opening a model: sources, tokenizers and refusals."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from mjax.data.tokenizers import train_bpe
from mjax.generate.opened import open_model
from mjax.hugging_face.export import write
from mjax.hugging_face.tensors import our_shapes
from tests.generate.models import SMALL, random_params, save_run, with_options
from tests.hugging_face.small import Arrays, small_model
from tests.hugging_face.small import random_params as random_tensors
from tests.training import make_mesh

ONE = (1, 1, 1, 1)


def bpe() -> str:
    text = Path(__file__).read_text()
    return train_bpe(text.splitlines(), 300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work_dir = tmp_path_factory.mktemp("run") / "work"
    save_run(work_dir, random_params(SMALL), steps=(3, 7), tokenizer_digest="bytes")
    return work_dir


@pytest.mark.parametrize("mesh", [ONE, (1, 1, 2, 2), (1, 1, 1, 4)])
def test_each_value_of_a_run_is_on_the_mesh_as_it_was_saved(run, mesh):
    found = open_model(str(run), make_mesh(mesh), dtype="float32")
    want = jax.tree.map(lambda x: x + np.float32(7), random_params(SMALL))
    assert jax.tree.structure(found.params) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.params), want)
    assert found.model == SMALL
    assert (found.seq_len, found.end_ids) == (64, (256,))
    assert found.name.endswith("/7")


@pytest.mark.parametrize(("version", "start"), [(1, ()), (2, (256,))])
def test_a_prompt_begins_as_the_documents_of_the_run_did(tmp_path, version, start):
    config = TrainConfig(model=SMALL, data=DataConfig(seq_len=64, version=version))
    save_run(tmp_path / "run", random_params(SMALL), config)
    opened = open_model(str(tmp_path / "run"), make_mesh(ONE), dtype="float32")
    assert opened.prompt_ids("ab") == (*start, *b"ab")
    assert opened.prompt_ids("") == (256,)


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/3"])
def test_a_step_is_found_by_its_number_and_by_its_folder(run, below):
    step = 3 if not below.endswith("3") else None
    path = str(run / below)
    found = open_model(path, make_mesh(ONE), dtype="float32", step=step)
    want = random_params(SMALL)["final_norm"]["scale"] + np.float32(3)
    np.testing.assert_array_equal(found.params["final_norm"]["scale"], want)


def test_parameters_are_rounded_to_the_dtype_that_is_asked_for(run):
    found = open_model(str(run), make_mesh(ONE), dtype="bfloat16")
    table = random_params(SMALL)["embed"]["table"] + np.float32(7)
    assert found.params["embed"]["table"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        found.params["embed"]["table"], table.astype(jnp.bfloat16)
    )


def test_the_tokenizer_of_the_work_dir_comes_before_that_of_the_config(tmp_path):
    folder = tmp_path / "tokenizer"
    data = DataConfig(seq_len=64, tokenizer="train:300")
    model = with_options(vocab_size=300)
    config = TrainConfig(model=model, data=data)
    save_run(tmp_path, random_params(model), config)
    with pytest.raises(ValueError, match=r"trained its tokenizer .*--tokenizer PATH"):
        open_model(str(tmp_path), make_mesh(ONE), dtype="float32")
    folder.mkdir()
    (folder / "tokenizer.json").write_text(bpe())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "chat_template": "from the config"})
    )
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "3"):
        found = open_model(str(path), make_mesh(ONE), dtype="float32")
        assert found.tokenizer.vocab_size == 300
        assert found.chat_template is not None
        assert found.chat_template.text == "from the config"
    (folder / "chat_template.jinja").write_text("from its own file")
    found = open_model(str(tmp_path), make_mesh(ONE), dtype="float32")
    assert found.chat_template is not None
    assert found.chat_template.text == "from its own file"


def test_another_tokenizer_than_that_of_the_checkpoint_is_refused(tmp_path):
    model = with_options(vocab_size=300)
    save_run(
        tmp_path / "run",
        random_params(model),
        TrainConfig(model=model, data=DataConfig(seq_len=64, vocab="model")),
        tokenizer_digest="bytes",
    )
    (tmp_path / "tokenizer.json").write_text(bpe())
    with pytest.raises(ValueError, match=r"not that of .*trained with bytes"):
        open_model(
            str(tmp_path / "run"),
            make_mesh(ONE),
            dtype="float32",
            tokenizer=str(tmp_path / "tokenizer.json"),
        )


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    save_run(tmp_path / "run", random_params(SMALL))
    (tmp_path / "tokenizer.json").write_text(bpe())
    with pytest.raises(ValueError, match=r"has 300 tokens .*only 257"):
        open_model(
            str(tmp_path / "run"),
            make_mesh(ONE),
            dtype="float32",
            tokenizer=str(tmp_path / "tokenizer.json"),
        )


def test_a_folder_of_hugging_face_has_its_parameters_tokenizer_and_ends(
    tmp_path, caplog
):
    model = small_model("llama")
    tensors = random_tensors(model)
    write(Arrays(tensors), model, tmp_path / "hf", seq_len=48)
    with pytest.raises(ValueError, match=r"no tokenizer\.json; .*--tokenizer bytes"):
        open_model(str(tmp_path / "hf"), make_mesh(ONE), dtype="float32")
    few = Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    few.decoder = decoders.ByteLevel()
    few.save(str(tmp_path / "hf" / "tokenizer.json"))
    few = Tokenizer(models.BPE({"</s>": 0, "a": 1}, []))
    few.decoder = decoders.ByteLevel()
    few.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    found = open_model(str(tmp_path / "hf"), make_mesh(ONE), dtype="float32")
    assert (found.seq_len, found.end_ids) == (48, (1, 2))
    assert not caplog.text
    other = open_model(
        str(tmp_path / "hf"), make_mesh(ONE), dtype="float32", tokenizer=str(tmp_path)
    )
    assert (
        f"--tokenizer {tmp_path} is not the tokenizer of {tmp_path}/hf" in caplog.text
    )
    assert other.end_ids == (0, 2, 1)
    paths = our_shapes(found.model)
    for path in paths:
        leaf: Any = found.params
        for name in path.split("."):
            leaf = leaf[name]
        want = tensors[f"params.{path}"]
        rows = min(len(want), leaf.shape[0])
        np.testing.assert_array_equal(np.asarray(leaf)[:rows], want[:rows])
    with pytest.raises(ValueError, match="no steps; leave out --step 3"):
        open_model(str(tmp_path / "hf"), make_mesh(ONE), dtype="float32", step=3)


def test_what_cannot_be_used_is_refused_with_the_remedy(run, tmp_path):
    def refusal(path: Path, mesh: tuple[int, int, int, int], **more) -> str:
        with pytest.raises(ValueError, match=r"give|use|leave out|must be") as caught:
            open_model(str(path), make_mesh(mesh), dtype="float32", **more)
        return str(caught.value)

    assert "does not exist; give a work dir" in refusal(tmp_path / "none", ONE)
    with pytest.raises(ValueError, match=r"hf://a/b@main is on a hub.*give FOLDER"):
        open_model("hf://a/b@main", make_mesh(ONE), dtype="float32")
    assert "no step 4" in refusal(run, ONE, step=4)
    assert "--mesh.pp must be 1" in refusal(run, (2, 1, 1, 1))
    assert "use --mesh.tp 4" in refusal(run, (1, 1, 1, 8))
    missing = refusal(run, ONE, tokenizer="none.json")
    assert missing.startswith("--tokenizer must be bytes, hf://NAME@REVISION or the")
    assert "--data.tokenizer" not in missing
    named = refusal(run, ONE, tokenizer="--data.tokenizer.json")
    assert named.endswith("got '--data.tokenizer.json'")
    endless = tmp_path / "endless.json"
    endless.write_text(bpe().replace("<|endoftext|>", "<end>"))
    remedy = refusal(run, ONE, tokenizer=str(endless))
    assert remedy.startswith(f"--tokenizer {endless} has none of ")
    assert remedy.endswith("as eos_token in a tokenizer_config.json beside it")


def test_parameters_that_the_config_does_not_mean_are_refused(tmp_path):
    params = random_params(SMALL)
    params["embed"]["table"] = params["embed"]["table"][:, :16]
    save_run(tmp_path, params)
    with pytest.raises(ValueError, match=r"embed\.table: \(288, 16\), by its config"):
        open_model(str(tmp_path), make_mesh(ONE), dtype="float32")

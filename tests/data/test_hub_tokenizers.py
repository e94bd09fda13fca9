"""Tokenizers by name, from a small hub on this machine."""

import builtins
import json
import pathlib

import huggingface_hub.constants
import pytest

from mjax.config.train import TrainConfig
from mjax.data import hub as hub_module
from mjax.data import hub_tokenizers
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset, prepare_files
from mjax.data.tokenizer_files import read_files
from mjax.data.tokenizers import load_tokenizer, train_bpe
from mjax.plan.topology import with_vocabulary
from tests.data.hub_server import COMMIT, NEXT, Hub

NAME = "hf://org/model@main"
SPEC = train_bpe(["the then them thesis, the quick brown fox\n" * 3], 262).encode()
CONFIG = json.dumps({"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"})
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def model(hub: Hub) -> None:
    hub.model_files = {
        "model.safetensors": b"weights",
        "tokenizer.json": SPEC,
        "tokenizer_config.json": CONFIG.encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }


def test_a_tokenizer_by_name_is_the_one_in_its_files(hub, tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    for name, content in hub.model_files.items():
        (folder / name).write_bytes(content)
    found, plain = load_tokenizer(NAME), load_tokenizer(str(folder))
    assert (found.digest, found.vocab_size) == (plain.digest, 262)
    assert read_files(NAME) == read_files(str(folder))
    ours = {*hub.model_files, "generation_config.json"} - {"model.safetensors"}
    assert set(read_files(NAME).contents) == ours
    assert not any("model.safetensors" in asked for asked in hub.asked)


def test_data_and_plans_take_a_tokenizer_by_name(hub, corpus, tmp_path):
    config = DataConfig(
        path=(str(corpus),), cache_dir=str(tmp_path), tokenizer=NAME, seq_len=8
    )
    [prepared] = prepare_files(config)
    dataset = open_dataset(config, seed=0)
    assert dataset.tokenizer_path == f"hf://org/model@{COMMIT}"
    assert dataset.tokenizer.digest == prepared.tokenizer.digest
    assert with_vocabulary(TrainConfig(data=config)).model.vocab_size == 262


def test_the_chat_template_comes_with_the_tokenizer(hub, tmp_path):
    chat = {"messages": [{"role": "user", "content": "the"}]}
    chat["messages"].append({"role": "assistant", "content": " fox"})
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 40)
    config = DataConfig(
        path=(str(tmp_path / "chats.jsonl"),),
        cache_dir=str(tmp_path / "cache"),
        tokenizer=NAME,
        format="chat",
        seq_len=16,
    )
    template = open_dataset(config, seed=0).chat_template
    assert template is not None
    assert (template.text, template.bos_token) == (TEMPLATE, "<|endoftext|>")


def test_a_commit_that_is_here_is_read_without_the_hub(hub, caplog):
    digest = load_tokenizer(NAME).digest
    hub.asked.clear()
    assert load_tokenizer(f"hf://org/model@{COMMIT}").digest == digest
    assert hub.asked == []
    hub.status = 503
    assert load_tokenizer(NAME).digest == digest
    assert f"reading the copy of commit {COMMIT}" in caplog.text


def test_a_run_keeps_its_commit_when_the_revision_moves(hub, caplog):
    began = hub_tokenizers.pinned(NAME)
    assert began == f"hf://org/model@{COMMIT}"
    assert hub_tokenizers.pinned(NAME, began) == began
    assert caplog.text.count("commit") == 0
    hub.commit = NEXT
    assert hub_tokenizers.pinned(NAME, began) == began
    assert f"main is commit {NEXT} now, but the run began with commit" in caplog.text
    hub.status = 503
    assert hub_tokenizers.pinned(NAME, began) == began
    hub.status = 200
    assert hub_tokenizers.pinned(NAME, "bytes") == f"hf://org/model@{NEXT}"
    assert hub_tokenizers.pinned("train:300", began) == "train:300"


def test_a_file_that_was_edited_in_the_cache_is_refused(hub):
    path = hub_tokenizers.local(NAME)
    path.write_bytes(SPEC + b" ")
    with pytest.raises(
        ValueError,
        match=r"tokenizer\.json is not what was downloaded.*delete .* and s",
    ):
        load_tokenizer(NAME)
    path.resolve().unlink()
    load_tokenizer(NAME)


def test_a_slow_hub_is_given_up(hub, monkeypatch):
    hub.delay_s = 0.5
    monkeypatch.setattr(hub_module, "_TIMEOUT_S", 0.1)
    with pytest.raises(ValueError, match=r"does not answer as it should .*timed out"):
        load_tokenizer(NAME)
    hub.delay_s = 0.0
    load_tokenizer(NAME)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://org/model", r"--data.tokenizer must be hf://NAME@REVISION .*@main"),
        ("hf://datasets/org/texts@main", "of a repository of a model"),
        ("hf://org/model@nope", "the model org/model has no revision 'nope'; give a"),
        ("hf://org/none@main", "has no model org/none, or it is private; .*HF_TOKEN"),
    ],
)
def test_names_that_do_not_exist_are_refused(hub, name, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(name)


def test_what_needs_a_token_says_so(hub):
    hub.gated.add("tokenizer.json")
    with pytest.raises(
        ValueError,
        match=r"the model org/model is only for users who accepted its terms; accept "
        r"them on http://127.0.0.1:\d+/org/model, and set HF_TOKEN",
    ):
        load_tokenizer(NAME)
    hub.status = 403
    with pytest.raises(
        ValueError, match=r"403 .* complete copy of the model; set HF_TO"
    ):
        load_tokenizer(NAME)


def test_a_model_without_a_tokenizer_json_is_refused_with_what_it_has(hub):
    hub.model_files = {"tokenizer.model": b"x", "model.safetensors": b"x"}
    with pytest.raises(
        ValueError, match=r"holds no tokenizer.json, only tokenizer.model; convert it"
    ):
        load_tokenizer(NAME)


def test_without_the_library_a_message_names_the_package(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"needs huggingface_hub; pip install 'mjax\["):
        load_tokenizer(NAME)


def test_offline_mode_of_the_library_reads_the_copy(hub, monkeypatch):
    path = hub_tokenizers.local(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert hub_tokenizers.local(NAME) == path == pathlib.Path(path)
    assert hub.asked == []

"""What a run takes from the model of --init-from, and what it refuses to replace."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mjax.config.lora import LoraConfig
from mjax.config.train import TrainConfig, to_json
from mjax.data.config import DataConfig
from mjax.data.names import BYTES
from mjax.data.tokenizer_files import TokenizerFiles, read_files
from mjax.hugging_face import families
from mjax.layers.config import AdapterConfig
from mjax.model.config import ModelConfig
from mjax.run.base import Settled, settle
from tests.data.test_end_tokens import loop, made
from tests.hugging_face.saved_runs import make_run, small_config
from tests.hugging_face.small import small_model

TEMPLATE = loop("{{ m.content }}<|im_end|>\n")
OTHER = loop("{{ m.content }}<|end|>")
SIZE = made().get_vocab_size()


def write_tokenizer(folder: Path, template: str | None = TEMPLATE, eos="</s>") -> str:
    folder.mkdir(exist_ok=True)
    made().save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos} | (
        {} if template is None else {"chat_template": template}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def write_model(folder: Path, vocab_size: int = SIZE, **files: Any) -> str:
    """Write a Hugging Face folder without weights."""
    folder.mkdir(exist_ok=True)
    model = dataclasses.replace(small_model("llama"), vocab_size=vocab_size)
    _, config = families.hf_config(model, seq_len=64)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A model with a tokenizer, a template, and two end tokens."""
    ids = made().token_to_id("</s>"), made().token_to_id("<|eot_id|>")
    folder = write_model(tmp_path / "hf", generation_config={"eos_token_id": [*ids]})
    return write_tokenizer(Path(folder))


def config(init_from: str | None, **data: Any) -> TrainConfig:
    """Return a config as recipe, config file and flags together give it."""
    is_chat = "chat_template" in data or data.get("format") == "chat"
    path = {"path": ("chats.jsonl",), "format": "chat"} if is_chat else {}
    return TrainConfig(init_from=init_from, data=DataConfig(**(path | data)))


def typed(**data: Any) -> list[str]:
    return [w for k, v in data.items() for w in (f"--data.{k.replace('_', '-')}", v)]


def refusal(*args: Any) -> str:
    with pytest.raises(ValueError, match=r"give|remove|omit") as caught:
        settle(*args)
    return str(caught.value)


def names(ids: Any) -> list[str]:
    return [made().id_to_token(i) or "" for i in ids]


def test_tokenizer_vocabulary_and_end_tokens_are_those_of_the_base(base):
    found = settle(config(base), [], None)
    assert (found.tokenizer, found.vocab_size, found.vocab) == (base, SIZE, "tokenizer")
    assert names(found.end_ids) == ["</s>", "<|eot_id|>", "<|im_end|>"]
    assert found.lines == [f"tokenizer: that of --init-from {base}"]
    applied = found.applied(config(base))
    assert (applied.data.tokenizer, applied.model.vocab_size) == (base, SIZE)


def test_a_typed_copy_of_the_tokenizer_is_that_of_the_base(base, tmp_path):
    copy = write_tokenizer(tmp_path / "copy", template=None)
    found = settle(config(base, tokenizer=copy), typed(tokenizer=copy), None)
    assert (found.tokenizer, found.vocab_size) == (copy, SIZE)
    assert names(found.end_ids) == ["</s>", "<|eot_id|>", "<|im_end|>"]


@pytest.mark.parametrize("form", ["bytes", "train:300", "end"])
def test_another_tokenizer_is_taken_if_a_flag_gives_it_and_then_printed(base, form):
    given = {"eos_token": "<|end|>"} if form == "end" else {"tokenizer": form}
    if form == "train:300":
        Path(base, "config.json").unlink()
        write_model(Path(base), vocab_size=300)
    found = settle(config(base, **given), typed(**given), None)
    name = base if form == "end" else form
    assert (found.tokenizer, found.end_ids) == (name, ())
    digest = read_files(base).digest or ""
    [line] = found.lines
    assert line.startswith(
        f"warning: the tokenizer {name} is not that of --init-from {base} (digest "
    )
    assert f"there {digest[:12]}), so ids have another meaning" in line


def test_another_tokenizer_that_no_flag_gives_is_refused_by_its_digest(base, tmp_path):
    found = refusal(config(base, tokenizer="bytes"), ["--recipe", "my.py:tuned"], None)
    assert "the recipe or the --config file gives the tokenizer bytes, which" in found
    assert f"is not that of --init-from {base} (digest bytes, there " in found
    assert found.endswith("or give --data.tokenizer bytes to use it anyway")
    found = refusal(config(base, eos_token="<|end|>"), [], None)
    assert f"gives the tokenizer {base}, which is not that of" in found
    copy = write_tokenizer(tmp_path / "copy")
    assert settle(config(base, tokenizer=copy), [], None).tokenizer == copy


def test_a_tokenizer_that_a_recipe_would_train_gives_way_to_that_of_the_base(base):
    for data in ({}, {"format": "chat"}, {"mixture": ("1=a", "2=b")}):
        found = settle(config(base, tokenizer="train:32768", **data), [], None)
        assert found.tokenizer == base


def test_a_base_without_a_tokenizer_needs_one_by_flag(tmp_path):
    base = write_model(tmp_path / "hf")
    found = refusal(config(base), [], None)
    assert found.startswith(
        f"the tokenizer of --init-from {base} is unknown: it has no"
    )
    assert "as --data.tokenizer (bytes if its tokens are bytes)" in found
    given = typed(tokenizer="bytes")
    found = settle(config(base, tokenizer="bytes"), given, None)
    assert (found.tokenizer, found.vocab_size, found.vocab) == ("bytes", SIZE, "model")
    assert found.lines == [f"the tokenizer of --init-from {base} is unknown"]


def test_a_tokenizer_with_more_ids_than_the_base_is_refused(tmp_path):
    base = write_tokenizer(Path(write_model(tmp_path / "hf", vocab_size=SIZE - 1)))
    found = refusal(config(base), [], None)
    assert f"{base} has {SIZE} ids, but the model of --init-from {base} only" in found


def test_a_vocabulary_with_unused_ids_is_that_of_the_base_unless_a_flag_gives_it(
    tmp_path,
):
    base = write_tokenizer(Path(write_model(tmp_path / "hf", vocab_size=320)))
    found = settle(config(base), [], None)
    assert (found.vocab, found.vocab_size) == ("model", 320)
    other = dataclasses.replace(config(base), model=ModelConfig(vocab_size=300))
    given = ["--data.vocab=model", "--model.vocab_size", "300"]
    found = settle(other, given, None)
    assert (found.vocab, found.vocab_size) == ("tokenizer", 300)
    found = settle(other, ["--data.vocab", "tokenizer"], None)
    assert found.vocab == "tokenizer"


def test_the_chat_template_of_the_base_is_replaced_only_by_a_flag(base, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    same = config(base, chat_template=str(path))
    assert settle(same, [], None).lines == [f"tokenizer: that of --init-from {base}"]
    path.write_text(OTHER)
    found = refusal(same, [], None)
    assert f"gives --data.chat-template {path}, whose chat template is not" in found
    found = settle(same, typed(chat_template=str(path)), None).lines[-1]
    assert found == (
        f"note: --data.chat-template {path} replaces the chat template of --init-from "
        f"{base}"
    )
    copy = write_tokenizer(tmp_path / "copy", template=OTHER)
    beside = config(base, tokenizer=copy, format="chat")
    assert "--data.tokenizer" in refusal(beside, [], None)
    found = settle(beside, typed(tokenizer=copy), None).lines[-1]
    assert found.startswith(f"note: --data.tokenizer {copy} replaces the chat template")


def run_of(
    path: Path, files: TokenizerFiles | None, tokenizer: str, **facts: Any
) -> str:
    return str(make_run(path, small_config(tokenizer, SIZE), files, **facts))


def test_a_run_and_each_of_its_checkpoints_give_the_tokenizer_beside_them(tmp_path):
    files = read_files(write_tokenizer(tmp_path / "given"))
    run = run_of(tmp_path / "run", files, "/gone/tokenizer.json")
    for path in (run, f"{run}/checkpoints", f"{run}/checkpoints/30"):
        found = settle(config(path), [], None)
        assert found.tokenizer == f"{run}/tokenizer"
        assert names(found.end_ids) == ["</s>", "<|im_end|>"]
    Path(run, "tokenizer").rename(tmp_path / "aside")
    found = refusal(config(run), [], None)
    assert (
        f"the tokenizer of --init-from {run} is unknown: there is no tokeniz" in found
    )
    aside = str(tmp_path / "aside")
    given = config(run, tokenizer=aside)
    [line] = settle(given, typed(tokenizer=aside), None).lines
    assert line == f"tokenizer: that of --init-from {run}"  # by the recorded digest
    assert "which is not that of" in refusal(config(run, tokenizer="bytes"), [], None)


def test_a_run_of_bytes_gives_bytes_and_its_template_if_it_has_one(tmp_path):
    run = run_of(tmp_path / "run", read_files(BYTES), BYTES)
    assert settle(config(run), [], None).tokenizer == BYTES
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    assert settle(config(run), [], None).tokenizer == f"{run}/tokenizer"


def test_a_tokenizer_that_is_not_the_one_of_the_checkpoint_is_not_taken(tmp_path):
    files = read_files(write_tokenizer(tmp_path / "given"))
    run = run_of(tmp_path / "run", files, BYTES, tokenizer_digest="0123")
    found = refusal(config(run), [], None)
    assert f"that in {run}/tokenizer has another digest than the checkpoint re" in found


def test_the_tokenizer_of_adapters_comes_before_that_of_their_base(base, tmp_path):
    adapters = write_tokenizer(tmp_path / "adapters", template=OTHER)
    whole = dataclasses.replace(
        config(base, format="chat"), lora=LoraConfig(rank=2, init_from=adapters)
    )
    assert isinstance(whole.adapters, AdapterConfig)
    found = settle(whole, [], None)
    assert found.tokenizer == adapters
    ends = ["</s>", "<|end|>", "<|eot_id|>", "<|im_end|>"]
    assert sorted(names(found.end_ids)) == sorted(ends)
    write_tokenizer(tmp_path / "adapters", eos="<|end|>")
    found = refusal(whole, [], None)
    assert f"the tokenizer in --lora.init-from {adapters} is not that of" in found
    given = dataclasses.replace(whole, data=config(base, tokenizer=base).data)
    assert settle(given, typed(tokenizer=base), None).tokenizer == base


def test_a_run_that_has_begun_keeps_what_it_began_with(base):
    """A run of an older version may have another tokenizer than its base."""
    old = json.loads(to_json(config(base, tokenizer="bytes", vocab="model")))
    old["model"]["vocab_size"] = 320
    kept = Settled(tokenizer="bytes", eos_token=None, vocab="model", vocab_size=320)
    assert settle(config(base), [], old) == kept
    assert settle(config(base, tokenizer="train:300"), [], old) == kept
    assert settle(config("gone"), [], old) == kept
    other = settle(config(base, tokenizer=base), typed(tokenizer=base), old)
    assert other.tokenizer == base  # refused with the other differences of the run


def test_a_base_that_is_gone_needs_a_typed_tokenizer(base):
    """The run may have saved steps at --ckpt.remote, which have everything else."""
    with pytest.raises(ValueError, match=r"--init-from gone cannot be used: gone does"):
        settle(config("gone"), [], None)
    found = settle(config("gone", tokenizer=base), typed(tokenizer=base), None)
    assert (found.tokenizer, found.lines) == (base, ())


def test_without_a_base_the_tokenizer_is_that_of_the_recipe_or_bytes():
    assert settle(config(None), [], None).tokenizer == BYTES
    assert (
        settle(config(None, tokenizer="train:300"), [], None).tokenizer == "train:300"
    )

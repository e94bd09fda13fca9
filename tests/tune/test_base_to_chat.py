"""From a base with a tokenizer to a model that answers and stops, without a flag."""

import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mjax import train
from mjax.ckpt import __main__ as ckpt_command
from mjax.cli import exit_codes
from mjax.data import __main__ as data_command
from mjax.evaluate import __main__ as evaluate_command
from mjax.generate import __main__ as generate_command
from mjax.tune import __main__ as tune_command
from tests.tune.test_tune_command import MODEL

NAMES = ("<|begin|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|head|>")
END, EOT, EOM = 1, 2, 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n\n{% endif %}"
)
ANSWER = "yes, it is"


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer in the form of Llama 3: answers end with <|eot_id|>."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=[*NAMES],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"is it so? {ANSWER} " * 9], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": NAMES[0], "eos_token": NAMES[END], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A base `hf`, tuned on chats as `chat`, with no flag about its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    before = jax.config.jax_compilation_cache_dir
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.chdir(folder)
    write_tokenizer(Path("given"))
    Path("text.txt").write_text(f"is it so? {ANSWER}\n" * 500)
    with Path("chats.jsonl").open("w") as file:
        for n in range(60):
            asked = {"role": "user", "content": f"is it {n}?"}
            answer = {"role": "assistant", "content": ANSWER}
            file.write(json.dumps({"messages": [asked, answer]}) + "\n")
    base = [*MODEL.split(), "--steps", "1", "--work-dir", "base"]
    base += ["--data.path", "text.txt", "--data.tokenizer", "given"]
    # More ids than the tokenizer, and a list of end tokens, as published models have.
    base += ["--data.vocab", "model", "--model.vocab-size", "293"]
    assert train.main(base) == exit_codes.DONE
    assert ckpt_command.main(["export", "base", "hf"]) == 0
    path = Path("hf/generation_config.json")
    path.write_text(json.dumps({"eos_token_id": [END, EOM], "temperature": 0.6}))
    assert train.main(tuning("chat", "60")) == exit_codes.DONE
    yield folder
    patch.undo()
    jax.config.update("jax_compilation_cache_dir", before)


def tuning(work_dir: str, steps: str, *more: str) -> list[str]:
    words = ["--init-from", "hf", "--data.format", "chat", "--data.path", "chats.jsonl"]
    words += ["--steps", steps, "--optim.lr", "1e-2", "--log.sample-tokens", "30"]
    return [*MODEL.split(), *words, "--work-dir", work_dir, *more]


def listed(path: str) -> list[int]:
    return json.loads(Path(path, "generation_config.json").read_text())["eos_token_id"]


def test_the_run_its_exports_and_its_adapters_list_all_end_tokens(folder):
    assert listed("chat/tokenizer") == [END, EOM, EOT]
    config = json.loads(Path("chat/config.json").read_text())
    assert config["data"]["tokenizer"] == "hf"
    assert config["model"]["vocab_size"] == 293
    sample = Path("chat/sample.txt").read_text()
    assert sample.endswith(f"continued by the model:\n{ANSWER}<|eot_id|>\n")
    assert ckpt_command.main(["export", "chat", "merged"]) == 0
    assert listed("merged") == [END, EOM, EOT]
    assert json.loads(Path("merged/config.json").read_text())["eos_token_id"] == [
        *(END, EOM, EOT)
    ]
    other = ["export", "chat", "other", "--eos-token-id", str(EOT)]
    assert ckpt_command.main(other) == 0
    assert listed("other") == [EOT, EOM]
    assert train.main(tuning("lora", "1", "--lora.rank", "2", "--eval.every", "1")) == 0
    assert tune_command.main(["export", "lora", "adapters"]) == 0
    assert listed("adapters") == [END, EOM, EOT]


@pytest.mark.parametrize("model", ["chat", "old", "merged", "again"])
def test_an_answer_ends_with_the_end_of_its_turn(folder, monkeypatch, capsys, model):
    """Also in a run of a version that did not list the tokens, and a second export."""
    if model == "old":
        shutil.copytree("chat", "old")
        Path("old/tokenizer/generation_config.json").unlink()
    elif model in ("merged", "again") and not Path(model).exists():
        assert ckpt_command.main(["export", "chat", model]) == 0
    if model == "again":
        Path(model, "generation_config.json").unlink()
        config = json.loads(Path(model, "config.json").read_text())
        Path(model, "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"is it 7?\n")))
    words = [model, "--chat", "--tokens", "25", "--temperature", "0"]
    assert generate_command.main(words) == 0
    out, err = capsys.readouterr()
    assert out.strip() == ANSWER
    assert "truncated" not in err


def test_a_run_is_used_and_resumed_without_its_base(folder, caplog, capsys):
    shutil.copytree("chat", "moved")
    Path("hf").rename("away")
    try:
        assert data_command.main(["show", "--work-dir", "moved"]) == 0
        assert evaluate_command.main(["moved", "--held-out", "--json"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["loss"] == pytest.approx(report["run_eval_loss"], rel=1e-4)
        assert train.main(["--work-dir", "moved", "--steps", "61"]) == exit_codes.DONE
        assert "--data.tokenizer hf is gone; the run reads its own copy" in caplog.text
        assert train.main(tuning("moved", "62")) == exit_codes.DONE
    finally:
        Path("away").rename("hf")
    config = json.loads(Path("moved/config.json").read_text())
    assert config["data"]["tokenizer"] == "hf"
    assert "<|eot_id|>" in Path("moved/sample.txt").read_text()


def test_another_tokenizer_is_refused_from_a_file_and_printed_for_a_flag(
    folder, capsys
):
    Path("my.toml").write_text('[data]\ntokenizer = "bytes"\n')
    path = ["--data.chat-template", "chat.jinja"]
    Path("chat.jinja").write_text(TEMPLATE.replace("<|eot_id|>", "{{ eos_token }}"))
    capsys.readouterr()
    words = tuning("never", "1", "--config", "my.toml", *path, "--dry-run")
    assert train.main(words) == exit_codes.BAD_INPUT
    found = " ".join(capsys.readouterr().err.split())
    assert "gives the tokenizer bytes, which is not that of --init-from hf" in found
    words += ["--data.tokenizer", "bytes"]
    assert train.main(words) == exit_codes.DONE
    found = capsys.readouterr().out
    assert (
        "warning: the tokenizer bytes is not that of --init-from hf (digest " in found
    )
    assert "note: --data.chat-template chat.jinja replaces the chat template" in found
    assert not Path("never").exists()

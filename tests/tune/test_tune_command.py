"""A tuned run from its flags to its exports, and what its commands refuse."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from mjax import train
from mjax.ckpt import __main__ as ckpt_command
from mjax.ckpt import places
from mjax.ckpt.saved_step import SavedStep
from mjax.cli import exit_codes
from mjax.hugging_face.params import open_params, read_config
from mjax.layers.config import AdapterConfig
from mjax.tune import __main__ as tune_command
from mjax.tune.merged import Merged

MODEL = "--recipe debug --model.window None --model.rope True --model.layers 1"
MODEL += " --model.no-rope-interleaved --model.d-model 16 --model.heads 2"
MODEL += " --model.d-ff 16 --model.block serial --model.norm rmsnorm --seed 3"
MODEL += " --batch.size 8 --data.seq-len 64 --log.sample-tokens 0 --optim.name adamw"
MODEL += " --eval.batches 1 --optim.warmup-steps 0"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'wizard' %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_chats(path: Path, *more: Any) -> Path:
    turns = [
        [
            {"role": "user", "content": f"{n} + 1"},
            {"role": "assistant", "content": str(n + 1)},
        ]
        for n in range(40)
    ]
    path.write_text(
        "".join(json.dumps({"messages": t}) + "\n" for t in [*turns, *more])
    )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A base, its export, and a run with adapters of two steps."""
    folder = tmp_path_factory.mktemp("tuned")
    before = jax.config.jax_compilation_cache_dir
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.chdir(folder)
    Path("chat.jinja").write_text(TEMPLATE)
    write_chats(Path("chats.jsonl"))
    Path("text.txt").write_text("0 1 2 3 and so on\n" * 500)
    base = [*MODEL.split(), "--steps", "1", "--work-dir", "base"]
    base += ["--data.path", "text.txt"]
    assert train.main(base) == exit_codes.DONE
    assert ckpt_command.main(["export", "base", "hf"]) == 0
    assert train.main(tuning("tuned")) == exit_codes.DONE
    yield folder
    patch.undo()
    jax.config.update("jax_compilation_cache_dir", before)


def tuning(work_dir: str, **changes: str) -> list[str]:
    flags = {
        "steps": "2",
        "ckpt.every": "1",
        "eval.every": "2",
        "data.format": "chat",
        "data.chat-template": "chat.jinja",
        "data.path": "chats.jsonl",
        "init-from": "hf",
        "lora.rank": "2",
        "work-dir": work_dir,
    } | {name.replace("__", ".").replace("_", "-"): v for name, v in changes.items()}
    flags = {name: value for name, value in flags.items() if value}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return [*MODEL.split(), *words]


def refused(capsys, words: list[str], main=train.main) -> str:
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    assert code == 2
    return " ".join(capsys.readouterr().err.split())


def newest(work_dir: str) -> SavedStep:
    return SavedStep(epath.Path(places.choose(places.find(work_dir), None)))


def test_a_resumed_run_ends_with_the_same_bits_as_the_whole_one(folder):
    shutil.copytree("tuned", "again")
    shutil.rmtree(places.find("again").store.path(2))
    assert train.main(tuning("again")) == exit_codes.DONE
    whole, again = newest("tuned"), newest("again")
    names = sorted(whole.names())
    assert names == sorted(again.names())
    moments = [name for name in names if ".mu." in name or ".nu." in name]
    assert moments
    assert all(".adapters." in name for name in moments)
    for name in names:
        np.testing.assert_array_equal(whole.read(name), again.read(name), err_msg=name)


def test_exports_have_the_template_of_the_run_and_the_merged_weights(folder):
    assert tune_command.main(["export", "tuned", "adapters"]) == 0
    assert ckpt_command.main(["export", "tuned", "merged"]) == 0
    for where in ("tuned/tokenizer", "adapters", "merged"):
        assert Path(where, "chat_template.jinja").read_text() == TEMPLATE
        assert Path(where, "tokenizer.json").is_file()
    assert not Path("hf", "chat_template.jinja").exists()
    config = json.loads(Path("adapters", "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (2, "hf")
    _, model = read_config(Path("merged"))
    there = open_params(Path("merged"), model)
    scale = config["lora_alpha"] / config["r"]
    targets = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
    targets += ("mlp.w_in", "mlp.w_gate", "mlp.w_out")
    adapters = AdapterConfig(rank=2, scale=scale, targets=targets)
    merged = Merged(newest("tuned"), adapters)
    for name in there.names():
        np.testing.assert_array_equal(there.read(name), merged.read(name))
    bare = ["export", "tuned", "bare", "--without-tokenizer"]
    assert tune_command.main(bare) == 0
    names = sorted(path.name for path in Path("bare").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_template_beside_the_tokenizer_of_the_base_is_taken_and_kept(folder):
    """Nothing but the folder of the base is named."""
    shutil.copytree("hf", "with_template")
    Path("with_template", "chat_template.jinja").write_text(TEMPLATE)
    run = tuning("own", init_from="with_template", steps="1", data__chat_template="")
    assert train.main([*run, "--eval.every", "1"]) == exit_codes.DONE
    assert Path("own/tokenizer/chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora__rank": "0"}, "--lora.rank must be at least 1, got 0"),
        ({"lora__rank": "17"}, "--lora.rank must be at most 16, got 17"),
        ({"lora__targets": "qproj"}, "qproj matches no linear layer .* q_proj"),
        (
            {"init_from": ""},
            "--lora.rank 2 trains adapters of an existing model, but --init-from",
        ),
        ({"init_from": "nowhere"}, "--init-from nowhere cannot be used: .*not exist"),
        ({"lora__init_from": "hf://org/a@main"}, "hf://org/a@main is on a hub, where"),
        ({"lora__init_from": "hf"}, "--lora.init-from hf has no adapter_config.json"),
        ({"data__chat_template": ""}, "bytes has no chat template; give a Jinja file"),
        ({"data__chat_template": "none.jinja"}, "none.jinja cannot be read"),
        ({"work_dir": "tuned", "lora__rank": "3"}, "lora.rank: 2 there, 3 in this run"),
        ({"work_dir": "tuned", "lora__alpha": "3"}, "lora.alpha: 16.0 there, 3.0 in"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_training(
    folder, capsys, changes, named
):
    found = refused(capsys, tuning(**{"work_dir": "never", **changes}))
    assert_matches(named, found)
    assert not Path("never").exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"messages": [', r"bad.jsonl:41 is not JSON .*, column 15\)"),
        ([{"role": "user", "content": "x"}], "bad.jsonl:41 has no assistant turn"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}],
            "bad.jsonl:41: message 2, an assistant turn, is empty",
        ),
        (
            [{"role": "wizard", "content": "x"}, {"role": "assistant", "content": "y"}],
            "bad.jsonl:41: .*no role wizard; fix the chat, or give another template",
        ),
        (
            [
                {"role": "user", "content": "x" * 99},
                {"role": "assistant", "content": "y"},
            ],
            "1 of .* chats have more than --data.seq-len 64 tokens: bad.jsonl:41 has",
        ),
    ],
)
def test_bad_chats_are_refused_with_file_and_line(folder, capsys, line, named):
    path = write_chats(Path("bad.jsonl"), *([] if isinstance(line, str) else [line]))
    if isinstance(line, str):
        path.write_text(path.read_text() + line + "\n")
    found = refused(capsys, tuning("never", data__path="bad.jsonl"))
    assert_matches(named, found)


def test_a_broken_template_is_refused_with_line_and_remedy(folder, capsys):
    Path("broken.jinja").write_text("{% for m in messages %}\n{{ m.content }\n")
    found = refused(capsys, tuning("never", data__chat_template="broken.jinja"))
    assert_matches("--data.chat-template broken.jinja: .*line 2: .*fix it, or", found)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "the only command is export, .* got nothing"),
        (["merge", "tuned", "x"], "got merge; python -m mjax.ckpt export writes the"),
        (["export", "tuned"], "OUT"),
        (["export", "tuned", "x", "--familly", "llama"], "--familly"),
        (["export", "tuned", "x", "--family", "lama"], "no family 'lama'; there are"),
        (["export", "tuned", "x", "--family", "gpt2"], "gpt2 cannot express"),
        (["export", "tuned", "x", "--step", "7"], "no step 7 in .*--step"),
        (["export", "tuned", "base"], "base exists and is not an empty folder"),
        (["export", "nowhere", "x"], "nowhere does not exist; give a work dir"),
        (["export", "hf", "x"], "hf is a model in the form of Hugging Face, not a ch"),
        (["export", "base", "x"], "has no adapters: .*python -m mjax.ckpt export"),
        (
            ["export", "tuned", "x", "--tokenizer", "no"],
            "--tokenizer no does not exist",
        ),
        (
            ["export", "tuned", "x", "--tokenizer", "hf", "--without-tokenizer"],
            "--tokenizer hf and --without-tokenizer contradict",
        ),
    ],
)
def test_the_command_refuses_with_what_to_do(folder, capsys, words, named):
    assert_matches(named, refused(capsys, words, tune_command.main))
    assert not Path("x").exists()


def test_adapters_are_no_base_and_the_flags_that_are_meant_are_named(folder, capsys):
    assert tune_command.main(["export", "tuned", "only"]) == 0
    found = refused(capsys, tuning("never", init_from="only"))
    assert_matches(
        "--init-from only holds PEFT adapters .*--lora.init-from only", found
    )


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)

"""`python -m mjax.evaluate` through its flags: output and refusals."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from mjax.ckpt.__main__ import main as ckpt
from mjax.config.run import EvalConfig
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.tokenizer_files import read_files
from mjax.data.tokenizers import END_OF_TEXT, load_tokenizer, train_bpe
from mjax.evaluate.__main__ import main
from mjax.generate.opened import find_starts
from mjax.hugging_face.export import write
from tests.hugging_face.saved_runs import make_run, small_config
from tests.hugging_face.small import Arrays, random_params

ROOT = Path(__file__).parents[2]
PEER = os.environ.get("MJAX_HF_PYTHON", str(ROOT / ".venv-hf" / "bin" / "python"))
DOCUMENTS = ["the quick brown fox\n" * 3, "then them", "thesis, the"]
Evaluate = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, `hf` exported from it, `bos`, and texts."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "held.txt").write_text("a line of some text\n" * 600)
    config = small_config()
    data = DataConfig(
        path=(str(folder / "held.txt"),),
        seq_len=64,
        cache_dir=str(folder / "cache"),
    )
    config = dataclasses.replace(config, data=data, eval=EvalConfig(batches=1))
    fingerprint = open_dataset(data, seed=config.seed).fingerprint
    make_run(folder / "run", config, read_files("bytes"), data_fingerprint=fingerprint)
    assert ckpt(["export", str(folder / "run"), str(folder / "hf")]) == 0
    write_bos(folder / "bos")
    lines = [json.dumps({"text": text}) + "\n" for text in DOCUMENTS]
    (folder / "texts.jsonl").write_text("".join(lines))
    (folder / "empty.txt").write_bytes(b"")
    for name in ("ids.bin", "ids.idx"):
        (folder / name).write_bytes(b"not read")
    (folder / "latin.txt").write_bytes("café\n".encode("latin-1"))
    return folder


def spec_with_bos() -> Tokenizer:
    spec = Tokenizer.from_str(train_bpe(["the then them thesis, quick\n" * 3], 262))
    spec.add_special_tokens(["<s>"])
    spec.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 262)]
    )
    return spec


SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": END_OF_TEXT,
}


def write_bos(path: Path) -> None:
    model = small_config("train:263", 263).model
    files = {
        "tokenizer.json": spec_with_bos().to_str().encode(),
        "tokenizer_config.json": json.dumps(SETTINGS).encode(),
    }
    write(Arrays(random_params(model)), model, path, seq_len=64, files=files)


@pytest.fixture
def evaluate(capsys) -> Evaluate:
    """Run the command; return its exit code, stdout and stderr."""

    def run_(*words: Any) -> tuple[int, str, str]:
        code = main([*map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return run_


def found(evaluate: Evaluate, *words: Any) -> dict[str, Any]:
    code, out, err = evaluate(*words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_text_is_scored_and_the_file_gets_what_is_printed(
    folder, tmp_path, evaluate
) -> None:
    out = tmp_path / "result.json"
    words = (folder / "run", "--data.path", folder / "texts.jsonl", "--out", out)
    got = found(evaluate, *words, "--precision", "float32")
    assert json.loads(out.read_text()) == got
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    # A document begins with the end token of another; its own is scored.
    num_bytes = sum(map(len, DOCUMENTS))
    assert (got["documents"], got["bytes"]) == (3, num_bytes)
    assert (got["tokens"], got["start_token"]) == (num_bytes + 3, "eos")
    assert got["start_ids"] == [256]
    assert got["tokenizer_digest"] == "bytes"
    assert len(got["text_digest"]) == 64


def test_a_mesh_of_tp_has_the_same_loss(folder, evaluate) -> None:
    words = (folder / "run", "--data.path", folder / "texts.jsonl")
    words = (*words, "--precision", "float32")
    one = found(evaluate, *words, "--mesh.tp", 1)
    two = found(evaluate, *words, "--mesh.tp", 2)
    # float32 sums over 257 tokens and 32 inputs in another order
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two["text_digest"] == one["text_digest"]


def test_held_out_batches_are_those_of_the_run(folder, evaluate) -> None:
    got = found(evaluate, folder / "run", "--held-out", "--mesh.tp", 2)
    assert 0 < got["samples"] <= 32
    assert got["run_eval_loss"] == 1.25
    assert len(got["data_fingerprint"]) == 64
    assert got["loss"] > 0


def test_held_out_text_that_has_changed_is_refused(folder, tmp_path, evaluate) -> None:
    config = dataclasses.replace(
        small_config(),
        data=DataConfig(
            path=(str(folder / "held.txt"),),
            seq_len=64,
            cache_dir=str(folder / "cache"),
        ),
    )
    run = make_run(
        tmp_path / "run", config, read_files("bytes"), data_fingerprint="f" * 64
    )
    code, _, err = evaluate(run, "--held-out")
    assert code == 2
    assert "fingerprint ffffffffffff there" in err
    assert "or give --data.path" in err


def test_a_folder_that_begins_texts_scores_their_first_token(folder, evaluate) -> None:
    words = (folder / "bos", "--data.path", folder / "texts.jsonl")
    tokenizer = load_tokenizer(str(folder / "bos"))
    num = sum(len(tokenizer.encode(text)) for text in DOCUMENTS)
    got = found(evaluate, *words)
    assert (got["start_token"], got["start_ids"]) == ("bos", [262])
    assert (got["tokens"], got["unscored_tokens"]) == (num, 0)
    bare = found(evaluate, *words, "--start-token", "none")
    assert (bare["tokens"], bare["unscored_tokens"]) == (num - 3, 3)
    eos = found(evaluate, *words, "--start-token", "eos")
    assert (eos["tokens"], eos["start_ids"]) == (num, [tokenizer.eos_id])
    assert eos["loss"] != got["loss"]
    assert eos["tokenizer_digest"] == got["tokenizer_digest"] == tokenizer.digest


def test_an_export_begins_documents_as_its_run_does(folder, evaluate) -> None:
    words = ("--data.path", folder / "texts.jsonl", "--precision", "float32")
    run = found(evaluate, folder / "run", *words)
    got = found(evaluate, folder / "hf", *words, "--end-token", True)
    assert (got["start_token"], got["unscored_tokens"]) == ("eos", 0)
    assert got["loss"] == pytest.approx(run["loss"], rel=1e-6)  # the same program


def test_a_run_of_data_version_1_leaves_first_tokens_out(
    folder, tmp_path, evaluate, capsys
) -> None:
    config = small_config()
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, version=1)
    )
    run = make_run(tmp_path / "run", config, read_files("bytes"))
    assert ckpt(["export", str(run), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    for model in (run, tmp_path / "hf"):
        got = found(evaluate, model, "--data.path", folder / "texts.jsonl")
        assert (got["start_token"], got["unscored_tokens"]) == ("none", 3)
        eos = found(
            *(evaluate, model, "--data.path", folder / "texts.jsonl"),
            *("--start-token", "eos"),
        )
        assert (eos["start_ids"], eos["unscored_tokens"]) == ([256], 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["absent", "--data.path", "texts.jsonl"], "absent does not exist; give a wo"),
        (["run", "--data.path", "absent.txt"], "absent.txt' does not exist"),
        (["run", "--data.path", "empty.txt"], "empty.txt' is empty; give a file with"),
        (["run", "--data.path", "latin.txt"], "latin.txt"),
        (["run"], "either --data.path, the text to score, or --held-out"),
        (["run", "--held-out", "--data.path", "texts.jsonl"], "own, got both"),
        (["hf", "--held-out"], "--held-out needs a run, and"),
        (["run", "--held-out", "--step", "7"], "7"),
        (["run", "--data.path", "texts.jsonl", "--seq-len", "0"], "at least 1, got 0"),
        (["run", "--data.path", "texts.jsonl", "--stride", "0"], "at least 1, got 0"),
        (
            ["run", "--data.path", "texts.jsonl", "--seq-len", "8", "--stride", "9"],
            "--stride must be from 1 to --seq-len 8, got 9",
        ),
        (
            ["run", "--data.path", "texts.jsonl", "--stride", "65"],
            "--stride must be from 1 to --seq-len 64, got 65",
        ),
        (
            ["run", "--data.path", "texts.jsonl", "--seq-len", "65"],
            "--seq-len must be at most 64, the longest sequence of the model, got 65",
        ),
        (
            ["run", "--data.path", "texts.jsonl", "--mesh.tp", "8"],
            "--mesh.tp must divide the model's heads, which is 4, got 8",
        ),
        (
            ["run", "--data.path", "texts.jsonl", "--batch-size", "3"],
            "--batch-size must be a multiple of the data-parallel size 8",
        ),
        (
            ["run", "--data.path", "texts.jsonl", "--start-token", "bos"],
            "names no beginning-of-text token; give eos or none",
        ),
        (
            ["run", "--data.path", "texts.jsonl", "--out", "absent/x.json"],
            "create it, or name another file",
        ),
        (["run", "--data.path", "texts.jsonl", "--out", "run"], "is a folder; name a"),
        (
            ["run", "--data.path", "texts.jsonl", "--tokenizer", "absent.json"],
            "--tokenizer must be bytes, hf://NAME@REVISION or the path of a "
            "tokenizer.json",
        ),
        (["run", "--data.path", "texts.jsonl", "--windows", "3"], "--windows"),
        (["run", "run", "--held-out"], "2 runs are given: run run; give one"),
        (["run", "--data.path", "ids.bin"], "ids, which only training reads; give"),
    ],
    ids=" ".join,
)
def test_bad_input_ends_with_code_2_and_a_message(
    words, says, folder, evaluate, monkeypatch
) -> None:
    monkeypatch.chdir(folder)
    code, out, err = evaluate(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("error: ")


def test_a_run_without_its_tokenizer_says_how_to_give_it(tmp_path, evaluate) -> None:
    (tmp_path / "text.txt").write_text("some text")
    run = make_run(tmp_path / "run", small_config("train:262", 262), None)
    code, _, err = evaluate(run, "--data.path", tmp_path / "text.txt")
    assert code == 2
    assert "trained its tokenizer (train:262) on its data" in err
    assert "as --tokenizer PATH" in err


STARTS = {
    "template": ({}, True),
    "asked": ({"add_bos_token": True}, False),
    "asked not": ({"add_bos_token": False}, True),
    "neither": ({}, False),
}


def write_tokenizer(path: Path, name: str) -> Path:
    settings, has_template = STARTS[name]
    spec = json.loads(spec_with_bos().to_str())
    if not has_template:
        spec["post_processor"] = None
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(spec))
    (path / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    return path


@pytest.mark.parametrize(
    ("name", "ids"),
    [("template", (262,)), ("asked", ()), ("asked not", (262,)), ("neither", ())],
)
def test_texts_begin_as_the_files_say(name: str, ids: tuple, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer", name)
    assert find_starts(load_tokenizer(str(path)), path) == (ids, 262)


@pytest.mark.hf
def test_texts_begin_as_transformers_lets_them(tmp_path: Path) -> None:
    paths = [write_tokenizer(tmp_path / n.replace(" ", ""), n) for n in STARTS]
    ask = (
        "import json, sys; from transformers import AutoTokenizer as A; "
        "print(json.dumps([A.from_pretrained(p)('them')['input_ids'] "
        "for p in sys.argv[1:]]))"
    )
    done = subprocess.run(
        [PEER, "-c", ask, *map(str, paths)],
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for path, theirs in zip(paths, json.loads(done.stdout), strict=True):
        tokenizer = load_tokenizer(str(path))
        starts = find_starts(tokenizer, path).ids
        assert [*starts, *tokenizer.encode("them").tolist()] == theirs

"""`python -m mjax.generate`: output and refusals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mjax.generate.__main__ import main
from tests.generate.models import SMALL, random_params, save_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    work_dir = tmp_path_factory.mktemp("run") / "work"
    save_run(work_dir, random_params(SMALL), tokenizer_digest="bytes")
    return str(work_dir)


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["answers"]


def test_a_prompt_is_printed_with_its_continuation(run, capsys):
    words = [run, "--prompt", "def f(", "--tokens", "20", "--temperature", "0"]
    (wanted,) = answers(capsys, *words)
    assert wanted["prompt_tokens"] == [256, *b"def f("]
    assert len(wanted["tokens"]) == 20 or wanted["finished"] == "stop"
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out == f"def f({wanted['text']}\n"
    assert "tokens/s" in err
    assert main([*words, "--no-echo"]) == 0
    assert capsys.readouterr().out == f"{wanted['text']}\n"


def test_several_prompts_have_the_answers_of_each_alone(run, capsys, tmp_path):
    (tmp_path / "third.txt").write_text("third")
    words = [run, "--tokens", "12", "--seed", "5"]
    several = answers(
        capsys,
        *(*words, "--prompt", "first", "second one"),
        *("--prompt-file", str(tmp_path / "third.txt")),
    )
    assert [a["prompt"] for a in several] == ["first", "second one", "third"]
    assert [a["seed"] for a in several] == [5, 6, 7]
    for answer in several:
        seed = str(answer["seed"])
        words = [run, "--tokens", "12", "--seed", seed, "--slots", "3"]
        (alone,) = answers(capsys, *words, "--prompt", answer["prompt"])
        assert alone == answer


def test_seeds_of_several_prompts_continue_at_0(run, capsys):
    words = [run, "--tokens", "2", "--seed", str(2**32 - 1), "--prompt", "a", "a"]
    assert [a["seed"] for a in answers(capsys, *words)] == [2**32 - 1, 0]


def test_an_empty_prompt_begins_a_document(run, capsys):
    (answer,) = answers(capsys, run, "--prompt", "", "--tokens", "3")
    assert answer["prompt_tokens"] == [256]


def test_an_answer_ends_before_a_stop_text(run, capsys):
    words = [run, "--prompt", "x", "--tokens", "30", "--temperature", "0"]
    (free,) = answers(capsys, *words)
    text = free["text"]
    at = next(i for i, c in enumerate(text[4:], 4) if c.isascii() and c.isprintable())
    stop = text[at]
    (answer,) = answers(capsys, *words, "--stop", stop)
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finished"] == "stop"


def test_standard_input_is_a_prompt_and_a_process_prints_the_text_alone(run):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mjax.generate", run, "--prompt", "-"),
            *("--tokens", "5", "--mesh.tp", "2", "--simulate-devices", "2"),
        ],
        input="from here",
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("from here")
    assert "on 2 cpu device(s)" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no prompt; give --prompt TEXT"),
        (["--prompt", "-", "-"], "give it once"),
        (["--prompt", "a", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature must be finite"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature must be finite"),
        (["--prompt", "a", "--top-p", "0"], "--top-p must be above 0"),
        (["--prompt", "a", "--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["--prompt", "a", "--seed", "-1"], "--seed must be from 0"),
        (["--prompt", "a", "--stop", ""], "--stop must not be empty"),
        (["--prompt", "a", "--mesh.tp", "0"], "--mesh.tp must be at least 1, got 0"),
        (["--prompt", "a", "--mesh.tp", "64"], "needs 64 devices"),
        (["--prompt", "a", "--mesh.tp", "3"], "--mesh.tp must divide"),
        (["--prompt", "a", "--slots", "0"], "--slots must be at least 1, got 0"),
        (["--prompt", "a" * 63], "the prompt has 64 tokens.*--max-len"),
        (["--prompt", "a", "--tokens", "63"], "at most 62 can follow, got 63"),
        (["--prompt", "a", "b" * 63], "prompt 2 of 2: the prompt has 64"),
        (["--prompt-file", "/no/such"], "--prompt-file /no/such cannot be read"),
        (["--prompt", "a", "--step", "99"], "99"),
        (["--prompt", "a", "--tokenizer", "/no/such"], "--tokenizer"),
        (["--prompt", "a", "--tokns", "3"], "unknown flag --tokns; .*--tokens"),
    ],
)
def test_bad_input_is_answered_in_one_line(run, capsys, words, message):
    assert main([run, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert re.search(message, last)


def test_without_a_number_as_many_tokens_follow_as_fit(run, capsys):
    (answer,) = answers(capsys, run, "--prompt", "a" * 59, "--temperature", "0")
    assert len(answer["tokens"]) == 4 or answer["finished"] == "stop"


def test_a_model_that_is_nowhere_is_refused(capsys):
    assert main(["/no/such/run", "--prompt", "a"]) == 2
    assert "/no/such/run does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("use", [["--prompt", "a"], ["--serve", "8000"]])
def test_of_several_runs_the_newest_is_named(capsys, tmp_path, monkeypatch, use):
    monkeypatch.chdir(tmp_path)
    for age_s, name in enumerate(["demo-3", "demo-1", "demo-2"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 1000 - age_s))
    assert main(["demo-1", "demo-2", "demo-3", *use]) == 2
    assert capsys.readouterr().err == (
        "error: 3 runs are given: demo-1 demo-2 demo-3; give one; the newest is "
        "demo-3\n"
    )
    assert main(["demo-1", "one", *use]) == 2
    assert "unexpected word one" in capsys.readouterr().err


def test_a_stop_text_that_cannot_be_written_is_refused(capsys, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    spec = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "\u0120a": 1, "a": 2}, "a"))
    spec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spec.decoder = decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    spec.save(str(path))
    save_run(tmp_path / "work", random_params(SMALL))
    words = ["--prompt", "a", "--tokenizer", str(path), "--stop", "unheard"]
    assert main([str(tmp_path / "work"), *words]) == 2
    assert "--stop 'unheard' is a text that the tokenizer" in capsys.readouterr().err


def test_a_longer_text_than_in_training_is_written_when_it_is_asked_for(run, capsys):
    words = [run, "--prompt", "ab", "--tokens", "80", "--max-len", "90"]
    (answer,) = answers(capsys, *words)
    assert len(answer["tokens"]) == 80 or answer["finished"] == "stop"
    assert np.asarray(answer["tokens"]).max() < 257

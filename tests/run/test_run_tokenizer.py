"""A run keeps its tokenizer beside its checkpoints, and its digest in them."""

import json
from pathlib import Path

import jax
import pytest

from mjax import train
from mjax.ckpt import places
from mjax.data.tokenizers import load_tokenizer, train_bpe
from mjax.run import ending
from tests.data.hub_server import COMMIT, NEXT, serving

TEXT = "".join(
    f"line {i}: the {i * 7919 % 1000} then them thesis\n" for i in range(900)
)


@pytest.fixture(autouse=True)
def caches(tmp_path_factory, monkeypatch):
    """Keep the caches of the user out of the tests."""
    home = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT)
    return path


def start(work_dir: Path, corpus: Path, *more: str) -> int:
    words = ["--recipe", "debug", "--data.path", str(corpus), "--steps", "1"]
    words += [
        "--optim.warmup-steps",
        "1",
        "--log.sample-tokens",
        "0",
        "--work-dir",
        str(work_dir),
        *more,
    ]
    return train.main(words)


def saved_digest(work_dir: Path) -> str:
    folder = places.choose(places.find(str(work_dir)), None)
    return places.describe(folder)[0].run["tokenizer_digest"]


def files_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("bytes", marks=pytest.mark.slow),
        "train:300",
        "hf://org/model@main",
    ],
)
def test_the_tokenizer_beside_the_checkpoints_is_that_of_the_run(
    tmp_path, corpus, monkeypatch, caplog, kind
):
    run, is_on_hub = tmp_path / "run", kind.startswith("hf:")
    with serving(tmp_path / "hub", monkeypatch) as hub:
        hub.model_files = {"tokenizer.json": train_bpe([TEXT], 280).encode()}
        assert start(run, corpus, "--data.tokenizer", kind) == ending.DONE
        kept = load_tokenizer(str(run / "tokenizer"))
        assert kept.vocab_size == {"bytes": 257, "train:300": 300}.get(kind, 280)
        assert kept.digest == saved_digest(run)
        before = files_in(run / "tokenizer")
        config = json.loads((run / "config.json").read_text())
        used = f"hf://org/model@{COMMIT}" if is_on_hub else kind
        assert config["data"]["tokenizer"] == used

        hub.commit = NEXT  # of another tokenizer
        hub.model_files = {"tokenizer.json": train_bpe([TEXT[::-1]], 280).encode()}
        more = ("--data.tokenizer", kind, "--steps", "2")
        assert start(run, corpus, *more) == ending.DONE
        assert files_in(run / "tokenizer") == before
        moved = f"is commit {NEXT} now, but the run began with commit {COMMIT}"
        assert (moved in caplog.text) == is_on_hub


def test_another_vocabulary_of_the_same_size_is_refused(tmp_path, corpus, capsys):
    """The flags are the same, but the tokenized data differ."""
    given = tmp_path / "given.json"
    given.write_text(train_bpe([TEXT], 280))
    run, flags = tmp_path / "run", ("--data.tokenizer", str(given))
    assert start(run, corpus, *flags) == ending.DONE
    before = files_in(run / "tokenizer")
    given.write_text(train_bpe([TEXT[::-1]], 280))
    capsys.readouterr()
    assert start(run, corpus, *flags, "--steps", "2") == ending.BAD_INPUT
    assert "the tokenizer is not that of the checkpoint" in capsys.readouterr().err
    assert files_in(run / "tokenizer") == before


def test_a_run_from_before_gets_its_tokenizer_when_it_is_resumed(tmp_path, corpus):
    run = tmp_path / "run"
    assert start(run, corpus) == ending.DONE
    for path in (run / "tokenizer").iterdir():
        path.unlink()
    (run / "tokenizer").rmdir()
    assert start(run, corpus, "--steps", "2") == ending.DONE
    assert load_tokenizer(str(run / "tokenizer")).digest == "bytes"


def test_a_tokenizer_that_was_changed_in_the_work_dir_is_refused(
    tmp_path, corpus, capsys
):
    run = tmp_path / "run"
    assert start(run, corpus) == ending.DONE
    (run / "tokenizer" / "tokenizer.json").write_text("{}")
    capsys.readouterr()
    assert start(run, corpus, "--steps", "2") == ending.BAD_INPUT
    assert "is not the tokenizer of this run; move" in capsys.readouterr().err

"""A run keeps its tokenizer beside its checkpoints, and its digest in them."""

import json
import socket
from pathlib import Path

import jax
import pytest

from mjax import train
from mjax.ckpt import places
from mjax.cli import exit_codes
from mjax.data import hub as hub_module
from mjax.data.tokenizers import load_tokenizer, train_bpe
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
        assert start(run, corpus, "--data.tokenizer", kind) == exit_codes.DONE
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
        assert start(run, corpus, *more) == exit_codes.DONE
        assert files_in(run / "tokenizer") == before
        moved = f"is commit {NEXT} now, but the run began with commit {COMMIT}"
        assert (moved in caplog.text) == is_on_hub


def test_another_vocabulary_of_the_same_size_is_refused(tmp_path, corpus, capsys):
    """The flags are the same, but the tokenized data differ."""
    given = tmp_path / "given.json"
    given.write_text(train_bpe([TEXT], 280))
    run, flags = tmp_path / "run", ("--data.tokenizer", str(given))
    assert start(run, corpus, *flags) == exit_codes.DONE
    before = files_in(run / "tokenizer")
    given.write_text(train_bpe([TEXT[::-1]], 280))
    capsys.readouterr()
    assert start(run, corpus, *flags, "--steps", "2") == exit_codes.BAD_INPUT
    assert "the tokenizer is not that of the checkpoint" in capsys.readouterr().err
    assert files_in(run / "tokenizer") == before


def test_a_run_from_before_gets_its_tokenizer_when_it_is_resumed(tmp_path, corpus):
    run = tmp_path / "run"
    assert start(run, corpus) == exit_codes.DONE
    for path in (run / "tokenizer").iterdir():
        path.unlink()
    (run / "tokenizer").rmdir()
    assert start(run, corpus, "--steps", "2") == exit_codes.DONE
    assert load_tokenizer(str(run / "tokenizer")).digest == "bytes"


def test_a_tokenizer_that_was_changed_in_the_work_dir_is_refused(
    tmp_path, corpus, capsys
):
    run = tmp_path / "run"
    assert start(run, corpus) == exit_codes.DONE
    (run / "tokenizer" / "tokenizer.json").write_text("{}")
    capsys.readouterr()
    assert start(run, corpus, "--steps", "2") == exit_codes.BAD_INPUT
    assert "is not the tokenizer of this run; move" in capsys.readouterr().err


def no_answer(hub, monkeypatch, how: str) -> None:
    """Take the hub away, and the copy of its files."""
    if how == "refuses":
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    elif how == "hangs":
        hub.delay_s = 1.0
        monkeypatch.setattr(hub_module, "_TIMEOUT_S", 0.1)
    else:
        hub.status = 503


@pytest.mark.parametrize("how", ["refuses", "hangs", "is busy"])
def test_a_run_goes_on_with_its_own_tokenizer_on_a_new_host_without_the_hub(
    tmp_path, corpus, monkeypatch, caplog, capsys, how
):
    run, name = tmp_path / "run", "hf://org/model@main"
    with serving(tmp_path / "hub", monkeypatch) as hub:
        hub.model_files = {"tokenizer.json": train_bpe([TEXT], 280).encode()}
        assert start(run, corpus, "--data.tokenizer", name) == exit_codes.DONE
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "new"))
        no_answer(hub, monkeypatch, how)
        assert train.main(["--work-dir", str(run), "--steps", "2"]) == exit_codes.DONE
        assert f"the run reads its own copy in {run}/tokenizer" in caplog.text
        config = json.loads((run / "config.json").read_text())
        assert config["data"]["tokenizer"] == f"hf://org/model@{COMMIT}"

        own = run / "tokenizer" / "tokenizer.json"
        own.write_text(train_bpe([TEXT[::-1]], 280))
        capsys.readouterr()
        more = ["--work-dir", str(run), "--steps", "3"]
        assert train.main(more) == exit_codes.BAD_INPUT
        assert "the tokenizer is not that of the checkpoint" in capsys.readouterr().err
        own.unlink()
        assert train.main(more) == exit_codes.BAD_INPUT
        said = capsys.readouterr().err
        assert f"copy {tmp_path}/new/models--org--model from a machine that" in said
        assert "start again when the hub can be reached, or set HF_ENDPOINT" in said

"""`python -m mjax.ckpt export`: contents of the folder, and refusals."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from mjax.ckpt.__main__ import Family, main
from mjax.data.tokenizer_files import read_files
from mjax.data.tokenizers import END_OF_TEXT, load_tokenizer, train_bpe
from mjax.hugging_face import families
from mjax.hugging_face.model_card import Card
from mjax.hugging_face.params import flags_of, read_config, read_positions
from mjax.run import export as run_export
from tests.hugging_face.saved_runs import STEP, make_run, small_config
from tests.hugging_face.small import small_model

ROOT = Path(__file__).parents[2]
BPE_JSON = train_bpe(["the then them thesis, the quick brown fox\n" * 3], 262)


@pytest.fixture(scope="module")
def bytes_run(tmp_path_factory) -> Path:
    run = make_run(
        tmp_path_factory.mktemp("bytes") / "run", small_config(), read_files("bytes")
    )
    starts = run / "starts"
    starts.mkdir()
    (starts / "0001.json").write_text('{"argv": ["--recipe", "gpt-125m"]}')
    return run


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "tokenizer.json").write_text(BPE_JSON)
    files = read_files(str(folder))
    return make_run(folder / "run", small_config("train:262", 262), files)


@pytest.fixture
def export(capsys):
    """Run the command; return its exit code, stdout and stderr."""

    def run_(*words):
        code = main(["export", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return run_


def test_the_folder_has_all_that_others_need(bytes_run, tmp_path, export):
    out = tmp_path / "my-model"
    code, said, _ = export(bytes_run, out)
    assert code == 0
    assert said == (
        f"{bytes_run}/checkpoints/{STEP} -> {out}: llama, float32, end of text 256\n"
    )
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "README.md"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == 256
    assert load_tokenizer(str(out)).digest == "bytes"
    assert read_config(out)[1].vocab_size == 257


def test_the_card_says_how_it_was_trained_and_no_folder(bytes_run, tmp_path, export):
    assert export(bytes_run, tmp_path / "my-model")[0] == 0
    card = (tmp_path / "my-model" / "README.md").read_text()
    tokens = STEP * 32 * 64
    for line in (
        "# my-model",
        "| recipe | gpt-125m |",
        "| data | corpus |",
        "| steps | 30 |",
        f"| tokens | {tokens:,} |",
        "| held-out loss | 1.2500 nats per token |",
        "| tokenizer | UTF-8 bytes, 257 ids |",
        'AutoTokenizer.from_pretrained("my-model")',
    ):
        assert line in card
    assert "/home/me" not in card
    assert "secret" not in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("what", ["checkpoints", f"checkpoints/{STEP}"])
def test_the_tokenizer_is_found_from_its_checkpoints(bpe_run, tmp_path, export, what):
    assert export(bpe_run / what, tmp_path / "out")[0] == 0
    out, kept = (
        load_tokenizer(str(f)) for f in (tmp_path / "out", bpe_run / "tokenizer")
    )
    assert out.encode("the fox").tolist() == kept.encode("the fox").tolist()
    assert (out.start_ids, kept.start_ids) == ((out.eos_id,), ())


def test_a_run_of_data_version_1_exports_its_tokenizer_as_it_is(tmp_path, export):
    (tmp_path / "tokenizer.json").write_text(BPE_JSON)
    config = small_config("train:262", 262)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, version=1)
    )
    run = make_run(tmp_path / "run", config, read_files(str(tmp_path)))
    assert export(run, tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == BPE_JSON


def test_the_positions_of_the_folder_may_be_others(bytes_run, tmp_path, export):
    assert export(bytes_run, tmp_path / "run")[0] == 0
    assert export(bytes_run, tmp_path / "more", "--positions", 4096)[0] == 0
    assert read_positions(tmp_path / "run") == 64
    assert read_positions(tmp_path / "more") == 4096
    code, _, said = export(bytes_run, tmp_path / "none", "--positions", 0)
    assert (code, said) == (2, "error: --positions must be at least 1, got 0\n")


def test_positions_of_gpt_j_are_its_n_positions(tmp_path, export):
    llama = small_config()
    model = small_model("gptj")
    gptj = dataclasses.replace(
        llama, model=dataclasses.replace(model, vocab_size=257, vocab_multiple=1)
    )
    run = make_run(tmp_path / "run", gptj, read_files("bytes"))
    assert export(run, tmp_path / "out", "--positions", 2048)[0] == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["n_positions"]) == ("gptj", 2048)
    assert "--data.seq-len 2048" in flags_of(tmp_path / "out")


def test_every_family_can_be_asked_for():
    assert get_args(Family) == tuple(family.name for family in families.FAMILIES)


def test_a_run_without_its_tokenizer_says_how_to_give_it(bpe_run, tmp_path, export):
    run = Path(shutil.copytree(bpe_run, tmp_path / "run"))
    kept = (run / "tokenizer").rename(tmp_path / "kept")
    code, _, said = export(run, tmp_path / "out")
    assert code == 2
    assert "--data.tokenizer train:262 was trained for the run; give the fol" in said
    assert not (tmp_path / "out").exists()
    assert export(run, tmp_path / "out", "--tokenizer", kept)[0] == 0
    written = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert written["model"] == json.loads(BPE_JSON)["model"]
    code, said, _ = export(run, tmp_path / "bare", "--without-tokenizer")
    assert (code, said.rstrip()[-19:]) == (0, "without a tokenizer")
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    assert "AutoTokenizer" not in (tmp_path / "bare" / "README.md").read_text()
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert config["eos_token_id"] is None


def test_an_older_run_of_bytes_needs_nothing(tmp_path, export):
    run = make_run(tmp_path / "run", small_config(), None)
    assert export(run, tmp_path / "out")[0] == 0
    assert load_tokenizer(str(tmp_path / "out")).digest == "bytes"


def test_another_tokenizer_of_the_same_size_is_refused(bpe_run, tmp_path, export):
    """Valid ids of another tokenizer, which shapes and ranges cannot reveal."""
    other = tmp_path / "tokenizer.json"
    other.write_text(train_bpe(["fox brown quick, sisht meht neht\n" * 3], 262))
    code, _, said = export(bpe_run, tmp_path / "out", "--tokenizer", other)
    assert code == 2
    there, here = read_files(str(other)).digest, read_files(str(bpe_run / "tokenizer"))
    assert f"digest {str(there)[:12]} there, {str(here.digest)[:12]} saved" in said
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, export):
    """A step of an older version has no digest to check."""
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE_JSON)
    run = make_run(tmp_path / "run", small_config(str(path), 260), None)
    code, _, said = export(run, tmp_path / "out")
    assert code == 2
    assert "has 262 ids, the model 260; give the run's as --tokenizer" in said


def test_a_model_larger_than_its_tokenizer_is_exported_and_says_so(tmp_path, export):
    files = read_files("bytes")
    run = make_run(tmp_path / "run", small_config(vocab_size=300), files)
    code, said, _ = export(run, tmp_path / "out")
    assert code == 0
    assert "the model has 43 more ids than the tokenizer; no text contains them" in said
    assert read_config(tmp_path / "out")[1].vocab_size == 300


def test_a_tokenizer_without_an_end_asks_for_it(tmp_path, export):
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE_JSON.replace(END_OF_TEXT, "<stop>"))
    run = make_run(tmp_path / "run", small_config("train:262", 262), None)
    words = (run, tmp_path / "out", "--tokenizer", path)
    code, _, said = export(*words)
    assert code == 2
    assert (
        "does not say which token ends a document; give its id as --eos-token-id"
        in said
    )
    assert export(*words, "--eos-token-id", "0")[0] == 0
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<stop>"


def test_the_end_of_a_document_may_be_another(bpe_run, tmp_path, export):
    out = tmp_path / "out"
    assert export(bpe_run, out, "--eos-token-id", "5")[0] == 0
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 5
    assert load_tokenizer(str(out)).eos_id == 5
    code, _, said = export(bpe_run, tmp_path / "next", "--eos-token-id", "262")
    assert code == 2
    assert "--eos-token-id must be from 0 to 261, got 262" in said


@pytest.mark.parametrize("more", [("--eos-token-id", "256"), ()])
def test_the_end_of_bytes_is_the_only_one(bytes_run, tmp_path, export, more):
    code, _, said = export(bytes_run, tmp_path / "a", "--eos-token-id", "10")
    assert code == 2
    assert "--eos-token-id must be 256 with the tokenizer bytes, got 10" in said
    assert export(bytes_run, tmp_path / "b", *more)[0] == 0


def test_contradicting_flags_are_refused(bytes_run, tmp_path, export):
    words = ("--tokenizer", "bytes", "--without-tokenizer")
    code, _, said = export(bytes_run, tmp_path / "out", *words)
    assert code == 2
    assert "--tokenizer bytes and --without-tokenizer contradict each other" in said


def test_of_two_exports_at_once_the_first_to_end_stays(
    bytes_run, tmp_path, monkeypatch, export
):
    """The other export ends while this one writes its card."""
    out = tmp_path / "out"

    def write_card(card: Card) -> str:
        monkeypatch.undo()
        assert main(["export", str(bytes_run), str(out), "--dtype", "bfloat16"]) == 0
        return real(card)

    real = run_export.write_card
    monkeypatch.setattr(run_export, "write_card", write_card)
    code, _, said = export(bytes_run, out)
    assert code == 2
    assert "exists and is not an empty folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_second_export_leaves_the_first_as_it_is(bytes_run, tmp_path, export):
    out = tmp_path / "out"
    assert export(bytes_run, out)[0] == 0
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    code, _, said = export(bytes_run, out, "--dtype", "bfloat16")
    assert code == 2
    assert "exists and is not an empty folder; give another name" in said
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before


def child(run: Path, out: Path, before: str) -> subprocess.CompletedProcess:
    """Export in another process, after some lines of code."""
    code = (
        f"import os, resource, signal, sys\n{before}\n"
        "from mjax.ckpt.__main__ import main\n"
        "sys.exit(main(['export', *sys.argv[1:]]))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(run), str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_killed_export_leaves_nothing_that_looks_whole(bytes_run, tmp_path, export):
    """It is killed when everything is written except the final name."""
    out = tmp_path / "out"
    before = (
        "from pathlib import Path\n"
        "Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert child(bytes_run, out, before).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.writing-")
    assert export(bytes_run, out)[0] == 0
    assert read_config(out)[1].vocab_size == 257


def test_a_disk_without_room_leaves_nothing(bytes_run, tmp_path):
    """A file size limit below the weights simulates a full disk."""
    before = (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    )
    done = child(bytes_run, tmp_path / "out", before)
    assert done.returncode == 2
    assert "was not written: [Errno 27] File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_form_writes_nothing(tmp_path, export):
    config = small_config()
    model = dataclasses.replace(config.model, activation="gelu")
    config = dataclasses.replace(config, model=model)
    run = make_run(tmp_path / "run", config, read_files("bytes"))
    code, _, said = export(run, tmp_path / "out")
    assert code == 2
    assert "no family of Hugging Face can express this model" in said
    assert not (tmp_path / "out").exists()

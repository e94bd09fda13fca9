import re

import pytest

from mjax.data.__main__ import main
from mjax.data.dataset import DataConfig, open_dataset


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def flags(corpus, tmp_path) -> list:
    cache = tmp_path / "cache"
    return ["--data.path", corpus, "--data.seq-len", 30, "--data.cache-dir", cache]


def test_show_prints_the_batch_that_training_reads(corpus, tmp_path, capsys):
    argv = ["--step", 7, "--batch-size", 3, "--seed", 5, *flags(corpus, tmp_path)]
    code, out, _ = run(capsys, "show", *argv)
    assert code == 0
    config = DataConfig(
        path=(str(corpus),), seq_len=30, cache_dir=str(tmp_path / "cache")
    )
    dataset = open_dataset(config, seed=5)
    stream = dataset.train
    assert out.startswith("step 7, seed 5: 3 rows of 30 tokens")
    for row, (corpus, index) in enumerate(stream.ids(7, 3).tolist()):
        tokens = stream.corpora[corpus][index]["tokens"]
        lines = [ln for ln in out.splitlines() if ln.startswith(f"{row}.")]
        shown = "".join(line.split(" | ", 1)[1] for line in lines)
        assert shown == dataset.tokenizer.decode(tokens).replace("\n", "")
        assert f"row {row}: corpus {corpus}, sample {index}, " in out


def test_segments_are_numbered_and_control_characters_escaped(tmp_path, capsys):
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text("\x1b[2J" + name)
    argv = ["--data.path", tmp_path, "--data.cache-dir", tmp_path / ".cache"]
    argv += ["--data.seq-len", 9, "--data.held-out-fraction", 0.5, "--batch-size", 1]
    code, out, _ = run(capsys, "show", *argv)
    assert code == 0
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
    assert "0.0 | " in out
    assert "0.1 | " in out


def test_info_describes_the_corpus(corpus, tmp_path, capsys):
    code, out, _ = run(capsys, "info", *flags(corpus, tmp_path))
    assert code == 0
    assert "documents              60\n" in out
    assert "unigram bits per byte" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["info", "--data.path", "stdlb"], "did you mean 'stdlib'"),
        (["info", "--data.tokenizer", "byts"], "did you mean 'bytes'"),
        (["show", "--step", "-1", "--data.path", "synthetic"], "step=-1"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_line(argv, message, capsys):
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_batch_without_rows_is_refused(capsys):
    assert main(["show", "--batch-size", "0"]) == 2
    assert "--batch-size must be at least 1, got 0" in capsys.readouterr().err


def test_a_bad_flag_ends_with_code_2_and_names_the_rule(capsys):
    for argv in (["--data.tokenizer", "train:2"], ["--data.seq-len", "0"]):
        assert main(["info", *argv]) == 2
        assert re.search("train:N|data.seq_len must be", capsys.readouterr().err)

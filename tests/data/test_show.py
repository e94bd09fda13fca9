import dataclasses
import re

import jax
import numpy as np
import pytest

from mjax.config.step import BatchConfig
from mjax.config.train import TrainConfig, to_json
from mjax.data.__main__ import main
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.loader import Loader


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def flags(corpus, tmp_path) -> list:
    cache = tmp_path / "cache"
    return ["--data.path", corpus, "--data.seq-len", 30, "--data.cache-dir", cache]


@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_show_prints_the_batch_that_training_reads(
    corpus, tmp_path, capsys, packing, is_mixed
):
    """Of a run, named by its folder alone, next to what its loader gives."""
    if is_mixed:
        (tmp_path / "other.txt").write_text("one more corpus\n" * 50)
        parts = (f"2={corpus}", f"1={tmp_path}/other.txt")
        data = DataConfig(mixture=parts, seq_len=30)
    else:
        data = DataConfig(path=(str(corpus),), seq_len=30)
    data = dataclasses.replace(data, cache_dir=str(tmp_path / "cache"), packing=packing)
    run_config = TrainConfig(data=data, batch=BatchConfig(size=6), seed=5)
    (tmp_path / "config.json").write_text(to_json(run_config))
    code, out, _ = run(capsys, "show", "--work-dir", tmp_path, "--step", 7)
    assert code == 0
    assert out.startswith("step 7, seed 5: 6 rows of 30 tokens")

    dataset = open_dataset(data, seed=5)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("dp",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    with Loader(dataset.train, place, batch_size=6, start_step=7) as loader:
        batch = jax.device_get(next(loader))
    lines = out.splitlines()
    for row, (corpus_index, sample) in enumerate(dataset.train.ids(7, 6).tolist()):
        is_text = np.ones(30, bool)
        if packing == "documents":
            is_text = batch["segments"][row] == 0
        shown = "".join(
            line.split(" | ", 1)[1] for line in lines if line.startswith(f"{row}.")
        )
        text = dataset.tokenizer.decode(batch["tokens"][row][is_text])
        assert shown == text.replace("\n", "")
        num_targets = int((batch["targets"][row] >= 0).sum())
        num_segments = batch["segments"][row][is_text].max() + 1
        assert (
            f"row {row}: corpus {corpus_index}, sample {sample}, {num_segments} "
            f"segment(s), {num_targets} targets, {30 - is_text.sum()} padding"
        ) in lines
    assert any(" padding" in line for line in lines)
    assert (sum(line.startswith("corpus ") for line in lines) == 2) is is_mixed


def test_a_batch_can_be_asked_for_by_flags_as_well(corpus, tmp_path, capsys):
    given = flags(corpus, tmp_path)
    data = DataConfig(
        path=(str(corpus),), seq_len=30, cache_dir=str(tmp_path / "cache")
    )
    run_config = TrainConfig(data=data, batch=BatchConfig(size=3), seed=5)
    (tmp_path / "config.json").write_text(to_json(run_config))
    by_flags = run(capsys, "show", "--batch-size", 3, "--seed", 5, *given)
    assert by_flags == run(capsys, "show", "--work-dir", tmp_path)
    moved = ["--data.cache-dir", tmp_path / "other"]
    assert by_flags == run(capsys, "show", "--work-dir", tmp_path, *moved)
    assert (tmp_path / "other").is_dir()


def test_the_folder_of_a_run_takes_no_flags_beside_it(tmp_path, capsys):
    code, _, err = run(capsys, "show", "--work-dir", tmp_path, "--seed", 1)
    assert code == 2
    assert "leave out --batch-size, --seed and all --data flags but" in err
    code, _, err = run(capsys, "show", "--work-dir", tmp_path)
    assert code == 2
    assert "is not the folder of a run" in err
    for text in ("{", '{"sead": 1}'):
        (tmp_path / "config.json").write_text(text)
        code, _, err = run(capsys, "show", "--work-dir", tmp_path)
        assert code == 2
        assert "config.json is not the config of a run" in err


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
    assert "  documents            60\n" in out
    assert "unigram bits per byte" in out
    held_out = re.findall(r"^    held out           (\S+)", out, re.MULTILINE)
    assert 0 < int(held_out[0]) < 60


def test_info_of_one_file_says_that_only_its_end_is_held_out(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("one text\n" * 1000)
    code, out, _ = run(capsys, "info", *flags(tmp_path / "one.txt", tmp_path))
    assert code == 0
    assert (
        "  documents            1\n    held out           the end of the text\n" in out
    )
    assert "  bytes                9000\n    held out           450 (5.0%)\n" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["info", "--data.path", "stdlb"], "did you mean 'stdlib'"),
        (["info", "--data.tokenizer", "byts"], "did you mean 'bytes'"),
        (
            ["show", "--step", "-1", "--data.path", "synthetic"],
            "--step must be at least 0, got -1",
        ),
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
        assert re.search("train:N|--data.seq-len must be", capsys.readouterr().err)


def test_damaged_token_files_end_with_a_message_and_exit_code_1(
    corpus, tmp_path, capsys
):
    assert run(capsys, "show", *flags(corpus, tmp_path))[0] == 0
    (path,) = (tmp_path / "cache").glob("*/train.tokens")
    path.write_bytes(path.read_bytes()[::-1])
    code, out, err = run(capsys, "show", *flags(corpus, tmp_path))
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {path} is damaged: bytes 0 to ")
    assert len(err.splitlines()) == 1

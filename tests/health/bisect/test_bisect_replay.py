import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mjax.ckpt.manifest import Piece, part_name, write_pieces
from mjax.health.bisect.replay import COMPUTED, digest, main, read_rows, read_sums
from mjax.run.metrics import without_timing

ROW = {
    "step": 1,
    "loss": 4.5,
    "bits_per_byte": 6.5,
    "grad_norm": 1.25,
    "lr": 1e-3,
    "tokens": 512,
    "step_s": 0.5,
    "data_wait_s": 0.01,
    "tokens_per_s": 1024.0,
    "mfu": None,
    "skipped": 0,
}


def rows(num: int = 3) -> list[dict[str, Any]]:
    return [ROW | {"step": step, "loss": 4.5 - step / 7} for step in range(1, num + 1)]


def test_the_hash_takes_fields_that_a_run_computes_and_no_times():
    """The hashed fields are those that the trainer does not count as timing."""
    assert set(COMPUTED) <= without_timing(ROW).keys()


def test_times_do_not_change_the_hash():
    later = [row | {"step_s": 9.0, "ckpt_s": 1.0, "mfu": 0.5} for row in rows()]
    assert digest(later, 3) == digest(rows(), 3)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_the_last_bit_of_a_number_changes_the_hash(step: int, field: str):
    wrong = rows()
    value = wrong[step - 1][field]
    wrong[step - 1][field] = float.fromhex(value.hex()) * (1 + 2**-52)
    assert wrong[step - 1][field] != value
    assert digest(wrong, 3) != digest(rows(), 3)


def test_two_losses_that_change_places_change_the_hash():
    swapped = rows()
    swapped[0]["loss"], swapped[1]["loss"] = swapped[1]["loss"], swapped[0]["loss"]
    assert digest(swapped, 3) != digest(rows(), 3)


def test_what_a_number_is_that_is_not_finite_changes_the_hash():
    nan, infinite = rows(), rows()
    nan[2] |= {"loss": None, "nonfinite": {"loss": "nan"}}
    infinite[2] |= {"loss": None, "nonfinite": {"loss": "inf"}}
    assert len({digest(x, 3) for x in (nan, infinite, rows())}) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (rows(2), r"has the steps \[1, 2\]; expected 1 to 3"),
        (rows(4), "expected 1 to 3"),
        (rows()[::-1], r"has the steps \[3, 2, 1\]"),
        ([rows()[0], *rows()[:2]], r"has the steps \[1, 1, 2\]"),
        ([], r"has the steps \[\]"),
        ([{"step": 1, "loss": 1.0}], "has no grad_norm"),
    ],
)
def test_rows_that_are_not_those_of_all_steps_are_refused(
    wrong: list[dict[str, Any]], message: str
):
    with pytest.raises(ValueError, match=message):
        digest(wrong, 3)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ValueError, match="the job wrote no"):
        read_rows(path)
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW)[:-5])
    with pytest.raises(ValueError, match="is truncated"):
        read_rows(path)
    path.write_text(json.dumps(ROW) + "\n[1]\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .* must be an object"):
        read_rows(path)


def save(folder: Path, crc: int, num_processes: int = 1) -> None:
    """Save the checksums of a state, as the trainer writes them."""
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").touch()
    for process in range(num_processes):
        pieces = {"params.embed": [Piece(((0, 4),), crc + process)]}
        (folder / part_name(process)).write_text(write_pieces(pieces))


def test_one_bit_of_the_saved_state_changes_the_hash(tmp_path: Path):
    sums = []
    for run, crc in (("a", 1024), ("b", 1024), ("c", 1025)):
        save(tmp_path / run / "checkpoints" / "3", crc, num_processes=2)
        sums.append(read_sums(tmp_path / run, 3))
        assert len(sums[-1]) == 2
    first, same, other = (digest(rows(), 3, each) for each in sums)
    assert first == same != other
    assert first != digest(rows(), 3)
    assert first != digest(rows(), 3, sums[0][::-1])


def test_a_state_that_was_not_saved_is_refused(tmp_path: Path):
    save(tmp_path / "checkpoints" / "2", 1)
    with pytest.raises(ValueError, match="saved no checkpoint of step 3"):
        read_sums(tmp_path, 3)
    (tmp_path / "checkpoints" / "2" / "checkpoint.json").unlink()
    with pytest.raises(ValueError, match="saved no checkpoint of step 2"):
        read_sums(tmp_path, 2)  # it was not ended


def trainer(tmp_path: Path, code: str = "") -> list[str]:
    """Return a command that writes rows as a trainer does."""
    (tmp_path / "rows.json").write_text(json.dumps(rows()))
    program = tmp_path / "trainer.py"
    program.write_text(
        "import json, pathlib, sys\n"
        f"rows = json.load(open({str(tmp_path / 'rows.json')!r}))\n"
        f"{code}\n"
        "folder = pathlib.Path(sys.argv[1]); folder.mkdir()\n"
        "text = ''.join(json.dumps(row) + '\\n' for row in rows)\n"
        "(folder / 'metrics.jsonl').write_text(text)\n"
        "print('done')\n"
    )
    return [sys.executable, "-S", str(program), "{work_dir}"]


def test_the_hash_is_the_last_line_and_the_work_dir_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "shared"
    folder.mkdir()
    command = ["--no-state", "--dir", str(folder), "--", *trainer(tmp_path)]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines() == [digest(rows(), 3)]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit('out of memory')", "the job ended with 1: out of memory"),
        ("rows = rows[:2]", "has the steps [1, 2]; expected 1 to 3"),
        ("", "the job saved no checkpoint of step 3"),
        ("import time; time.sleep(30)", "the job did not end in 1 s"),
    ],
)
def test_a_job_that_fails_prints_no_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, message: str
):
    words = ["--time-limit-s", "1" if "sleep" in code else "60"]
    words += ["--no-state"] if code else []
    assert main([*words, "--", *trainer(tmp_path, code)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--devices", "0"), "--devices must be at least 1, got 0"),
        (("--dir", "/absent"), "--dir /absent is not a folder"),
        (("--dir", "/proc"), "--dir /proc: "),  # where nobody can make a folder
        (("--time-limit-s", "-1"), "--time-limit-s must be positive, got -1"),
        (("--", "./job"), "has no {work_dir}"),
        (("--step", "3"), "unknown flag --step; the nearest is --steps"),
    ],
)
def test_bad_input_is_one_message_and_code_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
):
    assert main(list(words)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_job_computes_the_same_bits_twice_and_others_with_another_seed():
    command = [sys.executable, "-m", "mjax.health.bisect.replay", "--devices", "2"]
    found = [
        subprocess.run(
            [*command, "--seed", seed], capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "0", "1")
    ]
    assert len(found[0].strip()) == 64
    assert found[0] == found[1] != found[2]

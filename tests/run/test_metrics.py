"""Rows, files, the figure: also with NaN, after a kill, on a full disk."""

import io
import json
import math
import os
import resource
import shutil
import struct
import time
from unittest.mock import Mock

import pytest

from mjax.cli import exit_codes
from mjax.config.run import LogConfig
from mjax.config.train import TrainConfig
from mjax.data.dataset import Dataset
from mjax.hardware.utilization import Utilization
from mjax.run import metrics, report
from mjax.run.json_files import write_json
from mjax.run.metrics import Recorder, make_row, read_rows
from mjax.run.tracking.delivery import Delivery

UNKNOWN_PEAK = Utilization(flops_per_token=6.0, peak_flops_per_s=None, num_devices=1)


COUNTS = {"tokens": 100, "visible_pairs": 250.0, "skipped": 0}


def a_row(step, *, loss=2.0, step_s=0.25, utilization=UNKNOWN_PEAK):
    return make_row(
        step,
        {"loss": loss, "grad_norm": 0.5, "lr": 1e-3, **COUNTS},
        step_s=step_s,
        data_wait_s=0.01,
        bytes_per_token=1.0,
        utilization=utilization,
    )


LOG = LogConfig()


def record(work_dir, rows, *, start_step=0, config=LOG, num_steps=10):
    recorder = Recorder(
        work_dir, config, start_step=start_step, num_steps=num_steps, active=True
    )
    for row in rows:
        recorder.record(row)
    recorder.close()


def strict_lines(path):
    def refuse(constant):
        raise AssertionError(f"not JSON: {constant}")

    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_row_has_the_fields_of_the_contract_in_order():
    assert list(a_row(7)) == [
        *("step", "loss", "bits_per_byte", "grad_norm", "lr", "tokens", "step_s"),
        *("data_wait_s", "tokens_per_s", "mfu", "mfu_visible", "skipped"),
    ]
    assert a_row(7)["tokens_per_s"] == 400
    assert (a_row(7)["mfu"], a_row(7)["mfu_visible"]) == (None, None)


def test_mfu_is_model_flops_over_the_peak_of_all_devices():
    utilization = Utilization(flops_per_token=6e9, peak_flops_per_s=3e12, num_devices=2)
    assert a_row(1, utilization=utilization)["mfu"] == 6e9 * 400 / (3e12 * 2)
    assert "6e+09" in utilization.describe()
    assert "2 x 3 TFLOP/s" in utilization.describe()


def test_mfu_visible_counts_the_pairs_of_the_batch():
    """A token has 2 FLOPs in weights and 2 x 4 in pairs; documents leave 2.5 pairs."""
    utilization = Utilization(
        flops_per_token=10.0,
        peak_flops_per_s=1e4,
        num_devices=1,
        flops_per_pair=2.0,
        pairs_per_token=4.0,
    )
    row = a_row(1, utilization=utilization)
    assert row["mfu"] == pytest.approx(400 * 10 / 1e4)
    assert row["mfu_visible"] == pytest.approx(400 * (2 + 2 * 2.5) / 1e4)


def test_bits_per_byte_divides_by_ln_2_and_by_bytes_per_token():
    row = make_row(
        1,
        {"loss": math.log(16), "grad_norm": 0, "lr": 0, **COUNTS},
        step_s=1.0,
        data_wait_s=0.0,
        bytes_per_token=4.0,
        utilization=UNKNOWN_PEAK,
    )
    assert row["bits_per_byte"] == pytest.approx(1.0, rel=1e-15)


def test_rows_are_written_one_line_each(tmp_path):
    record(tmp_path, [a_row(1), a_row(2)])
    assert strict_lines(tmp_path / "metrics.jsonl") == [a_row(1), a_row(2)]


def test_every_row_is_in_the_file_before_the_next_step(tmp_path):
    recorder = Recorder(tmp_path, LogConfig(), start_step=0, num_steps=3, active=True)
    for step in (1, 2, 3):
        recorder.record(a_row(step))
        assert len(read_rows(tmp_path / "metrics.jsonl")) == step
    recorder.close()


def test_a_checkpoint_has_its_rows_on_disk(tmp_path, monkeypatch):
    """Rows that are only in the page cache are lost if the host loses power."""
    path, flushed = tmp_path / "metrics.jsonl", []

    def fsync(descriptor):
        assert os.path.samestat(os.fstat(descriptor), path.stat())
        flushed.append(len(read_rows(path)))

    recorder = Recorder(tmp_path, LogConfig(), start_step=0, num_steps=3, active=True)
    monkeypatch.setattr(os, "fsync", fsync)
    for step in (1, 2):
        recorder.record(a_row(step))
        recorder.sync()
    assert flushed == [1, 2]
    recorder.close()


def test_values_that_are_not_finite_are_null_and_named(tmp_path):
    record(tmp_path, [a_row(1, loss=float("nan")), a_row(2, loss=-float("inf"))])
    nan, inf = strict_lines(tmp_path / "metrics.jsonl")
    assert nan["loss"] is None
    assert nan["nonfinite"] == {"loss": "nan", "bits_per_byte": "nan"}
    assert inf["nonfinite"]["loss"] == "-inf"


def test_a_float32_loss_survives_the_file_bitwise(tmp_path):
    (loss,) = struct.unpack("f", struct.pack("I", 0x3F9D70A5))
    record(tmp_path, [a_row(1, loss=loss)])
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert struct.unpack("I", struct.pack("f", row["loss"])) == (0x3F9D70A5,)


def test_resuming_drops_the_rows_after_the_restored_step(tmp_path):
    record(tmp_path, [a_row(step) for step in range(1, 6)])
    record(tmp_path, [a_row(step, loss=1.0) for step in (4, 5)], start_step=3)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows] == [2.0, 2.0, 2.0, 1.0, 1.0]


def test_a_last_line_that_was_cut_off_is_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record(tmp_path, [a_row(1), a_row(2)])
    path.write_bytes(path.read_bytes()[:-30])
    record(tmp_path, [a_row(2)], start_step=1)
    assert strict_lines(path) == [a_row(1), a_row(2)]


@pytest.mark.parametrize(
    "damage", [b'{"step": 2, "lo', b"null", b'{"loss": 1.0}', b"\xff", b"[" * 10**5]
)
def test_a_row_whose_line_is_damaged_is_reported_on_resume(tmp_path, capsys, damage):
    path = tmp_path / "metrics.jsonl"
    record(tmp_path, [a_row(1), a_row(2), a_row(3)])
    first, _, third = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join((first, damage, third)) + b"\n")
    assert read_rows(path) == [a_row(1), a_row(3)]
    record(tmp_path, [a_row(4)], start_step=3)
    assert strict_lines(path) == [a_row(1), a_row(3), a_row(4)]
    out = capsys.readouterr().out
    assert f"warning: {path} has no row of step 2, because of line 2: " in out
    record(tmp_path, [a_row(5)], start_step=4)
    assert "has no row" not in capsys.readouterr().out


def test_a_row_that_a_full_disk_has_split_survives_a_deleted_folder(tmp_path):
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(tmp_path, LogConfig(), start_step=0, num_steps=9, active=True)
    recorder.record(a_row(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    recorder.record(a_row(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    path.unlink()
    recorder.record(a_row(3))
    recorder.close()
    assert strict_lines(path) == [a_row(1), a_row(2), a_row(3)]


def test_a_full_disk_is_reported_once_and_its_rows_follow_later(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(tmp_path, LogConfig(), start_step=0, num_steps=9, active=True)
    recorder.record(a_row(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    recorder.record(a_row(2))
    recorder.record(a_row(3))
    before = recorder.owed
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    recorder.record(a_row(4))
    recorder_owed = before, recorder.owed
    recorder.close()
    assert read_rows(path) == [a_row(step) for step in (1, 2, 3, 4)]
    assert recorder_owed == (["metrics.jsonl"], [])
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written") == 1


def test_rows_are_written_again_although_the_work_dir_cannot_be_made_again(
    tmp_path, capsys
):
    """A damaged tokenizer does not matter while config.json is there."""

    def remake():
        raise ValueError("tokenizer is not the tokenizer of this run")

    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(
        tmp_path, LOG, start_step=0, num_steps=9, active=True, remake=remake
    )
    recorder.record(a_row(1))
    (tmp_path / "config.json").touch()
    path.unlink()
    recorder.record(a_row(2))
    assert strict_lines(path) == [a_row(1), a_row(2)]
    for number, step in enumerate((3, 5), start=1):
        path.unlink()
        path.mkdir()
        recorder.record(a_row(step))
        said = capsys.readouterr().out
        assert said.count("metrics.jsonl cannot be written, training") == 1, number
        path.rmdir()
        recorder.record(a_row(step + 1))
    recorder.close()
    assert strict_lines(path) == [a_row(step) for step in range(1, 7)]


@pytest.mark.parametrize("fate", ["deleted", "moved", "replaced"])
def test_a_work_dir_that_is_gone_is_made_again_with_all_rows(tmp_path, capsys, fate):
    work_dir, remade = tmp_path / "run", []

    def remake():
        work_dir.mkdir(exist_ok=True)
        remade.append(work_dir)

    work_dir.mkdir()
    recorder = Recorder(
        work_dir, LOG, start_step=0, num_steps=9, active=True, remake=remake
    )
    recorder.record(a_row(1))
    recorder.record(a_row(2))
    if fate == "deleted":
        shutil.rmtree(work_dir)
    elif fate == "moved":
        work_dir.rename(tmp_path / "elsewhere")
    else:
        (work_dir / "metrics.jsonl").unlink()
        (work_dir / "metrics.jsonl").write_text("")
    assert recorder.owed == ["metrics.jsonl"]
    recorder.record(a_row(3))
    assert read_rows(work_dir / "metrics.jsonl") == [a_row(1), a_row(2), a_row(3)]
    assert recorder.owed == []
    recorder.close()
    assert remade == [work_dir]
    out = capsys.readouterr().out
    assert out.count("metrics.jsonl was deleted, moved or replaced") == 1


def test_a_work_dir_that_cannot_be_made_again_is_owed_its_rows(tmp_path, capsys):
    work_dir = tmp_path / "run"
    work_dir.mkdir()
    recorder = Recorder(work_dir, LOG, start_step=0, num_steps=9, active=True)
    recorder.record(a_row(1))
    shutil.rmtree(work_dir)
    work_dir.write_text("a file")
    recorder.record(a_row(2))
    recorder.sync()
    assert recorder.owed == ["metrics.jsonl"]
    work_dir.unlink()
    recorder.sync()
    assert recorder.owed == []
    recorder.close()
    assert read_rows(work_dir / "metrics.jsonl") == [a_row(1), a_row(2)]
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written") == 1


def test_an_evaluation_that_comes_later_is_added_to_the_row_of_its_step(tmp_path):
    record(tmp_path, [a_row(1), a_row(2)])
    recorder = Recorder(tmp_path, LOG, start_step=2, num_steps=9, active=True)
    recorder.amend(3, {"eval_loss": 9.0})
    recorder.amend(2, {"eval_loss": 1.5})
    recorder.record(a_row(3))
    recorder.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows == [a_row(1), a_row(2) | {"eval_loss": 1.5}, a_row(3)]


def test_a_log_whose_encoding_lacks_a_character_gets_its_number(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    metrics.say("é")
    assert raw.getvalue() == b"\\xe9\n"


def test_an_inactive_recorder_writes_nothing(tmp_path, capsys):
    recorder = Recorder(
        tmp_path, LogConfig(every=1), start_step=0, num_steps=1, active=False
    )
    recorder.record(a_row(1))
    recorder.say("hello")
    recorder.sync()
    recorder.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_after_a_takeover_no_file_and_no_tracker_gets_anything(tmp_path, capsys):
    kept, tracker = tmp_path / "summary.json", Mock()
    kept.write_text("of the other start")
    recorder = Recorder(
        tmp_path,
        LOG,
        start_step=0,
        num_steps=9,
        active=True,
        is_ours=lambda: False,
        open_trackers=lambda say: [tracker],
    )
    recorder.record(a_row(1))
    recorder.amend(1, {"eval_loss": 1.5})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    recorder.record(a_row(2))
    code = report.write_summary(
        *(tmp_path, Mock(spec=TrainConfig), Mock(spec=Dataset), recorder),
        exit_code=exit_codes.PREEMPTED,
        is_saved=lambda: True,
        wall_s=1.0,
    )
    recorder.guarded("sample.txt", lambda: kept.write_text("ours"))
    recorder.close("gave up")
    assert code == exit_codes.GAVE_UP
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    tracker.send.assert_called_once_with(a_row(1))
    tracker.end.assert_called_once_with("stopped")
    assert "taken over by another start" in capsys.readouterr().out


def test_progress_is_a_plain_line_every_n_steps_and_at_the_end(tmp_path, capsys):
    rows = [a_row(step) for step in range(1, 8)]
    record(tmp_path, rows, config=LogConfig(every=3), num_steps=7)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 3/7",
        "step 6/7",
        "step 7/7",
    ]
    assert "loss 2.0000" in lines[0]
    assert "400 tokens/s" in lines[0]


def test_a_line_averages_the_timing_of_the_steps_since_the_one_before(tmp_path, capsys):
    """The third step's metrics were read with those of the fourth."""
    took_s = {1: 30.0, 2: 0.25, 3: 0.4999, 4: 0.0001, 5: 0.25}
    known = Utilization(flops_per_token=6.0, peak_flops_per_s=6e3, num_devices=1)
    rows = [
        a_row(step, step_s=took_s.get(step, 0.25), utilization=known)
        for step in range(1, 17)
    ]
    record(tmp_path, rows, config=LogConfig(every=4), num_steps=16)
    line, *others = capsys.readouterr().out.splitlines()
    assert line.startswith("step 4/16")
    assert "250.0 ms  wait 10.0 ms  400 tokens/s  mfu 40.0%" in line
    assert all("400 tokens/s" in other for other in others)
    assert read_rows(tmp_path / "metrics.jsonl")[3]["tokens_per_s"] == 1_000_000


def test_the_first_step_of_a_start_is_shown_alone(tmp_path, capsys):
    rows = [a_row(1, step_s=50.0), a_row(2)]
    record(tmp_path, rows, config=LogConfig(every=1), num_steps=2)
    assert [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()] == [
        "2 tokens/s",
        "400 tokens/s",
    ]


def test_a_terminal_gets_a_live_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    recorder = Recorder(tmp_path, LogConfig(), start_step=0, num_steps=3, active=True)
    recorder.record(a_row(2) | {"eval_loss": 1.5, "eval_bits_per_byte": 2.5})
    recorder.say("between [steps]")
    recorder.record(a_row(3) | {"skipped": 1})
    recorder.close()
    out = capsys.readouterr().out
    assert "step 3/3 100%" in out
    assert "between [steps]" in out
    assert "step 2: eval loss 1.5000, 2.500 bits/byte" in out
    assert "warning: step 3 was skipped" in out


def test_the_summary_takes_the_last_loss_the_last_evaluation_and_median_speed():
    rows = [a_row(step) for step in (1, 2, 3)]
    rows[0]["tokens_per_s"] = 1.0
    rows[1] |= {"eval_loss": 1.5, "eval_bits_per_byte": 2.2}
    assert metrics.summarize(rows) == {
        **{"steps": 3, "loss": 2.0, "eval_loss": 1.5, "eval_bits_per_byte": 2.2},
        **{"tokens_per_s": 400, "mfu": None, "mfu_visible": None},
    }
    assert metrics.summarize([])["steps"] == 0


def test_json_files_are_complete_and_strict(tmp_path):
    write_json(tmp_path / "summary.json", {"loss": float("inf"), "steps": 3})
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content == {"loss": None, "steps": 3, "nonfinite": {"loss": "inf"}}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_log_cadence_below_one_is_refused():
    with pytest.raises(ValueError, match=r"--log\.every must be at least 1, got 0"):
        LogConfig(every=0)


class SlowDelivery(Delivery):
    """A tracker that takes a while to finish."""

    def __init__(self, calls):
        self.calls = calls

    def end(self, ending):
        self.calls.append(("end", ending))

    def finish(self, ending, *, patience_s):
        time.sleep(min(patience_s, 0.05))
        self.calls.append(("finish", ending, patience_s))


def test_trackers_share_the_time_that_a_run_waits_for_them(tmp_path):
    calls = []
    recorder = Recorder(
        tmp_path,
        LogConfig(),
        start_step=0,
        num_steps=1,
        active=True,
        open_trackers=lambda _: [SlowDelivery(calls), SlowDelivery(calls)],
    )
    recorder.close("done")
    # Both get the end before the recorder waits for either.
    assert calls[:2] == [("end", "done")] * 2
    (_, _, first_s), (_, _, second_s) = calls[2:]
    assert second_s <= first_s - 0.05

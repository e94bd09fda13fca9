"""The command finds a slow device in the spans of a run, and its cost."""

import json
from pathlib import Path

import numpy as np
import pytest

from mjax.observe.spans import FOLDER, Header, Line, Span, encode, file_name
from mjax.observe.whatif import main

NUM, STEPS = 4, 20
FORWARD_S, BACKWARD_S, NORM_S, OPTIMIZER_S, GAP_S = 0.1, 0.2, 0.03, 0.02, 0.005


def write_run(work_dir: Path, slow: dict[int, float], skipped: int = 0) -> float:
    """Write the spans of data-parallel ranks; return the seconds of a step."""
    rng = np.random.default_rng(0)
    at_s = 0.0
    lines: dict[int, list[Line]] = {rank: [] for rank in range(NUM)}
    for step in range(1, STEPS + 1):
        noise = np.exp(rng.normal(0, 0.005, (2, NUM)))
        factor = np.array([slow.get(rank, 1.0) for rank in range(NUM)])
        forward_s = at_s + GAP_S + FORWARD_S * noise[0] * factor
        backward_s = forward_s + BACKWARD_S * noise[1] * factor
        norm_s = float(backward_s.max()) + NORM_S
        for rank in range(NUM):
            zero_s = 1e3 * (rank + 1)  # the clock of each host
            ends_s = (forward_s[rank], backward_s[rank], norm_s, norm_s + OPTIMIZER_S)
            times = [at_s + GAP_S, *ends_s]
            ns = [int((zero_s + float(time_s)) * 1e9) for time_s in times]
            stream = f"device:{rank}"
            spans = (
                Span("forward", "compute", stream, ns[0], ns[1]),
                Span("backward", "compute", stream, ns[1], ns[2]),
                Span("norm", "dp", stream, ns[2], ns[3]),
                Span("optimizer", "optimizer", stream, ns[3], ns[4]),
            )
            if step != skipped:
                lines[rank].append(Line(n=len(lines[rank]), step=step, spans=spans))
        at_s = norm_s + OPTIMIZER_S
    for rank in range(NUM):
        header = Header(
            run="r",
            host=f"host-{rank}",
            rank=rank,
            generation=1,
            pid=1,
            wall_ns=0,
            monotonic_ns=0,
            devices=(rank,),
            mesh={"pp": 1, "dp_replicate": 1, "dp_shard": NUM, "tp": 1},
        )
        path = work_dir / FOLDER / file_name(header)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(encode, [header, *lines[rank]])))
    return at_s / STEPS


def ask(work_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert main(["--work-dir", str(work_dir), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_slow_device_is_named_with_what_it_costs(tmp_path, capsys):
    slow_s = write_run(tmp_path / "slow", {2: 1.3})
    even_s = write_run(tmp_path / "even", {})
    found = ask(tmp_path / "slow", capsys)
    assert found["cause"] == "slow host"
    (blamed,) = found["causes"][0]["workers"]
    assert (blamed["rank"], blamed["host"]) == (2, "host-2")
    assert found["step_s"] == pytest.approx(slow_s, rel=0.01)
    # 10% of the slowdown, the bound of the generated pipelines.
    without_s = found["causes"][0]["step_s"]
    assert abs(without_s - even_s) < 0.1 * (slow_s - even_s)
    assert max(found["hosts"], key=found["hosts"].get) == "host-2"


def test_nothing_is_named_in_an_even_run(tmp_path, capsys):
    write_run(tmp_path, {})
    found = ask(tmp_path, capsys)
    assert found["cause"] is None
    assert abs(found["stragglers"]) < 0.02


def test_only_steps_in_a_row_count(tmp_path, capsys):
    write_run(tmp_path, {}, skipped=6)
    assert ask(tmp_path, capsys)["steps"] == [9, STEPS]
    assert ask(tmp_path, capsys, "--from-step", "12")["steps"] == [12, STEPS]


def test_people_are_told_the_same(tmp_path, capsys):
    write_run(tmp_path, {1: 1.5})
    assert main(["--work-dir", str(tmp_path), "--out", str(tmp_path / "o.json")]) == 0
    said = capsys.readouterr().out
    assert "slow host (rank 1 on host-1)" in said
    assert json.loads((tmp_path / "o.json").read_text())["cause"] == "slow host"


def test_a_run_without_spans_is_refused(tmp_path, capsys):
    assert main(["--work-dir", str(tmp_path)]) == 2
    assert "has no spans; name the work dir of a run" in capsys.readouterr().err


def test_a_run_without_stamps_is_refused(tmp_path, capsys):
    write_run(tmp_path, {})
    for path in (tmp_path / FOLDER).iterdir():
        path.write_bytes(path.read_bytes().replace(b"device:", b"step:"))
    assert main(["--work-dir", str(tmp_path)]) == 2
    assert "stamps record them, by default on Hopper" in capsys.readouterr().err


def test_a_run_of_one_device_is_not_advised_to_record_stamps(tmp_path, capsys):
    write_run(tmp_path, {})
    for path in sorted((tmp_path / FOLDER).iterdir()):
        header = json.loads(path.read_bytes().partition(b"\n")[0])
        if header["rank"] != 0:
            path.unlink()
            continue
        alone = dict.fromkeys(header["mesh"], 1)
        text = path.read_bytes().replace(b"device:", b"step:")
        for old, new in ((header["mesh"], alone), (header["devices"], [0])):
            shown = [
                json.dumps(one, separators=(",", ":")).encode() for one in (old, new)
            ]
            assert shown[0] in text
            text = text.replace(*shown, 1)
        path.write_bytes(text)
    assert main(["--work-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "the run has one device, so no other waits for it" in err
    assert "stamps" not in err


def test_steps_that_are_not_there_are_refused(tmp_path, capsys):
    write_run(tmp_path, {})
    assert main(["--work-dir", str(tmp_path), "--from-step", "99"]) == 2
    assert "no consecutive steps" in capsys.readouterr().err

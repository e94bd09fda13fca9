"""The command names the rank to blame in the files of a run, and changes none."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from mjax.observe import beats
from mjax.observe.beats import Beat
from mjax.observe.spans import FOLDER, Header, Launch, Line, Span, encode, file_name
from mjax.observe.stuck import main
from mjax.processes.progress import LOCK_ANSWER, Phase, Writer

NUM = 4
WAITING = (
    "Current thread 0x00007f (most recent call first):\n"
    '  File "/x/jax/_src/array.py", line 1 in _value\n'
    '  File "/x/mjax/run/loop.py", line 2 in run\n'
)
SLEEPING = WAITING.replace("/x/jax/_src/array.py", "/x/my/reader.py")


def write_run(
    work_dir: Path,
    *,
    steps: tuple[int, ...] = (7, 7, 7, 7),
    age_s: float = 600.0,
    launch: bool = True,
    missing: tuple[int, ...] = (),
    ends: dict[int, int] | None = None,
) -> None:
    """Write the spans of ranks on another machine, whose clock has another zero."""
    said_ns = time.time_ns() - int(age_s * 1e9)
    for rank in range(NUM):
        if rank in missing:
            continue
        header = Header(
            run="r",
            host=f"host-{rank // 2}",
            rank=rank,
            generation=1,
            pid=2**22 + 1,
            wall_ns=said_ns,
            monotonic_ns=0,
            devices=(rank,),
            mesh={"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 2},
            launch=Launch(name="a", generation=0) if launch else None,
        )
        lines = [
            Line(
                n=step - 1,
                step=step,
                spans=(Span("step", "compute", "step", -2 * 10**9, -(10**9)),),
            )
            for step in range(1, steps[rank])
        ]
        if ends and rank in ends:
            lines.append(Line(n=len(lines), end=ends[rank]))
        path = work_dir / FOLDER / file_name(header)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(encode(each) for each in (header, *lines)))


def write_words(
    work_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    steps: tuple[int, ...] = (7, 7, 7, 7),
    phases: dict[int, Phase] | None = None,
    missing: tuple[int, ...] = (),
) -> Path:
    """Write progress words at the zero of the monotonic clock of the spans."""
    folder = work_dir / "launch" / "generation-0000"
    folder.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: 1)
        for rank, step in enumerate(steps):
            if rank in missing:
                continue
            writer = Writer(folder / f"progress-{rank}")
            writer.mark((phases or {}).get(rank, Phase.STEP), step)
            writer.ended_first_step()
    return folder


def write_beats(
    work_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    entered: tuple[int, ...] = (40, 40, 40, 40),
    silent: tuple[int, ...] = (),
    clock_s: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0),
    stands_s: tuple[float, ...] = (600.0, 600.0, 600.0, 600.0),
    **fields: tuple[object, ...],
) -> None:
    """Write the beats of ranks on another machine; all but some keep beating."""
    before = {}
    for rank in range(NUM):
        wall_ns = time.time_ns() + int(clock_s[rank] * 1e9)
        header = Header(
            run="r",
            host=f"host-{rank // 2}",
            rank=rank,
            generation=1,
            pid=2**22 + 1,
            wall_ns=wall_ns,
            monotonic_ns=0,
            devices=(rank,),
            mesh={"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 2},
        )
        own = {name: values[rank] for name, values in fields.items()}
        before[rank] = Beat(
            n=3,
            whose=header,
            every_s=1.0,
            wall_ns=wall_ns,
            monotonic_ns=0,
            since_ns=-int(stands_s[rank] * 1e9),
            entered=entered[rank],
            again=3,
            **{  # pyright: ignore[reportArgumentType]
                "phase": int(Phase.STEP),
                "step": 7,
                "microstep": 0,
                "has_stepped": True,
                "doing": "device",
            }
            | own,
        )
        path = work_dir / beats.FOLDER / beats.file_name(header)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(beats.encode(before[rank]))
    again = {rank: beat for rank, beat in before.items() if rank not in silent}
    monkeypatch.setattr(
        beats,
        "still_beating",
        lambda _, known: {rank: again[rank] for rank in known if rank in again},
    )


def ask(work_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert main(["--work-dir", str(work_dir), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_rank_whose_word_is_behind_is_named(tmp_path, capsys, monkeypatch):
    write_run(tmp_path)
    write_words(tmp_path, monkeypatch, steps=(8, 8, 7, 8))
    found = ask(tmp_path, capsys)
    assert (found["ranks"], found["host"]) == ([2], "host-1")
    assert (found["phase"], found["step"]) == ("step", 7)
    assert found["groups"] == {"dp_shard": [0], "tp": [3]}


def test_the_rank_without_a_record_is_named(tmp_path, capsys, monkeypatch):
    write_run(tmp_path, missing=(3,))
    write_words(tmp_path, monkeypatch, missing=(3,))
    found = ask(tmp_path, capsys)
    assert found["ranks"] == [3]
    assert found["reason"] == "it has no record"
    assert found["groups"] == {"dp_shard": [1], "tp": [2]}


@pytest.mark.parametrize("has_beats", [True, False])
def test_nobody_is_named_while_ranks_write_their_first_records(
    tmp_path, capsys, monkeypatch, has_beats
):
    write_run(tmp_path, launch=False, age_s=2.0, missing=(2, 3))
    if has_beats:
        write_beats(tmp_path, monkeypatch, stands_s=(2.0,) * NUM)
        for path in (tmp_path / beats.FOLDER).glob("*-[23]-1.json"):
            path.unlink()
    found = ask(tmp_path, capsys)
    assert (found["ranks"], found["is_stuck"]) == ([], False)
    write_run(tmp_path, launch=False, age_s=60.0, missing=(2, 3))
    for path in (tmp_path / beats.FOLDER).glob("*"):
        path.unlink()
    assert ask(tmp_path, capsys)["ranks"] == [2, 3]


def test_the_rank_that_does_not_wait_is_named_with_its_stack(
    tmp_path, capsys, monkeypatch
):
    write_run(tmp_path)
    folder = write_words(tmp_path, monkeypatch)
    for rank in range(NUM):
        text = (SLEEPING if rank == 1 else WAITING) + LOCK_ANSWER
        (folder / f"stacks-{rank}.txt").write_text(text)
    found = ask(tmp_path, capsys)
    assert found["ranks"] == [1]
    assert "reader.py" in found["stacks"]["1"]


def test_the_rank_that_holds_the_interpreter_lock_is_named(
    tmp_path, capsys, monkeypatch
):
    write_run(tmp_path)
    folder = write_words(tmp_path, monkeypatch)
    for rank in range(NUM):
        text = WAITING + (LOCK_ANSWER if rank != 0 else "")
        (folder / f"stacks-{rank}.txt").write_text(text)
    assert ask(tmp_path, capsys)["ranks"] == [0]


def test_stacks_of_the_watchdog_are_read_without_a_launcher(tmp_path, capsys):
    write_run(tmp_path, launch=False)
    (tmp_path / "stacks").mkdir()
    for rank in range(NUM):
        old = "Timeout (0:00:01)!\n" + SLEEPING
        new = "Timeout (0:00:01)!\n" + (SLEEPING if rank == 3 else WAITING)
        path = tmp_path / "stacks" / f"host-{rank // 2}-{rank}-1.txt"
        path.write_text(old + new)
    found = ask(tmp_path, capsys)
    assert (found["ranks"], found["step"]) == ([3], 7)
    assert found["stacks"]["3"].count("Timeout") == 1


def test_stacks_older_than_the_last_progress_say_nothing(tmp_path, capsys):
    write_run(tmp_path, launch=False)
    (tmp_path / "stacks").mkdir()
    for rank in range(NUM):
        path = tmp_path / "stacks" / f"host-{rank // 2}-{rank}-1.txt"
        path.write_text(SLEEPING if rank == 3 else WAITING)
        long_ago_s = time.time() - 3600
        os.utime(path, (long_ago_s, long_ago_s))
    found = ask(tmp_path, capsys)
    assert found["is_stuck"]
    assert (found["ranks"], found["stacks"]) == ([], {})


def test_the_rank_that_failed_is_named_and_not_those_that_wait(tmp_path, capsys):
    write_run(tmp_path, launch=False, ends={1: 1})
    found = ask(tmp_path, capsys)
    assert (found["ranks"], found["phase"]) == ([1], "exit")


def test_nobody_is_named_while_all_go_on(tmp_path, capsys):
    write_run(tmp_path, launch=False, age_s=3.0)
    found = ask(tmp_path, capsys)
    assert not found["is_stuck"]
    assert found["ranks"] == []


def test_a_long_save_is_no_hang(tmp_path, capsys, monkeypatch):
    write_run(tmp_path)
    write_words(tmp_path, monkeypatch, phases=dict.fromkeys(range(NUM), Phase.SAVE))
    assert not ask(tmp_path, capsys)["is_stuck"]


def test_a_run_that_has_ended_is_not_stuck(tmp_path, capsys):
    write_run(tmp_path, launch=False, ends=dict.fromkeys(range(NUM), 0))
    assert ask(tmp_path, capsys)["reason"] == "all ranks have ended"


def test_reading_changes_no_file_and_out_has_what_json_prints(
    tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    write_run(run)
    write_words(run, monkeypatch, steps=(8, 8, 7, 8))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = ask(run, capsys, "--out", str(tmp_path / "out.json"))
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert before == after
    assert json.loads((tmp_path / "out.json").read_text())["ranks"] == found["ranks"]


def test_people_are_told_rank_host_step_and_who_waits(tmp_path, capsys, monkeypatch):
    write_run(tmp_path)
    write_words(tmp_path, monkeypatch, steps=(8, 8, 7, 8))
    assert main(["--work-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rank 2 on host-1 in step, step 7" in said
    assert "waiting for them in tp: rank 3" in said
    assert re.search(r"last progress: [\d.]+ s ago, the limit is [\d.]+ s\n", said)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "no spans and no progress words"),
        (("--step-s", "0"), "--step-s must be finite and above 0, got 0"),
        (("--step-s", "nan"), "--step-s must be finite and above 0, got nan"),
        (("--save-s", "-1"), "--save-s must be finite and above 0, got -1"),
    ],
)
def test_bad_input_is_one_line_and_code_2(flags, says, tmp_path, capsys):
    assert main(["--work-dir", str(tmp_path), *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_work_dir_that_is_none_is_refused(tmp_path, capsys):
    assert main(["--work-dir", str(tmp_path / "no")]) == 2
    assert "--work-dir must be the work dir of a run" in capsys.readouterr().err


def test_the_silent_rank_is_named_though_all_are_at_one_place(
    tmp_path, capsys, monkeypatch
):
    write_run(tmp_path, launch=False)
    write_beats(tmp_path, monkeypatch, silent=(2,))
    found = ask(tmp_path, capsys)
    assert (found["ranks"], found["host"]) == ([2], "host-1")
    assert "no sign of life" in found["reason"]
    assert [one["is_beating"] for one in found["seen"]] == [True, True, False, True]


def test_the_rank_that_has_begun_the_fewest_things_is_named_by_beats_alone(
    tmp_path, capsys, monkeypatch
):
    write_beats(tmp_path, monkeypatch, entered=(40, 38, 40, 40))
    found = ask(tmp_path, capsys)
    assert (found["ranks"], found["step"]) == ([1], 7)
    assert found["groups"] == {"dp_shard": [3], "tp": [0]}


def test_the_rank_that_is_behind_in_an_evaluation_is_named(
    tmp_path, capsys, monkeypatch
):
    phase = (int(Phase.EVAL),) * NUM
    write_beats(tmp_path, monkeypatch, phase=phase, microstep=(3, 3, 3, 1))
    assert ask(tmp_path, capsys, "--eval-s", "9")["ranks"] == [3]
    assert ask(tmp_path, capsys, "--eval-s", "900")["ranks"] == []


def test_the_rank_whose_main_thread_stands_elsewhere_is_named(
    tmp_path, capsys, monkeypatch
):
    waits, sleeps = WAITING.partition("\n")[2], SLEEPING.partition("\n")[2]
    write_beats(tmp_path, monkeypatch, stack=(waits, waits, sleeps, waits))
    found = ask(tmp_path, capsys)
    assert found["ranks"] == [2]
    assert found["stacks"] == {"2": sleeps}


def test_nobody_is_named_when_all_are_silent(tmp_path, capsys, monkeypatch):
    write_beats(
        tmp_path, monkeypatch, entered=(40, 38, 40, 40), silent=tuple(range(NUM))
    )
    found = ask(tmp_path, capsys)
    assert (found["ranks"], found["is_stuck"]) == ([], True)
    assert "no rank shows a sign of life" in found["reason"]


def test_nobody_is_named_for_its_exit_code_when_all_others_are_silent(
    tmp_path, capsys, monkeypatch
):
    write_beats(tmp_path, monkeypatch, end=(None, None, 1, 1), silent=(0, 1))
    found = ask(tmp_path, capsys)
    assert found["ranks"] == []
    assert "all have ended, were killed or are lost" in found["reason"]
    write_beats(tmp_path, monkeypatch, end=(None, None, None, 1), silent=(0, 1))
    assert ask(tmp_path, capsys)["ranks"] == [3]


@pytest.mark.parametrize("silent", [(2,), ()])
def test_the_rank_that_stood_still_before_others_gave_up_is_named(
    tmp_path, capsys, monkeypatch, silent
):
    # Ranks 1 and 3 have waited for rank 2 for 30 s, and ended with an error.
    write_beats(
        tmp_path,
        monkeypatch,
        entered=(40, 40, 39, 40),
        clock_s=(0.0, -2.0, -32.0 if silent else 0.0, -1.0),
        stands_s=(32.0, 0.0, 0.0 if silent else 32.0, 0.0),
        end=(None, 1, None, 1),
        silent=(*silent, 1, 3),
    )
    found = ask(tmp_path, capsys, "--step-s", "5")
    assert found["ranks"] == [2]
    assert found["reason"] == "it made no progress, and others ended later"


@pytest.mark.parametrize(("silent", "ranks"), [((), []), ((2,), [2])])
def test_nobody_is_named_for_being_behind_a_rank_that_gave_up(
    tmp_path, capsys, monkeypatch, silent, ranks
):
    # Rank 2 has stopped below Python; rank 1 has waited for 30 s and ended.
    write_beats(
        tmp_path,
        monkeypatch,
        entered=(40, 42, 40, 40),
        clock_s=(0.0, 0.0, -32.0 if silent else 0.0, 0.0),
        stands_s=(32.0, 0.0, 0.0 if silent else 32.0, 32.0),
        end=(None, 1, None, None),
        silent=(1, *silent),
    )
    found = ask(tmp_path, capsys, "--step-s", "5")
    assert (found["ranks"], found["is_stuck"]) == (ranks, True)
    if not ranks:
        assert found["reason"] == (
            "all other ranks stopped before rank 1 ended, and none of them differs"
        )
        assert main(["--work-dir", str(tmp_path), "--step-s", "5"]) == 0
        said = capsys.readouterr().out
        assert "stuck; the rank to blame is unknown: all other ranks" in said


def test_the_rank_that_ended_is_named_where_the_others_stand_still_since_then(
    tmp_path, capsys, monkeypatch
):
    write_beats(
        tmp_path,
        monkeypatch,
        entered=(40, 39, 39, 40),
        clock_s=(0.0, 0.0, 0.0, -30.0),
        stands_s=(30.0, 31.0, 31.0, 0.0),
        end=(None, None, None, 1),
        silent=(3,),
    )
    found = ask(tmp_path, capsys, "--step-s", "5")
    assert (found["ranks"], found["reason"]) == ([3], "ended while the others wait")


@pytest.mark.parametrize("hours", [-1.0, 1.0])
def test_clocks_of_hosts_that_differ_change_nothing(
    tmp_path, capsys, monkeypatch, hours
):
    clock_s = (0.0, 0.0, 3600 * hours, 3600 * hours)
    write_beats(tmp_path, monkeypatch, clock_s=clock_s, stands_s=(3.0,) * NUM)
    assert not ask(tmp_path, capsys)["is_stuck"]
    write_beats(tmp_path, monkeypatch, clock_s=clock_s, silent=(2,))
    assert ask(tmp_path, capsys)["ranks"] == [2]


def test_a_rank_that_may_still_save_is_told_and_not_named(
    tmp_path, capsys, monkeypatch
):
    phase = (int(Phase.SAVE), *(int(Phase.STEP),) * 3)
    write_beats(tmp_path, monkeypatch, entered=(38, 40, 40, 40), phase=phase)
    found = ask(tmp_path, capsys)
    assert (found["ranks"], found["is_stuck"]) == ([], False)
    assert (
        "the others wait for rank 0, which has been in save for 600.0 s"
        in found["reason"]
    )
    found = ask(tmp_path, capsys, "--save-s", "60")
    assert (found["ranks"], found["phase"]) == ([0], "save")


def test_beats_that_some_ranks_lack_are_left_out_and_that_is_said(
    tmp_path, capsys, monkeypatch
):
    write_run(tmp_path, launch=False)
    write_beats(tmp_path, monkeypatch, silent=(2,))
    next((tmp_path / beats.FOLDER).glob("*-1-1.json")).unlink()
    found = ask(tmp_path, capsys)
    assert found["ranks"] == []
    assert "those of rank 1 are missing" in found["problems"][0]


def test_the_limit_of_a_step_can_be_below_that_of_the_launcher(
    tmp_path, capsys, monkeypatch
):
    write_beats(tmp_path, monkeypatch, entered=(40, 38, 40, 40), stands_s=(9.0,) * NUM)
    assert ask(tmp_path, capsys)["ranks"] == []
    assert ask(tmp_path, capsys, "--step-s", "4")["ranks"] == [1]

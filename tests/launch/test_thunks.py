"""XLA's report on a step that takes too long.

The lines were written after what openxla/xla logs; none was seen on a GPU yet.
"""

import json

import pytest

from mjax.launch import failures, thunks
from mjax.launch.log_rules import LogReader
from mjax.launch.messages import DeviceProgress, RankState
from mjax.launch.policy import Cause
from mjax.processes import progress
from mjax.processes.progress import Phase, Writer

PLACES = {"jit_train_step": {"all-reduce-start.4": "transpose(jvp(block))/psum"}}
GATHER = "jit_gather_first"


def line(thread, text):
    return f"E1123 11:02:42.123456 {thread:7d} gpu_executable.cc:611] {text}"


def report(
    device, completed, pending, thread=7001, total=800, program="jit_train_step"
):
    """Return XLA's log of a device, with pending operations as (name, loops)."""
    thunk = (
        "  - exec[{n}] thunk[{n}/900] {kind}: {name} at 2026-11-23 11:02:41.5{loops}"
    )
    done = thunk.format(n=1, kind="kKernel", name="done_fusion", loops="")
    texts = [
        f"[{device}] XLA GPU execution `{program}` failed to finish in 20m.",
        f"[{device}] Completed thunks: {completed}/{total} (unique thunks: 900)",
        f"[{device}] Pending thunks: {total - completed}/{total} (unique thunks: 900)",
        f"[{device}] Last completed thunks: size=1",
        done,
        f"[{device}] First pending thunks: size={len(pending)}",
        *(
            thunk.format(n=completed, kind="kAllReduceStart", name=name, loops=loops)
            for name, loops in pending
        ),
        f"[{device}] Last pending thunks: size=1",
        thunk.format(n=total, kind="kKernel", name="last_fusion", loops=""),
    ]
    return [line(thread, text) for text in texts]


def write(path, lines):
    path.write_text("".join(f"{one}\n" for one in lines))


def read(tmp_path, lines, operations=None):
    log = tmp_path / "rank-0.log"
    write(log, lines)
    with log.open("rb") as file:
        reader = LogReader(file.fileno(), 0)
        reader.read()
    path = tmp_path / "operations"
    if operations is not None:
        path.write_text(operations)
    return reader.thunks.devices(path)


def test_the_first_operations_that_wait_are_told_with_their_place(tmp_path):
    pending = [("all-reduce-start.4", " [while.3 iter=11]"), ("fusion.9", "")]
    lines = ["step 3/9  loss 2.1", *report(2, 310, pending)]
    (told,) = read(tmp_path, lines, json.dumps(PLACES))
    assert (told.device, told.limit) == (2, "20m")
    assert (told.completed, told.total) == (310, 800)
    assert told.pending == [
        "all-reduce-start.4 (transpose(jvp(block))/psum, iteration while.3 11)",
        "fusion.9",
    ]
    assert thunks.describe([told]) == (
        "XLA ended jit_train_step, which took more than 20m; device 2 has done 310 of "
        "800 operations and waits for all-reduce-start.4 (transpose(jvp(block))/psum, "
        "iteration while.3 11); fusion.9"
    )


def test_devices_that_write_at_once_are_told_apart(tmp_path):
    first = report(0, 100, [("a", "")], thread=7001)
    second = report(1, 200, [("b", "")], thread=7002)
    mixed = [one for pair in zip(first, second, strict=True) for one in pair]
    found = read(tmp_path, mixed)
    assert [(one.device, one.completed, one.pending) for one in found] == [
        (0, 100, ["a"]),
        (1, 200, ["b"]),
    ]


@pytest.mark.parametrize("operations", [None, "", "{"])
def test_without_a_table_the_names_are_told(tmp_path, operations):
    (told,) = read(tmp_path, report(0, 1, [("all-reduce-start.4", "")]), operations)
    assert told.pending == ["all-reduce-start.4"]


def test_without_tracking_the_limit_is_told(tmp_path):
    (told,) = read(tmp_path, report(0, 0, [])[:1])
    text = "XLA ended jit_train_step, which took more than 20m"
    assert thunks.describe([told]) == text


@pytest.mark.parametrize("cut", range(1, 80, 3))
def test_a_report_that_is_cut_off_is_no_error(tmp_path, cut):
    text = "\n".join(report(0, 1, [("a", " [while.3 iter=1]")]))
    read(tmp_path, text[: len(text) * cut // 80].splitlines())


def test_another_log_says_nothing(tmp_path):
    assert (
        read(tmp_path, ["step 1/2", line(1, "  - exec[1] thunk[1/2] k: n at a b")])
        == []
    )


def test_an_operation_of_another_program_is_not_placed_in_the_step(tmp_path):
    lines = report(0, 3, [("all-reduce-start.4", "")], program=GATHER)
    (told,) = read(tmp_path, lines, json.dumps(PLACES))
    assert (told.program, told.pending) == (GATHER, ["all-reduce-start.4"])


@pytest.mark.parametrize("thread", [7001, 7002])
def test_a_device_is_in_the_program_that_it_reports_first(tmp_path, thread):
    step = report(0, 310, [("a", "")])
    queued = report(0, 0, [("b", "")], thread=thread, total=9, program=GATHER)
    (told,) = read(tmp_path, [*step, *queued])
    assert (told.program, told.completed, told.pending) == (
        "jit_train_step",
        310,
        ["a"],
    )


def of(*completed, programs=()):
    return {
        rank: [
            DeviceProgress(
                device=0,
                program=dict(enumerate(programs)).get(rank, "jit_train_step"),
                limit="20m",
                completed=number,
                total=800,
            )
        ]
        for rank, number in enumerate(completed)
    }


@pytest.mark.parametrize(
    ("completed", "ranks"),
    [
        ((310, 310, 120, 310), (2,)),
        ((310, 120), (1,)),
        ((310, 310), ()),
        ((310,), ()),
        ((120, 310, 120, 310), ()),
        ((120, 120, 310), ()),  # one has passed the collective of the others
        ((120, 310, 120, 310, 310), (0, 2)),
    ],
)
def test_who_has_done_the_least_holds_up_the_others(completed, ranks):
    assert thunks.behind(of(*completed)) == ranks


def states(devices, codes):
    return {
        rank: RankState(
            rank=rank,
            generation=1,
            pid=1,
            code=codes[rank],
            ended_ns=1 if codes[rank] is not None else None,
            phase=Phase.STEP,
            step=41,
            devices=devices[rank],
        )
        for rank in devices
    }


def failed(devices, codes):
    return failures.of_ranks(
        states(devices, codes),
        [f"host-{rank}" for rank in devices],
        age_s=60.0,
        since_end_s=1.0,
        are_heard=True,
    )


def test_a_step_that_xla_ends_is_a_hang_of_who_is_behind():
    # Rank 1 has not ended yet. XLA waits ten seconds, so its report is known.
    found = failed(of(310, 120, 310), {0: -6, 1: None, 2: -6})
    assert found is not None
    assert (found.cause, found.ranks, found.hosts) == (Cause.HUNG, (1,), ("host-1",))
    assert found.text == (
        "rank 1 on host-1 in step, step 41: XLA ended jit_train_step, which took more "
        "than 20m; device 0 has done 120 of 800 operations and waits for nothing"
    )


def test_ranks_in_different_programs_are_not_compared():
    devices = of(310, 310, 3, programs=["jit_train_step", "jit_train_step", GATHER])
    found = failed(devices, dict.fromkeys(range(3), -6))
    assert found is not None
    assert (found.cause, found.ranks, found.hosts) == (Cause.HUNG, (), ())
    assert found.text.startswith("all in step, step 41: XLA ended jit_train_step, ")
    assert found.text.endswith(
        "; different programs, so no rank is named: jit_train_step on rank 0, 1, "
        f"{GATHER} on rank 2"
    )


def test_a_rank_that_was_killed_meanwhile_explains_more():
    found = failed(of(310, 120, 310), {0: -6, 1: -9, 2: -6})
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.KILLED, (1,))


def test_a_rank_writes_the_table_beside_its_word(tmp_path):
    writer = Writer(tmp_path / "progress-0")
    writer.operations(PLACES)
    path = progress.operations_path(tmp_path / "progress-0")
    assert json.loads(path.read_text()) == PLACES
    Writer(None).operations(PLACES)

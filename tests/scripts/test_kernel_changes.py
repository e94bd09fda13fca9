"""The comparison of compiled kernels with those of an older commit."""

from scripts.kernels import kernel_changes, kernel_summary
from scripts.kernels.compiled_kernels import CaseReport, CompiledKernel
from scripts.kernels.sass import LOOP_WATCHED, Loop


def kernel(name: str, *instructions: int, **changes) -> CompiledKernel:
    counts = dict.fromkeys(LOOP_WATCHED, 0) | {"MUFU.EX2": 66, "BAR": 1, "MEMBAR": 2}
    fields = {
        "name": name,
        "registers": 168,
        "set_registers": (240, 24),
        "stack_bytes": 0,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "shared_memory_bytes": 2048,
        "serialised": (),
        "instructions": {},
        "loops": tuple(
            Loop(instructions=n, counts=counts, hidden_exponentials=5)
            for n in instructions
        ),
    }
    return CompiledKernel(**fields | changes)


def report(case: str, *kernels: CompiledKernel) -> CaseReport:
    return CaseReport(case=case, compile_s=1.0, kernels=kernels, faults=())


def test_each_kernel_stands_beside_the_one_of_the_same_case_and_name():
    before = [
        report("a", kernel("attention_dq", 3)),
        report("b", kernel("attention_dq", 1), kernel("attention_forward", 900, 500)),
    ]
    now = [report("b", kernel("attention_forward", 600), kernel("norm_backward", 9))]
    was, is_now = kernel_changes.rows(before, now)
    start = ("b", "attention_forward")
    assert was[:3] == (*start, "before")
    assert was[3:6] == ("900 / 500", "5 of 66 / 5 of 66", "0 / 0")
    assert is_now == (
        *(*start, "now", "600", "5 of 66", "0", "3"),
        *("0, 0 B", "no", "240/24", "2 KiB"),
    )
    assert len(is_now) == len(was) == len(kernel_changes.HEADER)


def test_a_kernel_that_was_not_there_is_compared_with_nothing():
    serialised = kernel("attention_dkv", 7, serialised=("C7513",), spill_store_bytes=4)
    was, is_now = kernel_changes.rows([], [report("new", serialised)])
    assert set(was[3:]) == {"none"}
    assert is_now[-4:-2] == ("4, 0 B", "yes")


def test_an_unknown_commit_ends_the_command_before_anything_is_compiled(capsys):
    assert kernel_changes.main(["no-such-commit"]) == 1
    assert (
        "error: git archive no-such-commit mjax scripts failed"
        in capsys.readouterr().err
    )


def test_the_summary_of_changes_counts_the_cases_of_both_commits():
    before = [report("a", kernel("attention_dq", 900, 500, spill_store_bytes=4))]
    now = [report(case, kernel("attention_dq", 600)) for case in ("a", "new")]
    rows = kernel_changes.rows(before, now)
    was, is_now = kernel_summary.of_changes(kernel_changes.HEADER, rows).rows
    assert was == [
        *("attention_dq", "before", "1", "2", "900", "8%", "0", "6", "0", "1")
    ]
    assert is_now == ["attention_dq", "now", "1", "1", "600", "8%", "0", "3", "0", "0"]


def test_the_summary_of_kernels_has_the_extremes_of_all_cases():
    header = ("kernel", "registers", "spilled", "shared memory")
    cases = [
        ("forward", "128 (160/24)", "0 B", "53.1 KiB"),
        ("forward", "168", "8 B", "42.0 KiB"),
        ("norm", "255", "0 B", "22.0 KiB"),
    ]
    loop_header = (
        *("kernel", "instructions", "exponentials under a product", "LD", "BAR"),
    )
    loops = [
        ("forward", "900", "64 of 64", "1", "0"),
        ("forward", "1000", "30 of 64", "2", "3"),
        ("forward", "100", "0 of 0", "0", "0"),
    ]
    rows = kernel_summary.of_kernels(header, cases, loop_header, loops).rows
    assert rows == [
        [
            *("forward", "2", "3", "168", "8 B", "42.0 to 53.1 KiB", "1000", "47%"),
            *("3", "3"),
        ],
        ["norm", "1", "0", "255", "0 B", "22.0 to 22.0 KiB", "", "", "0", "0"],
    ]

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mjax.health.bisect.outcomes import Record
from mjax.health.bisect.runner import check_template, command_for, run_round

PYTHON = sys.executable


def run(
    groups: list[tuple[str, ...]],
    code: str,
    *,
    limit_s: float = 60.0,
    parallel: int = 4,
) -> list[Record]:
    return run_round(
        groups,
        [PYTHON, "-S", "-c", code, "{hosts}", "{num}"],
        number=3,
        parallel=parallel,
        limit_s=limit_s,
        done=lambda record: None,
    )


def is_gone(pid: int) -> bool:
    """Say whether a process has ended; one that was killed may need a moment."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    if state != "Z":
        time.sleep(0.05)
    return state == "Z"


def test_hosts_and_their_number_are_put_into_the_command():
    template = ["srun", "--nodelist={hosts}", "-N", "{num}", "{hosts}"]
    found = command_for(template, ["n1", "n2"])
    assert found == ["srun", "--nodelist=n1,n2", "-N", "2", "n1,n2"]


def test_a_word_that_a_shell_would_read_is_passed_as_it_is():
    code = "import sys; sys.exit(sys.argv[1] != '$(touch x);a')"
    assert run([("$(touch x);a",)], code)[0].outcome == "pass"


def test_records_are_in_the_order_of_the_groups():
    code = "import sys; print('of', sys.argv[1]); sys.exit('b' in sys.argv[1])"
    found = run([("a",), ("b", "c"), ("d",)], code)
    assert [one.hosts for one in found] == [("a",), ("b", "c"), ("d",)]
    assert [one.outcome for one in found] == ["pass", "fail", "pass"]
    assert [one.output for one in found] == ["of a", "of b,c", "of d"]
    assert {one.round for one in found} == {3}
    assert found[1].reason == "exit code 1: of b,c"


def test_a_test_that_does_not_end_fails_and_leaves_no_process(tmp_path: Path):
    """Its child has the same session, and ignores SIGTERM."""
    code = (
        "import os, signal, time; pid = os.fork(); "
        "signal.signal(signal.SIGTERM, (signal.SIG_IGN, signal.SIG_DFL)[pid > 0]);"
        f"path = '{tmp_path}/' + ('child', 'parent')[pid > 0]; "
        "open(path, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    found = run([("a",)], code, limit_s=1.0)[0]
    assert found.outcome == "fail"
    assert found.reason == "no end in 1 s"
    for name in ("parent", "child"):
        pid = int((tmp_path / name).read_text())
        assert any(is_gone(pid) for _ in range(100))


def test_a_test_that_a_signal_ends_fails():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run([("a",)], code)[0].reason == "exit code -9"


def test_a_command_that_does_not_exist_is_bad_input_and_not_a_bad_host():
    with pytest.raises(ValueError, match="/no/such/program cannot be started"):
        run_round(
            [("a",), ("b",)],
            ["/no/such/program", "{hosts}"],
            number=1,
            parallel=2,
            limit_s=5.0,
            done=lambda record: None,
        )


def test_a_search_that_is_stopped_records_no_failed_test(tmp_path: Path):
    """Ctrl-C reaches the main thread while two tests run."""
    recorded: list[Record] = []
    code = (
        "import os, signal, sys, time\n"
        "if 'c' in sys.argv[1]:\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)"
    )
    # A shell that starts the tests in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_round(
                [("a", "b"), ("c", "d")],
                [PYTHON, "-S", "-c", code, "{hosts}"],
                number=1,
                parallel=2,
                limit_s=60.0,
                done=recorded.append,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert recorded == []


def test_tests_with_a_common_host_do_not_run_at_the_same_time(tmp_path: Path):
    """Each test makes a file of its host and removes it."""
    code = (
        "import os, sys, time\n"
        "for host in sys.argv[1].split(','):\n"
        f"    os.close(os.open('{tmp_path}/' + host, os.O_CREAT | os.O_EXCL))\n"
        "time.sleep(0.1)\n"
        "for host in sys.argv[1].split(','):\n"
        f"    os.remove('{tmp_path}/' + host)\n"
    )
    groups = [("a", "b"), ("b", "c"), ("c", "a"), ("d",)]
    assert {one.outcome for one in run(groups, code)} == {"pass"}


def test_long_output_is_not_kept(tmp_path: Path):
    found = run([("a",)], "print('x' * 3_000_000); print('end ' * 200)")[0]
    assert found.output is not None
    assert len(found.output) == 200
    assert found.output.startswith("end end")


def test_the_locale_of_a_test_is_c():
    os.environ.pop("LC_ALL", None)
    found = run([("a",)], "import os; print(os.environ['LC_ALL'])")[0]
    assert found.output == "C"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([], "the test command is missing; write it after --"),
        (["./test", "{num}"], r"the command ./test {num} has no {hosts}"),
    ],
)
def test_a_command_without_hosts_is_refused(template: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        check_template(template)

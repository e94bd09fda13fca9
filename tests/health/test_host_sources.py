"""Sources of the host's checks: small files, each device, processes, packages."""

import os
import subprocess
import sys

import pytest

from mjax.health.check import judge
from mjax.health.checks.processors import cpu_list
from mjax.health.checks.table import BY_NAME
from mjax.health.checks.versions import Packages, fits
from mjax.health.findings import State, UnreadableError
from mjax.health.logs import Log
from mjax.health.processes import Processes, family, parsed, table
from mjax.health.small_files import Each, lines_of, outputs, values
from mjax.health.sources import Command, Files
from tests.health import cases

STAT = (
    "4711 (python3 -u (x) y) S 1 4711 4711 0 -1 4194304 100 0 0 0 {utime} {stime} 0 0 "
    "20 0 1 0 {start} 1000000 512 18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 1\n"
)


def test_files_come_back_by_path_with_numbers_in_order(tmp_path):
    for name, content in (("cpu10", "c\n"), ("cpu2", "!b"), ("cpu1", "\\a\nx\n")):
        (tmp_path / name).write_text(content)
    text = Files((f"{tmp_path}/cpu*",)).read(5.0).text
    found = lines_of(text)
    assert [path.rpartition("/")[2] for path in found] == ["cpu1", "cpu2", "cpu10"]
    assert [*found.values()] == [["\\a", "x"], ["!b"], ["c"]]
    with pytest.raises(UnreadableError, match="cpu1 has 2 lines"):
        values(text)


@pytest.mark.parametrize(
    "text",
    ["", "/a\tb", "/a b\n", "a\tb\n", "/a\t!Permission denied\n", "/a\tb\nmore\n"],
)
def test_what_is_no_text_of_files_is_refused(text):
    with pytest.raises(UnreadableError):
        lines_of(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("7\n", {7}), ("0-0", {0})],
)
def test_lists_of_processors_are_read(text, found):
    assert cpu_list(text) == found


@pytest.mark.parametrize("text", ["0-", "3-1", "a", "1.5", "0-1000000", "٣"])
def test_what_is_no_list_of_processors_is_refused(text):
    with pytest.raises(UnreadableError, match="expected a list of processors"):
        cpu_list(text)


@pytest.fixture
def devices(tmp_path):
    for name in ("nvme10", "nvme2", "nvme0"):
        (tmp_path / name).mkdir()
    return f"{tmp_path}/nvme[0-9]*"


def each(program: str, pattern: str) -> Each:
    return Each((sys.executable, "-c", program), pattern)


def test_a_command_is_run_for_each_device_in_order(devices):
    reading = each("import sys; print(sys.argv[1]); print('{}')", devices).read(20.0)
    assert reading.cut == ""
    assert [*outputs(reading.text)] == [
        (f"/dev/{name}", f"/dev/{name}\n{{}}") for name in ("nvme0", "nvme2", "nvme10")
    ]


def test_a_command_can_get_the_name_alone(devices):
    program = "import sys; print(sys.argv[1])"
    source = Each((sys.executable, "-c", program), devices, folder="")
    assert source.shown.endswith(" nvme[0-9]*")
    assert dict(outputs(source.read(20.0).text)) == {
        f"/{name}": name for name in ("nvme0", "nvme2", "nvme10")
    }


def test_a_device_whose_command_fails_is_named(devices):
    program = "import sys; sys.exit('Permission denied' if '2' in sys.argv[1] else 0)"
    reading = each(program, devices).read(20.0)
    with pytest.raises(UnreadableError, match="nvme2: it ended with 1: Permission den"):
        dict(outputs(reading.text))


def test_no_device_or_no_command_is_absent(devices, tmp_path):
    assert "there is no" in each("", f"{tmp_path}/sd*").read(5.0).absent
    assert "no-such-command" in Each(("no-such-command",), devices).read(5.0).absent


def test_devices_that_do_not_answer_in_time_are_incomplete(devices):
    reading = each("import time; time.sleep(60)", devices).read(0.1)
    assert "time limit" in reading.cut


def test_a_process_is_read_whatever_its_name_is():
    found = parsed(STAT.format(utime=7, stime=5, start=99), "alice")
    assert (found.command, found.state, found.parent) == ("python3_-u_(x)_y", "S", 1)
    assert (found.ticks, found.start, found.rss_pages) == (12, 99, 512)
    with pytest.raises(ValueError, match="no /proc/PID/stat"):
        parsed("4711 (x) S 1 2 3\n", "alice")


def test_the_use_of_a_processor_is_that_of_the_interval():
    hertz = os.sysconf("SC_CLK_TCK")
    old, new = (
        parsed(STAT.format(utime=ticks, stime=0, start=99), "alice")
        for ticks in (10**7, 10**7 + hertz)
    )
    other = parsed(STAT.format(utime=hertz, stime=hertz, start=100), "bob")
    text = table({1: old, 2: old}, {1: new, 2: other, 3: other}, 2.0, own=7)
    rows = [line.split("\t") for line in text.splitlines()[1:]]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("1", "alice", "50.0"),
        ("2", "bob", "100.0"),  # the same number, another process
        ("3", "bob", "100.0"),
    ]


def test_a_process_its_children_and_its_ancestors_are_left_out():
    parents = {1: 0, 10: 1, 20: 10, 30: 20, 40: 30, 21: 10, 50: 1, 2: 0}
    assert family(20, parents) == {10, 20, 30, 40}
    assert family(20, parents, pythons={10}) == {10, 20, 21, 30, 40}
    assert family(20, parents, pythons={1, 50}) == {10, 20, 30, 40}
    assert family(20, {20: 30, 30: 20}) == {20, 30}


def test_the_processes_of_this_host_are_read_without_our_own():
    with subprocess.Popen(["sleep", "60"]) as child:
        text = Processes(interval_s=0.05).read(5.0).text
        child.kill()
    pids = [line.split("\t")[0] for line in text.splitlines()[1:]]
    assert not {str(os.getpid()), str(child.pid)} & {*pids}
    settings = cases.cases()[0].settings
    reading = Processes(interval_s=0.05).read(5.0)
    finding = judge(BY_NAME["processes.zombies"], reading, settings)
    assert finding.state in (State.OK, State.FAILED)


def test_processes_without_time_to_look_twice_are_incomplete():
    assert "time limit" in Processes(interval_s=1.0).read(0.5).cut


@pytest.mark.parametrize(
    ("has", "wanted", "is_fit"),
    [
        ("6.8.0-45-generic", "6.8", True),
        ("6.8.0-45-generic", "6.80", False),
        ("6.80", "6.8", False),
        ("12.5", "12.5.1", False),
        ("2.21.5+cuda12.4", "2.21.5", True),
        ("ubuntu 22.04", "ubuntu", True),
        ("1", "", False),
        ("", "", True),
    ],
)
def test_an_expected_version_is_a_whole_one_or_its_beginning(has, wanted, is_fit):
    assert fits(has, wanted) is is_fit


def test_the_packages_of_this_interpreter_are_listed():
    reading = Packages().read(5.0)
    assert reading.cut == ""
    settings = cases.cases()[0].settings
    finding = judge(BY_NAME["versions.packages"], reading, settings)
    assert finding.reason == "the expectations have no entry in table [packages]"
    assert f"pytest=={pytest.__version__}\n" in reading.text


def test_a_host_without_any_tool_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = cases.cases()[0].settings
    mine = [c for c in BY_NAME.values() if isinstance(c.source, Command | Each | Log)]
    assert len(mine) > 50
    for check in mine:
        finding = judge(check, check.source.read(5.0), settings)
        assert finding.state is State.UNKNOWN, finding


def test_one_of_many_files_that_is_too_long_is_not_read_in_part(tmp_path):
    (tmp_path / "a").write_text("x" * 2**16)
    (tmp_path / "b").write_text("x" * (2**16 + 1))
    text = Files((f"{tmp_path}/*",)).read(5.0).text
    assert text.splitlines()[1] == f"{tmp_path}/b\t!it has more than 65536 bytes"
    with pytest.raises(UnreadableError, match="b: it has more than 65536 bytes"):
        lines_of(text)

"""The kernel log is read completely, in bounded memory, and counted correctly."""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.health import kernel_rules
from mjax.health.check import judge
from mjax.health.checks.table import BY_NAME
from mjax.health.findings import State, UnreadableError
from mjax.health.log_digest import (
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    Digest,
    Scanner,
    digest,
    split_time,
)
from mjax.health.logs import Log
from mjax.health.sources import Command, File
from tests.health import cases
from tests.health.cases import NOW

XID = "NVRM: Xid (PCI:0000:{:02x}:00): 79, pid=1, GPU has fallen off the bus."

# Writes this many MiB of a log: the same piece of 1 MiB repeatedly, and in the middle 3
# lines about two GPUs. The last line is whole.
WRITER = """
import sys
line = b"[   12.345678] docker0: port 1(veth12ab) entered forwarding state\\n"
piece = line * (2**20 // len(line))
for index in range({mib}):
    sys.stdout.buffer.write(piece)
    if index == {mib} // 2:
        for bus in (0x1b, 0x9d, 0x9d):
            text = "[0.5] NVRM: Xid (PCI:0000:%02x:00): 79, GPU is lost\\n" % bus
            sys.stdout.buffer.write(text.encode())
"""
# VmHWM, since ru_maxrss of a child also counts its parent's memory before exec.
READER = """
import sys, time
from pathlib import Path
from mjax.health.logs import Log
from mjax.health.sources import Command
reading = Log((Command((sys.executable, "-c", sys.argv[1])),)).read(500.0)
status = Path("/proc/self/status").read_text()
print(status.split("VmHWM:")[1].split()[0], round(time.process_time(), 2))
print(reading.cut, reading.absent)
print(reading.text)
"""


def scanned(text: str | bytes, *, is_severe: bool = False) -> Digest:
    data = text.encode() if isinstance(text, str) else text
    scanner = Scanner("test", NOW, is_severe=is_severe)
    scanner.feed(data)
    return scanner.digest()


def command(program: str) -> Command:
    return Command((sys.executable, "-c", program))


def read_in_a_child(mib: int) -> tuple[int, Digest]:
    """Return the largest resident memory of a process that reads a log, in MiB."""
    writer = WRITER.format(mib=mib)
    done = subprocess.run(
        [sys.executable, "-c", READER, writer],
        capture_output=True,
        text=True,
        check=True,
        timeout=550,
    )
    used, problems, text = done.stdout.split("\n", 2)
    assert problems.strip() == ""
    kib, cpu_s = used.split()
    print(f"{mib} MiB of log: {int(kib) // 1024} MiB resident, {cpu_s} s of CPU")
    return int(kib) // 1024, digest(text)


def assert_large_log_is_read(mib: int) -> None:
    resident_mib, found = read_in_a_child(mib)
    assert resident_mib < 100
    assert found.num_bytes > 0.99 * mib * 2**20
    counts = {(m.device, m.code): m.count for m in found.matches}
    assert counts == {("0000:1b:00", "79"): 1, ("0000:9d:00", "79"): 2}


def test_a_log_of_200_mib_takes_less_than_100_mib_of_memory():
    assert_large_log_is_read(200)


@pytest.mark.slow
def test_a_log_of_1_gib_takes_less_than_100_mib_of_memory():
    assert_large_log_is_read(1024)


LINES = [
    "<6>[   11.2] mlx5_core 0000:18:00.0 ens1f0np0: Link down",
    f"<3>[ 5000.1] {XID.format(0x1B)}",
    "",
    "<4>[ 5000.2] EDAC MC3: 7 CE memory read error on DIMM_A1 (channel:1 slot:0)",
    "\x1b[31m not a line of the kernel \x00",
    f"<3>[ 5000.3] {XID.format(0x9D)}",
    "<4>[ 5000.4] EDAC MC3: 5 CE memory read error on DIMM_A1 (channel:1 slot:0)",
]


@given(st.lists(st.integers(0, 400), max_size=6))
def test_pieces_of_any_size_give_the_same_digest(places):
    data = "".join(f"{line}\n" for line in LINES).encode()
    scanner = Scanner("test", NOW)
    bounds = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    for start, stop in itertools.pairwise(bounds):
        scanner.feed(data[start:stop])
    assert scanner.digest() == scanned(data)
    assert scanner.reading().cut == ""


@given(st.permutations(LINES))
def test_what_is_counted_does_not_depend_on_the_order_of_lines(lines):
    found = scanned("".join(f"{line}\n" for line in lines))
    counts = {(m.rule, m.device, m.code): m.count for m in found.matches}
    assert counts == {
        ("link_down", "ens1f0np0", ""): 1,
        ("xid", "0000:1b:00", "79"): 1,
        ("xid", "0000:9d:00", "79"): 1,
        ("memory_corrected", "3", "DIMM_A1"): 12,
    }


@given(st.binary(max_size=3000), st.booleans())
def test_no_bytes_raise_and_the_digest_can_be_read_again(data, is_severe):
    scanner = Scanner("test", NOW, is_severe=is_severe)
    scanner.feed(data)
    reading = scanner.reading()
    assert (reading.cut != "") == (data != b"" and not data.endswith(b"\n"))
    if b"\n" in data:
        assert json.loads(reading.text)["num_lines"] == data.count(b"\n")


def test_a_log_that_ends_in_a_line_is_incomplete_and_not_ok():
    whole = Scanner("test", NOW)
    whole.feed(b"[1.0] a line\n")
    cut = Scanner("test", NOW)
    cut.feed(b"[1.0] a line\n[2.0] NVRM: Xi")
    settings = cases.cases()[0].settings
    for scanner, state in ((whole, State.OK), (cut, State.INCOMPLETE)):
        finding = judge(BY_NAME["kernel.xid"], scanner.reading(), settings)
        assert finding.state is state


def test_a_thousand_devices_are_counted_in_bounded_memory():
    text = "".join(
        f"[1.0] pcieport 0000:{i >> 4:02x}:{i & 15:02x}.0: PCIe Bus Error: "
        "severity=Corrected, type=Physical Layer\n"
        for i in range(1000)
    )
    found = scanned(text)
    assert len(found.matches) == 65
    assert sum(m.count for m in found.matches) == 1000
    assert found.matches[-1].device == "others"
    assert found.matches[-1].count == 936


def test_a_line_without_an_end_is_not_kept_and_what_follows_it_is_read():
    scanner = Scanner("test", NOW)
    scanner.feed(b"[1.0] first\n")
    for _ in range(5):
        scanner.feed(b"x" * CHUNK_BYTES)
        assert len(scanner._rest) <= 2 * CHUNK_BYTES
    scanner.feed(b"\n" + f"[2.0] {XID.format(1)}\n".encode())
    found = scanner.digest()
    assert (found.num_long, found.num_lines, len(found.matches)) == (1, 2, 1)
    assert scanner.reading().cut == ""
    with pytest.raises(UnreadableError, match="1 lines are too long"):
        digest(scanner.reading().text)


@pytest.mark.parametrize(("extra", "num_long"), [(0, 0), (1, 1)])
def test_a_line_is_searched_up_to_the_longest(extra, num_long):
    line = f"[2.0] {XID.format(1)}"
    line += "x" * (MAX_LINE_BYTES - len(line) + extra)
    found = scanned(f"{line}\n")
    assert (found.num_long, len(found.matches)) == (num_long, 1 - num_long)


@pytest.mark.parametrize(
    ("line", "age_s", "rest"),
    [
        ("[863990.500000] text", 9.5, " text"),
        ("<3>[    0.500000] text", 863999.5, " text"),
        ("[    0.500000] node17 kernel: text", 863999.5, " node17 kernel: text"),
        ("May 31 23:00:00 node17 kernel: [864000.0] text", 0.0, " text"),
        ("1717199990.5 node17 kernel: text", 9.5, "node17 kernel: text"),
        ("2024-06-01T00:00:00+0000 node17 kernel: x", 0.0, "node17 kernel: x"),
        ("2024-06-01T02:00:00+02:00 node17 kernel: x", 0.0, "node17 kernel: x"),
        ("2024-05-31T23:00:00,123456+00:00 x", 3600.0, "x"),
        ("2024-05-31T23:59:00Z [12.5] x", 60.0, "[12.5] x"),
        ("[864059.0] of a clock that is ahead", -59.0, " of a clock that is ahead"),
        ("[864061.0] of another boot", None, " of another boot"),
        ("2024-13-01T00:00:00Z x", None, "2024-13-01T00:00:00Z x"),
        ("1985-01-01T00:00:00Z x", None, "x"),
        ("<3>without a time", None, "without a time"),
        ("[٣.٣] no digits of ASCII", None, "[٣.٣] no digits of ASCII"),
    ],
)
def test_the_time_of_a_line_is_read_in_each_form(line, age_s, rest):
    assert split_time(line, NOW) == (age_s, rest)


@pytest.mark.parametrize(
    ("uptime", "hours"),
    [("860401.0", 0), ("860400.0", 1), ("777600.0", 24), ("1", 168)],
)
def test_ages_are_whole_hours(uptime, hours):
    uptime = f"{uptime}.0" if "." not in uptime else uptime
    found = scanned(f"[{uptime}] {XID.format(1)}\n")
    assert found.matches[0].hours == {str(hours): 1}


def test_the_first_way_that_gives_a_line_is_read():
    good = command("print('[1.0] a line')")
    absent, empty = Command(("no-such-command",)), command("")
    fails = command("print('[1.0] x'); import sys; sys.exit('Permission denied')")
    for ways in ((good,), (absent, good), (empty, good), (fails, good), (good, fails)):
        reading = Log(ways).read(20.0)
        assert (reading.absent, reading.cut) == ("", "")
        assert digest(reading.text).read_from == good.shown
        assert digest(reading.text).num_lines == 1


def test_ways_that_all_fail_are_named(tmp_path):
    path = tmp_path / "kern.log"
    ways = (
        Command(("no-such-command",)),
        command("import sys; sys.exit('Permission denied')"),
        command(""),
        File(str(path)),
    )
    reading = Log(ways).read(20.0)
    for words in (
        "there is no command no-such-command",
        "ended with 1: Permission denied",
        "gives no line",
        f"there is no {path}",
    ):
        assert words in reading.absent
    settings = cases.cases()[0].settings
    assert judge(BY_NAME["kernel.xid"], reading, settings).state is State.UNKNOWN


def test_no_severe_line_is_fine_if_the_command_ended_well():
    assert digest(Log((command(""),), is_severe=True).read(20.0).text).num_lines == 0
    assert Log((command("1/0"),), is_severe=True).read(20.0).absent


def test_a_file_is_read(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text("".join(f"{line}\n" for line in LINES))
    reading = Log((File(str(path)),)).read(20.0)
    assert len(digest(reading.text).matches) == 4


def test_a_log_that_does_not_end_in_time_is_incomplete_and_its_command_is_killed():
    argv = ("sleep", "61.0625")
    reading = Log((Command(argv),)).read(0.1)
    assert reading.status is None
    assert "time limit" in reading.cut
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert path.read_bytes() != b"sleep\x0061.0625\x00"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_lines": 0}, "no line"),
        ({"num_lines": -1}, "no line"),
        ({"num_long": 1}, "too long"),
        ({"begin": ""}, "no line has a time"),
        ({"matches": [{"rule": "invented"}]}, "an unknown rule, or a count or an age"),
        ({"matches": [{"count": 0}]}, "an unknown rule, or a count or an age"),
        ({"matches": [{"hours": {"-1": 1}}]}, "an unknown rule, or a count or an age"),
        ({"matches": [{"hours": {"x": 1}}]}, "invalid literal"),
        ({"matches": "none"}, "matches must be"),
    ],
)
def test_a_digest_that_cannot_be_is_refused(change, words):
    fields = dataclasses.asdict(scanned(f"[1.0] {XID.format(1)}\n"))
    if isinstance(change.get("matches"), list):
        change = {"matches": [fields["matches"][0] | change["matches"][0]]}
    with pytest.raises(UnreadableError, match=words):
        digest(json.dumps(fields | change))


def test_every_rule_and_allowance_is_met_by_a_case():
    rules = kernel_rules.shipped()
    mine = [case for case in cases.cases() if case.group == "kernel"]
    met = set()
    for case in mine:
        if case.state is not State.UNKNOWN:
            is_severe = case.check == "kernel.unlisted"
            found = scanned(case.output, is_severe=is_severe)
            met |= {m.rule for m in found.matches}
    assert met == rules.rules.keys() | {kernel_rules.UNLISTED}
    for allowed in rules.allowed:
        assert any(allowed.pattern.search(case.output) for case in mine), allowed


def test_every_rule_has_a_check_a_source_and_an_anchor():
    rules = kernel_rules.shipped()
    for rule in rules.rules.values():
        assert rule.check in BY_NAME
        assert rule.source.startswith(("https://", "chosen: "))
        assert rule.action.endswith("."), rule.name
        assert rule.ended_by in ("", *rules.rules)
        assert rule.anchor
        assert rule.pattern.groupindex.keys() <= {"device", "code", "count"}
        assert rule.kind in ("fatal", "counted", "told", "xid", "action")
        assert rule.heals in ("reboot", "repair", "reset", "itself")
        if rule.kind == "counted":
            assert "max_count" in cases.limits()[rule.check]
    assert set(rules.xids.values()) == {"program", *rules.xid_actions}
    assert rules.xid_names.keys() <= rules.xids.keys()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[[rule]]", "[[rulle]]"),
        ('anchor = "NVRM: Xid ("', 'angkor = "NVRM: Xid ("'),
        ("'Machine check events logged'", "'('"),
        ("[xid]", "[xyd]"),
        ("[[allow]]", "[[allow"),
    ],
)
def test_rules_that_are_no_rules_are_refused(old, new, tmp_path):
    text = kernel_rules.RULES_PATH.read_text()
    assert old in text
    path = tmp_path / "rules.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=r"rules\.toml cannot be read"):
        kernel_rules.read(path)

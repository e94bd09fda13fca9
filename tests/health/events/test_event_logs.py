"""Times and kinds of lines of every format, and bytes of any kind."""

import datetime
import random
import zoneinfo

import pytest

from mjax.health.events.logs import MAX_LINE_BYTES, Reader


def lines(data, year=2026, zone: datetime.tzinfo = datetime.UTC):
    reader = Reader(year=year, zone=zone)
    return list(reader.feed(data, is_over=True))


def ns(text):
    moment = datetime.datetime.fromisoformat(text)
    micro = (
        moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    ).total_seconds()
    return round(micro * 1e6) * 1000


@pytest.mark.parametrize(
    ("line", "kind", "when", "host"),
    [
        ("[Mon Nov 23 15:50:34 2026] x", "kernel", "2026-11-23T15:50:34+00:00", None),
        ("[Sun Nov  1 05:00:00 2026] x", "kernel", "2026-11-01T05:00:00+00:00", None),
        (
            "2026-11-23T15:50:34,5+02:00 mlx5_core 0000:ab:00.0 a: x",
            "kernel",
            "2026-11-23T13:50:34.5+00:00",
            None,
        ),
        (
            "2026-11-23T15:50:34.000001+00:00 h1 kernel: x",
            "kernel",
            "2026-11-23T15:50:34.000001+00:00",
            "h1",
        ),
        (
            "2026-11-23T15:50:34+0100 h1 sshd[12]: x",
            "syslog",
            "2026-11-23T14:50:34+00:00",
            "h1",
        ),
        ("Nov  3 05:06:07 h2 kernel: x", "kernel", "2026-11-03T05:06:07+00:00", "h2"),
        ("<13>Nov 23 05:06:07 h2 app: x", "syslog", "2026-11-23T05:06:07+00:00", "h2"),
        (
            "2024-05-01 12:00:00.123 [12] [917] WARNING [Hardware] IBPort [a]: x",
            "ufm",
            "2024-05-01T12:00:00.123+00:00",
            None,
        ),
    ],
)
def test_each_format_has_its_kind_time_and_host(line, kind, when, host):
    (found,) = lines(line.encode())
    assert (found.kind, found.time_ns, found.host) == (kind, ns(when), host)
    assert not found.is_since_boot


def test_a_line_of_ufm_through_syslog_has_the_time_of_ufm():
    data = b"Oct 17 15:56:34 c9 eventlog[30300]: WARNING - 2016-10-17 15:56:33.245 "
    (found,) = lines(data + b"[5744] [112] WARNING [Hardware] IBPort [x]: y")
    assert (found.kind, found.time_ns) == ("ufm", ns("2016-10-17T15:56:33.245+00:00"))


def test_seconds_since_boot_are_exact_and_a_new_boot_is_seen():
    found = lines(b"[    1.000001] a\n[99999.5] b\n[99999.4] late\n<4>[    0.25] c\n")
    assert [one.time_ns for one in found][:2] == [1_000_001_000, 99_999_500_000_000]
    assert [one.boot for one in found] == [0, 0, 0, 1]
    assert all(one.is_since_boot for one in found)


def test_a_time_without_zone_is_in_the_zone_that_is_named():
    zone = zoneinfo.ZoneInfo("America/Los_Angeles")
    (found,) = lines(b"2024-05-01 12:00:00.0 [1] [2] INFO x", zone=zone)
    assert found.time_ns == ns("2024-05-01T19:00:00+00:00")


def test_the_year_changes_after_december_and_a_late_line_is_of_the_old_year():
    data = b"Dec 31 23:59:59 h a: x\nJan  1 00:00:00 h a: y\nDec 31 23:59:58 h a: z\n"
    found = [one.time_ns for one in lines(data, year=2025)]
    days = ["2025-12-31T23:59:59", "2026-01-01T00:00:00", "2025-12-31T23:59:58"]
    assert found == [ns(f"{day}+00:00") for day in days]


def test_a_line_without_a_time_has_that_of_the_line_before():
    first, second, third = lines(b"no time\n[ 5.0] a\n  continued\n")
    assert (first.time_ns, second.time_ns, third.time_ns) == (
        None,
        5 * 10**9,
        5 * 10**9,
    )
    assert [one.is_stamped for one in (first, second, third)] == [False, True, False]
    assert [one.kind for one in (first, second, third)] == ["other", "kernel", "kernel"]


@pytest.mark.parametrize(
    "line",
    [
        *("[Mon Feb 30 15:50:34 2026] x", "Xxx 12 01:02:03 h a: x"),
        *("2026-13-01T00:00:00Z h a: x", "[123", "2026-11-23T25:50:34+00:00 h a: x"),
        *("9999-12-31T23:59:59-23:59 h a: x", "0001-01-01T00:00:00+23:00 h a: x"),
        *("[9999999999.0] x", "2200-01-01T00:00:01Z h a: x"),
    ],
)
def test_a_time_that_cannot_be_is_no_time(line):
    (found,) = lines(line.encode())
    assert (found.kind, found.time_ns) == ("other", None)


def test_any_pieces_of_bytes_give_the_same_lines():
    rng = random.Random(1)
    data = (
        b"".join(b"[%5d.0] line %d\r\n" % (i, i * 37) for i in range(200))
        + b"[9.0] end"
    )
    whole = lines(data)
    for _ in range(20):
        reader, found, place = Reader(year=2026), [], 0
        while place < len(data):
            size = rng.randrange(1, 400)
            found += reader.feed(data[place : place + size])
            place += size
        assert found + list(reader.feed(b"", is_over=True)) == whole
    assert len(whole) == 201
    assert whole[-1].end == len(data)
    assert whole[0].text == "[    0.0] line 0"


def test_a_long_line_is_cut_and_counted_and_the_next_one_is_whole():
    reader = Reader(year=2026)
    found = [one for _ in range(100) for one in reader.feed(b"x" * 50_000)]
    found += reader.feed(b"\n[ 1.0] next\n" + b"y" * MAX_LINE_BYTES + b"\n")
    assert [len(one.text) for one in found] == [MAX_LINE_BYTES, 11, MAX_LINE_BYTES]
    assert (reader.counts.lines, reader.counts.cut) == (3, 1)


def test_binary_junk_is_lines_of_no_known_kind():
    data = random.Random(2).randbytes(200_000)
    reader = Reader(year=2026)
    found = list(reader.feed(data, is_over=True))
    assert len(found) == data.count(b"\n") + (not data.endswith(b"\n"))
    assert {one.kind for one in found} == {"other"}
    assert reader.counts.stamped == 0

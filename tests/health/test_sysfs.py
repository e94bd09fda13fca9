"""Files of /sys and the ports in them: identity, order, and no number by accident."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.health.checks import ports, sysfs
from mjax.health.findings import UnreadableError
from mjax.health.settings import Settings
from mjax.health.sources import Files
from tests.health import cases

NONE = Settings(limits={})
PORTS = cases.fixture("infiniband", "four_ports.txt")


def test_files_are_read_as_the_source_writes_them(tmp_path):
    contents = {"a": "one\n", "b": "!bad\n\\x\n", "c": "", "d": "two\nthree"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    tree = sysfs.tree(Files((f"{tmp_path}/*",)).read(1.0).text)
    found = {name: tree.read(f"{tmp_path}/{name}") for name in contents}
    assert found == {"a": "one", "b": "!bad\n\\x", "c": "", "d": "two\nthree"}


def test_a_file_that_cannot_be_read_says_why():
    tree = sysfs.tree("/a\t!Invalid argument\n/b\t1\n")
    assert tree.paths == ["/a", "/b"]
    with pytest.raises(UnreadableError, match="/a: Invalid argument"):
        tree.read("/a")
    with pytest.raises(UnreadableError, match="/c: it is not there"):
        tree.number("/c")
    with pytest.raises(UnreadableError, match="expected a path, got 'a"):
        sysfs.tree("a\t1\n")
    with pytest.raises(UnreadableError, match="expected a path, got '/a 1'"):
        sysfs.tree("/a 1\n")


@pytest.mark.parametrize(
    "text", ["", "-1", "1_0", "٣", "1e9", "0x1", " 1", "1\n2", "N/A"]
)
def test_what_is_no_number_is_refused(text):
    lines = "".join(f"/a\t{line}\n" for line in text.split("\n"))
    with pytest.raises(UnreadableError, match="/a: expected a number"):
        sysfs.tree(lines).number("/a")


def test_numbers_are_read_in_full():
    assert sysfs.tree("/a\t18446744073709551615\n").number("/a") == 2**64 - 1


@given(st.lists(st.text(max_size=12), unique=True))
def test_names_have_one_order_wherever_they_begin(names):
    there = sorted(names, key=sysfs.natural)
    names.reverse()
    assert there == sorted(names, key=sysfs.natural)


def test_names_are_in_the_order_of_their_numbers():
    names = ["mlx5_10", "mlx5_9", "mlx5_1", "eth0"]
    assert sorted(names, key=sysfs.natural) == ["eth0", "mlx5_1", "mlx5_9", "mlx5_10"]


def test_hours_and_limits_grow_with_the_time_since_boot():
    assert sysfs.hours_up(sysfs.tree("/proc/uptime\t5400.99 1.00\n")) == 1.5
    for bad in ("5400", "5400.99", "-1.00 1.00", "5400.99 1.00 2"):
        with pytest.raises(UnreadableError, match="/proc/uptime"):
            sysfs.hours_up(sysfs.tree(f"/proc/uptime\t{bad}\n"))
    settings = Settings(limits={"a.b": {"at_start": 3, "max_per_hour": 0.5}})
    assert sysfs.allowed(settings, "a.b", 0.0) == 3
    assert sysfs.allowed(settings, "a.b", 10.0) == 8


def test_ports_are_those_of_expected_devices_in_the_order_of_numbers():
    tree = sysfs.tree(PORTS)
    names = [port.name for port in ports.ports(tree, NONE)]
    numbers = (0, 1, 3, 10)
    assert names == [f"mlx5_{number} port 1" for number in numbers]
    some = Settings(limits={}, expect={"hcas": ["mlx5_10", "mlx5_3"]})
    assert [p.device for p in ports.ports(tree, some)] == ["mlx5_3", "mlx5_10"]
    assert ports.devices(tree, some) == ["mlx5_3", "mlx5_10"]
    ethernet = ports.of_layer(tree, NONE, ports.ETHERNET)
    assert [port.device for port in ethernet] == ["mlx5_1"]


def test_a_port_of_which_one_file_is_left_is_still_a_port():
    lines = [line for line in PORTS.splitlines() if "mlx5_3/ports" not in line]
    left = "\n".join([*lines, "/sys/class/infiniband/mlx5_3/ports/1/lid\t0x1"])
    found = ports.all_ports(sysfs.tree(left))
    assert "mlx5_3 port 1" in [port.name for port in found]
    with pytest.raises(UnreadableError, match="mlx5_3/ports/1/state"):
        found[2].known("state", ports.STATES)


@pytest.mark.parametrize(
    ("text", "gbps", "lanes"),
    [
        ("400 Gb/sec (4X NDR)", 400.0, 4),
        ("2.5 Gb/sec (1X SDR)", 2.5, 1),
        ("2.5 Gb/sec (1X)", 2.5, 1),
        ("40 Gb/sec (4X FDR10)", 40.0, 4),
        ("1600 Gb/sec (8X XDR)", 1600.0, 8),
    ],
)
def test_the_rate_of_a_link_has_lanes(text, gbps, lanes):
    line = f"/sys/class/infiniband/a/ports/1/rate\t{text}\n"
    (port,) = ports.all_ports(sysfs.tree(line))
    assert port.rate == ports.Rate(gbps=gbps, lanes=lanes)


@pytest.mark.parametrize("text", ["400", "400 Gb/sec", "400 Gb/sec (4 NDR)", "", "N/A"])
def test_another_form_of_a_rate_is_refused(text):
    line = f"/sys/class/infiniband/a/ports/1/rate\t{text}\n"
    (port,) = ports.all_ports(sysfs.tree(line))
    with pytest.raises(UnreadableError, match="a/ports/1/rate"):
        port.rate  # noqa: B018

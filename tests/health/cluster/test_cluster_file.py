"""The cluster file: valid content, and all kinds of contradictions."""

from pathlib import Path

import pytest

from mjax.health.checks.table import BY_NAME
from mjax.health.cluster import file as cluster_file
from mjax.health.cluster.file import ClusterError
from mjax.health.cluster.parts import Port
from mjax.health.cluster.ranges import MAX_NAMES, expand
from tests.health.cluster.fabrics import FILE

EXAMPLE = Path(__file__).parents[3] / "deploy" / "cluster.example.toml"


def problems(text: str) -> list[tuple[str, str]]:
    """Return path and kind of each problem."""
    with pytest.raises(ClusterError) as caught:
        cluster_file.parse(text)
    assert str(caught.value).startswith("the cluster file has ")
    for one in caught.value.problems:
        assert str(one) in str(caught.value)
    return [(one.path, one.kind) for one in caught.value.problems]


def message(text: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        cluster_file.parse(text)
    return str(caught.value)


def test_the_example_is_free_of_contradictions():
    found = cluster_file.read(EXAMPLE)
    assert (len(found.hosts), len(found.switches), len(found.cables)) == (48, 24, 896)
    assert found.hosts["gpu004"].rack == "r1"
    assert found.hosts["gpu005"].rack is None
    assert found.leaves["gpu033"]["mlx5_7"] == "leaf-b7"
    assert found.guids["gpu001:mlx5_0"] == 0x946DAE03005A3C10
    first = found.cables[0]
    assert first.low == Port(node="gpu001", name="mlx5_0")
    assert first.high == Port(node="leaf-a0", name="1")
    assert first.rate_gbps == 400


def test_a_required_check_must_be_one_that_there_is():
    known = ["gpu.count", "infiniband.ports"]
    text = FILE.replace('"small"', '"small"\nrequire = ["gpu.*", "gpu.cuont"]')
    with pytest.raises(ClusterError) as caught:
        cluster_file.parse(text, known_checks=known)
    told = "require[1]: no check is called gpu.cuont; did you mean gpu.count?"
    assert told in str(caught.value)
    assert len(caught.value.problems) == 1
    cluster_file.read(EXAMPLE, [*BY_NAME])


def test_the_lower_end_of_a_cable_is_the_one_nearer_to_hosts():
    turned = FILE.replace(
        'ends = ["gpu[01-04]:mlx5_0", "leaf1:[1-4]"]',
        'ends = ["leaf1:[1-4]", "gpu[01-04]:mlx5_0"]',
    )
    assert turned != FILE
    found, usual = cluster_file.parse(turned), cluster_file.parse(FILE)
    assert [(c.low, c.high) for c in found.cables] == [
        (c.low, c.high) for c in usual.cables
    ]


# What is replaced in a file without contradictions, and the problems: path and kind.
LEAVES = '[[switches]]\nnames = "leaf[1-4]"'
HOSTS_1 = '[[hosts]]\nnames = "gpu[05-08]"\ngpus = 2'
CASES = {
    "a host twice": (
        '"gpu[05-08]"',
        '"gpu[04-08]"',
        {("hosts[1].names", "name")},
    ),
    "a host in two groups with other GPUs": (
        HOSTS_1,
        HOSTS_1.replace("05", "04").replace("= 2", "= 4"),
        {("hosts[1].gpus", "gpus"), ("hosts[1].names", "name")},
    ),
    "PCI addresses for another number of GPUs": (
        HOSTS_1,
        f'{HOSTS_1}\ngpu_pci = ["0000:1b:00.0"]',
        {("hosts[1].gpu_pci", "gpus")},
    ),
    "fewer GPUs than none": (
        HOSTS_1,
        HOSTS_1.replace("= 2", "= -1"),
        {("hosts[1].gpus", "size")},
    ),
    "a PCI address twice": (
        HOSTS_1,
        f'{HOSTS_1}\ngpu_pci = ["1b:00.0", "1B:00.0"]',
        {("hosts[1].gpu_pci[1]", "gpus")},
    ),
    "no PCI address": (
        HOSTS_1,
        f'{HOSTS_1}\ngpu_pci = ["1b:00.0", "GPU-1"]',
        {("hosts[1].gpu_pci[1]", "gpus")},
    ),
    "a NIC twice": (
        '{ name = "mlx5_1", rail = 1',
        '{ name = "mlx5_0", rail = 1',
        {(f"hosts[{n}].nics[1].name", "name") for n in (0, 1)}
        | {(f"cables[{n}].ends[0]", "unknown") for n in (1, 3)},
    ),
    "a switch that is a host": (
        '"spine[1-2]"',
        '"spine[1-2],gpu01"',
        {("switches[1].names", "name")},
    ),
    "a switch twice": (
        '"spine[1-2]"',
        '"spine[1-2],spine1"',
        {("switches[1].names", "name")},
    ),
    "a cable to an unknown switch": (
        '"leaf1:[1-4]"',
        '"leef1:[1-4]"',
        {("cables[0].ends[1]", "unknown")},
    ),
    "a cable to an unknown host": (
        '"gpu[01-04]:mlx5_0"',
        '"gpu[01-03]:mlx5_0,cpu04:mlx5_0"',
        {("cables[0].ends[0]", "unknown")},
    ),
    "a cable to an unknown port": (
        '"leaf1:[1-4]"',
        '"leaf1:[1-3,9]"',
        {("cables[0].ends[1]", "unknown")},
    ),
    "a cable without a port": (
        '"leaf1:[1-4]"',
        '"leaf[1-4]"',
        {("cables[0].ends[1]", "unknown")},
    ),
    "a port with two cables": (
        '"leaf1:[1-4]"',
        '"leaf1:[1-3,5]"',
        {("cables[4]", "two cables")},
    ),
    "a NIC with two cables": (
        'ends = ["gpu[01-04]:mlx5_1", "leaf2:[1-4]"]',
        'ends = ["gpu[01-04]:mlx5_1,gpu01:mlx5_1", "leaf2:[1-4],leaf2:8"]',
        {("cables[1]", "two cables"), ("cables[5]", "two cables")},
    ),
    "a cable from a switch to itself": (
        '"leaf[1-4]:[7-8]", "spine2:[1-8]"',
        '"leaf[1-4]:7,spine2:[1-2]", "spine2:[3-8]"',
        {("cables[5]", "loop")},
    ),
    "ends of different lengths": (
        '"leaf1:[1-4]"',
        '"leaf1:[1-3]"',
        {("cables[0].ends", "count")},
    ),
    "a rail on two leaves": (
        '"leaf1:[1-4]"]\n[[cables]]\nends = ["gpu[01-04]:mlx5_1", "leaf2:[1-4]"]',
        '"leaf1:[1-3],leaf2:4"]\n[[cables]]\nends = ["gpu[01-04]:mlx5_1", '
        '"leaf2:[1-3],leaf1:4"]',
        {("hosts[0]", "wiring")},
    ),
    "NICs of a host on two leaves": (
        'gpus = 2\nnics = [{ name = "mlx5_0"',
        'gpus = 2\nwiring = "host"\nnics = [{ name = "mlx5_0"',
        {("hosts[0]", "wiring"), ("hosts[1]", "wiring")},
    ),
    "a rail on a leaf of another": (
        'tier = "leaf"\nports = 8',
        'tier = "leaf"\nports = 8\nrail = 0',
        {("cables[1]", "rail"), ("cables[3]", "rail")},
    ),
    "a host in two racks": (
        LEAVES,
        '[[racks]]\nname = "r1"\nhosts = "gpu[01-04]"\n[[racks]]\nname = "r2"\n'
        'hosts = "gpu[04-08]"\n' + LEAVES,
        {("racks[1].hosts", "rack")},
    ),
    "a rack twice": (
        LEAVES,
        '[[racks]]\nname = "r1"\n[[racks]]\nname = "r1"\n' + LEAVES,
        {("racks[1].name", "name")},
    ),
    "an unknown host in a rack": (
        LEAVES,
        '[[racks]]\nname = "r1"\nhosts = "gpu[08-09]"\nswitches = "leaf9"\n' + LEAVES,
        {("racks[0].hosts", "unknown"), ("racks[0].switches", "unknown")},
    ),
    "more cables than ports": (
        '"gpu[01-04]:mlx5_1", "leaf2:[1-4]"',
        '"gpu[01-04]:mlx5_1", "leaf1:*"',
        {("cables[5]", "too many cables")},
    ),
    "a switch that no host reaches": (
        'names = "spine[1-2]"',
        'names = "spine[1-2],lost[1-2]"',
        {("switches", "unreachable")},
    ),
    "switches that are joined with each other only": (
        'names = "spine[1-2]"\ntier = "spine"\nports = 8',
        'names = "spine[1-2],lost[1-2]"\ntier = "spine"\nports = 8\n'
        '[[cables]]\nends = ["lost1:1", "lost2:1"]',
        {("switches", "unreachable")},
    ),
    "a NIC without a rail on a leaf of one": (
        '{ name = "mlx5_1", rail = 1, rate_gbps = 400 }]\n[[switches]]\n'
        'names = "leaf[1-4]"\ntier = "leaf"\nports = 8',
        '{ name = "mlx5_1" }]\n[[switches]]\nnames = "leaf[1-2]"\ntier = "leaf"\n'
        'ports = 8\n[[switches]]\nnames = "leaf[3-4]"\ntier = "leaf"\nports = 8\n'
        "rail = 0",
        {("cables[3]", "rail")},
    ),
    "hosts on a spine": (
        '"leaf1:[1-4]"',
        '"leaf1:[1-3],spine2:8"',
        {("cables[0]", "tier"), ("cables[5]", "two cables"), ("hosts[0]", "wiring")},
    ),
    "a NIC that was forgotten": (
        '"gpu[05-08]:mlx5_1", "leaf4:[1-4]"',
        '"gpu[05-07]:mlx5_1", "leaf4:[1-3]"',
        {("hosts[1]", "no cable")},
    ),
    "two fabrics on one cable": (
        '{ name = "mlx5_1", rail = 1, rate_gbps = 400 }]\n[[switches]]',
        '{ name = "mlx5_1", fabric = "ethernet", rate_gbps = 400 }]\n[[switches]]',
        {("cables[3]", "fabric")},
    ),
    "a cable that is faster than its NIC": (
        '"leaf1:[1-4]"]',
        '"leaf1:[1-4]"]\nrate_gbps = 800',
        {("cables[0].rate_gbps", "rate")},
    ),
    "switches that are joined at unknown ports": (
        '"leaf[1-4]:[5-6]", "spine1:[1-8]"',
        '"leaf[1-4]:[5-6]", "spine1:*"',
        {("cables[4]", "pattern")},
    ),
    "a GUID of two ports": (
        '"small"',
        '"small"\nguids = { "gpu01:mlx5_0" = "0xa1", leaf1 = "0xA1" }',
        {('guids."leaf1"', "guid")},
    ),
    "a GUID of nothing": (
        '"small"',
        '"small"\nguids = { "gpu01:mlx5_9" = "0xa1", leaf1 = "north" }',
        {('guids."gpu01:mlx5_9"', "unknown"), ('guids."leaf1"', "guid")},
    ),
    "islands that are not there": (
        '"small"',
        '"small"\nislands = 2',
        {("islands", "islands")},
    ),
    "no islands": (
        '"small"',
        '"small"\nislands = 0',
        {("islands", "size"), ("islands", "islands")},
    ),
    "names of other ports": (
        'tier = "spine"\nports = 8',
        'tier = "spine"\nports = 8\nport_names = "[1-8],8"',
        {("switches[1].port_names", "ports")},
    ),
    "a check that is required twice": (
        '"small"',
        '"small"\nrequire = ["gpu.count", "gpu.count"]',
        {("require[1]", "name")},
    ),
    "a range that runs backwards": (
        '"spine[1-2]"',
        '"spine[2-1]"',
        {("switches[1].names", "pattern")},
    ),
    "numbers out of range": (
        "rail = 0, rate_gbps = 400",
        "rail = -1, rate_gbps = 0",
        {
            (f"hosts[{n}].nics[0].{key}", "size")
            for n in (0, 1)
            for key in ("rail", "rate_gbps")
        },
    ),
    "unknown keys": (
        "rail = 0,",
        "rial = 0,",
        {(f"hosts[{n}].nics[0].rial", "unknown key") for n in (0, 1)},
    ),
    "a tier that there is not": (
        '"spine"',
        '"spien"',
        {("switches[1].tier", "type")},
    ),
    "values of other types": (
        HOSTS_1,
        '[[hosts]]\nnames = ["gpu05"]\ngpus = true',
        {("hosts[1].names", "type"), ("hosts[1].gpus", "type")},
    ),
    "a table for a list": (
        '"small"',
        '"small"\nrequire = "gpu.count"\nversions = ["1"]',
        {("require", "type"), ("versions", "type")},
    ),
    "an absent key": (
        "gpus = 2",
        "",
        {("hosts[0]", "absent key"), ("hosts[1]", "absent key")},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_contradiction_is_found_at_its_place(name: str):
    old, new, expected = CASES[name]
    assert old in FILE
    assert {*problems(FILE.replace(old, new))} == expected


def test_a_fabric_that_falls_apart_is_told_with_its_parts():
    text = FILE.replace(
        '"leaf[1-4]:[5-6]", "spine1:[1-8]"', '"leaf[1-2]:5", "spine1:[1-2]"'
    )
    text = text.replace(
        '"leaf[1-4]:[7-8]", "spine2:[1-8]"', '"leaf[3-4]:5", "spine2:[1-2]"'
    )
    told = message(text)
    assert "islands: the switches on infiniband make 2 parts" in told
    assert "3 with leaf1, leaf2, spine1; 3 with leaf3, leaf4, spine2" in told
    assert "set islands = 2" in told
    cluster_file.parse(text.replace('"small"', '"small"\nislands = 2'))


def test_a_file_may_leave_out_all_cables():
    text = FILE.partition("[[cables]]")[0]
    found = cluster_file.parse(text)
    assert (found.cables, len(found.switches)) == ((), 6)
    assert found.leaves["gpu01"] == {}


def test_a_host_without_gpus_and_a_cable_to_any_port_are_allowed():
    text = FILE.replace("gpus = 2", "gpus = 0").replace('"leaf1:[1-4]"', '"leaf1:*"')
    found = cluster_file.parse(text)
    assert [str(c) for c in found.cables[:2]] == [
        "gpu01:mlx5_0 - leaf1:*",
        "gpu02:mlx5_0 - leaf1:*",
    ]
    two = text.replace('"leaf1:*"', '"leaf1:*,leaf1:*"')
    assert problems(two) == [("cables[0].ends", "count")]


def test_a_switch_that_no_host_reaches_is_told_apart_from_one_without_cables():
    old, new, _ = CASES["switches that are joined with each other only"]
    told = message(FILE.replace(old, new))
    assert "lost1 is a switch, and no host reaches it" in told
    old, new, _ = CASES["a switch that no host reaches"]
    assert "lost1 is a switch, and it has no cable" in message(FILE.replace(old, new))


def test_all_contradictions_are_told_at_once():
    text = FILE.replace('"leaf1:[1-4]"', '"leaf1:[1-3,5]"')
    text = text.replace('"small"', '"small"\ncolour = "red"\nrequire = ["a", "a"]')
    text = text.replace(
        "[[switches]]", '[[racks]]\nname = "r"\nhosts = "cpu1"\n[[switches]]', 1
    )
    assert [*problems(text)] == [
        ("colour", "unknown key"),
        ("racks[0].hosts", "unknown"),
        ("require[1]", "name"),
        ("cables[4]", "two cables"),
    ]


def test_an_unknown_key_names_the_nearest_one():
    assert "unknown key; did you mean rail? Known keys: name, rail," in message(
        FILE.replace("rail = 0,", "rial = 0,")
    )


def test_an_unknown_name_names_the_nearest_one():
    told = message(FILE.replace('"leaf1:[1-4]"', '"leef1:[1-4]"'))
    assert "no host and no switch is called leef1; did you mean leaf1?" in told
    told = message(FILE.replace("gpu[01-04]:mlx5_0", "gpu[01-04]:mlx4_0"))
    assert "gpu01 has no NIC mlx4_0; did you mean mlx5_0?" in told


def test_many_problems_of_an_entry_become_a_few_and_a_count():
    told = message(FILE.replace('"leaf1:[1-4]"', '"leaf1:[11-14]"'))
    assert told.count("leaf1 has no port") == 3
    assert "cables[0].ends[1]: and 1 more like it" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the key name is absent"),
        ('name = "a"', "hosts: no host"),
        ("name = 3", "name: must be text, got 3"),
        ("name =", "is not TOML"),
        ("[" * 5000, "is not TOML"),
        ('name = "a"\nhosts = 3', "hosts: must be a list, got 3"),
        ('name = "a"\n[[hosts]]\nnames = "a b"\ngpus = 1', "or a space"),
        ('name = "a"\n[[hosts]]\nnames = "a:b"\ngpus = 1', "has a colon"),
    ],
)
def test_what_is_no_cluster_file_is_told_in_one_message(text: str, told: str):
    assert told in message(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none\.toml cannot be read: No such file"):
        cluster_file.read(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ValueError, match="is not UTF-8"):
        cluster_file.read(tmp_path / "latin.toml")


# ------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[8-10]", ["gpu8", "gpu9", "gpu10"]),
        ("a[1,3-4]b,c", ["a1b", "a3b", "a4b", "c"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("leaf1:*", ["leaf1:*"]),
        (" ", []),
    ],
)
def test_a_pattern_stands_for_names(pattern: str, names: list[str]):
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("gpu[1-", "without its partner"),
        ("gpu1]", "without its partner"),
        ("gpu[[1]]", "without its partner"),
        ("gpu[a-b]", "write numbers and ranges"),
        ("gpu[]", "write numbers and ranges"),
        ("gpu[4-3]", "runs backwards"),
        ("gpu[01-100]", "have 2 and 3 digits"),
        ("a,,b", "an empty name"),
        ("gpu 1", "or a space"),
        ("gpu[1-99999999999]", f"more than {MAX_NAMES} names"),
        ("g[1-9999]p[1-9999]", f"more than {MAX_NAMES} names"),
        (f"gpu[{'9' * 5000}]", "write numbers and ranges"),
    ],
)
def test_a_malformed_pattern_is_refused(pattern: str, told: str):
    with pytest.raises(ValueError, match=told.replace("[", r"\[")):
        expand(pattern)

"""The shipped rules match the lines that public documents show, and name the device.

Sources of the lines, from public documentation: IBM Cluster System Management, Unified
Fabric Manager (112); github.com/imbue-ai/cluster-health, find_problematic_events.py
(329, 702). Lines of the kernel follow the format strings of the files that each rule
names as its source. Line heads of 329 and 702, and the whole line of 917, follow the
regular expression of cluster-health.
"""

# ruff: noqa: E501, lines of logs are longer.

from pathlib import Path

import pytest

from mjax.health import kernel_rules
from mjax.health.events import rules
from mjax.health.events.logs import Reader

FOLDER = Path(rules.__file__).parent
HEAD = "2023-12-20 07:46:24.442 [5744] "
DOWN = (
    f"{HEAD}[329] WARNING [Link] Link [x_33 : y_8]: Link went down: (Switch:T3-E21-N-U47:"
    "1/17/1)9c0591030090e000:33 - (Switch:T4-E45-L-U51:1/4/2)fc6a1c0300244e00:8, cable "
    "S/N: MT2330FT09118"
)
CASES = {
    "ufm": [
        (
            "Oct 17 15:56:33 c931hsm04 eventlog[30300]: WARNING - 2016-10-17 15:56:33.245 "
            "[5744] [112] WARNING [Hardware] IBPort [default(34) / Switch: "
            "c931ibsw-leaf01 / NA / 16] [dev_id: 248a0703006d40f0]: Link-Downed counter "
            "delta threshold exceeded. Threshold is 0, calculated delta is 1. Peer info: "
            "Computer: c931f03p08 HCA-1 / 1.",
            {"link-downed-counter": {"switch": "c931ibsw-leaf01", "port": "16"}},
        ),
        (
            DOWN,
            {
                "link-flapping": {"switch": "T3-E21-N-U47", "port": "17/1"},
                "many-links-down": {"switch": "T3-E21-N-U47"},
            },
        ),
        (DOWN.replace("[329]", "[328]").replace("went down", "is up"), {}),
        (DOWN.replace("(Switch:T3", "(Computer:T3", 1), {}),
        (
            f"{HEAD}[702] WARNING [Hardware] IBPort [default / Switch: a / 1/2/1]: Peer "
            "Port T2-E63-L-U37:1/19/2 is considered by SM as unhealthy due to FLAPPING.",
            {"unhealthy-port": {"switch": "T2-E63-L-U37", "port": "19/2"}},
        ),
        (
            f"{HEAD}[917] CRITICAL [Hardware] IBPort [default(1) / Switch: a-1 / 1/17/1] "
            "[dev_id: 248a]: some words",
            {"symbol-ber": {"switch": "a-1", "port": "17/1"}},
        ),
        (
            f"{HEAD}[918] WARNING [Hardware] IBPort [default(1) / Switch: a-1 / 1/17/1]: x",
            {"symbol-ber-warning": {"switch": "a-1", "port": "17/1"}},
        ),
        (f"{HEAD}[91] INFO [Hardware] IBPort [d / Switch: a / 9]: [917]", {}),
    ],
    "kernel": [
        (
            "[1.0] NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus",
            {"gpu-off-the-bus": {"pci": "0000:44:00"}},
        ),
        (
            "[1.0] NVRM: Xid (PCI:0000:44:00): 94, pid=1, name=python, Contained",
            {"gpu-memory-error": {"pci": "0000:44:00", "xid": "94"}},
        ),
        (
            "[1.0] NVRM: Xid (PCI:0000:44:00 GPU-I:05 GPU-CI:00): 95, pid=1, Uncontained",
            {"gpu-fault": {"pci": "0000:44:00", "xid": "95"}},
        ),
        (
            "[1.0] NVRM: Xid (PCI:0000:44:00): 109, pid=1, name=python, CTX SWITCH",
            {"gpu-fault": {"pci": "0000:44:00", "xid": "109"}},
        ),
        ("[1.0] NVRM: Xid (PCI:0000:44:00): 13, Graphics Exception", {}),
        ("[1.0] NVRM: Xid (PCI:0000:44:00): 790, x", {}),
        (
            "Feb 14 05:03:41 g1 kernel: mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN",
            {"nic-flapping": {"device": "mlx5_5", "port": "1"}},
        ),
        (
            "Feb 14 05:03:41 g1 kernel: mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE",
            {},
        ),
        (
            "Feb 14 05:03:41 g1 app: mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN",
            {},
        ),
        (
            "[1.0] pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), x",
            {"pcie-uncorrected": {"pci": "0000:00:01.0"}},
        ),
        (
            "[1.0] pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=x",
            {"pcie-corrected-often": {"pci": "0000:00:01.0"}},
        ),
        (
            "[1.0] pcieport 0000:00:01.0: AER: PCIe Bus Error: severity=Uncorrectable "
            "(Non-Fatal), type=Transaction Layer, (Requester ID)",
            {"pcie-uncorrected": {"pci": "0000:00:01.0"}},
        ),
        (
            "[1.0] pcieport 0000:00:01.0: AER: PCIe Bus Error: severity=Correctable, x",
            {"pcie-corrected-often": {"pci": "0000:00:01.0"}},
        ),
        (
            "[1.0] mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000400405",
            {"machine-check": {"cpu": "3"}},
        ),
        (
            "[1.0] mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: 9c00004000010090",
            {},
        ),
        (
            "[1.0] Memory cgroup out of memory: Killed process 12 (python3) total-vm:1kB",
            {"oom-killer": {"program": "python3"}},
        ),
        (
            "[1.0] mlx5_core 0000:18:00.0 ens1f0np0: Link down",
            {"interface-flapping": {"device": "ens1f0np0"}},
        ),
        ("[1.0] mlx5_core 0000:18:00.0 ens1f0np0: Link up", {}),
        (
            "[1.0] Out of memory: Killed process 12 (py thon) total-vm:1kB",
            {"oom-killer": {"program": "py thon"}},
        ),
        (
            "[1.0] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 22013, Non-fatal, Link 1 x",
            {"nvswitch-warning": {"pci": "0000:c1:00.0"}},
        ),
        (
            "[1.0] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM",
            {"nvswitch-fault": {"pci": "0000:c1:00.0"}},
        ),
        (
            "[1.0] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Severity 1 Engine",
            {},
        ),
        (
            "[1.0] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 3 x",
            {
                "nvswitch-stalls": {"pci": "0000:c1:00.0"},
                "nvswitch-warning": {"pci": "0000:c1:00.0"},
            },
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_a_line_matches_its_rules_and_no_other(name, line, expected):
    (read,) = Reader(year=2026).feed(line.encode(), is_over=True)
    found = {}
    for rule in rules.read(FOLDER / f"{name}_rules.toml").rules:
        match = rule.regex.search(read.text)
        if match and rule.log in ("any", read.kind):
            found[rule.name] = {group: match[group] for group in rule.by}
    assert found == expected


@pytest.mark.parametrize("name", sorted(CASES))
def test_each_shipped_rule_has_a_line(name):
    named = {rule for _, expected in CASES[name] for rule in expected}
    assert named == {r.name for r in rules.read(FOLDER / f"{name}_rules.toml").rules}


def test_the_xids_of_a_fault_are_those_that_fail_a_host():
    """The catalog of Xids is kept in one place: kernel_log.toml."""
    xids = kernel_rules.shipped().xids
    shipped = {r.name: r for r in rules.read(FOLDER / "kernel_rules.toml").rules}
    found = {
        number
        for number in range(1000)
        for name in ("gpu-off-the-bus", "gpu-fault")
        if shipped[name].regex.search(f"NVRM: Xid (PCI:0000:01:00): {number}, x")
    }
    assert found == {number for number, kind in xids.items() if kind != "program"}

"""The XML of nvidia-smi is read once, as a whole, and each GPU keeps its own fields."""

import re
from pathlib import Path

import pytest

from mjax.health.check import judge, run
from mjax.health.checks.gpudirect import IOMMU
from mjax.health.checks.nvidia_smi import SMI, Gpu, gpus, parse
from mjax.health.checks.table import BY_NAME, CHECKS
from mjax.health.findings import Finding, State, UnreadableError
from mjax.health.settings import Settings
from mjax.health.sources import Files, Reading
from tests.health import cases

SMI_CHECKS = [check for check in CHECKS if check.source == SMI]
H100 = cases.fixture("gpu", "h100.xml")
B200 = cases.fixture("gpu", "b200.xml")
EXPECT = {
    "h100.xml": {
        "gpus": 4,
        "gpu_name": "NVIDIA H100 80GB HBM3",
        "versions": {"nvidia_driver": "550.90.07"},
    },
    "b200.xml": {
        "gpus": 2,
        "gpu_name": "NVIDIA B200",
        "versions": {"nvidia_driver": "580.95.05"},
    },
}


SETTINGS = Settings(limits=cases.limits())


def judged(text: str, file: str = "b200.xml", status: int = 0) -> dict[str, Finding]:
    settings = Settings(limits=cases.limits(), expect=EXPECT[file])
    reading = Reading(text=text, status=status)
    return {check.name: judge(check, reading, settings) for check in SMI_CHECKS}


def test_a_healthy_host_passes_all_checks_of_its_driver():
    not_ok = {
        file: {
            name
            for name, finding in judged(cases.fixture("gpu", file), file).items()
            if finding.state is not State.OK
        }
        for file in EXPECT
    }
    # Driver 550 does not know these.
    assert not_ok == {
        "h100.xml": {"gpu.repair_pending", "gpu.fabric_health"},
        "b200.xml": set(),
    }


def test_no_beginning_of_the_output_can_be_read():
    for end in [*range(0, len(H100) - 2, 997), len(H100) - 3]:
        with pytest.raises(UnreadableError):
            parse(H100[:end])


def test_when_no_field_has_a_value_almost_nothing_is_ok():
    begin = B200.index("<gpu ")
    body = re.sub(
        r"<(?!uuid|pci_bus_id)(\w+)>[^<\n]+</\1>", r"<\1>N/A</\1>", B200[begin:]
    )
    found = judged(B200[:begin] + body)
    ok = {name for name, finding in found.items() if finding.state is State.OK}
    assert ok == {
        "gpu.answers",
        "gpu.count",
        "gpu.driver",  # The version stands in front of the GPUs.
        "gpu.foreign_processes",  # An empty list is no word.
    }


def test_a_line_that_is_lost_never_makes_a_fault_ok():
    """Each word of the second GPU is spoilt, then each field of it is dropped."""
    bad = B200
    for old, new in (
        ("<persistence_mode>Enabled", "<persistence_mode>Disabled"),
        ("<remapped_row_pending>No", "<remapped_row_pending>Yes"),
        ("<remapped_row_failure>No", "<remapped_row_failure>Yes"),
        ("<current_ecc>Enabled", "<current_ecc>Disabled"),
        ("_hw_slowdown>Not Active", "_hw_slowdown>Active"),
        ("<dram_uncorrectable>0", "<dram_uncorrectable>900"),
        ("<current_link_width>16x", "<current_link_width>8x"),
        ("<state>Completed", "<state>In Progress"),
    ):
        first = bad.index(old, bad.index('<gpu id="00000000:43:00.0">'))
        bad = bad[:first] + bad[first:].replace(old, new)
    before = {
        name for name, finding in judged(bad).items() if finding.state is State.FAILED
    }
    assert len(before) == 9
    lines = bad.splitlines(keepends=True)
    begin = next(i for i, line in enumerate(lines) if "00000000:43:00.0" in line)
    for number in range(begin, len(lines)):
        if "</" not in lines[number].lstrip()[1:]:
            continue  # The beginning or end of a section: without it it is not XML.
        text = "".join(lines[:number] + lines[number + 1 :])
        for name in before:
            finding = judge(BY_NAME[name], Reading(text=text), SETTINGS)
            assert finding.state is not State.OK, (lines[number], name)


@pytest.mark.parametrize("index", range(4))
def test_a_bad_gpu_is_named_and_no_other(index):
    text = H100
    for _ in range(index):
        text = text.replace("<remapped_row_failure>No", "<remapped_row_failure>no", 1)
    text = text.replace("<remapped_row_failure>No", "<remapped_row_failure>Yes", 1)
    text = text.replace("<remapped_row_failure>no", "<remapped_row_failure>No")
    reason = judged(text, "h100.xml")["gpu.remap_failed"].reason
    bad = gpus(H100)[index]
    assert reason == f"{bad.label}: a row could not be remapped"
    bus = ("1B", "43", "9A", "BB")[index]
    serial = 1650523000101 + index
    assert bad.label == f"GPU {index} (00000000:{bus}:00.0, serial {serial})"


def test_the_order_of_the_gpus_changes_no_verdict():
    first, second = (B200.index(f'<gpu id="00000000:{bus}') for bus in ("1B", "43"))
    end = B200.index("</nvidia_smi_log>")
    swapped = B200[:first] + B200[second:end] + B200[first:second] + B200[end:]
    assert [gpu.bus_id for gpu in gpus(swapped)] == [
        "00000000:43:00.0",
        "00000000:1B:00.0",
    ]
    before, after = judged(B200), judged(swapped)
    assert {n: f.state for n, f in before.items()} == {
        n: f.state for n, f in after.items()
    }


@pytest.mark.parametrize(
    "text",
    [
        "<nvidia_smi_log>" + "<a>" * 10**5 + "</a>" * 10**5 + "</nvidia_smi_log>",
        H100.replace("<serial>", "<a>" * 9 + "</a>" * 9 + "<serial>", 1),
        '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>' + H100[22:],
        H100.replace("<attached_gpus>4", "<attached_gpus>four"),
        H100.replace('id="00000000:9A:00.0"', 'id="9A"'),
        H100.replace('id="00000000:9A:00.0"', ""),
        H100.replace("<uuid>", "<uiud>").replace("</uuid>", "</uiud>"),
        H100.replace("Hopper", "\ud800"),
        H100.replace("Hopper", "\x00"),
        "</nvidia_smi_log>",
        "",
    ],
)
def test_a_damaged_output_is_refused(text):
    with pytest.raises(UnreadableError):
        gpus(text)


@pytest.mark.parametrize(
    "value",
    ["1_0 W", "٣ W", "1e3 W", "0x10 W", "+1 W", "1 W W", "1", "nan W", "9" * 40],
)
def test_a_number_is_digits_and_its_unit(value):
    gpu = Gpu(index=0, bus_id="b", fields={"power": value}, processes=None)
    with pytest.raises(UnreadableError, match="power"):
        gpu.number("W", "power")


def test_the_first_name_that_is_there_is_read():
    gpu = Gpu(index=0, bus_id="b", fields={"old": "2 W", "new": "1 W"}, processes=None)
    assert gpu.number("W", "new", "old") == 1.0
    assert gpu.number("W", "newest", "old") == 2.0


def test_a_corrupted_inforom_fails_one_check_and_the_rest_is_read():
    found = judged(B200, status=14)
    failed = {n for n, f in found.items() if f.state is State.FAILED}
    assert failed == {"gpu.inforom"}
    assert "the infoROM of a GPU is corrupted" in found["gpu.inforom"].reason
    assert {f.state for f in found.values()} == {State.OK, State.FAILED}


def test_a_gpu_that_is_lost_fails_one_check_and_the_rest_is_unknown():
    found = judged("Unable to determine the device handle\n", status=15)
    assert found.pop("gpu.answers").state is State.FAILED
    assert {finding.state for finding in found.values()} == {State.UNKNOWN}


FAKE = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
"-q -x") cat {fixtures}/gpu/h100.xml ;;
"nvlink -s") cat {fixtures}/nvlink/h100_status.txt ;;
"nvlink -e") exit 3 ;;
"topo -m") cat {fixtures}/topology/h100_matrix.txt ;;
*) cat {fixtures}/topology/h100_peers.txt ;;
esac
"""


def test_all_checks_of_a_host_read_nvidia_smi_once(tmp_path: Path, monkeypatch):
    fake, log = tmp_path / "nvidia-smi", tmp_path / "log"
    fake.write_text(FAKE.format(log=log, fixtures=cases.FIXTURES_DIR))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    checks = [c for c in CHECKS if c.source.shown.startswith("nvidia-smi")]
    settings = Settings(limits=cases.limits(), expect=EXPECT["h100.xml"])
    report = run(checks, settings)
    states = {finding.name: finding.state for finding in report.findings}
    assert sorted(log.read_text().splitlines()) == [
        "-q -x",
        "nvlink -e",
        "nvlink -s",
        "topo -m",
        "topo -p2p r",
    ]
    assert {n for n, state in states.items() if state is not State.OK} == {
        "gpu.repair_pending",
        "gpu.fabric_health",
        "nvlink.errors",
    }
    assert report.is_ok


def test_iommu_groups_are_found_behind_the_links_of_sysfs(tmp_path: Path):
    device = tmp_path / "sys/devices/0000:1b:00.0"
    group = tmp_path / "sys/kernel/iommu_groups/7"
    driver = tmp_path / "sys/bus/pci/drivers/nvidia"
    for folder in (device, group, driver):
        folder.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (group / "type").write_text("DMA-FQ\n")
    (device / "iommu_group").symlink_to(group)
    (driver / "0000:1b:00.0").symlink_to(device)
    (driver / "bind").write_text("")
    source = Files(tuple(f"{tmp_path}{pattern}" for pattern in IOMMU.patterns))
    text = source.read(1.0).text.replace(str(tmp_path), "")
    settings = Settings(limits=cases.limits())
    finding = judge(BY_NAME["gpudirect.iommu"], Reading(text=text), settings)
    assert (finding.state, finding.reason) == (State.FAILED, "0000:1b:00.0: DMA-FQ")

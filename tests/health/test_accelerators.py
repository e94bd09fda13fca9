"""A host without GPUs is not failed for what only they need, and none passes by it."""

import dataclasses

import pytest

from mjax.health import accelerators, check
from mjax.health.check import Check
from mjax.health.checks.table import BY_NAME, CHECKS
from mjax.health.findings import State, failed, ok
from mjax.health.settings import EXPECTED, Settings
from mjax.health.sources import Files, Reading, whole
from tests.health import cases

PCI = "/sys/bus/pci/devices/0000:{}:00.0/"
LAPTOP = (("00", "0x060000", "0x8086"), ("02", "0x030000", "0x8086"))
WIFI = ("03", "0x028000", "0x8086")
NPU = ("04", "0x120000", "0x8086")


def devices(*each, more=""):
    """Write what `accelerators.SOURCE` reads of PCI devices."""
    lines = []
    for bus, kind, vendor in each:
        lines.append(f"{PCI.format(bus)}class\t{kind}\n")
        lines.append(f"{PCI.format(bus)}vendor\t{vendor}\n")
    return Reading(text="".join(sorted(lines)) + more)


def settings(**expect):
    return Settings(limits=cases.limits(), expect=expect)


@pytest.mark.parametrize(
    "reading",
    [devices(*LAPTOP, WIFI, NPU), devices(), Reading(absent="there are no such files")],
)
def test_a_host_without_such_devices_is_plain(reading):
    assert accelerators.is_plain(reading, settings())


@pytest.mark.parametrize(
    "device",
    [
        ("17", "0x030200", "0x10de"),  # H100: 3D controller
        ("17", "0x030000", "0x10de"),  # GeForce: VGA controller
        ("17", "0x038000", "0x1002"),
        ("17", "0x120000", "0x1002"),
        ("17", "0x020700", "0x15b3"),  # InfiniBand
        ("17", "0x020000", "0x15b3"),  # ConnectX on Ethernet
        ("17", "0x020700", "0x8086"),
    ],
)
def test_one_gpu_or_adapter_makes_a_training_host(device):
    for reading in (devices(*LAPTOP, device), devices(device)):
        assert not accelerators.is_plain(reading, settings())


@pytest.mark.parametrize(
    "line",
    [
        "/proc/driver/nvidia/gpus/0000:17:00.0/information\tModel: NVIDIA H100\n",
        "/sys/class/infiniband/mlx5_0/node_type\t1: CA\n",
        f"{PCI.format('17')}class\t!Permission denied\n",
        f"{PCI.format('17')}class\t0x060000\n",  # its vendor is not there
        "junk\n",
    ],
)
def test_what_a_driver_shows_or_cannot_be_read_is_no_plain_host(line):
    assert not accelerators.is_plain(devices(*LAPTOP, more=line), settings())


def test_a_reading_that_was_cut_is_no_plain_host():
    whole = devices(*LAPTOP)
    late = dataclasses.replace(whole, status=None)
    short = dataclasses.replace(whole, num_bytes=len(whole.text) + 1)
    for reading in (late, short):
        assert not accelerators.is_plain(reading, settings())


def test_an_expected_device_makes_a_training_host():
    for expect in ({"gpus": 8}, {"hcas": ["mlx5_0"]}, {"ports": 1}):
        assert expect.keys() <= EXPECTED.keys()
        assert not accelerators.is_plain(devices(*LAPTOP), settings(**expect))
    for expect in ({"gpus": 0}, {"hcas": []}, {"cpus": 8}):
        assert accelerators.is_plain(devices(*LAPTOP), settings(**expect))


@dataclasses.dataclass(frozen=True)
class Said:
    """A source that says always the same."""

    reading: Reading
    shown: str = "said"

    def read(self, limit_s):
        del limit_s
        return self.reading


def ran(devices_seen, verdict, *, monkeypatch, for_training=True, expect=None):
    """Run one check on a host that has these devices."""
    monkeypatch.setattr(accelerators, "SOURCE", Said(devices_seen, shown="devices"))
    one = Check(
        name="memory.swap",
        what="It is so.",
        source=Said(Reading(text="x\n", num_bytes=2)),
        judge=lambda text, given: verdict,
        action="Do it.",
        for_training=for_training,
    )
    report = check.run([one], settings(**(expect or {})))
    (finding,) = report.findings
    return report, finding


def test_a_plain_host_is_not_failed_and_never_ok_for_that(monkeypatch):
    bad = failed("device 3: 1 is not 2", 1, 2)
    report, finding = ran(devices(*LAPTOP), bad, monkeypatch=monkeypatch)
    assert (finding.state, report.is_ok) == (State.UNKNOWN, True)
    assert finding.reason == (
        "device 3: 1 is not 2; not judged: this host has no GPU and no RDMA device, "
        "and none is expected"
    )
    seen = devices(*LAPTOP, ("17", "0x030200", "0x10de"))
    for reading, expect in ((seen, {}), (devices(*LAPTOP), {"gpus": 8})):
        report, finding = ran(reading, bad, monkeypatch=monkeypatch, expect=expect)
        assert (finding.state, report.is_ok) == (State.FAILED, False)


def test_the_other_checks_and_the_other_states_are_as_before(monkeypatch):
    bad, here = failed("no"), devices(*LAPTOP)
    _, finding = ran(here, bad, for_training=False, monkeypatch=monkeypatch)
    assert finding.state is State.FAILED
    _, finding = ran(here, ok(1, 1), monkeypatch=monkeypatch)
    assert finding.state is State.OK
    expect = {"require": ["memory.swap"]}
    _, finding = ran(here, bad, monkeypatch=monkeypatch, expect=expect)
    assert finding.state is State.FAILED


def test_locked_memory_is_among_the_checks_for_training():
    names = {one.name for one in CHECKS if one.for_training}
    assert {"ulimits.locked_memory", "ulimits.open_files", "sysctl.pid_max"} <= names
    assert not {name for name in names if name.startswith(("gpu.", "kernel."))}


H100, CONNECTX = ("17", "0x030200", "0x10de"), ("17", "0x020000", "0x15b3")
HALF = (cases.FIXTURES_DIR / "gpu" / "h100.xml").read_text()[:20_000]
ENDS_EARLY = Reading(text=HALF, num_bytes=len(HALF))
NO_TOOL = Reading(absent="there is no command nvidia-smi")


@pytest.mark.parametrize(
    ("reading", "signs"),
    [
        (devices(*LAPTOP, CONNECTX), {}),
        (devices(*LAPTOP, H100), {"gpu": "the NVIDIA GPU 0000:17:00.0 on PCI"}),
        (devices(more="/dev/nvidia0\n"), {"gpu": "/dev/nvidia0"}),
        (
            devices(more="/dev/infiniband/uverbs0\n"),
            {"rdma": "/dev/infiniband/uverbs0"},
        ),
        (
            devices(("17", "0x020700", "0x15b3")),
            {"rdma": "the InfiniBand adapter 0000:17:00.0 on PCI"},
        ),
        (
            devices(
                more="/proc/driver/nvidia/gpus/0000:17:00.0/information\tModel: X\n"
            ),
            {"gpu": "/proc/driver/nvidia/gpus/0000:17:00.0/information"},
        ),
        (
            devices(more="/sys/class/infiniband/mlx5_0/node_type\t1: CA\n"),
            {"rdma": "/sys/class/infiniband/mlx5_0/node_type"},
        ),
    ],
)
def test_each_sign_of_a_device_is_seen(reading, signs):
    assert accelerators.signs(reading) == signs


@pytest.mark.parametrize(
    ("seen", "reading", "state"),
    [
        (devices(*LAPTOP, H100), ENDS_EARLY, State.FAILED),
        (devices(*LAPTOP, H100), NO_TOOL, State.FAILED),
        (devices(*LAPTOP, H100), Reading(status=1, error="no driver"), State.FAILED),
        (devices(more="/dev/nvidia0\n"), NO_TOOL, State.FAILED),
        # The tool runs, so its half output is no sign of a host without GPUs.
        (devices(*LAPTOP, CONNECTX), ENDS_EARLY, State.FAILED),
        (devices(*LAPTOP, CONNECTX), NO_TOOL, State.UNKNOWN),
        (devices(*LAPTOP, CONNECTX), Reading(status=1), State.UNKNOWN),
        (devices(*LAPTOP), ENDS_EARLY, State.UNKNOWN),
        (devices(*LAPTOP), NO_TOOL, State.UNKNOWN),
    ],
)
def test_a_device_that_cannot_be_questioned_fails_the_host(
    monkeypatch, seen, reading, state
):
    monkeypatch.setattr(accelerators, "SOURCE", Said(seen, shown="devices"))
    answers = dataclasses.replace(BY_NAME["gpu.answers"], source=Said(reading))
    report = check.run([answers], settings())
    assert [one.state for one in report.findings] == [state]
    assert report.is_ok == (state is State.UNKNOWN)


def test_a_port_that_no_driver_shows_fails_the_host(monkeypatch):
    monkeypatch.setattr(
        accelerators, "SOURCE", Said(devices(("17", "0x020700", "0x15b3")), "devices")
    )
    ports = BY_NAME["infiniband.state"]
    ports = dataclasses.replace(ports, source=Said(Reading(absent="there is no x")))
    (finding,) = check.run([ports], settings()).findings
    assert finding.state is State.FAILED
    assert "although this host has the InfiniBand adapter" in finding.reason


def test_a_device_is_listed_and_not_opened(tmp_path):
    (tmp_path / "nvidia0").mkdir()  # cannot be read
    listing = Files((), present=(f"{tmp_path}/nvidia[0-9]*",))
    assert listing.read(1.0) == whole(f"{tmp_path}/nvidia0\n")

"""Compare the reports of hosts with a cluster file.

Input: one JSON text per host, as `health check --json` prints it:

    {"host": "gpu001",
     "checks": [{"name": "gpu.count", "state": "ok", "reason": ""}],
     "inventory": {"gpus": [{"pci": "0000:1b:00.0"}],
                   "nics": [{"name": "mlx5_0", "guid": "0x946d...", "rate_gbps": 400}],
                   "versions": {"nvidia_driver": "580.65.06"}}}

Other keys are ignored, and the inventory may be absent: the number of GPUs is then the
value of `gpu.count`. Output: findings. A value that a host does not report never
matches: an absent required check has not passed, and a number, address, GUID or version
that only the file gives is unknown.
"""

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mjax import checked_json
from mjax.health.cluster.contradictions import few
from mjax.health.cluster.parts import Cluster, Host, Port

_OK, _COUNT = "ok", "gpu.count"
MAX_BYTES = 16 * 2**20
"""Maximum size of a report. 60 checks with their evidence take 100 kB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A difference from the cluster file."""

    kind: str
    text: str
    nodes: tuple[str, ...] = ()
    """Hosts and switches that the finding concerns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportedCheck:
    """A check of a host."""

    name: str
    state: str
    reason: str = ""
    value: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportedGpu:
    """A GPU of a host."""

    pci: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportedNic:
    """A NIC of a host."""

    name: str
    guid: str | None = None
    rate_gbps: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostReport:
    """The report of one host."""

    host: str
    checks: tuple[ReportedCheck, ...]
    gpus: tuple[ReportedGpu, ...] | None = None
    """None: not in the report."""
    nics: tuple[ReportedNic, ...] | None = None
    versions: Mapping[str, str] | None = None


def read(text: str | bytes) -> HostReport:
    """Read the report of a host.

    Raises:
      ValueError: the text is not such a report, or is truncated.
    """
    value = checked_json.read(text, dict[str, Any])
    inventory = checked_json.check(value.get("inventory", {}), dict[str, Any])
    gpus, nics = inventory.get("gpus"), inventory.get("nics")
    return HostReport(
        host=checked_json.check(value.get("host"), str, "host"),
        checks=tuple(_rows(value.get("checks"), ReportedCheck, "checks")),
        gpus=None if gpus is None else tuple(_rows(gpus, ReportedGpu, "gpus")),
        nics=None if nics is None else tuple(_rows(nics, ReportedNic, "nics")),
        versions=checked_json.check(
            inventory.get("versions"), dict[str, str] | None, "versions"
        ),
    )


def _rows(value: Any, kind: Any, name: str) -> Iterator[Any]:
    """Yield the entries of a list as instances of `kind`, ignoring unknown keys."""
    known = {field.name for field in dataclasses.fields(kind)}
    for index, row in enumerate(checked_json.check(value, list[dict[str, Any]], name)):
        kept = {key: item for key, item in row.items() if key in known}
        yield checked_json.check(kept, kind, f"{name}[{index}]")


def compare(
    cluster: Cluster, reports: Sequence[HostReport]
) -> tuple[list[Finding], list[str]]:
    """Compare the hosts of a file with their reports.

    Returns:
      the differences, and the reasons why the comparison is incomplete.
    """
    findings: list[Finding] = []
    problems: list[str] = []
    by_host: dict[str, HostReport] = {}
    for report in reports:
        if report.host in by_host:
            problems.append(f"there are two reports of {report.host}; keep the newer")
        by_host[report.host] = report
    for name in by_host.keys() - cluster.hosts.keys():
        text = f"{name} sent a report, but the file has no such host"
        findings.append(Finding(kind="unknown host", text=text, nodes=(name,)))
    silent = [name for name in cluster.hosts if name not in by_host]
    if silent:
        text = f"{len(silent)} hosts have no report: {few(silent)}"
        findings.append(Finding(kind="no report", text=text, nodes=tuple(silent)))
    for name, report in by_host.items():
        if name in cluster.hosts:
            found = _of_host(cluster.hosts[name], report, cluster, problems)
            findings += [
                Finding(kind=kind, text=f"{name}: {text}", nodes=(name,))
                for kind, text in found
            ]
    return findings, problems


def rates(reports: Sequence[HostReport]) -> dict[Port, float]:
    """Return the link rates in Gb/s that hosts report, by port."""
    return {
        Port(node=report.host, name=nic.name): nic.rate_gbps
        for report in reports
        for nic in report.nics or ()
        if nic.rate_gbps is not None
    }


def _of_host(
    host: Host, report: HostReport, cluster: Cluster, problems: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of each difference; add missing values to `problems`."""
    yield from _checks(report, cluster.require)
    num_gpus = _num_gpus(report)
    if num_gpus is None:
        problems.append(f"the report of {host.name} does not say how many GPUs it has")
    elif num_gpus != host.num_gpus:
        yield "gpu count", f"{num_gpus} GPUs, but the file says {host.num_gpus}"
    if report.gpus is not None:
        yield from _addresses(host, report.gpus)
    elif host.gpu_pci:
        problems.append(f"the report of {host.name} does not say where its GPUs are")
    if report.nics is not None:
        yield from _nics(host, report.nics, cluster.guids)
    elif any(f"{host.name}:{nic.name}" in cluster.guids for nic in host.nics):
        problems.append(f"the report of {host.name} does not name the GUIDs of NICs")
    versions = report.versions or {}
    for name, expected in cluster.versions.items():
        found = versions.get(name, "unknown")
        if found != expected:
            yield "version", f"{name} is {found}, but the file says {expected}"


def _num_gpus(report: HostReport) -> int | None:
    """Return the number of GPUs that a host reports; None if it reports none."""
    if report.gpus is not None:
        return len(report.gpus)
    for check in report.checks:
        value = check.value or ""
        if check.name == _COUNT and value.isascii() and value.isdigit():
            return int(value[:9])
    return None


def _checks(report: HostReport, require: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of each required check that is not ok.

    A pattern such as `gpu.*` requires all matching checks that ran.
    """
    for pattern in require:
        mine = [c for c in report.checks if fnmatch.fnmatchcase(c.name, pattern)]
        if not mine:
            yield "required check", f"{pattern} is required, but was not run"
        for check in mine:
            if check.state != _OK:
                text = f"{check.name} is {check.state}: {check.reason}"
                yield "required check", text


def _addresses(host: Host, gpus: Sequence[ReportedGpu]) -> Iterator[tuple[str, str]]:
    if not host.gpu_pci:
        return
    found = {_pci(gpu.pci) for gpu in gpus if gpu.pci}
    expected = {_pci(address) for address in host.gpu_pci}
    if absent := sorted(expected - found):
        yield "gpu address", f"no GPU at {few(absent)}"
    if extra := sorted(found - expected):
        yield "gpu address", f"a GPU at {few(extra)}, which the file does not name"


def _pci(address: str) -> str:
    """Normalise a PCI address: nvidia-smi gives the domain 8 digits, Linux 4."""
    domain, _, rest = address.lower().rpartition(":")[0].rpartition(":")
    bus = f"{rest}:{address.lower().rpartition(':')[2]}"
    return f"{domain.lstrip('0').rjust(4, '0')}:{bus}"


def _nics(
    host: Host, nics: Sequence[ReportedNic], guids: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    found = {nic.name: nic for nic in nics}
    for nic in host.nics:
        if nic.name not in found:
            yield "nic absent", f"no NIC {nic.name}"
            continue
        expected = guids.get(f"{host.name}:{nic.name}")
        said = found[nic.name].guid
        if expected is None:
            continue
        if said is None:
            yield "guid", f"the GUID of {nic.name} is unknown"
        elif _guid(said) != expected:
            yield "guid", f"{nic.name} has {said}, but the file 0x{expected:016x}"


def _guid(text: str) -> int | None:
    try:
        return int(text.replace(":", ""), 16)
    except ValueError:
        return None

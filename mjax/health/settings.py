"""Limits of the checks, and expectations of this host.

`limits.toml` has the limits of all checks with their sources; a user's file may change
them. The expectations state what a host must have: numbers of devices, versions, and
the checks that must not be unknown.
"""

import dataclasses
import difflib
import fnmatch
import math
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

LIMITS_PATH = Path(__file__).with_name("limits.toml")
_ABOUT = ("source", "unit")
"""Keys of a check in limits.toml that are not limits."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of each check, and the expectations of the host."""

    limits: Mapping[str, Mapping[str, Any]]
    expect: Mapping[str, Any] = _NOTHING
    """`gpus`, `ports`, `versions`, ...; see `EXPECTED`."""
    is_plain: bool = False
    """Whether the host has no GPU and no RDMA device, and none is expected; see
    `accelerators`."""
    signs: Mapping[str, str] | None = None
    """Signs of devices, see `accelerators.signs`; None: nobody has looked."""

    def limit(self, check: str, name: str) -> Any:
        """Return a limit of a check; limits.toml must define it."""
        return self.limits[check][name]

    def require(self, check: str) -> bool:
        """Return whether a check must not be unknown."""
        patterns = self.expect.get("require", ())
        return any(fnmatch.fnmatchcase(check, pattern) for pattern in patterns)


EXPECTED: Mapping[str, tuple[type, str]] = MappingProxyType(
    {
        "gpus": (int, "GPUs of a host"),
        "gpu_name": (str, "name of each GPU, as nvidia-smi writes it"),
        "gpu_pcie_gen": (int, "PCIe generation of the link of each GPU"),
        "gpu_pcie_width": (int, "PCIe lanes of each GPU"),
        "nvlinks": (int, "active NVLinks of each GPU; 0 if it has none"),
        "modules": (list, "kernel modules that must be loaded"),
        "ports": (int, "InfiniBand or RoCE ports that must be active"),
        "port_rate_gbps": (int, "rate of each of these ports, Gbit/s"),
        "hcas": (list, "devices with a port that must be active, such as mlx5_0"),
        "link_layer": (
            str,
            "link layer of these ports: InfiniBand, or Ethernet for RoCE",
        ),
        "interfaces": (list, "Ethernet interfaces that must be up, such as eth0"),
        "ethernet_gbps": (int, "minimum speed of each of these interfaces, Gbit/s"),
        "mtu": (int, "MTU of each of these interfaces, bytes"),
        "roce_priority": (int, "priority of RoCE, 0 to 7: with ECN and flow control"),
        "roce_traffic_class": (int, "traffic class with which RoCE sends"),
        "pcie_allowed": (list, "PCI addresses of links that may be narrow or slow"),
        "memory_gib": (int, "minimum memory of the host, GiB"),
        "cpus": (int, "minimum number of logical processors"),
        "hugepages": (int, "number of reserved huge pages"),
        "mounts": (list, "file systems that must be mounted"),
        "nodes_tb": (int, "minimum capacity of all NVMe disks together, TB"),
        "versions": (dict, "maps a name to the version that must be installed"),
        "services": (list, "systemd units that must be active"),
        "sysctl": (dict, "maps a kernel parameter to its value"),
        "nccl": (dict, "maps an NCCL variable to its value"),
        "packages": (dict, "maps a Python package to its version"),
        "smt": (str, "two threads per core: on, off"),
        "numa_nodes": (int, "NUMA nodes that have processors"),
        "nvme_disks": (int, "NVMe disks"),
        "zpools": (list, "ZFS pools that must be online"),
        "arrays": (list, "software RAIDs that must be present, such as md0"),
        "product": (str, "vendor and model of the host, as DMI writes them"),
        "power_supplies": (int, "power supplies of a host"),
        "require": (list, "checks that must not be unknown: names, or patterns with *"),
    }
)

VERSIONS = (
    *("kernel", "os", "glibc", "bios", "cuda", "docker", "container_toolkit"),
    *("nvidia_driver", "vbios", "mlx5_core", "ofed"),
    *("infiniband_board", "infiniband_firmware", "pcie_switch"),
)
"""Names in `versions` for which a check exists."""
_WITH_NUMBERS = ("sysctl", "nccl")
"""Expectations whose values may be written as whole numbers. A version may not: 12.10
would become 12.1."""


def read_limits(path: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the limits of all checks: check -> name of a limit -> its value.

    Args:
      path: TOML file whose limits replace the shipped ones; None: no file.
    Raises:
      ValueError: the file is not TOML, names an unknown check or limit, or has a value
        of another type.
    """
    limits: dict[str, dict[str, Any]] = tomllib.loads(LIMITS_PATH.read_text())
    if path is None:
        return limits
    flag = f"--limits {path}"
    for check, changed in _read(path, flag).items():
        _known(check, limits, f"{flag}: no check")
        if not isinstance(changed, dict):
            raise ValueError(f"{flag}: {check} must be a table, got {changed!r}")
        for name, value in changed.items():
            _known(name, limits[check], f"{flag}: {check} has no limit")
            shipped = limits[check][name]
            if not _is_like(value, shipped):
                raise ValueError(
                    f"{flag}: {check}.{name} must be like {shipped!r}, got {value!r}"
                )
            limits[check][name] = value
    return limits


def _is_like(value: Any, shipped: Any) -> bool:
    """Return whether a user's limit can replace the shipped one."""
    if isinstance(shipped, list):
        return isinstance(value, list) and all(_is_like(v, shipped[0]) for v in value)
    if isinstance(shipped, dict):
        first = next(iter(shipped.values()))
        inner = value.values() if isinstance(value, dict) else ()
        return isinstance(value, dict) and all(_is_like(v, first) for v in inner)
    if isinstance(shipped, str | bool):
        return type(value) is type(shipped)
    # Every comparison with nan is false, so a check would never fail.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not math.isnan(value)


def read_expected(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Return the expectations of a file, by key of `EXPECTED`.

    Args:
      path: path of a TOML file with keys of `EXPECTED`.
      names: names of all checks, for `require`.
    Raises:
      ValueError: the file is not TOML, or has an unknown key or a value of another
        type.
    """
    flag = f"--expect {path}"
    expect = _read(path, flag)
    for key, value in expect.items():
        _known(key, EXPECTED, f"{flag}: no expectation")
        wanted = EXPECTED[key][0]
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(
                f"{flag}: {key} must be of type {wanted.__name__}, got {value!r}"
            )
        _check_items(flag, key, value)
    for name in expect.get("versions", ()):
        _known(name, VERSIONS, f"{flag}: versions: no check compares")
    for pattern in expect.get("require", ()):
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"{flag}: require: no check is named {pattern!r}")
    return expect


def _check_items(flag: str, key: str, value: Any) -> None:
    """Raise if an item of a list or table is not text."""
    places: dict[str, Any] = {}
    if isinstance(value, list):
        places = {f"{key}[{index}]": item for index, item in enumerate(value)}
    elif isinstance(value, dict):
        places = {f"{key}.{name}": item for name, item in value.items()}
    for place, item in places.items():
        is_number = key in _WITH_NUMBERS and type(item) is int
        if not isinstance(item, str) and not is_number:
            raise ValueError(
                f"{flag}: {place} must be text, got {item!r}; write it in quotes"
            )


def _read(path: Path, flag: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} cannot be read: {error}") from error


def _known(name: str, names: Collection[str], what: str) -> None:
    known = [one for one in names if one not in _ABOUT]
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{what} {name}{hint}")

"""Read the ports of InfiniBand and RoCE devices from /sys/class/infiniband.

Input: the files of that folder. Output: the ports that the checks cover: those of the
devices in the expectation `hcas`, or all. A host often has devices that training does
not use (management, storage) and that may be unplugged; list the devices of training in
`hcas`.

Source: Documentation/ABI/stable/sysfs-class-infiniband, and for the words in the files
drivers/infiniband/core/sysfs.c, both at https://github.com/torvalds/linux
"""

import dataclasses
import re
from collections.abc import Sequence

from mjax.health.checks import sysfs
from mjax.health.checks.sysfs import Tree
from mjax.health.findings import UnreadableError
from mjax.health.settings import Settings

ROOT = "/sys/class/infiniband"
INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
STATES = ("0: NOP", "1: DOWN", "2: INIT", "3: ARMED", "4: ACTIVE", "5: ACTIVE_DEFER")
ACTIVE = "4: ACTIVE"
PHYSICAL_STATES = (
    "1: Sleep",
    "2: Polling",
    "3: Disabled",
    "4: PortConfigurationTraining",
    "5: LinkUp",
    "6: LinkErrorRecovery",
    "7: Phy Test",
)
LINK_UP = "5: LinkUp"
_PORT = re.compile(rf"{ROOT}/([^/]+)/ports/([0-9]{{1,4}})/.+")
_DEVICE = re.compile(rf"{ROOT}/([^/]+)/.+")
_RATE = re.compile(r"([0-9]{1,5}(?:\.5)?) Gb/sec \(([0-9]{1,2})X(?: [A-Z0-9]+)?\)")
_SHOWN_CHARS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """Speed of a link."""

    gbps: float
    lanes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Port:
    """A port of a device."""

    device: str
    number: str
    files: Tree

    @property
    def name(self) -> str:
        """Name for a person."""
        return f"{self.device} port {self.number}"

    def path(self, name: str) -> str:
        """Return the path of a file of the port."""
        return f"{ROOT}/{self.device}/ports/{self.number}/{name}"

    def read(self, name: str) -> str:
        """Return the content of a file of the port; raises as `Tree.read`."""
        return self.files.read(self.path(name))

    def known(self, name: str, words: Sequence[str]) -> str:
        """Return the content of a file, which must be one of the words.

        Raises:
          UnreadableError: it has another content, or cannot be read.
        """
        word = self.read(name)
        if word not in words:
            raise UnreadableError(f"{self.path(name)}: {word[:_SHOWN_CHARS]!r}")
        return word

    @property
    def layer(self) -> str:
        """InfiniBand, or Ethernet for RoCE."""
        return self.known("link_layer", (INFINIBAND, ETHERNET))

    @property
    def rate(self) -> Rate:
        """Speed of its link."""
        text = self.read("rate")
        found = _RATE.fullmatch(text)
        if found is None:
            raise UnreadableError(f"{self.path('rate')}: {text[:_SHOWN_CHARS]!r}")
        return Rate(gbps=float(found[1]), lanes=int(found[2]))


def all_ports(files: Tree) -> list[Port]:
    """Return all ports, in the order of their names.

    Raises:
      UnreadableError: the host has no port.
    """
    found = {(m[1], m[2]) for path in files.paths if (m := _PORT.fullmatch(path))}
    if not found:
        raise UnreadableError(f"there is no port in {ROOT}")
    ordered = sorted(found, key=lambda pair: sysfs.natural(" ".join(pair)))
    return [Port(device=d, number=n, files=files) for d, n in ordered]


def devices(files: Tree, settings: Settings) -> list[str]:
    """Return the devices that the checks cover: the expected ones, or all.

    Raises:
      UnreadableError: the host has no device, or an expected device is missing.
    """
    found = {m[1] for path in files.paths if (m := _DEVICE.fullmatch(path))}
    return sorted(_expected(found, settings), key=sysfs.natural)


def ports(files: Tree, settings: Settings) -> list[Port]:
    """Return the ports that the checks cover: those of expected devices, or all.

    Raises:
      UnreadableError: the devices have no port, or an expected device is missing.
    """
    found = all_ports(files)
    names = _expected({port.device for port in found}, settings)
    return [port for port in found if port.device in names]


def of_layer(files: Tree, settings: Settings, layer: str) -> list[Port]:
    """Return those of `ports` that have a link layer.

    Raises:
      UnreadableError: no port has this link layer; for other causes as `ports`.
    """
    found = [port for port in ports(files, settings) if port.layer == layer]
    if not found:
        raise UnreadableError(f"no port has the link layer {layer}")
    return found


def _expected(found: set[str], settings: Settings) -> set[str]:
    wanted = settings.expect.get("hcas")
    names = found if wanted is None else set(map(str, wanted))
    if not names:
        raise UnreadableError("there is no device, or hcas is empty")
    missing = sorted(names - found)
    if missing:
        raise UnreadableError(f"there is no {', '.join(missing)}, which hcas names")
    return names

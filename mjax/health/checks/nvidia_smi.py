"""Parse the output of `nvidia-smi -q -x`, which most GPU checks share.

Input: the XML. Output: the values of each GPU, with accessors that reject unknown
values. The XML follows nvsmi_device_v11.dtd, v12 or v13, which differ in names
(`clocks_throttle_reasons` became `clocks_event_reasons`, `power_readings` became
`gpu_power_readings`): an accessor accepts both.
Sources: the manual, https://docs.nvidia.com/deploy/nvidia-smi/index.html, and outputs
that users have published, https://github.com/influxdata/telegraf
(plugins/inputs/nvidia_smi/testdata).
"""

import dataclasses
import functools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mjax.health.check import Check, Judge, check
from mjax.health.findings import UnreadableError, Verdict, failed, ok, unknown
from mjax.health.settings import Settings
from mjax.health.sources import Command

SMI = Command(("nvidia-smi", "-q", "-x"))
CORRUPTED_INFOROM = 14
"""Exit status whose output is valid: nvidia-smi manual, RETURN VALUE."""

_BUS_ID = re.compile(r"[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7]")
_WARNING = re.compile(r"WARNING: infoROM is corrupted at gpu (\S+)")
_NO_VALUES = frozenset(
    {"", "N/A", "[N/A]", "Not Supported", "[Not Supported]", "Unknown Error"}
    | {"[Unknown Error]", "GPU is lost", "[GPU is lost]", "Insufficient Permissions"}
    | {"Requested functionality has been deprecated"}
)
_SKIPPED = frozenset({"supported_clocks", "mig_devices", "processes"})
_SHOWN_CHARS = 60
_MAX_DEPTH = 8
"""Maximum depth of elements; the DTD has five levels below a GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """A process that uses a GPU."""

    pid: str
    name: str
    memory: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """The values that nvidia-smi reports for one GPU."""

    index: int
    """Position in the output, as for `nvidia-smi -i`."""
    bus_id: str
    fields: Mapping[str, str | None]
    """Maps a path below <gpu> to its text; None if the path occurs more than once."""
    processes: Sequence[Process] | None
    """None if the output does not list processes."""

    @property
    def label(self) -> str:
        """Name of the GPU for nvidia-smi (index), logs (bus id) and repair (serial)."""
        serial = self.fields.get("serial")
        shown = f", serial {serial}" if serial and serial not in _NO_VALUES else ""
        return f"GPU {self.index} ({self.bus_id}{shown})"

    def text(self, *paths: str) -> str:
        """Return the text of the first path that exists.

        Raises:
          UnreadableError: none of the paths exists, or the path has no value.
        """
        path = self._path(paths)
        value = self.fields[path]
        if value is None:
            raise UnreadableError(f"{self.label}: {path} appears twice")
        if value in _NO_VALUES:
            raise self._refused(path, "no value")
        return value

    def word(self, words: Collection[str], *paths: str) -> str:
        """Return the text, which must be one of these words."""
        value = self.text(*paths)
        if value not in words:
            raise self._refused(self._path(paths), f"none of {', '.join(words)}")
        return value

    def number(self, unit: str, *paths: str) -> float:
        """Return the number, which must have this unit."""
        value = self.text(*paths)
        found = re.fullmatch(r"(-?[0-9]{1,15}(?:\.[0-9]{1,6})?)(?: (.+))?", value)
        if found is None or (found[2] or "") != unit:
            raise self._refused(self._path(paths), f"no number in {unit}".strip())
        return float(found[1])

    def count(self, *paths: str) -> int:
        """Return the number, a non-negative integer without a unit."""
        value = self.text(*paths)
        if re.fullmatch(r"[0-9]{1,18}", value) is None:
            raise self._refused(self._path(paths), "no count")
        return int(value)

    def _path(self, paths: Sequence[str]) -> str:
        for path in paths:
            if path in self.fields:
                return path
        raise UnreadableError(f"{self.label}: there is no {' or '.join(paths)}")

    def _refused(self, path: str, why: str) -> UnreadableError:
        value = (self.fields[path] or "")[:_SHOWN_CHARS]
        return UnreadableError(f"{self.label}: {path} is {value!r}, {why}")

    def has(self, path: str) -> bool:
        """Return whether a path exists with a value."""
        return (self.fields.get(path) or "") not in _NO_VALUES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Smi:
    """The whole output."""

    driver_version: str
    num_attached: int
    gpus: Sequence[Gpu]
    corrupted: Sequence[str]
    """Bus ids of GPUs with a warning that their infoROM is corrupted."""


@functools.lru_cache(4)
def parse(text: str) -> Smi:
    """Parse the output of nvidia-smi.

    Raises:
      UnreadableError: it is not the complete XML of nvidia-smi.
    """
    body, end, rest = text.partition("</nvidia_smi_log>")
    if not end or "<!ENTITY" in body:
        raise UnreadableError("it is not <nvidia_smi_log>, or ends early")
    warnings = [_WARNING.fullmatch(line.strip()) for line in rest.splitlines() if line]
    try:
        root = ET.fromstring(body + end)
    except (ET.ParseError, ValueError, LookupError) as error:
        raise UnreadableError(f"it is not XML: {error}") from error
    attached = _top(root, "attached_gpus")
    if re.fullmatch(r"[0-9]{1,4}", attached) is None:
        raise UnreadableError(f"attached_gpus is {attached!r}")
    gpus = [_gpu(index, node) for index, node in enumerate(root.findall("gpu"))]
    for name, keys in (
        ("bus id", [gpu.bus_id for gpu in gpus]),
        ("uuid", [gpu.fields.get("uuid") for gpu in gpus]),
    ):
        if len(set(keys)) != len(keys):
            raise UnreadableError(f"two GPUs have the same {name}")
    return Smi(
        driver_version=_top(root, "driver_version", "kmd_version"),
        num_attached=int(attached),
        gpus=gpus,
        corrupted=[_warned(found) for found in warnings],
    )


def _top(root: ET.Element, *names: str) -> str:
    found = [node for name in names for node in root.findall(name)]
    if len(found) != 1 or (found[0].text or "").strip() in _NO_VALUES:
        raise UnreadableError(f"it has no {' or '.join(names)}, or two")
    return (found[0].text or "").strip()


def _warned(found: re.Match[str] | None) -> str:
    if found is None:
        raise UnreadableError("there is something behind </nvidia_smi_log>")
    return found[1]


def _gpu(index: int, node: ET.Element) -> Gpu:
    bus_id = node.get("id", "").upper()
    fields = _fields(node)
    if not _BUS_ID.fullmatch(bus_id) or not fields.get("uuid"):
        raise UnreadableError(f"GPU {index} has no bus id {bus_id!r} or no uuid")
    named = fields.get("pci/pci_bus_id")
    if named is not None and named.upper() != bus_id:
        raise UnreadableError(f"GPU {index} is {bus_id} and {named}")
    lists = node.findall("processes")
    known = len(lists) == 1 and (lists[0].text or "").strip() in ("", "None")
    return Gpu(
        index=index,
        bus_id=bus_id,
        fields=fields,
        processes=[_process(p) for p in lists[0]] if known else None,
    )


def _process(node: ET.Element) -> Process:
    def text(name: str) -> str:
        return (node.findtext(name) or "").strip()

    if node.tag != "process_info" or not re.fullmatch(r"[0-9]{1,10}", text("pid")):
        raise UnreadableError(f"<{node.tag:.40}> is not a process with a pid")
    return Process(
        pid=text("pid"), name=text("process_name"), memory=text("used_memory")
    )


def _fields(node: ET.Element) -> Mapping[str, str | None]:
    fields: dict[str, str | None] = {}
    todo = [("", child, 1) for child in node if child.tag not in _SKIPPED]
    while todo:
        above, one, depth = todo.pop()
        path = above + one.tag
        if depth > _MAX_DEPTH:
            raise UnreadableError(f"{path:.60} is nested too deeply")
        fields[path] = None if path in fields else (one.text or "").strip()
        todo += [(f"{path}/", child, depth + 1) for child in one]
    return fields


def gpus(text: str) -> Sequence[Gpu]:
    """Return all GPUs.

    Raises:
      UnreadableError: no GPU is listed, or not as many as are attached.
    """
    smi = parse(text)
    if not smi.gpus or len(smi.gpus) != smi.num_attached:
        raise UnreadableError(
            f"it lists {len(smi.gpus)} GPUs, {smi.num_attached} are attached"
        )
    return smi.gpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """The result of a check for one GPU."""

    value: str
    bad: str = ""
    """The problem of the GPU; empty if it has none."""
    rank: int | float = 0
    """Severity; the value of the GPU with the highest severity is shown."""


def judge_gpus(text: str, look: Callable[[Gpu], Seen], limit: object = "") -> Verdict:
    """Return failed if any GPU is bad, otherwise unknown if any is unknown, or ok.

    Args:
      text: output of `nvidia-smi -q -x`.
      look: judges one GPU; raises `UnreadableError` if the GPU is unknown.
      limit: the limit that the values are compared with.
    """
    seen: list[Seen] = []
    bad: list[str] = []
    silent: dict[str, str] = {}
    for gpu in gpus(text):
        try:
            one = look(gpu)
        except UnreadableError as error:
            silent[gpu.label] = str(error).removeprefix(f"{gpu.label}: ")
            continue
        seen.append(one)
        if one.bad:
            bad.append(f"{gpu.label}: {one.bad}")
    if silent and not bad:
        return unknown(_why_silent(silent, len(gpus(text))))
    value = max(seen, key=lambda one: (bool(one.bad), one.rank)).value
    if bad:
        bad += [f"{label}: {why}" for label, why in silent.items()]
        return failed("; ".join(bad), value, limit)
    return ok(value, limit)


def _why_silent(silent: Mapping[str, str], num_gpus: int) -> str:
    causes = set(silent.values())
    if len(silent) == num_gpus and len(causes) == 1:
        return f"all {num_gpus} GPUs: {causes.pop()}"
    return "; ".join(f"{label}: {why}" for label, why in silent.items())


def limit_of(settings: Settings, check: str, name: str) -> float:
    """Return a limit that is a number."""
    return float(settings.limit(check, name))


def smi_check(name: str, *, action: str, **fields: Any) -> Callable[[Judge], Check]:
    """Return a decorator that makes a check of the output of `nvidia-smi -q -x`."""
    statuses = (0, CORRUPTED_INFOROM)
    return check(name, source=SMI, action=action, statuses=statuses, **fields)

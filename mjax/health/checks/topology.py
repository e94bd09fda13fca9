"""Checks of the paths between the GPUs of a host, and from GPUs to network cards.

Input: the matrices of `nvidia-smi topo -m` and `nvidia-smi topo -p2p r`. Output:
verdicts. The header of a matrix names its columns and is underlined by escape codes.
The paths, from the legend of the output: NV# is a bond of # NVLinks; PIX crosses at
most one PCIe bridge, PXB several but no host bridge, PHB a host bridge, NODE several
host bridges of one NUMA node, SYS two NUMA nodes. Source of the format:
https://github.com/stas00/ml-engineering (compute/accelerator/nvidia/debug.md).
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from mjax.health.check import check
from mjax.health.findings import UnreadableError, Verdict, failed, ok, unknown
from mjax.health.settings import Settings
from mjax.health.sources import Command

MATRIX = Command(("nvidia-smi", "topo", "-m"))
PEERS = Command(("nvidia-smi", "topo", "-p2p", "r"))

_ESCAPE = re.compile(r"\x1b\[[0-9;]{0,8}m")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,40}")
_GPU = re.compile(r"GPU[0-9]{1,3}")
_PATH = re.compile(r"SYS|NODE|PHB|PXB|PIX|NV[0-9]{1,3}")
_STATUSES: Mapping[str, str] = {
    "OK": "",
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "U": "unknown",
}
"""Meanings from the legend of the output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """The path between every two devices."""

    names: Sequence[str]
    cells: Mapping[tuple[str, str], str]
    """Path of each ordered pair of different devices."""

    @property
    def gpus(self) -> Sequence[str]:
        """GPUs; all other devices are network cards."""
        return [name for name in self.names if _GPU.fullmatch(name)]


@functools.lru_cache
def parse(text: str) -> Matrix:
    """Return the matrix.

    Raises:
      UnreadableError: it is not a square with rows in the order of its columns and
        X on the diagonal.
    """
    lines = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    header, *rest = [line for line in lines if line] or [[]]
    names = header[: header.index("CPU")] if "CPU" in header else header
    rows = rest[: len(names)]
    if (
        not names
        or len(set(names)) != len(names)
        or not all(map(_NAME.fullmatch, names))
    ):
        raise UnreadableError(f"expected a matrix header, got {' '.join(header)!r:.60}")
    if [line[:1] for line in rows] != [[name] for name in names]:
        raise UnreadableError("its rows are not those of its header")
    if ["Legend:"] not in rest:
        raise UnreadableError("it has no legend, or ends early")
    cells = {}
    for name, line in zip(names, rows, strict=True):
        if len(line) <= len(names):
            raise UnreadableError(f"the row of {name} ends early")
        for other, cell in zip(names, line[1:], strict=False):
            if (cell == "X") != (name == other):
                raise UnreadableError(f"{name} to {other} is {cell!r:.20}")
            if name != other:
                cells[name, other] = cell
    return Matrix(names=names, cells=cells)


def _paths(text: str) -> Matrix:
    """Return a matrix of paths.

    Raises:
      UnreadableError: as `parse`; a path is unknown, or differs in the two directions.
    """
    matrix = parse(text)
    for (one, other), path in matrix.cells.items():
        if not _PATH.fullmatch(path):
            raise UnreadableError(
                f"the path from {one} to {other} is {path!r:.20}, which is unknown"
            )
    for (one, other), path in matrix.cells.items():
        if (back := matrix.cells[other, one]) != path:
            raise UnreadableError(
                f"the path from {one} to {other} is {path}, but from {other} to {one} "
                f"it is {back}"
            )
    return matrix


def _missing(matrix: Matrix, settings: Settings) -> Sequence[str]:
    wanted, has = settings.expect.get("gpus"), len(matrix.gpus)
    if wanted is not None and has != wanted:
        return [f"{has} GPUs of {wanted} are listed"]
    if not has:
        raise UnreadableError("it lists no GPU")
    return []


@check(
    "topology.peer_access",
    source=PEERS,
    action="Turn off ACS and IOMMU translation in BIOS and kernel.",
)
def peer_access(text: str, settings: Settings) -> Verdict:
    """Each GPU can read the memory of every other GPU."""
    matrix = parse(text)
    bad, silent = list(_missing(matrix, settings)), []
    num_open = list(matrix.cells.values()).count("OK")
    for (one, other), status in matrix.cells.items():
        if status not in _STATUSES:
            raise UnreadableError(f"{one} to {other} is {status!r:.20}")
        if status == "U":
            silent.append(f"{one} to {other}: unknown")
        elif status != "OK":
            bad.append(f"{one} to {other}: {_STATUSES[status]} ({status})")
    if bad:
        wanted = settings.expect.get("gpus", 0)
        num_pairs = max(len(matrix.cells), wanted * (wanted - 1))
        value = f"{num_open} of {num_pairs} pairs have access"
        return failed("; ".join(bad), value, "all pairs")
    if silent:
        return unknown("; ".join(silent))
    return ok(f"{len(matrix.cells)} pairs", limit="all pairs")


@check(
    "topology.nic_affinity",
    source=MATRIX,
    action="Compare with a good host: a card is missing or in another slot.",
)
def nic_affinity(text: str, settings: Settings) -> Verdict:
    """Each GPU has a network card under the same PCIe switch."""
    matrix = _paths(text)
    bad = list(_missing(matrix, settings))
    near = settings.limit("topology.nic_affinity", "paths")
    nics = [name for name in matrix.names if name not in matrix.gpus]
    if not nics:
        return unknown("it lists no network card")
    for gpu in matrix.gpus:
        paths = [matrix.cells[gpu, nic] for nic in nics]
        if not any(path in near for path in paths):
            bad.append(f"{gpu}: the paths to its network cards are {', '.join(paths)}")
    if bad:
        return failed("; ".join(bad), f"{len(nics)} cards", " or ".join(near))
    return ok(f"{len(nics)} cards", " or ".join(near))


@check(
    "topology.nvlink_pairs",
    source=MATRIX,
    action="Reset all GPUs; restart nvidia-fabricmanager; then replace the GPU.",
)
def nvlink_pairs(text: str, settings: Settings) -> Verdict:
    """All GPUs have the same number of NVLinks to other GPUs.

    If the numbers differ, the GPUs with the fewest NVLinks are named: a GPU that has
    lost its links has none, and each other GPU has lost only its links to this GPU.
    """
    matrix = _paths(text)
    bad = list(_missing(matrix, settings))
    bonds = {
        gpu: sum(
            int(matrix.cells[gpu, other][2:])
            for other in matrix.gpus
            if other != gpu and matrix.cells[gpu, other].startswith("NV")
        )
        for gpu in matrix.gpus
    }
    fewest = min(bonds.values(), default=0)
    most = max(bonds.values(), default=fewest)
    if fewest != most:
        worst = [gpu for gpu, number in bonds.items() if number == fewest]
        text = f"{fewest} NVLinks to others, some have {most}"
        bad += [f"{gpu}: {text}" for gpu in worst]
    wanted = settings.expect.get("nvlinks")
    if len(matrix.gpus) > 1 and not most and wanted != 0:
        if wanted is None:
            return unknown("no GPU has NVLinks; nvlinks is not in the expectations")
        bad.append("no GPU reaches another by NVLink")
    if bad:
        return failed("; ".join(bad), fewest, most)
    return ok(fewest, most)


CHECKS = (
    peer_access,
    nvlink_pairs,
    nic_affinity,
)

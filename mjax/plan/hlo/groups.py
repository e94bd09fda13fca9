"""Groups of devices in collectives: XLA's notations, and the mesh axes of a group.

Input: the text of replica_groups or source_target_pairs. Output: device numbers. The
number of a device is its position in the mesh's flat order over `AXES`, which is how
jax numbers the partitions of a program.
"""

import dataclasses
import functools
import itertools
import math
import re

import numpy as np

from mjax.mesh.axes import AXES, AxisSizes

_PAIRS = re.compile(r"\{(?:\{\d+,\d+\},?)+\}")
_LISTED = re.compile(r"\{(?:\{\d+(?:,\d+)*\},?)+\}")
_IOTA = re.compile(
    r"\[(?P<groups>\d+(?:,\d+)*)\](?:<=\[(?P<dims>\d+(?:,\d+)*)\])?"
    r"(?:T\((?P<order>\d+(?:,\d+)*)\))?"
)
_MESH = re.compile(
    r"mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<devices>[^{]*)\))? "
    r"\{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'(?P<name>\w+)'=(?P<size>\d+)")
_AXIS_REF = re.compile(r"'(?P<name>\w+)'(?::\((?P<before>\d+)\)(?P<size>\d+))?")


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """Groups of devices that communicate, or pairs that send."""

    members: np.ndarray
    """[groups, size], int: device numbers; a pair is (sender, receiver)."""
    are_pairs: bool

    def axes(self, sizes: AxisSizes) -> tuple[str, ...]:
        """Return the mesh axes along which the members of a group differ.

        Raises:
          ValueError: a device is not in the mesh.
        """
        if self.members.max() >= sizes.num_devices:
            raise ValueError(
                f"a group has device {self.members.max()}, but the mesh "
                f"{sizes.as_tuple()} has {sizes.num_devices} devices"
            )
        places = np.unravel_index(self.members, sizes.as_tuple())
        differs = [bool((place != place[:, :1]).any()) for place in places]
        return tuple(axis for axis, far in zip(AXES, differs, strict=True) if far)

    def crosses_nodes(self, gpus_per_node: int) -> bool:
        """Return whether any group spans nodes."""
        nodes = self.members // gpus_per_node
        return bool((nodes != nodes[:, :1]).any())

    def size_in_node(self, gpus_per_node: int) -> int:
        """Return the minimum number of members of a group on a node; 1 for pairs."""
        if self.are_pairs:
            return 1
        nodes = np.sort(self.members // gpus_per_node, axis=1)
        ends = np.flatnonzero(np.diff(nodes, axis=1, append=-1).ravel())
        return int(np.diff(ends, prepend=-1).min())

    def partition(self, sizes: AxisSizes) -> tuple[int, bytes]:
        """Return a key that is the same for the same sets of devices.

        A permute counts as a group of all devices along its axes.
        """
        members = self.members
        if self.are_pairs:
            names = ",".join(f"'{axis}'" for axis in self.axes(sizes))
            members = read_groups(_mesh_text(sizes) + f" {{{names}}}").members
        rows = np.sort(members, axis=1)
        return rows.shape[1], rows[np.argsort(rows[:, 0])].tobytes()


def _mesh_text(sizes: AxisSizes) -> str:
    named = zip(AXES, sizes.as_tuple(), strict=True)
    return "mesh[" + ",".join(f"'{axis}'={size}" for axis, size in named) + "]"


@functools.lru_cache(maxsize=4096)
def read_pairs(text: str) -> Groups:
    """Read source_target_pairs: {{from,to},...}.

    Raises:
      ValueError: the text has another form.
    """
    if not _PAIRS.fullmatch(text):
        raise ValueError(f"source_target_pairs are not understood: {text[:200]!r}")
    return Groups(_numbers(text).reshape(-1, 2), are_pairs=True)


@functools.lru_cache(maxsize=4096)
def read_groups(text: str, num_devices: int = 1) -> Groups:
    """Read replica_groups, in any of the forms that XLA prints.

    - {{0,1},{2,3}}: the groups are listed; {} is one group of all devices.
    - [2,4]<=[8], [4,2]<=[2,4]T(1,0): an array of the dims after <= holds the numbers
      0, 1, 2, ...; it is transposed as T says and reshaped to [groups, size].
    - mesh['a'=2,'b'=4] {'b'}: the devices are in an array of the mesh's sizes; the
      devices of a group differ only in the named axes. 'b':(2)2 is a part of an axis: b
      is split into 2 (before) x 2 (the part) x the rest. device_ids=(...) after the
      mesh lists the devices, or gives them as an array as above, [4,2]T(1,0). Without
      it they are numbered 0, 1, 2, ...

    Args:
      text: text of the groups.
      num_devices: number of devices of the program, used for {}.
    Raises:
      ValueError: the text has another form, the groups differ in size, or a device is
        in two groups.
    """
    if text == "{}":
        return Groups(np.arange(num_devices).reshape(1, -1), are_pairs=False)
    if _LISTED.fullmatch(text):
        rows = [row.count(",") + 1 for row in text.strip("{}").split("},{")]
        if len(set(rows)) > 1:
            raise ValueError(f"replica_groups differ in size: {text[:200]!r}")
        members = _numbers(text).reshape(len(rows), -1)
    elif iota := _IOTA.fullmatch(text):
        size = _ints(iota["groups"])[-1]
        members = _iota(iota, text).reshape(-1, size)
    elif mesh := _MESH.fullmatch(text):
        members = _of_mesh(mesh, text)
    else:
        raise ValueError(f"replica_groups are not understood: {text[:200]!r}")
    if len(np.unique(members)) != members.size:
        raise ValueError(f"replica_groups hold a device twice: {text[:200]!r}")
    return Groups(members, are_pairs=False)


def _of_mesh(mesh: re.Match[str], text: str) -> np.ndarray:
    sizes = {m["name"]: int(m["size"]) for m in _AXIS.finditer(mesh["mesh"])}
    named = list(_AXIS_REF.finditer(mesh["axes"]))
    if (
        ",".join(m[0] for m in _AXIS.finditer(mesh["mesh"])) != mesh["mesh"]
        or ",".join(m[0] for m in named) != mesh["axes"].replace(" ", "")
        or not {m["name"] for m in named} <= set(sizes)
    ):
        raise ValueError(f"replica_groups are not understood: {text[:200]!r}")
    # Split an axis where a part begins or ends: part 2 to 4 of 8 gives 2 x 2 x 2.
    segments: list[tuple[str, int, int]] = []
    for axis, size in sizes.items():
        parts = [_part(m) for m in named if m["name"] == axis and m["before"]]
        cuts = sorted({1, size, *(cut for part in parts for cut in part)})
        segments += [(axis, *ends) for ends in itertools.pairwise(cuts)]
    if any(end % start for _, start, end in segments):
        raise ValueError(f"an axis cannot be split like this: {text[:200]!r}")
    inside = [
        place
        for m in named
        for place, (axis, start, end) in enumerate(segments)
        if axis == m["name"]
        and (not m["before"] or (_part(m)[0] <= start and end <= _part(m)[1]))
    ]
    dims = [end // start for _, start, end in segments]
    devices = np.arange(math.prod(dims))
    if mesh["devices"]:
        iota = _IOTA.fullmatch(mesh["devices"])
        devices = _iota(iota, text) if iota else _numbers(mesh["devices"])
    if devices.size != math.prod(dims):
        raise ValueError(f"device_ids do not fill the mesh: {text[:200]!r}")
    outside = [place for place in range(len(dims)) if place not in inside]
    group = math.prod(dims[place] for place in inside)
    return devices.reshape(dims).transpose([*outside, *inside]).reshape(-1, group)


def _part(part: re.Match[str]) -> tuple[int, int]:
    """Return where a part of an axis begins and ends, as products of sizes."""
    before = int(part["before"])
    return before, before * int(part["size"])


def _iota(found: re.Match[str], text: str) -> np.ndarray:
    dims = _ints(found["dims"] or found["groups"])
    order = _ints(found["order"]) if found["order"] else list(range(len(dims)))
    if sorted(order) != list(range(len(dims))) or (
        math.prod(dims) != math.prod(_ints(found["groups"]))
    ):
        raise ValueError(f"replica_groups are not understood: {text[:200]!r}")
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).ravel()


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _numbers(text: str) -> np.ndarray:
    return np.array(text.translate({ord("{"): None, ord("}"): None}).split(","), int)

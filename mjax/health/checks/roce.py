"""Checks of RoCE: source GIDs, congestion control, traffic class.

Lossless Ethernet needs the same priority everywhere: in the traffic class of sent
packets, and for ECN at both the notification point and the reaction point. The
configuration of the switch cannot be seen from the host.

Sources: gid_attrs: Documentation/ABI/stable/sysfs-class-infiniband at
https://github.com/torvalds/linux; ECN:
https://docs.nvidia.com/networking/display/mlnxofedv24103250lts/explicit+congestion+notification+(ecn);
NCCL_IB_GID_INDEX: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
The form `Global tclass=N` of `tc/N/traffic_class` is known from scripts that read it;
NVIDIA does not document it.
"""

import re
from collections.abc import Mapping

from mjax.health import several
from mjax.health.check import check
from mjax.health.checks import ports, sysfs
from mjax.health.checks.ports import ROOT, Port
from mjax.health.checks.sysfs import Tree
from mjax.health.findings import UnreadableError, Verdict, judge_each, ok, unknown
from mjax.health.settings import Settings
from mjax.health.several import Called, Several
from mjax.health.sources import Environment, Files

_GIDS = Called(
    f"{ROOT}/*/ports/*/gid_attrs",
    Files(
        (
            f"{ROOT}/*/ports/*/link_layer",
            f"{ROOT}/*/ports/*/gids/*",
            f"{ROOT}/*/ports/*/gid_attrs/types/*",
        )
    ),
)
_INDEX = "NCCL_IB_GID_INDEX"
_INDEXED = Several((Environment((_INDEX,)), _GIDS))
_NET = "/sys/class/net"
_ECN = Called(
    f"{_NET}/*/ecn",
    Files(tuple(f"{_NET}/*/ecn/{point}/enable/*" for point in ("roce_np", "roce_rp"))),
)
_CLASSES = Files((f"{ROOT}/*/tc/*/traffic_class",))
_ECN_PATH = re.compile(rf"{_NET}/([^/]+)/ecn/(roce_np|roce_rp)/enable/([0-7])")
_CLASS_PATH = re.compile(rf"{ROOT}/([^/]+)/tc/([0-9]{{1,4}})/traffic_class")
_CLASS = re.compile(r"Global tclass=([0-9]{1,3})")
_GID_PATH = re.compile(r".*/gid_attrs/types/([0-9]{1,5})")
_V2 = "RoCE v2"
_TYPES = (_V2, "IB/RoCE v1")
_IPV4 = re.compile(r"0000:0000:0000:0000:0000:ffff:[0-9a-f]{4}:[0-9a-f]{4}")
_NUMBER = re.compile(r"-?[0-9]{1,5}")
_SHOWN_CHARS = 60


def _gids(port: Port) -> Mapping[int, str]:
    """Return the type of each GID of a port, such as "RoCE v2 over IPv4", by index.

    An index without a GID cannot be read, and is not in the result.
    """
    folder = port.path("gid_attrs/types/")
    found: dict[int, str] = {}
    is_there = False
    for path in port.files.paths:
        index = _GID_PATH.fullmatch(path) if path.startswith(folder) else None
        if index is None:
            continue
        is_there = True
        if path not in port.files.values:
            continue
        kind = port.known(f"gid_attrs/types/{index[1]}", _TYPES)
        gid = port.read(f"gids/{index[1]}")
        found[int(index[1])] = f"{kind} over {'IPv4' if _IPV4.fullmatch(gid) else gid}"
    if not is_there:
        raise UnreadableError(f"{port.name} has no table of GIDs")
    return found


@check(
    "roce.gid", source=_GIDS, action="Give the interface of the port an IPv4 address."
)
def has_gid(text: str, settings: Settings) -> Verdict:
    """Every RoCE port has a GID of RoCE v2 over IPv4."""
    found = ports.of_layer(sysfs.tree(text), settings, ports.ETHERNET)
    problems = []
    for port in found:
        if f"{_V2} over IPv4" not in _gids(port).values():
            problems.append((port.name, "it has no GID of RoCE v2 over IPv4"))
    return judge_each(problems, f"{len(found)} ports")


@check(
    "roce.gid_index",
    source=_INDEXED,
    action="Unset it (NCCL 2.21 and newer choose), or correct it with `show_gids`.",
)
def gid_index(text: str, settings: Settings) -> Verdict:
    """NCCL_IB_GID_INDEX selects RoCE v2 over IPv4 on every port."""
    environment, gids = map(several.present, several.parts(text, 2))
    found = ports.of_layer(sysfs.tree(gids), settings, ports.ETHERNET)
    name, _, index = environment.strip().partition("=")
    if not environment or (name, index) == (_INDEX, "-1"):
        return ok(f"{_INDEX} leaves it to NCCL")
    if name != _INDEX or not _NUMBER.fullmatch(index):
        raise UnreadableError(f"expected an index, got {environment[:_SHOWN_CHARS]!r}")
    problems = []
    for port in found:
        kind = _gids(port).get(int(index), "no GID")
        if kind != f"{_V2} over IPv4":
            problems.append((port.name, f"GID {index} is {kind}"))
    return judge_each(problems, f"index {index}")


@check(
    "roce.ecn",
    source=_ECN,
    action="Write 1 to the files of that priority, at each boot too.",
)
def ecn(text: str, settings: Settings) -> Verdict:
    """Congestion control is on for the priority of RoCE."""
    files = sysfs.tree(text)
    matches = [m for path in files.paths if (m := _ECN_PATH.fullmatch(path))]
    if not matches:
        raise UnreadableError("no interface has ECN settings")
    priority = settings.expect.get("roce_priority")
    if priority is None:
        return unknown("roce_priority is not in the expectations")
    names = dict.fromkeys(match[1] for match in matches)
    problems = []
    for name in names:
        for point in ("roce_np", "roce_rp"):
            if not _is_on(files, f"{_NET}/{name}/ecn/{point}/enable/{priority}"):
                problems.append((name, f"{point} is off for priority {priority}"))
    return judge_each(problems, f"{len(names)} interfaces", f"priority {priority}")


def _is_on(files: Tree, path: str) -> bool:
    word = files.read(path)
    if word not in ("0", "1"):
        raise UnreadableError(f"{path}: {word[:_SHOWN_CHARS]!r}")
    return word == "1"


@check(
    "roce.traffic_class",
    source=_CLASSES,
    action="Write the class to tc/PORT/traffic_class, at each boot too.",
)
def traffic_class(text: str, settings: Settings) -> Verdict:
    """Every device sends RoCE with the expected traffic class."""
    files = sysfs.tree(text)
    names = ports.devices(files, settings)
    wanted = settings.expect.get("roce_traffic_class")
    matches = [m for path in files.paths if (m := _CLASS_PATH.fullmatch(path))]
    found = {f"{m[1]} port {m[2]}": m[0] for m in matches if m[1] in names}
    classes = {name: _class(files, path) for name, path in found.items()}
    shown = ", ".join(f"{name}: {value}" for name, value in classes.items())
    if wanted is None:
        return unknown(f"{shown}; roce_traffic_class is not in the expectations")
    problems = [(n, f"{v}, not {wanted}") for n, v in classes.items() if v != wanted]
    return judge_each(problems, f"{len(classes)} ports", wanted)


def _class(files: Tree, path: str) -> int | None:
    """Return the traffic class in a file; None if none is set."""
    text = files.read(path)
    found = _CLASS.fullmatch(text)
    if found is None and text:
        raise UnreadableError(f"{path}: {text[:_SHOWN_CHARS]!r}")
    return int(found[1]) if found else None


CHECKS = (
    has_gid,
    gid_index,
    ecn,
    traffic_class,
)

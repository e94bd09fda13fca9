"""Checks of the NCCL variables in the environment that a run would inherit.

NCCL waits `4.096 us * 2^NCCL_IB_TIMEOUT` for an acknowledgement, NCCL_IB_RETRY_CNT
times; then the run fails. A flapping link is down for seconds, so the total wait must
be longer than that, but not so long that a dead link goes unnoticed. The default of
NCCL_IB_TIMEOUT depends on the version of NCCL (14, 18, 20), so its check is unknown if
it is not set.

NCCL silently ignores a misspelt variable, so a name that is close to a known one fails.
/etc/nccl.conf is not read here.

Sources: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; how lists
of devices are matched: src/misc/utils.cc (`parseStringList`, `matchIfList`) at
https://github.com/NVIDIA/nccl; why the timeout matters: MegaScale (Jiang et al. 2024),
https://www.usenix.org/conference/nsdi24/presentation/jiang-ziheng
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping, Sequence

from mjax.health import several
from mjax.health.check import check
from mjax.health.checks import sysfs
from mjax.health.checks.ports import ROOT
from mjax.health.findings import (
    UnreadableError,
    Verdict,
    failed,
    judge_each,
    ok,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.several import Several
from mjax.health.sources import Environment, Files

_ENVIRONMENT = Environment(("NCCL_",))
_DEVICES = Several((_ENVIRONMENT, Files((f"{ROOT}/*/ports/*/state",))))
_INTERFACES = Several((_ENVIRONMENT, Files(("/sys/class/net/*/operstate",))))
_LINE = re.compile(r"(NCCL_[A-Za-z0-9_]*)=(.*)")
_NUMBER = re.compile(r"[0-9]{1,6}")
_PORT_PATH = re.compile(rf"{ROOT}/([^/]+)/ports/([0-9]{{1,4}})/state")
_NET_PATH = re.compile(r"/sys/class/net/([^/]+)/operstate")
_TIMEOUT, _RETRIES = "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"
_TICK_S = 4.096e-6
_NEVER = 0
"""NCCL waits forever if NCCL_IB_TIMEOUT is this value, or 32 and more."""
_MAX_TIMEOUT = 31
_DEFAULT_RETRIES, _MAX_RETRIES = 7, 7
_TRANSPORTS = (
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NET_DISABLE_INTRA",
)
_LEVELS = ("VERSION", "WARN", "INFO", "TRACE", "")
_KNOWN = (
    _TIMEOUT,
    _RETRIES,
    *_TRANSPORTS,
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
)
_ALSO = ("NCCL_NVB_DISABLE", "NCCL_PXN_DISABLE", "NCCL_RMA_DISABLE")
"""Real NCCL variables whose names are close to one of the names above."""
_SHOWN_CHARS = 60


@functools.lru_cache(8)
def variables(text: str) -> Mapping[str, str]:
    """Return the values of the NCCL variables, by name.

    Raises:
      UnreadableError: a line is not a variable, because a value has several lines.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match[1] in found:
            raise UnreadableError(
                f"invalid or repeated variable: {line[:_SHOWN_CHARS]!r}"
            )
        found[match[1]] = match[2]
    return found


def _number(found: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = found.get(name)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        raise UnreadableError(f"{name} is not a number: {text[:_SHOWN_CHARS]!r}")
    return int(text)


@check(
    "nccl.timeout",
    source=_ENVIRONMENT,
    action="Set NCCL_IB_TIMEOUT (22 is 2 minutes with 7 retries).",
)
def timeout(text: str, settings: Settings) -> Verdict:
    """NCCL waits longer for a link than a flap lasts, but not forever."""
    found = variables(text)
    exponent = _number(found, _TIMEOUT, None)
    tries = _number(found, _RETRIES, _DEFAULT_RETRIES) or 0
    least_s = settings.limit("nccl.timeout", "min_s")
    most_s = settings.limit("nccl.timeout", "max_s")
    if exponent is None:
        return unknown(
            f"{_TIMEOUT} is not set: its default depends on the NCCL version"
        )
    limit = f"{least_s:g} s to {most_s:g} s"
    if exponent == _NEVER or exponent > _MAX_TIMEOUT:
        return failed(f"{_TIMEOUT}={exponent}: NCCL waits forever", "no end", limit)
    waits_s = _TICK_S * 2**exponent * tries
    value = f"{waits_s:.1f} s"
    if not least_s <= waits_s <= most_s:
        reason = f"{_TIMEOUT}={exponent} and {tries} retries are {value}"
        return failed(reason, value, limit)
    return ok(value, limit)


@check(
    "nccl.retries",
    source=_ENVIRONMENT,
    action="Unset NCCL_IB_RETRY_CNT, or set it to 7.",
)
def retries(text: str, settings: Settings) -> Verdict:
    """NCCL retries a transmission often enough."""
    count = _number(variables(text), _RETRIES, _DEFAULT_RETRIES) or 0
    least = settings.limit("nccl.retries", "min")
    if count > _MAX_RETRIES:
        return failed(f"{_RETRIES}={count}: at most {_MAX_RETRIES} fit", count, least)
    if count < least:
        return failed(f"{_RETRIES}={count}", count, f"at least {least}")
    return ok(count, f"at least {least}")


@check("nccl.debug", source=_ENVIRONMENT, action="Set NCCL_DEBUG to WARN.")
def debug(text: str, settings: Settings) -> Verdict:
    """NCCL does not log so much that it slows down a run."""
    level = variables(text).get("NCCL_DEBUG", "").upper()
    noisy = settings.limit("nccl.debug", "noisy")
    if level not in _LEVELS:
        return failed(
            f"NCCL_DEBUG={level} is not a valid level", level, "VERSION, WARN or INFO"
        )
    if level in noisy:
        return failed(f"NCCL_DEBUG={level} slows down every call", level)
    return ok(level or "not set")


@check(
    "nccl.transports",
    source=_ENVIRONMENT,
    action="Unset the variable: it is meant for debugging.",
)
def transports(text: str, settings: Settings) -> Verdict:
    """No transport of NCCL is disabled."""
    del settings
    found = variables(text)
    switches = {n: _number(found, n, 0) for n in _TRANSPORTS}
    problems = [("", f"{name}={value}") for name, value in switches.items() if value]
    return judge_each(problems, f"{len(switches)} variables")


@check(
    "nccl.expected",
    source=_ENVIRONMENT,
    action="Set the variables in the launch environment.",
)
def expected(text: str, settings: Settings) -> Verdict:
    """NCCL variables have the expected values."""
    found, wanted = variables(text), settings.expect.get("nccl")
    if not wanted:
        return unknown(f"{len(found)} are set; nccl is not in the expectations")
    problems = [
        (name, f"is {found.get(name, 'not set')}, not {value}")
        for name, value in wanted.items()
        if found.get(name) != str(value)
    ]
    return judge_each(problems, f"{len(wanted)} variables")


@check(
    "nccl.names",
    source=_ENVIRONMENT,
    action="Correct the name in the launch environment.",
)
def names(text: str, settings: Settings) -> Verdict:
    """No NCCL variable is misspelt."""
    least = settings.limit("nccl.names", "min_likeness")
    problems = []
    for name in variables(text):
        if name in (*_KNOWN, *_ALSO):
            continue
        near = difflib.get_close_matches(name, _KNOWN, cutoff=least)
        if near:
            problems.append((name, f"NCCL has no such variable; it has {near[0]}"))
    return judge_each(problems, f"{len(variables(text))} variables")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A list of names as NCCL reads it: `^` excludes, `=` matches whole names."""

    is_exclusion: bool
    is_exact: bool
    items: Sequence[tuple[str, str]]
    """Items as (name or its beginning, port or empty)."""

    def matches(self, item: tuple[str, str], name: str, port: str = "") -> bool:
        """Return whether an item of the list selects a device and port."""
        begin, number = item
        fits = name == begin if self.is_exact else name.startswith(begin)
        return fits and number in ("", "-1", port)


def choice(text: str) -> Choice:
    """Return the list of names in the value of a variable.

    Raises:
      UnreadableError: it names nothing.
    """
    is_exclusion = text.startswith("^")
    rest = text.removeprefix("^")
    is_exact = rest.startswith("=")
    found = []
    for entry in rest.removeprefix("=").split(","):
        name, _, more = entry.partition(":")
        if name:
            found.append((name, more.partition(":")[0]))
    if not found:
        raise UnreadableError(f"the list names nothing: {text[:_SHOWN_CHARS]!r}")
    return Choice(is_exclusion=is_exclusion, is_exact=is_exact, items=found)


@check(
    "nccl.hca",
    source=_DEVICES,
    action="Write it as =mlx5_0,mlx5_1, with the names of `ibstat -l`.",
)
def hca(text: str, settings: Settings) -> Verdict:
    """NCCL_IB_HCA names the expected devices."""
    found, files, absent = _with_files(text)
    if "NCCL_IB_HCA" not in found:
        return unknown("NCCL_IB_HCA is not set: NCCL uses all devices")
    listed = choice(found["NCCL_IB_HCA"])
    if absent:
        return failed(f"NCCL_IB_HCA={found['NCCL_IB_HCA']}, but {absent}")
    matches = [m for path in files.paths if (m := _PORT_PATH.fullmatch(path))]
    there = [(match[1], match[2]) for match in matches]
    problems = []
    for item in listed.items:
        hits = {device for device, port in there if listed.matches(item, device, port)}
        if not hits:
            problems.append((":".join(filter(None, item)), "there is no such device"))
        elif item[0] in hits and len(hits) > 1:
            others = ", ".join(sorted(hits - {item[0]}, key=sysfs.natural))
            problems.append((item[0], f"names {others} too; put = before the list"))
    used = [p for p in there if _is_used(listed, p)]
    if not used:
        problems.append(("", "no device is left"))
    problems += _unexpected({device for device, _ in used}, settings)
    return judge_each(problems, f"{len(used)} ports", found["NCCL_IB_HCA"])


def _is_used(listed: Choice, port: tuple[str, str]) -> bool:
    is_listed = any(listed.matches(item, *port) for item in listed.items)
    return is_listed != listed.is_exclusion


def _unexpected(used: set[str], settings: Settings) -> list[tuple[str, str]]:
    """Return (device, problem) where the used devices differ from `hcas`."""
    if "hcas" not in settings.expect:
        return []
    wanted = set(map(str, settings.expect["hcas"]))
    missing = [(device, "is not used") for device in wanted - used]
    extra = [(device, "is used, but not in hcas") for device in used - wanted]
    return sorted(missing + extra, key=lambda pair: sysfs.natural(pair[0]))


@check(
    "nccl.socket_interface",
    source=_INTERFACES,
    action="Correct it with the names of `ip link`.",
)
def socket_interface(text: str, settings: Settings) -> Verdict:
    """NCCL_SOCKET_IFNAME names an interface that is up."""
    del settings
    found, files, absent = _with_files(text)
    if "NCCL_SOCKET_IFNAME" not in found:
        return unknown(
            "NCCL_SOCKET_IFNAME is not set: NCCL uses the first one that it finds"
        )
    listed = choice(found["NCCL_SOCKET_IFNAME"])
    if absent:
        raise UnreadableError(absent)
    matches = [m for path in files.paths if (m := _NET_PATH.fullmatch(path))]
    states = {match[1]: files.read(match[0]) for match in matches}
    used = [n for n in states if _is_used(listed, (n, ""))]
    up = [n for n in used if states[n] == "up"]
    if listed.is_exclusion:
        up = [name for name in up if name != "lo"]
    if not up:
        shown = ", ".join(f"{name} is {states[name]}" for name in used)
        reason = f"NCCL_SOCKET_IFNAME={found['NCCL_SOCKET_IFNAME']}: no interface is up"
        return failed(f"{reason} ({shown})" if shown else reason)
    return ok(", ".join(up))


def _with_files(text: str) -> tuple[Mapping[str, str], sysfs.Tree, str]:
    """Return the variables, the files, and the reason if there are no files."""
    environment, files = several.parts(text, 2)
    return variables(environment.text), sysfs.tree(files.text), files.absent


CHECKS = (
    timeout,
    retries,
    debug,
    transports,
    expected,
    names,
    hca,
    socket_interface,
)

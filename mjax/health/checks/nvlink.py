"""Checks of NVLinks: number of active links, their rates, their error counters.

Input: the output of `nvidia-smi nvlink -s` and `-e`. Output: verdicts.

Error counters start at 0 when a GPU is reset. NVLink 4 and older has replay, recovery
and CRC errors; NVLink 5 has other names. Both are sorted into four groups, each with a
limit. Counters before error correction (FEC, BER, raw errors) also grow on healthy
links and are ignored. Sources of the formats: https://github.com/stas00/ml-engineering
(compute/accelerator/nvidia/debug.md, H100), and outputs published by users for
`<inactive>` and NVLink 5.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from mjax.health.check import check
from mjax.health.findings import UnreadableError, Verdict, failed, ok, unknown
from mjax.health.settings import Settings
from mjax.health.sources import Command

STATUS = Command(("nvidia-smi", "nvlink", "-s"))
ERRORS = Command(("nvidia-smi", "nvlink", "-e"))

_GPU = re.compile(
    r"GPU ([0-9]{1,3}): ([^(]{1,80}?) *\(UUID: (GPU-[0-9A-Za-z-]{1,60})\)"
)
_LINK = re.compile(r"Link ([0-9]{1,3}): (.{1,120})")
_ALL_INACTIVE = re.compile(
    r"(?:NVML: )?Unable to retrieve NVLink information as all links are inActive",
    re.IGNORECASE,
)
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) GB/s")
_COUNTER = re.compile(r"([A-Za-z][A-Za-z0-9 -]{1,60}?): ([0-9]{1,20})")
_GROUPS: Mapping[str, str] = {
    "Replay Errors": "replay",
    "Recovery Errors": "recovery",
    "CRC Errors": "crc",
    "Total link recovery events": "recovery",
    "Link recovery failed events": "recovery",
    "Malformed packet Errors": "other",
    "Buffer overrun Errors": "other",
    "Rx Errors": "other",
    "Rx remote Errors": "other",
    "Rx General Errors": "other",
    "Local link integrity Errors": "other",
    "Tx discards": "other",
    "Effective Errors": "other",
    "Symbol Errors": "other",
}
_LEFT_OUT = re.compile(
    r"(?:FEC Errors - [0-9]+|Effective BER|Symbol BER|Raw BER .{1,20}|"
    r"Raw Errors .{1,20}|[TR]x (?:packets|bytes)|Link recovery successful events): .+"
)


_LINK_ACTION = (
    "Drain the host and reset all GPUs; restart nvidia-fabricmanager; if the problem "
    "stays, replace the GPU or the baseboard."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The links of one GPU."""

    index: int
    name: str
    uuid: str
    lines: Mapping[int, Sequence[str]]
    """Maps the number of a link to its lines; empty if all are inactive."""

    @property
    def label(self) -> str:
        """Name of the GPU, for a person."""
        return f"GPU {self.index} ({self.uuid})"


@functools.lru_cache
def parse(text: str) -> Sequence[Links]:
    """Return the links of each GPU.

    Raises:
      UnreadableError: a line is neither a GPU nor one of its links, or a GPU has none.
    """
    gpus: list[Links] = []
    lines: dict[int, list[str]] = {}
    is_silent = False
    for line in filter(None, map(str.strip, text.splitlines())):
        head, link = _GPU.fullmatch(line), _LINK.fullmatch(line)
        if head is not None:
            _check_links(gpus, is_silent)
            lines, is_silent = {}, False
            gpus.append(
                Links(index=int(head[1]), name=head[2], uuid=head[3], lines=lines)
            )
        elif link is not None and gpus and not is_silent:
            lines.setdefault(int(link[1]), []).append(link[2])
        elif _ALL_INACTIVE.fullmatch(line) and gpus and not lines:
            is_silent = True
        else:
            raise UnreadableError(f"expected a link, got {line!r:.60}")
    _check_links(gpus, is_silent)
    if not gpus or not text.endswith("\n"):
        raise UnreadableError("it lists no GPU, or ends early")
    if len({gpu.index for gpu in gpus}) != len(gpus) or len(
        {gpu.uuid for gpu in gpus}
    ) != len(gpus):
        raise UnreadableError("a GPU appears twice")
    return gpus


def _check_links(gpus: Sequence[Links], is_silent: bool) -> None:
    """Raise if links of the last GPU are missing or not numbered from 0."""
    if not gpus or is_silent:
        return
    if not gpus[-1].lines or list(gpus[-1].lines) != [*range(len(gpus[-1].lines))]:
        raise UnreadableError(f"{gpus[-1].label}: some of its links are not listed")


def _rates(gpu: Links) -> Mapping[int, float]:
    """Return the rate of each active link in GB/s, by the number of the link."""
    rates = {}
    for link, lines in gpu.lines.items():
        found = _RATE.fullmatch(lines[0])
        if len(lines) != 1 or (found is None and lines[0] != "<inactive>"):
            raise UnreadableError(f"{gpu.label}: link {link} is {lines[0]!r:.60}")
        if found is not None:
            rates[link] = float(found[1])
    return rates


def _missing(gpus: Sequence[Links], settings: Settings) -> str:
    """Return the problem with the number of GPUs; empty if there is none."""
    wanted = settings.expect.get("gpus")
    if wanted is not None and len(gpus) != wanted:
        return f"{len(gpus)} GPUs of {wanted} are listed"
    return ""


@check("nvlink.active_links", source=STATUS, action=_LINK_ACTION)
def active_links(text: str, settings: Settings) -> Verdict:
    """Each GPU has all its NVLinks.

    Without the expectation `nvlinks`, inactive links fail the host only if their number
    differs between GPUs. If all GPUs have the same number, that may be the design of
    the host.
    """
    gpus, wanted = parse(text), settings.expect.get("nvlinks")
    active = {gpu.label: len(_rates(gpu)) for gpu in gpus}
    most = max(active.values()) if wanted is None else wanted
    bad = [_missing(gpus, settings)]
    bad += [
        f"{gpu.label}: {active[gpu.label]} of {most} links are active{_down(gpu)}"
        for gpu in gpus
        if active[gpu.label] != most
    ]
    fewest = min(active.values())
    if any(bad):
        return failed("; ".join(filter(None, bad)), f"{fewest} links", most)
    if wanted is None and (not most or any(map(_down, gpus))):
        return unknown(f"{most} links are active; nvlinks is not in the expectations")
    return ok(f"{fewest} links", most)


def _down(gpu: Links) -> str:
    down = [str(link) for link in gpu.lines if link not in _rates(gpu)]
    return f" (inactive: {', '.join(down)})" if down else ""


@check("nvlink.rate", source=STATUS, action=_LINK_ACTION)
def rate(text: str, settings: Settings) -> Verdict:
    """Each NVLink has its full rate."""
    known = settings.limit("nvlink.rate", "gb_per_s")
    bad = [_missing(parse(text), settings)]
    slowest = float("inf")
    for gpu in parse(text):
        words = re.findall(r"[A-Za-z0-9]+", gpu.name)
        wanted = next((known[word] for word in words if word in known), None)
        if wanted is None:
            return unknown(f"{gpu.label}: gb_per_s of {gpu.name} is not in the limits")
        rates = _rates(gpu)
        if not rates:
            return unknown(f"{gpu.label}: no link is active")
        slow = {link: has for link, has in rates.items() if has < wanted}
        slowest = min(slowest, *rates.values())
        bad += [
            f"{gpu.label}: link {link} has {has:g} of {wanted:g} GB/s"
            for link, has in slow.items()
        ]
    if any(bad):
        return failed("; ".join(filter(None, bad)), f"{slowest:g} GB/s", "full rate")
    return ok(f"{slowest:g} GB/s", limit="full rate")


def _counters(gpu: Links) -> Mapping[int, Mapping[str, int]]:
    """Return the errors by number of the link and counter.

    All links must have the same counters.
    """
    links = {}
    for link, lines in gpu.lines.items():
        counters: dict[str, int] = {}
        for line in lines:
            found = _COUNTER.fullmatch(line)
            if found is not None and found[1] in _GROUPS and found[1] not in counters:
                counters[found[1]] = int(found[2])
            elif _LEFT_OUT.fullmatch(line) is None:
                raise UnreadableError(f"{gpu.label}: link {link}: {line!r:.60}")
        links[link] = counters
    if len({tuple(counters) for counters in links.values()} - {()}) != 1 or not all(
        links.values()
    ):
        raise UnreadableError(f"{gpu.label}: not all links have all counters")
    return links


@check(
    "nvlink.errors",
    source=ERRORS,
    action=f"Look for Xid 74 and 144 to 150 in dmesg. {_LINK_ACTION}",
)
def errors(text: str, settings: Settings) -> Verdict:
    """NVLinks have counted few errors since the last reset."""
    gpus = parse(text)
    bad = [_missing(gpus, settings)]
    worst = 0
    counters = [_counters(gpu) for gpu in gpus]
    if len({len(links) for links in counters}) != 1:
        raise UnreadableError("the GPUs do not have the same number of links")
    for gpu, links in zip(gpus, counters, strict=True):
        for link, names in links.items():
            for name, number in names.items():
                most = settings.limit("nvlink.errors", f"max_{_GROUPS[name]}")
                worst = max(worst, number)
                if number > most:
                    bad.append(f"{gpu.label}: link {link}: {name} {number}")
    if any(bad):
        return failed("; ".join(filter(None, bad)), f"{worst} errors", "few errors")
    return ok(f"{worst} errors", limit="few errors")


CHECKS = (
    active_links,
    rate,
    errors,
)

"""Compare the links of a cluster with the cables in its file.

Input: a `Cluster`, and the links that its nodes report. Output: a report of missing
cables, swapped cables, cables on a wrong rail, links that are not in the file, slow
links, and silent nodes. The verdict is `ok` only if every cable was seen at its rate in
the file, no other link was seen, and no source was truncated. If a source is
incomplete, the verdict is `incomplete`, whatever the findings.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from mjax.health.cluster.contradictions import few
from mjax.health.cluster.host_reports import Finding
from mjax.health.cluster.links import Observation
from mjax.health.cluster.miswiring import Search, finding
from mjax.health.cluster.parts import Cable, Cluster, Port, switch_groups
from mjax.health.cluster.seen_links import SeenLinks

Verdict = Literal["ok", "failed", "incomplete"]
_MAX_PROBLEMS = 20
"""Maximum number of problems shown of an incomplete comparison. Two dumps of different
fabrics give a problem for each of 10,000 ports."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CablingReport:
    """The result of the comparison."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    """Differences from the file."""
    problems: tuple[str, ...]
    """Why the comparison is incomplete."""
    num_cables: int
    """Number of cables to find."""
    num_matched: int
    """Number of cables found in their places."""


def verdict(findings: Sequence[Finding], problems: Sequence[str]) -> Verdict:
    """Return the verdict for findings and problems."""
    if problems:
        return "incomplete"
    return "failed" if findings else "ok"


def compare(
    cluster: Cluster,
    observations: Sequence[Observation],
    *,
    fabrics: Collection[str] = ("infiniband", "ethernet"),
    rates: Mapping[Port, float] | None = None,
) -> CablingReport:
    """Compare the cables of a file with links that were seen.

    Args:
      cluster: the specification.
      observations: the links that were seen.
      fabrics: fabrics whose cables are checked.
      rates: rates of ports in Gb/s, for links whose source gives none.
    """
    wanted = [cable for cable in cluster.cables if cable.fabric in fabrics]
    seen = SeenLinks(cluster, observations, rates or {})
    silent = _silent_fabrics(seen, wanted)
    # The state of silent fabrics is unknown: their cables are not reported as missing.
    cables = [cable for cable in wanted if cable.fabric not in silent]
    matched = {cable for cable in cables if seen.has(cable)}
    search = Search(cluster, seen, [c for c in cables if c not in matched], cables)
    findings = [
        *search.find(),
        *_extra(seen, cables, search.explained),
        *_slow(seen, matched),
        *_silent(seen, cables, cluster),
        *_islands(seen, cluster, fabrics),
        *(
            Finding(kind="identity", text=text, nodes=(name,))
            for name, text in seen.resolver.disagreements.items()
        ),
    ]
    problems = _limited([*seen.problems, *_unjudged(seen, matched, search, silent)])
    return CablingReport(
        verdict=verdict(findings, problems),
        findings=tuple(findings),
        problems=tuple(problems),
        num_cables=len(wanted),
        num_matched=len(matched),
    )


def _extra(
    seen: SeenLinks, cables: Iterable[Cable], explained: Collection[Port]
) -> Iterator[Finding]:
    """Yield the links that have no cable in the file."""
    known = {cable.low for cable in cables} | {cable.high for cable in cables}
    known |= {
        peer
        for cable in cables
        if seen.has(cable) and isinstance(peer := seen.peers[cable.low], Port)
    }
    known |= {*explained}
    told: set[Port] = set()
    for port, peer in seen.peers.items():
        if port in known or port in told or peer in known:
            continue
        told |= {port} | ({peer} if isinstance(peer, Port) else set())
        text = f"{port} is joined with {peer}, but the file has no such cable"
        yield Finding(kind="extra", text=text, nodes=(port.node,))
    if seen.foreign:
        first = seen.foreign[0]
        text = (
            f"{len(seen.foreign)} links join nodes that the file does not name, first"
        )
        text = f"{text} {first.end} with {first.peer}; add them, or name them in ignore"
        yield Finding(kind="extra", text=text)


def _slow(seen: SeenLinks, matched: Iterable[Cable]) -> Iterator[Finding]:
    """Yield the cables whose link is slower than in the file or not active."""
    for cable in sorted(matched, key=lambda one: (one.low, one.high)):
        found = seen.rate_gbps(cable)
        if found is not None and cable.rate_gbps and found < cable.rate_gbps:
            text = f"{cable} runs at {found:g} Gb/s, but the file says"
            yield finding("slow", f"{text} {cable.rate_gbps}", cable)
        for end in (cable.low, cable.high):
            state = seen.states.get(end)
            if state and state != "Active":
                yield finding("not active", f"{cable}: {end} is {state}", cable)


def _silent(
    seen: SeenLinks, cables: Iterable[Cable], cluster: Cluster
) -> Iterator[Finding]:
    """Yield a finding that names the hosts without a NIC in any source."""
    heard = {port.node for port in seen.peers} | seen.nodes
    hosts = {c.low.node for c in cables if c.low.node in cluster.hosts}
    silent = [name for name in cluster.hosts if name in hosts and name not in heard]
    if silent:
        text = f"{len(silent)} hosts do not report: {few(silent)}"
        yield Finding(kind="silent hosts", text=text, nodes=tuple(silent))


def _islands(
    seen: SeenLinks, cluster: Cluster, fabrics: Collection[str]
) -> Iterator[Finding]:
    """Yield the fabrics whose switches form more separate parts than in the file."""
    links = [
        (port.node, peer.node)
        for port, peer in seen.peers.items()
        if isinstance(peer, Port)
    ]
    for fabric in fabrics:
        heard = [
            switch.name
            for switch in cluster.switches.values()
            if switch.fabric == fabric and switch.name in seen.nodes
        ]
        parts = switch_groups(heard, links)
        if len(parts) > cluster.islands:
            shown = "; ".join(f"{len(part)} with {few(part)}" for part in parts[:8])
            text = f"the switches on {fabric} make {len(parts)} parts, but the file"
            text = f"{text} says {cluster.islands}: {shown}"
            yield Finding(kind="islands", text=text)


def _silent_fabrics(seen: SeenLinks, cables: Sequence[Cable]) -> list[str]:
    """Return the fabrics with no port in any source."""
    found = []
    for fabric in sorted({cable.fabric for cable in cables}):
        ends = {end for c in cables if c.fabric == fabric for end in (c.low, c.high)}
        if not (ends & seen.peers.keys() or {end.node for end in ends} & seen.nodes):
            found.append(fabric)
    return found


def _unjudged(
    seen: SeenLinks, matched: Collection[Cable], search: Search, silent: Sequence[str]
) -> Iterator[str]:
    """Yield the reasons why cables cannot be judged.

    Args:
      seen: the links that were seen.
      matched: cables in their places.
      search: the search for all other cables.
      silent: fabrics without any report.
    """
    for fabric in silent:
        yield (
            f"no source reports the cables on {fabric}; give a dump of it, or name the "
            "other fabric in --fabrics"
        )
    if search.unseen:
        yield (
            f"no source reports either end of {len(search.unseen)} cables, first "
            f"{search.unseen[0]}; give the output of their switches too"
        )
    num = sum(1 for c in matched if c.rate_gbps and seen.rate_gbps(c) is None)
    if num:
        yield (
            f"the rates of {num} cables are not known; give reports of hosts, or leave "
            "rate_gbps out of the file"
        )


def _limited(problems: Sequence[str]) -> list[str]:
    """Return the first problems, and the number of the others."""
    num_more = len(problems) - _MAX_PROBLEMS
    more = [f"and {num_more} more"] if num_more > 0 else []
    return [*problems[:_MAX_PROBLEMS], *more]

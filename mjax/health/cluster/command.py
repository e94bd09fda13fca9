"""`python -m mjax.health cluster`: compare a cluster with its specification.

    cluster check  --cluster FILE [--fabric-dump FILE] [--lldp DIR] [--reports DIR]
    cluster place  --cluster FILE --pp 4 --dp 96 [--hosts gpu[001-048]]
    cluster expect --cluster FILE --host gpu001
    cluster show   --cluster FILE

Exit codes: 0 the cluster matches the file, 1 it differs or a source is incomplete, 2
bad input.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax import printable
from mjax.cli import exit_codes
from mjax.cli.flags.standard import ArgumentParser
from mjax.health.checks.table import BY_NAME
from mjax.health.cluster import cabling, fabric_dump, host_reports, lldp, placement
from mjax.health.cluster import file as cluster_file
from mjax.health.cluster.cabling import CablingReport
from mjax.health.cluster.contradictions import few
from mjax.health.cluster.host_reports import Finding, HostReport
from mjax.health.cluster.links import Observation
from mjax.health.cluster.neighbours import MeshSizes
from mjax.health.cluster.parts import TIERS, Cluster
from mjax.health.cluster.ranges import expand

_SHOWN = 40
"""Number of printed findings; --json has all. That many findings fill two screens."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
      SystemExit: argparse has printed the help (code 0) or a syntax error in the flags
        (code 2).
    """
    args = _parser().parse_args([*argv])
    run: Callable[[argparse.Namespace, Cluster], int] = args.run
    try:
        return run(args, cluster_file.read(args.cluster, [*BY_NAME]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m mjax.health cluster",
        description=(__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True)
    check = _command(
        commands, "check", _check, "compare the file with the real cluster"
    )
    add = check.add_argument
    add("--fabric-dump", type=Path, help="output of iblinkinfo --line or ibnetdiscover")
    add("--switches-only", action="store_true", help="the dump is of switches only")
    add(
        "--lldp",
        type=Path,
        help="folder with HOST.json, the output of lldpcli show neighbors",
    )
    add(
        "--reports",
        type=Path,
        help="folder with HOST.json, the output of health check --json",
    )
    add(
        "--fabrics",
        nargs="+",
        choices=["infiniband", "ethernet"],
        default=["infiniband", "ethernet"],
        help="fabrics whose cables to check",
    )
    place = _command(commands, "place", _place, "order hosts for a mesh")
    add = place.add_argument
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--dp", type=int, default=1, help="data-parallel size")
    add(
        "--dp-shard",
        type=int,
        help="number of devices over which state is sharded; absent: dp",
    )
    add("--tp", type=int, default=1, help="tensor-parallel size, inside a host")
    wraps = "the last stage sends to the first, as with --pipeline.chunks > 1"
    add("--pipeline-wraps", action="store_true", help=wraps)
    add("--hosts", default="", help="usable hosts; absent: all")
    add("--seed", type=int, default=0, help="seed of the random orders")
    expect = _command(
        commands, "expect", _expect, "write a file for --expect of health check"
    )
    expect.add_argument("--host", required=True, help="name of the host in the file")
    _command(commands, "show", _show, "summarise the file")
    return parser


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace, Cluster], int],
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, allow_abbrev=False)
    parser.add_argument("--cluster", type=Path, required=True, help="the cluster file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def _check(args: argparse.Namespace, cluster: Cluster) -> int:
    observations = [*_observations(args)]
    reports, problems = _reports(args.reports)
    findings: list[Finding] = []
    cables: CablingReport | None = None
    if observations:
        rates = host_reports.rates(reports)
        cables = cabling.compare(
            cluster, observations, fabrics=args.fabrics, rates=rates
        )
        findings += cables.findings
        problems += cables.problems
    if args.reports is not None:
        found, more = host_reports.compare(cluster, reports)
        findings, problems = [*findings, *found], [*problems, *more]
    verdict = cabling.verdict(findings, problems)
    if args.json:
        print(json.dumps(_as_json(verdict, findings, problems, cables)))
    else:
        print("\n".join(_lines(cluster, verdict, findings, problems, cables)))
        if not observations and args.reports is None:
            print(
                "checked only the file; give --fabric-dump, --lldp or --reports to "
                "compare"
            )
    return 0 if verdict == "ok" else 1


def _observations(args: argparse.Namespace) -> Iterator[Observation]:
    """Yield the observation of each given source."""
    if args.switches_only and args.fabric_dump is None:
        raise ValueError("--switches-only describes --fabric-dump; give both")
    if args.fabric_dump is not None:
        path: Path = args.fabric_dump
        try:
            with path.open("rb") as file:
                lines = fabric_dump.lines_of(file)
                yield fabric_dump.read(
                    lines, str(path), switches_only=args.switches_only
                )
        except OSError as error:
            raise ValueError(
                f"--fabric-dump {path} cannot be read: {error.strerror}"
            ) from error
    if args.lldp is not None:
        for path in _files(args.lldp, "--lldp"):
            yield lldp.read(_bytes(path, lldp.MAX_BYTES), path.stem, str(path))


def _reports(folder: Path | None) -> tuple[list[HostReport], list[str]]:
    """Return the readable reports of hosts, and why others cannot be read."""
    reports: list[HostReport] = []
    problems: list[str] = []
    for path in [] if folder is None else _files(folder, "--reports"):
        try:
            reports.append(host_reports.read(_bytes(path, host_reports.MAX_BYTES)))
        except ValueError as error:
            problems.append(f"{path} is not a report of health check --json: {error}")
    return reports, problems


def _files(folder: Path, flag: str) -> list[Path]:
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {folder} is not a folder")
    found = sorted(folder.glob("*.json"))
    if not found:
        raise ValueError(f"{flag} {folder} has no file HOST.json")
    return found


def _bytes(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > limit:
        raise ValueError(f"{path} has more than {limit} bytes")
    return text


def _as_json(
    verdict: str,
    findings: Sequence[Finding],
    problems: Sequence[str],
    cables: CablingReport | None,
) -> dict[str, Any]:
    return {
        "ok": verdict == "ok",
        "verdict": verdict,
        "cables": None if cables is None else cables.num_cables,
        "matched": None if cables is None else cables.num_matched,
        "findings": [dataclasses.asdict(one) for one in findings],
        "problems": [*problems],
    }


def _lines(
    cluster: Cluster,
    verdict: str,
    findings: Sequence[Finding],
    problems: Sequence[str],
    cables: CablingReport | None,
) -> Iterator[str]:
    """Yield the lines of a report for a person."""
    for one in findings[:_SHOWN]:
        yield f"{one.kind:>20}  {printable(one.text, kept='')}"
    if len(findings) > _SHOWN:
        yield f"{'':>20}  and {len(findings) - _SHOWN} more; --json shows all"
    for problem in problems:
        yield f"{'incomplete':>20}  {printable(problem, kept='')}"
    seen = ""
    if cables is not None:
        seen = f", {cables.num_matched} of {cables.num_cables} cables in their places"
    yield f"{cluster.name}: {verdict}, {len(findings)} findings{seen}"


def _place(args: argparse.Namespace, cluster: Cluster) -> int:
    sizes = MeshSizes(
        pp=args.pp,
        dp=args.dp,
        dp_shard=args.dp_shard,
        tp=args.tp,
        pipeline_wraps=args.pipeline_wraps,
    )
    hosts = expand(args.hosts) if args.hosts else None
    found = placement.place(cluster, sizes, hosts=hosts, seed=args.seed)
    if args.json:
        print(json.dumps(found.to_json()))
        return 0
    score, before = found.score, found.file_order
    print("\n".join(found.hosts))
    print(
        f"of {score.num_pairs} pairs of neighbours {score.leaf} cross a leaf and "
        f"{score.spine} a spine; in the order of the file {before.leaf} and "
        f"{before.spine}; a random order scores {found.random_mean:.0f}, the file's "
        f"{before.total}, this one {score.total}",
        file=sys.stderr,
    )
    return 0


def expectations(cluster: Cluster, host: str) -> dict[str, Any]:
    """Return the expectations of a host, by key of `mjax.health.settings.EXPECTED`.

    Raises:
      ValueError: the file has no such host.
    """
    if host not in cluster.hosts:
        raise ValueError(f"--host {host}: the cluster file has no such host")
    one = cluster.hosts[host]
    found: dict[str, Any] = {"gpus": one.num_gpus, "require": [*cluster.require]}
    cabled = [nic for nic in one.nics if nic.name in cluster.leaves[host]]
    # Next to InfiniBand, Ethernet is only for login and storage; no run uses it.
    cabled = [nic for nic in cabled if nic.fabric == "infiniband"] or cabled
    rates = {nic.rate_gbps for nic in cabled}
    if cabled:
        found["ports"] = len(cabled)
    if len(rates) == 1 and None not in rates:
        found["port_rate_gbps"] = rates.pop()
    if cluster.versions:
        found["versions"] = dict(cluster.versions)
    return found


def _expect(args: argparse.Namespace, cluster: Cluster) -> int:
    found = expectations(cluster, args.host)
    if args.json:
        print(json.dumps(found))
        return 0
    for key, value in found.items():
        if not isinstance(value, dict):
            print(f"{key} = {json.dumps(value)}")
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"[{key}]")
            for name, text in value.items():
                print(f"{json.dumps(name)} = {json.dumps(text)}")
    return 0


def _show(args: argparse.Namespace, cluster: Cluster) -> int:
    tiers = Counter(switch.tier for switch in cluster.switches.values())
    facts: dict[str, Any] = {
        "name": cluster.name,
        "hosts": len(cluster.hosts),
        "gpus": sum(host.num_gpus for host in cluster.hosts.values()),
        "nics": sum(len(host.nics) for host in cluster.hosts.values()),
        "racks": len(cluster.racks),
        "switches": {tier: tiers[tier] for tier in TIERS if tiers[tier]},
        "cables": len(cluster.cables),
        "guids": len(cluster.guids),
        "require": [*cluster.require],
        "versions": dict(cluster.versions),
    }
    if args.json:
        leaves = {host: [*found.values()] for host, found in cluster.leaves.items()}
        print(json.dumps(facts | {"leaves": leaves}))
        return 0
    switches = ", ".join(f"{num} {tier}" for tier, num in facts["switches"].items())
    print(f"{cluster.name}: {facts['hosts']} hosts with {facts['gpus']} GPUs and")
    print(f"  {facts['nics']} NICs, {facts['racks']} racks, switches: {switches},")
    print(f"  {facts['cables']} cables, {facts['guids']} GUIDs")
    groups: dict[str, list[str]] = {}
    for host, found in cluster.leaves.items():
        groups.setdefault(", ".join(dict.fromkeys(found.values())), []).append(host)
    for leaves, hosts in groups.items():
        print(f"  {leaves or 'no leaf'}: {len(hosts)} hosts, {few(hosts)}")
    return 0

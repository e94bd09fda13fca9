"""Check names, ports and a process group on this host."""

import ipaddress
import sys
from collections.abc import Sequence

from mjax.doctor.facts import Facts, check, probe
from mjax.health.check import Check
from mjax.health.findings import Verdict, failed, judge_each, ok
from mjax.health.sources import Command

_GROUP = Command(
    (
        *(sys.executable, "-m", "mjax.health", "init", "--json", "--repeats", "1"),
        *("--processes", "2", "--clients"),
    )
)
"""Command that starts a group of two processes, each with one CPU device."""


def host_name(facts: Facts, *, hosts: int) -> Verdict:
    """Check that this host's name resolves to an address that other hosts can use."""
    if facts["error"]:
        return failed(facts["error"])
    addresses = facts["addresses"]
    shown = f"{facts['name']} is {', '.join(addresses)}"
    is_local = all(
        ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in addresses
    )
    if hosts > 1 and is_local:
        return failed(f"{shown}: other hosts that use it connect to themselves")
    return ok(shown)


def free_ports(facts: Facts) -> Verdict:
    """Check that the ports on which the run will listen are free."""
    return judge_each((f"port {port}", why) for port, why in facts["taken"].items())


def reached(facts: Facts) -> Verdict:
    """Check that the addresses to which the run will connect answer."""
    return judge_each(facts["silent"].items())


def group(facts: Facts) -> Verdict:
    """Check that two processes connect, compare their software, and add a number."""
    slowest = sum(phase["slowest_s"]["2"] for phase in facts["phases"])
    return ok(f"2 processes met in {slowest:.1f} s")


def checks(hosts: int, ports: Sequence[int], connect: Sequence[str]) -> list[Check]:
    """Return the checks of names, ports and a process group.

    Args:
      hosts: number of hosts of the run.
      ports: ports on which the run will listen on this host.
      connect: addresses host:port to which the run will connect.
    """
    found = [
        check(
            "network.host_name",
            "The name of this host resolves to an address that reaches it.",
            probe("host_name"),
            lambda facts: host_name(facts, hosts=hosts),
            "give the name this host's address in DNS or /etc/hosts, not 127.0.1.1",
        )
    ]
    if ports:
        found.append(
            check(
                "network.ports",
                "Ports that the run will listen on are free.",
                probe("ports", *map(str, ports)),
                free_ports,
                "end the processes that use them (ss -ltnp), or choose other ports",
            )
        )
    if connect:
        found.append(
            check(
                "network.connect",
                "Addresses that the run will connect to answer.",
                probe("connect", *connect),
                reached,
                "start the service that should listen there; open the port in "
                "firewalls",
            )
        )
    found.append(
        check(
            "network.group",
            "Two processes of this host connect and sum a number.",
            _GROUP,
            group,
            "run python -m mjax.health init --processes 2, and read what it says",
            failing={1: "the processes did not meet"},
        )
    )
    return found

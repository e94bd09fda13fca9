"""Checks of the error counters of InfiniBand and RoCE ports.

The counters count since the driver was loaded, or since `perfquery -R`. Their limits
grow with the time since boot (see `sysfs`), and the limit of symbol errors with the
bits that the link can carry in that time, so that a recently booted host does not pass
because of low counts, and an old one does not fail forever. Counters of the InfiniBand
specification stop at their largest value (4, 8 or 16 bits). A counter at that value
gives no information, and fails the host until it is reset.

Sources: names and meaning: Documentation/ABI/stable/sysfs-class-infiniband; width of
the counters: drivers/infiniband/core/sysfs.c (PORT_PMA_ATTR); hw_counters of mlx5:
drivers/infiniband/hw/mlx5/counters.c, all at https://github.com/torvalds/linux;
https://git.zx2c4.com/linux-dev/commit/?id=0ad17a8f7fa000cbfc51eedd7fddd20f7664e4b6 and
https://git.zx2c4.com/linux-dev/commit/?id=d7fab916374c8f5488ca792c57ea8b72e8631213
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mjax.health.check import check
from mjax.health.checks import ports, sysfs
from mjax.health.checks.ports import ROOT, Port
from mjax.health.findings import Verdict, judge_each
from mjax.health.settings import Settings
from mjax.health.several import Called
from mjax.health.sources import Files

_SOURCE = Called(
    f"{ROOT}/*/ports/*/*counters",
    Files(
        (
            f"{ROOT}/*/ports/*/link_layer",
            f"{ROOT}/*/ports/*/rate",
            f"{ROOT}/*/ports/*/counters/*",
            f"{ROOT}/*/ports/*/hw_counters/*",
            sysfs.UPTIME,
        )
    ),
)
_LARGEST: Mapping[str, int] = MappingProxyType(
    {
        "counters/symbol_error": 0xFFFF,
        "counters/link_error_recovery": 0xFF,
        "counters/link_downed": 0xFF,
        "counters/port_rcv_errors": 0xFFFF,
        "counters/port_rcv_remote_physical_errors": 0xFFFF,
        "counters/port_xmit_discards": 0xFFFF,
        "counters/port_xmit_constraint_errors": 0xFF,
        "counters/port_rcv_constraint_errors": 0xFF,
        "counters/local_link_integrity_errors": 0xF,
        "counters/excessive_buffer_overrun_errors": 0xF,
        "counters/VL15_dropped": 0xFFFF,
    }
)
"""Value at which a counter of the specification stops."""
_BITS_PER_GBIT = 1e9
_S_PER_HOUR = 3600


_CABLE = "Reseat and clean the transceiver, then replace the cable."
_RESET = "After a repair, reset the counters with `perfquery -R`."
_FABRIC = (
    "Compare with other hosts: if many have it, suspect the fabric, otherwise the "
    "cable."
)


@check("counters.symbol_errors", source=_SOURCE, action=f"{_CABLE} {_RESET}")
def symbol_errors(text: str, settings: Settings) -> Verdict:
    """No link has more bit errors than the specification allows."""
    files = sysfs.tree(text)
    hours = sysfs.hours_up(files)
    max_rate = settings.limit("counters.symbol_errors", "max_bit_error_rate")
    problems, worst = [], 0.0
    for port in ports.ports(files, settings):
        found = port.files.number(port.path("counters/symbol_error"))
        bits = port.rate.gbps * _BITS_PER_GBIT * _S_PER_HOUR * hours
        worst = max(worst, found / max(bits, 1.0))
        if found > max_rate * bits or found == _LARGEST["counters/symbol_error"]:
            problems.append((port.name, f"{found} symbol errors in {hours:.1f} h"))
    return judge_each(problems, f"{worst:.1e} per bit", f"at most {max_rate:g}")


@check("counters.link_downed", source=_SOURCE, action=f"{_CABLE} {_RESET}")
def link_downed(text: str, settings: Settings) -> Verdict:
    """No link goes down repeatedly."""
    return _within(text, settings, "counters.link_downed", ["counters/link_downed"])


@check("counters.link_error_recovery", source=_SOURCE, action=f"{_CABLE} {_RESET}")
def link_error_recovery(text: str, settings: Settings) -> Verdict:
    """No link recovers from errors repeatedly."""
    names = ["counters/link_error_recovery"]
    return _within(text, settings, "counters.link_error_recovery", names)


@check("counters.receive_errors", source=_SOURCE, action=f"{_CABLE} {_RESET}")
def receive_errors(text: str, settings: Settings) -> Verdict:
    """Packets arrive without errors."""
    names = ["counters/port_rcv_errors"]
    return _within(text, settings, "counters.receive_errors", names)


@check(
    "counters.remote_physical",
    source=_SOURCE,
    action="Look for the switch port with symbol errors before this host.",
)
def remote_physical(text: str, settings: Settings) -> Verdict:
    """No packet was marked bad on an earlier link."""
    names = ["counters/port_rcv_remote_physical_errors"]
    return _within(text, settings, "counters.remote_physical", names)


@check("counters.transmit_discards", source=_SOURCE, action=_FABRIC)
def transmit_discards(text: str, settings: Settings) -> Verdict:
    """No packets are discarded before they are sent."""
    names = ["counters/port_xmit_discards"]
    return _within(text, settings, "counters.transmit_discards", names)


@check(
    "counters.constraint_errors",
    source=_SOURCE,
    action="Compare the partition keys of this port with the subnet manager's.",
)
def constraint_errors(text: str, settings: Settings) -> Verdict:
    """No packets are refused because of their partition."""
    names = [
        "counters/port_xmit_constraint_errors",
        "counters/port_rcv_constraint_errors",
    ]
    return _within(text, settings, "counters.constraint_errors", names)


@check("counters.link_integrity", source=_SOURCE, action=f"{_CABLE} {_RESET}")
def link_integrity(text: str, settings: Settings) -> Verdict:
    """Physical errors stay below the threshold of the link."""
    names = ["counters/local_link_integrity_errors"]
    return _within(text, settings, "counters.link_integrity", names)


@check("counters.buffer_overruns", source=_SOURCE, action=f"{_CABLE} {_RESET}")
def buffer_overruns(text: str, settings: Settings) -> Verdict:
    """No input buffer overruns."""
    names = ["counters/excessive_buffer_overrun_errors"]
    return _within(text, settings, "counters.buffer_overruns", names)


@check(
    "counters.vl15_dropped",
    source=_SOURCE,
    action="Read the log of the subnet manager.",
)
def vl15_dropped(text: str, settings: Settings) -> Verdict:
    """Packets of the subnet manager are not dropped."""
    return _within(text, settings, "counters.vl15_dropped", ["counters/VL15_dropped"])


@check(
    "counters.out_of_sequence",
    source=_SOURCE,
    action=f"{_FABRIC} Adaptive routing reorders too: raise the limit there.",
)
def out_of_sequence(text: str, settings: Settings) -> Verdict:
    """Packets arrive in order."""
    names = ["hw_counters/out_of_sequence", "hw_counters/packet_seq_err"]
    return _within(text, settings, "counters.out_of_sequence", names)


@check("counters.ack_timeouts", source=_SOURCE, action=_FABRIC)
def ack_timeouts(text: str, settings: Settings) -> Verdict:
    """Acknowledgements arrive in time."""
    names = ["hw_counters/local_ack_timeout_err"]
    return _within(text, settings, "counters.ack_timeouts", names)


@check(
    "counters.receiver_not_ready",
    source=_SOURCE,
    action="Look for slow processes on this host and its peers.",
)
def receiver_not_ready(text: str, settings: Settings) -> Verdict:
    """Receivers have buffers when packets arrive."""
    names = ["hw_counters/rnr_nak_retry_err", "hw_counters/out_of_buffer"]
    return _within(text, settings, "counters.receiver_not_ready", names)


@check("counters.retransmissions", source=_SOURCE, action=_FABRIC)
def retransmissions(text: str, settings: Settings) -> Verdict:
    """RoCE resends few packets."""
    names = ["hw_counters/roce_adp_retrans", "hw_counters/roce_adp_retrans_to"]
    return _within(text, settings, "counters.retransmissions", names, is_roce=True)


@check(
    "counters.icrc",
    source=_SOURCE,
    action=f"{_CABLE} Then suspect a switch that changes packets.",
)
def icrc(text: str, settings: Settings) -> Verdict:
    """The checksum of every RoCE packet is right."""
    names = ["hw_counters/rx_icrc_encapsulated"]
    return _within(text, settings, "counters.icrc", names, is_roce=True)


@check(
    "counters.congestion",
    source=_SOURCE,
    action="Compare PFC and ECN of the switches; look for colliding routes.",
)
def congestion(text: str, settings: Settings) -> Verdict:
    """Few RoCE packets were marked as congested."""
    files = sysfs.tree(text)
    most = settings.limit("counters.congestion", "max_percent")
    problems, worst = [], 0.0
    for port in ports.of_layer(files, settings, ports.ETHERNET):
        marked = _number(port, "hw_counters/np_ecn_marked_roce_packets")
        percent = 100 * marked / max(1, _number(port, "counters/port_rcv_packets"))
        worst = max(worst, percent)
        if percent > most:
            problems.append((port.name, f"{percent:.2f}% of its packets are marked"))
    return judge_each(problems, f"{worst:.2f}%", f"at most {most:g}%")


def _number(port: Port, name: str) -> int:
    return port.files.number(port.path(name))


def _within(
    text: str,
    settings: Settings,
    check: str,
    names: Sequence[str],
    *,
    is_roce: bool = False,
) -> Verdict:
    """Compare counters of every port with the number allowed since boot."""
    files = sysfs.tree(text)
    hours = sysfs.hours_up(files)
    most = sysfs.allowed(settings, check, hours)
    roce = ports.of_layer(files, settings, ports.ETHERNET) if is_roce else []
    found = roce or ports.ports(files, settings)
    counts = [(port, name, _number(port, name)) for port in found for name in names]
    problems = []
    for port, name, count in counts:
        short = name.rpartition("/")[-1]
        if count == _LARGEST.get(name):
            problems.append((port.name, f"{short} stopped at {count}; reset it"))
        elif count > most:
            problems.append((port.name, f"{short} is {count} in {hours:.1f} h"))
    worst = max(count for _, _, count in counts)
    return judge_each(problems, worst, f"at most {most:.4g} in {hours:.1f} h")


CHECKS = (
    symbol_errors,
    link_downed,
    link_error_recovery,
    receive_errors,
    remote_physical,
    transmit_discards,
    constraint_errors,
    link_integrity,
    buffer_overruns,
    vl15_dropped,
    out_of_sequence,
    ack_timeouts,
    receiver_not_ready,
    retransmissions,
    icrc,
    congestion,
)

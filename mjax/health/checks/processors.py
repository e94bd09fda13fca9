"""Checks of the processors: number, threads, NUMA nodes, clocks, microcode, load.

Sources of the formats: /sys/devices/system/cpu and /sys/devices/system/node after the
kernel's Documentation/ABI, /proc/cpuinfo and /proc/loadavg after proc_cpuinfo(5) and
proc_loadavg(5). A virtual machine has no cpufreq; the checks of the governor and the
frequency are then unknown.
"""

import functools
import re
from collections.abc import Mapping

from mjax.health.check import check
from mjax.health.findings import (
    KEPT_TEXTS,
    MOST_NAMED,
    UnreadableError,
    Verdict,
    failed,
    judge_each,
    ok,
    quoted,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.small_files import lines_of, values
from mjax.health.sources import File, Files

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"
_LISTS = Files((f"{_CPU}/online", f"{_CPU}/present"))
_SMT = File(f"{_CPU}/smt/active")
_FREQUENCY = Files(
    (
        f"{_CPU}/cpu[0-9]*/cpufreq/scaling_governor",
        f"{_CPU}/cpu[0-9]*/cpufreq/scaling_max_freq",
        f"{_CPU}/cpu[0-9]*/cpufreq/cpuinfo_max_freq",
    )
)
_NODES = Files((f"{_NODE}/node[0-9]*/cpulist", f"{_NODE}/node[0-9]*/meminfo"))
_CPUINFO = File("/proc/cpuinfo")
_LOADAVG = File("/proc/loadavg")
_RANGE = re.compile(r"^([0-9]{1,5})(?:-([0-9]{1,5}))?$")
_OF_CPU = re.compile(r"/(cpu[0-9]{1,5})/cpufreq/(\w+)$")
_OF_NODE = re.compile(r"/(node[0-9]{1,4})/(\w+)$")
_MEM_TOTAL = re.compile(r"^Node [0-9]+ MemTotal: +([0-9]{1,15}) kB$")
_LOAD = re.compile(r"^([0-9]{1,9}\.[0-9]{2})(?: [0-9.]{1,12}){2} [0-9]+/[0-9]+ [0-9]+$")
_SAME = ("model name", "stepping", "microcode")
_KHZ_PER_MHZ = 1000
_KIB_PER_GIB = 2**20


def cpu_list(text: str) -> set[int]:
    """Return the numbers of a list such as 0-3,8; an empty list has none.

    Raises:
      UnreadableError: it is not such a list.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = _RANGE.match(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UnreadableError(f"expected a list of processors, got {quoted(part)}")
        found |= {*range(int(match[1]), int(match[2] or match[1]) + 1)}
    return found


def _list(text: str, name: str) -> set[int]:
    lists = values(text)
    if f"{_CPU}/{name}" not in lists:
        raise UnreadableError(f"there is no {_CPU}/{name}")
    return cpu_list(lists[f"{_CPU}/{name}"])


@check(
    "processors.count",
    source=_LISTS,
    action="Look for maxcpus= in /proc/cmdline, and for a missing processor.",
)
def count(text: str, settings: Settings) -> Verdict:
    """The host has the expected number of processors."""
    has, wanted = len(_list(text, "online")), settings.expect.get("cpus")
    if wanted is None:
        return unknown(f"{has}; cpus is not in the expectations")
    if has < wanted:
        return failed(f"{has} processors are online, not {wanted}", has, wanted)
    return ok(has, wanted)


@check(
    "processors.offline",
    source=_LISTS,
    action="`echo 1 > /sys/devices/system/cpu/cpuN/online`; reboot.",
)
def offline(text: str, settings: Settings) -> Verdict:
    """Each processor that is present is online."""
    del settings
    present, online = _list(text, "present"), _list(text, "online")
    if not online:
        raise UnreadableError("no processor is online")
    missing = sorted(present - online)
    each = [(f"cpu{number}", "it is offline") for number in missing]
    return judge_each(each, f"{len(missing)} of {len(present)}", "none")


@check(
    "processors.smt",
    source=_SMT,
    action="Change it in the firmware to match the other hosts.",
)
def smt(text: str, settings: Settings) -> Verdict:
    """Two threads per core are on or off, as expected."""
    words = {"1\n": "on", "0\n": "off"}
    if text not in words:
        raise UnreadableError(f"neither 0 nor 1: {quoted(text)}")
    has, wanted = words[text], settings.expect.get("smt")
    if wanted is None:
        return unknown(f"{has}; smt is not in the expectations")
    if has != wanted:
        return failed(f"threads of one core are {has}, not {wanted}", has, wanted)
    return ok(has, wanted)


@functools.lru_cache(KEPT_TEXTS)
def _frequencies(text: str) -> Mapping[str, Mapping[str, str]]:
    """Return the content of each file of each processor: processor -> file -> text."""
    found: dict[str, dict[str, str]] = {}
    for path, value in values(text).items():
        match = _OF_CPU.search(path)
        if match is None:
            raise UnreadableError(f"expected a file of a processor, got {quoted(path)}")
        found.setdefault(match[1], {})[match[2]] = value
    return found


def _khz(cpu: str, files: Mapping[str, str], name: str) -> int:
    value = files.get(name, "")
    if not re.fullmatch("[0-9]{1,9}", value):
        raise UnreadableError(f"{cpu}: {name} is {quoted(value)}")
    return int(value)


@check(
    "processors.governor",
    source=_FREQUENCY,
    action="`cpupower frequency-set -g performance`, and at boot.",
    for_training=True,
)
def governor(text: str, settings: Settings) -> Verdict:
    """The governor of each processor is set to performance."""
    wanted = settings.limit("processors.governor", "governor")
    found = {
        cpu: files.get("scaling_governor", "")
        for cpu, files in _frequencies(text).items()
    }
    each = [(cpu, f"governor {has!r}") for cpu, has in found.items() if has != wanted]
    return judge_each(_few(each), " ".join(sorted({*found.values()})), wanted)


def _few(each: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the first (name, problem) pairs, and a last pair with the total number."""
    return [*each[:MOST_NAMED], *[("", f"{len(each)} in all")][: len(each)]]


@check(
    "processors.frequency",
    source=_FREQUENCY,
    action="Check the power profile in the firmware and `cpupower`.",
    for_training=True,
)
def frequency(text: str, settings: Settings) -> Verdict:
    """No processor is limited to less than its maximum clock."""
    least = settings.limit("processors.frequency", "min_fraction")
    each, lowest = [], []
    for cpu, files in _frequencies(text).items():
        most = _khz(cpu, files, "cpuinfo_max_freq")
        allowed = _khz(cpu, files, "scaling_max_freq")
        if most == 0:
            raise UnreadableError(f"{cpu}: cpuinfo_max_freq is 0")
        lowest.append(allowed)
        if allowed < least * most:
            mhz = f"{allowed / _KHZ_PER_MHZ:.0f} of {most / _KHZ_PER_MHZ:.0f} MHz"
            each.append((cpu, f"it may run at {mhz}"))
    value = f"{min(lowest) / _KHZ_PER_MHZ:.0f} MHz"
    return judge_each(_few(each), value, f"at least {least:g} of its maximum")


@functools.lru_cache(KEPT_TEXTS)
def _nodes(text: str) -> Mapping[str, float]:
    """Return the memory in GiB of each NUMA node that has processors, by node.

    Nodes without processors are the memory of a GPU (Grace) or of a CXL card.
    """
    lists: dict[str, dict[str, str]] = {}
    for path, lines in lines_of(text).items():
        match = _OF_NODE.search(path)
        if match is None:
            raise UnreadableError(f"expected a file of a node, got {quoted(path)}")
        lists.setdefault(match[1], {})[match[2]] = "\n".join(lines)
    found = {}
    for node, files in lists.items():
        if not files.keys() >= {"cpulist", "meminfo"}:
            raise UnreadableError(f"{node} has no cpulist or no meminfo")
        total = _MEM_TOTAL.match(files["meminfo"].split("\n")[0])
        if total is None:
            raise UnreadableError(f"{node}: no MemTotal")
        if files["cpulist"].strip():
            found[node] = int(total[1]) / _KIB_PER_GIB
    if not found:
        raise UnreadableError("no node has a processor")
    return found


@check(
    "processors.nodes",
    source=_NODES,
    action="Set nodes per socket in the firmware as on the other hosts.",
)
def nodes(text: str, settings: Settings) -> Verdict:
    """The host has as many NUMA nodes as expected."""
    has, wanted = len(_nodes(text)), settings.expect.get("numa_nodes")
    if wanted is None:
        return unknown(f"{has}; numa_nodes is not in the expectations")
    if has != wanted:
        return failed(f"{has} nodes have processors, not {wanted}", has, wanted)
    return ok(has, wanted)


@check(
    "processors.node_memory",
    source=_NODES,
    action="Reseat the memory modules of the node that has less.",
)
def node_memory(text: str, settings: Settings) -> Verdict:
    """The NUMA nodes have the same amount of memory."""
    gib = _nodes(text)
    least = settings.limit("processors.node_memory", "min_fraction") * max(gib.values())
    each = [
        (node, f"{has:.1f} GiB, others have {max(gib.values()):.1f} GiB")
        for node, has in gib.items()
        if has < least
    ]
    return judge_each(each, f"{min(gib.values()):.1f} GiB", f"at least {least:.1f} GiB")


@check(
    "processors.same",
    source=_CPUINFO,
    action="Update the firmware and the microcode package, then reboot.",
)
def same(text: str, settings: Settings) -> Verdict:
    """All processors have the same model, stepping and microcode."""
    del settings
    each: dict[tuple[str, ...], list[str]] = {}
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line.partition(":") for line in block.split("\n")]
        fields = {name.strip(): value.strip() for name, _, value in lines}
        if not fields.keys() >= {"processor", *_SAME}:
            raise UnreadableError("a processor has no model name or microcode")
        each.setdefault(tuple(fields[n] for n in _SAME), []).append(fields["processor"])
    kinds = [f"{' '.join(kind)}: {len(cpus)}" for kind, cpus in each.items()]
    if len(kinds) > 1:
        rare = min(each, key=lambda kind: len(each[kind]))
        shown = ", ".join(each[rare][:MOST_NAMED])
        reason = f"cpu {shown} differ: {'; '.join(kinds)}"
        return failed(reason, f"{len(kinds)} kinds", "1 kind")
    return ok(kinds[0], "1 kind")


@check(
    "processors.load",
    needs_idle=True,
    source=_LOADAVG,
    action="Find the process (`top`) and stop it.",
)
def load(text: str, settings: Settings) -> Verdict:
    """Nothing else runs on the host."""
    found = _LOAD.match(text.removesuffix("\n"))
    if found is None:
        raise UnreadableError(f"no /proc/loadavg: {quoted(text)}")
    has, most = float(found[1]), settings.limit("processors.load", "max_load")
    value, limit = f"{has:.2f}", f"at most {most:g}"
    if has > most:
        return failed(f"{has:.2f} processes are ready to run", value, limit)
    return ok(value, limit)


CHECKS = (
    count,
    offline,
    smt,
    governor,
    frequency,
    nodes,
    node_memory,
    same,
    load,
)

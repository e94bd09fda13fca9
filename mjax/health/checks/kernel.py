"""Checks of the kernel log: Xids, PCIe, machine checks, memory, storage, network.

The input is a `Digest` (JSON) of the lines that match a rule of `kernel_log.toml`; that
file gives the source of each rule. This module decides which faults fail a host. A
fault that only a reboot or a repair ends fails the host until the next boot. A fault
that a reset ends, or that ends by itself, fails it for `window_h` hours. So a fault
that was repaired last week does not fail the host forever.
"""

import dataclasses
import re
from collections.abc import Sequence

from mjax.health import kernel_rules
from mjax.health.check import Check, check
from mjax.health.findings import State, Verdict, failed, ok, warned
from mjax.health.kernel_rules import RULES_PATH, UNLISTED, Rule
from mjax.health.log_digest import AT_BOOT, Digest, Match, digest, recent
from mjax.health.logs import Log
from mjax.health.settings import Settings
from mjax.health.sources import Command

_LOG = Log(
    (
        Command(
            ("journalctl", "-k", "-b", "-q", "-o", "short-monotonic", "--no-pager")
        ),
        Command(("dmesg", "--raw")),
    )
)
_SEVERE = Log(
    (Command(("dmesg", "--raw", "--level=emerg,alert,crit")),), is_severe=True
)
_MOST_SHOWN = 8
_NO_ACTION = "0"  # of Xid 154: NV2080_CTRL_GPU_RECOVERY_ACTION_NONE of the driver


def _mine(name: str, found: Digest) -> list[Match]:
    """Return the matches of the rules of one check."""
    rules = kernel_rules.shipped().rules
    return [m for m in found.matches if m.rule in rules and rules[m.rule].check == name]


def _verdict(
    name: str, found: Digest, problems: Sequence[str], settings: Settings
) -> Verdict:
    total = sum(match.count for match in _mine(name, found))
    since = f" since {found.begin}" if found.begin else ""
    value = f"{total} of {found.num_lines} lines{since}"
    limit = f"none in {settings.limit(name, 'window_h')} h, or since boot"
    if not problems:
        return ok(value, limit)
    shown = "; ".join(problems[:_MOST_SHOWN])
    return failed(f"found {len(problems)}: {shown}", value, limit)


def _fatal(name: str, found: Digest, settings: Settings) -> list[str]:
    """Return texts on the faults that fail the host after one occurrence."""
    rules, problems = kernel_rules.shipped().rules, []
    for match in _mine(name, found):
        rule = rules[match.rule]
        num = _current(match, rule, settings.limit(name, "window_h"))
        if rule.kind == "fatal" and num:
            problems.append(_told(match, num, rule.action))
    return problems


def _current(match: Match, rule: Rule, window_h: int) -> int:
    return match.count if rule.is_for_this_boot else recent(match.hours, window_h)


def _counted(name: str, found: Digest, settings: Settings) -> list[str]:
    """Return texts on the faults that occurred too often on a device."""
    rules, problems = kernel_rules.shipped().rules, []
    window_h = settings.limit(name, "window_h")
    most = settings.limit(name, "max_count")
    mine = [m for m in _mine(name, found) if rules[m.rule].kind == "counted"]
    for key in dict.fromkeys((m.rule, m.device) for m in mine):
        same = [m for m in mine if (m.rule, m.device) == key]
        num = sum(recent(m.hours, window_h) for m in same)
        if num > most:
            last = max(same, key=_by_order)
            told = _told(last, num, rules[last.rule].action)
            problems.append(f"{told} (at most {most})")
    return problems


def _by_order(match: Match) -> int:
    return match.last_index


def _told(match: Match, num: int, action: str, name: str = "") -> str:
    name = name or f"{match.rule} {match.code}".strip()
    when = f", last {match.last}" if match.last else ""
    return (
        f"{match.device or 'host'}: {name}, count {num}{when}: {match.line} -> {action}"
    )


def _judge(name: str, found: Digest, settings: Settings) -> Verdict:
    """Judge a check whose rules are all fatal or only reported."""
    return _verdict(name, found, _fatal(name, found, settings), settings)


def _judge_counted(name: str, text: str, settings: Settings) -> Verdict:
    """Judge a check that also counts faults."""
    found = digest(text)
    problems = [*_fatal(name, found, settings), *_counted(name, found, settings)]
    return _verdict(name, found, problems, settings)


@check(
    "kernel.xid",
    source=_LOG,
    action="Follow the reason: reset the GPU, reboot, or open a ticket.",
)
def xid(text: str, settings: Settings) -> Verdict:
    """No GPU has had an Xid whose cause is not a program.

    The lists of `kernel_log.toml` give the kind of each Xid. Xid 154 gives the action
    that the driver requests; only the last such line of a GPU is used.
    """
    found = digest(text)
    window_h = settings.limit("kernel.xid", "window_h")
    problems = []
    for match in _mine("kernel.xid", found):
        if match.rule == "xid":
            problems.append(_xid(match, _last_action(match.device, found), window_h))
        elif match is _last_action(match.device, found) and match.code != _NO_ACTION:
            rule = kernel_rules.shipped().rules[match.rule]
            problems.append(_told(match, match.count, rule.action))
    return _verdict("kernel.xid", found, [p for p in problems if p], settings)


def _xid(match: Match, last: Match | None, window_h: int) -> str:
    """Return a text on the problem that an Xid indicates; empty if it indicates none.

    Args:
      match: the Xid.
      last: the last action that the driver requested for this GPU.
      window_h: hours for which an Xid that a reset clears is a problem.
    """
    rules = kernel_rules.shipped()
    number = int(match.code)
    kind = rules.xids.get(number, "")
    if kind == "program":
        return ""
    num = match.count
    if kind == "reset":
        num = recent(match.hours, window_h)
        if last and last.code == _NO_ACTION and last.last_index > match.last_index:
            num = 0
    name = f"Xid {number} {rules.xid_names.get(number, '')}".strip()
    action = rules.xid_actions.get(kind, "The number is in no list: look it up.")
    return _told(match, num, action, name) if num else ""


def _last_action(device: str, found: Digest) -> Match | None:
    """Return the last line with an action that the driver requested for a GPU."""
    said = [
        m for m in found.matches if m.rule == "recovery_action" and m.device == device
    ]
    return max(said, key=_by_order, default=None)


@check(
    "kernel.sxid",
    source=_LOG,
    action="Stop all jobs of the host and reset all its GPUs, or reboot it.",
)
def sxid(text: str, settings: Settings) -> Verdict:
    """No NVSwitch has had a fatal fault."""
    return _judge_counted("kernel.sxid", text, settings)


@check(
    "kernel.gpu_driver",
    source=_LOG,
    action="Reboot; if it happens again, remove the named GPU.",
)
def gpu_driver(text: str, settings: Settings) -> Verdict:
    """The NVIDIA driver started and lost no GPU."""
    return _judge("kernel.gpu_driver", digest(text), settings)


@check(
    "kernel.aer",
    source=_LOG,
    action="Reseat the named card, then its riser; then replace it.",
)
def aer(text: str, settings: Settings) -> Verdict:
    """No PCIe device has uncorrectable errors or many corrected ones."""
    return _judge_counted("kernel.aer", text, settings)


@check(
    "kernel.machine_check",
    source=_LOG,
    action="Open a ticket with the lines of the reason.",
)
def machine_check(text: str, settings: Settings) -> Verdict:
    """No processor reported a hardware error."""
    return _judge_counted("kernel.machine_check", text, settings)


@check("kernel.memory_errors", source=_LOG, action="Replace the named module.")
def memory_errors(text: str, settings: Settings) -> Verdict:
    """No memory module has uncorrectable errors or many corrected ones."""
    return _judge_counted("kernel.memory_errors", text, settings)


@check(
    "kernel.thermal",
    source=_LOG,
    action="Check fans and air flow; compare with the neighbours in the rack.",
)
def thermal(text: str, settings: Settings) -> Verdict:
    """The processors are not throttled because of their temperature."""
    return _judge_counted("kernel.thermal", text, settings)


@check(
    "kernel.out_of_memory",
    source=_LOG,
    action="Reboot; limit the memory of jobs with a cgroup.",
)
def out_of_memory(text: str, settings: Settings) -> Verdict:
    """No service of the host was killed because memory ran out."""
    return _judge("kernel.out_of_memory", digest(text), settings)


@check(
    "kernel.lockup", source=_LOG, action="Reboot, then burn the host before it is used."
)
def lockup(text: str, settings: Settings) -> Verdict:
    """No processor was stuck in the kernel."""
    return _judge("kernel.lockup", digest(text), settings)


@check(
    "kernel.hung_task",
    source=_LOG,
    action="Find the file system or driver that it is waiting for; reboot.",
)
def hung_task(text: str, settings: Settings) -> Verdict:
    """No process was stuck in the kernel."""
    return _judge("kernel.hung_task", digest(text), settings)


@check(
    "kernel.oops",
    source=_LOG,
    action="Save the log for the kernel's maintainers, then reboot.",
)
def oops(text: str, settings: Settings) -> Verdict:
    """The kernel reported no bug of its own."""
    return _judge("kernel.oops", digest(text), settings)


@check(
    "kernel.storage",
    source=_LOG,
    action="Read the SMART log of the named disk; replace the disk.",
)
def storage(text: str, settings: Settings) -> Verdict:
    """No disk failed to respond."""
    return _judge_counted("kernel.storage", text, settings)


@check(
    "kernel.file_system",
    source=_LOG,
    action="Unmount and check the file system; check its disk or server.",
)
def file_system(text: str, settings: Settings) -> Verdict:
    """No file system is damaged, read-only or cut off from its server."""
    found, rules = digest(text), kernel_rules.shipped().rules
    ends = {(m.rule, m.device): m.last_index for m in found.matches}
    lasting = [
        match
        for match in found.matches
        if ends.get((rules[match.rule].ended_by, match.device), 0) < match.last_index
    ]
    found = dataclasses.replace(found, matches=lasting)
    return _judge("kernel.file_system", found, settings)


@check(
    "kernel.network",
    source=_LOG,
    action="Reseat or replace the cable of the named port.",
)
def network(text: str, settings: Settings) -> Verdict:
    """No network adapter failed, and no link flaps."""
    return _judge_counted("kernel.network", text, settings)


def unlisted(text: str, settings: Settings) -> Verdict:
    """A rule matches each line of a severe level."""
    found = digest(text)
    window_h = settings.limit("kernel.unlisted", "window_h")
    mine = [m for m in found.matches if m.rule == UNLISTED]
    num = sum(recent(m.hours, window_h) for m in mine)
    value = f"{sum(m.count for m in mine)} of {found.num_lines} lines"
    limit = f"none in {window_h} h"
    if num:
        line = max(mine, key=_by_order).line
        reason = (
            f"{num} severe lines that match no rule, the last: {line}; to allow a "
            f"harmless line, add to {RULES_PATH}: {_allowance(line)}"
        )
        return failed(reason, value, limit)
    return ok(value, limit)


def _allowance(line: str) -> str:
    """Return the lines of `kernel_log.toml` that allow a line of the kernel log."""
    # A literal string of TOML has no quotes and no control characters.
    plain = "".join("'" if not char.isprintable() else char for char in line)
    pattern = re.sub(r"([.^$*+?{}\[\]|()\\])", r"\\\1", plain).replace("'", ".")
    return f"`[[allow]]`, `pattern = '{pattern}'`, `reason = \"why it is harmless\"`"


def unlisted_for_start(text: str, settings: Settings) -> Verdict:
    """Judge like `unlisted`, but only warn of lines that the boot itself wrote."""
    verdict = unlisted(text, settings)
    window_h = settings.limit("kernel.unlisted", "window_h")
    is_of_boot = all(
        match.code == AT_BOOT
        for match in digest(text).matches
        if match.rule == UNLISTED and recent(match.hours, window_h)
    )
    if verdict.state is State.FAILED and is_of_boot:
        return warned(verdict.reason, verdict.value, verdict.limit)
    return verdict


CHECKS = (
    xid,
    sxid,
    gpu_driver,
    aer,
    machine_check,
    memory_errors,
    thermal,
    out_of_memory,
    lockup,
    hung_task,
    oops,
    storage,
    file_system,
    network,
    Check(
        name="kernel.unlisted",
        what="A rule matches each line of the levels emerg to crit.",
        source=_SEVERE,
        judge=unlisted,
        judge_for_start=unlisted_for_start,
        action="Find out what the line means; if it is harmless, allow it as shown.",
    ),
)

"""Diagnose a failure: its cause, hosts and ranks, from the states of all ranks.

Input: the states of all ranks of a generation, and their stacks if they hang. Output:
the failure that explains all others.
"""

import dataclasses
import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mjax.launch import log_rules, policy, stacks, thunks
from mjax.launch.messages import Divergence, LastWords, Match, RankState
from mjax.launch.policy import Cause, is_consequence
from mjax.processes.progress import LOCK_ANSWER, OF_ANOTHER, Phase

LOG_FOLLOWS = "; the last lines of its log:"
"""Separates the text of a failure from the lines of a log in it."""
_MAX_SHOWN = 8
_SETTLE_S = 0.3
"""Seconds to wait for other ranks to end after the first one; all are then examined
together."""
_SIGNAL_SETTLE_S = 0.05
"""Seconds to wait instead of `_SETTLE_S` if a signal other than SIGABRT ended a rank:
the end of another rank cannot explain it."""
_STARTED_S = 15.0
"""Seconds that a host has to report its ranks after the order to start them."""
_UNEXPLAINED = (
    *(Cause.CRASHED, Cause.FAILED, Cause.KILLED, Cause.HUNG),
    Cause.UNKNOWN,
)
_OF_HARDWARE = (Cause.GPU_FAULT, Cause.HOST_FAULT)
_RAISED = re.compile(r"(?:\w+\.)*\w*(?:[Ee]rror|Exception): ")
"""Start of the line of an exception, or of a message that ends the trainer."""
_OF_ANOTHER = re.compile(
    r"Gloo [\w -]+ failed|JAX distributed service detected fatal errors"
    r"|did not answer within|[Ee]rror: process \d+: "
)
"""Pattern of the log of a rank that ended because of another one: of gloo and jax, and
of `mjax.processes.agreement`."""
_EXPLAINING = (*_OF_HARDWARE, Cause.OUT_OF_MEMORY, Cause.NETWORK, Cause.STORE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a generation ended; the cause may also be that the run is done."""

    cause: Cause
    text: str
    hosts: tuple[str, ...] = ()
    """Hosts that caused the failure."""
    ranks: tuple[int, ...] = ()
    suspects: tuple[str, ...] = ()
    """Hosts of the smallest group of ranks with equal stacks; they are used only if
    `hosts` is empty.
    """
    diverged: Divergence | None = None
    """Report of a rank whose state diverged; None if none did."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of the failure's event, with host and rank if unique."""
        return {
            "host": self.hosts[0] if len(self.hosts) == 1 else None,
            "rank": self.ranks[0] if len(self.ranks) == 1 else None,
            "data": {
                "cause": self.cause.value,
                "ranks": [*self.ranks],
                "hosts": [*self.hosts],
            },
        }


def of_silence(lost: Collection[str], limit_s: float) -> Failure:
    """Return the failure that hosts were silent for limit_s."""
    hosts = tuple(sorted(lost))
    text = f"no heartbeat of {', '.join(hosts)} for {limit_s:g} s"
    return Failure(cause=Cause.HOST_LOST, text=text, hosts=hosts)


def of_ranks(
    states: Mapping[int, RankState],
    hosts: Sequence[str],
    *,
    age_s: float,
    since_end_s: float,
    are_heard: bool,
) -> Failure | None:
    """Return why a generation has ended; None while it goes on.

    Ranks that never started are a failure too.

    Args:
      states: rank -> state, where it is known.
      hosts: host of each rank.
      age_s: seconds since the hosts were ordered to start the generation.
      since_end_s: seconds since the first end of a rank; negative if none has ended.
      are_heard: whether every host is connected and has sent a message since the first
        end. If not, a host may be gone: ends that this would explain are not judged
        before all ranks have ended.
    """
    ended = {rank: state for rank, state in states.items() if state.code is not None}
    is_bad = any(policy.is_failure(state.code or 0) for state in ended.values())
    causes = [c for c in (s.code or 0 for s in ended.values()) if not is_consequence(c)]
    if not causes:
        is_bad = is_bad and are_heard
    settle_s = _SIGNAL_SETTLE_S if min(causes, default=0) < 0 else _SETTLE_S
    if len(ended) == len(hosts) or (is_bad and since_end_s >= settle_s):
        if not causes and any(state.devices for state in ended.values()):
            return of_devices(states, hosts.__getitem__)
        return of_ends(ended, hosts.__getitem__)
    missing = tuple(rank for rank in range(len(hosts)) if rank not in states)
    if missing and age_s > _STARTED_S:
        text = f"rank {missing[0]} was not started by {hosts[missing[0]]}"
        return Failure(cause=Cause.FAILED, text=text, ranks=missing)
    return None


def of_ends(ended: Mapping[int, RankState], host_of: Callable[[int], str]) -> Failure:
    """Find the rank whose end explains the ends of all others.

    Ends that may follow from another end come last; otherwise `policy.RANKING` decides,
    and then the time. If all ranks have ended because of others, the cause is unknown.

    Args:
      ended: rank -> state, for ranks with an exit code; at least one.
      host_of: maps a rank to its host.
    """
    causes = {
        rank: policy.cause_of(
            state.code,
            out_of_memory=state.out_of_memory,
            last_words=state.last_words,
        )
        for rank, state in ended.items()
        if state.code is not None
    }

    def key(rank: int) -> tuple[bool, bool, int, int]:
        follows = is_consequence(ended[rank].code or 0)
        order = policy.RANKING.index(causes[rank])
        gave_up = _gave_up(ended[rank])
        return follows, gave_up, order, ended[rank].ended_ns or 0

    rank = min(causes, key=key)
    first, host = ended[rank], host_of(rank)
    if _gave_up(first):
        text = (
            f"rank {rank} on {host} ended with {describe_code(first.code or 0)} "
            "because of another rank, and no rank is known to have failed before"
        )
        text += f"{LOG_FOLLOWS}\n{first.last_lines}"
        return Failure(cause=Cause.UNKNOWN, text=text)
    code = first.code or 0
    text = f"rank {rank} on {host} ended with {describe_code(code)}"
    is_mute = code == -signal.SIGKILL or not policy.is_failure(code)
    if not is_mute and first.last_lines:
        text += f"{LOG_FOLLOWS}\n{first.last_lines}"
    words = first.last_words or LastWords()
    ranks, hosts = (rank,), (host,)
    if words.corrupted is not None:
        ranks = tuple(words.corrupted.processes)
        hosts = tuple(sorted({host_of(one) for one in ranks}))
    return Failure(
        cause=causes[rank], text=text, hosts=hosts, ranks=ranks, diverged=words.diverged
    )


def _gave_up(end: RankState) -> bool:
    """Return whether a rank has ended because of another one, by its log."""
    lines = end.last_lines.splitlines()
    raised = [line for line in lines if _RAISED.match(line)][-1:] or lines
    is_told = OF_ANOTHER in lines or any(_OF_ANOTHER.search(line) for line in raised)
    return is_consequence(end.code or 0) and is_told


def of_devices(
    states: Mapping[int, RankState], host_of: Callable[[int], str]
) -> Failure:
    """Find the ranks that block the others, in XLA's logs of their devices.

    Args:
      states: rank -> state, for all ranks; XLA has ended at least one.
      host_of: maps a rank to its host.
    """
    devices = {rank: state.devices for rank, state in states.items() if state.devices}
    ranks = thunks.behind(devices)
    hosts = tuple(sorted({host_of(rank) for rank in ranks}))
    first = ranks[0] if ranks else min(devices)
    where = f"rank {join(ranks)} on {', '.join(hosts)}" if ranks else "all"
    step, phase = states[first].step, Phase(states[first].phase).name.lower()
    text = f"{where} in {phase}, step {step}: {thunks.describe(devices[first])}"
    if len(programs := thunks.programs(devices)) > 1:
        shown = [f"{name} on rank {join(some)}" for name, some in programs.items()]
        text += f"; different programs, so no rank is named: {', '.join(shown)}"
    return Failure(cause=Cause.HUNG, text=text, hosts=hosts, ranks=ranks)


def explained(failure: Failure, matches: Mapping[str, Sequence[Match]]) -> Failure:
    """Return the failure with a cause from the hosts' logs, if they have one.

    A failure whose cause is known is returned unchanged. Otherwise, a hardware fault on
    any host explains it. Other log lines count only on the hosts that caused the
    failure, because ranks on other hosts log errors as well.

    Args:
      failure: the failure to explain.
      matches: host -> recent matches of rules.
    """
    if failure.cause not in _UNEXPLAINED:
        return failure
    found: dict[Cause, dict[str, str]] = {}
    for host, lines in matches.items():
        for one in lines:
            cause = log_rules.CAUSES.get(one.rule)
            if cause and (cause in _OF_HARDWARE or host in failure.hosts):
                found.setdefault(cause, {}).setdefault(host, one.line)
    for cause in _EXPLAINING:
        if cause in found:
            hosts = tuple(sorted(found[cause]))
            told = "; ".join(f"{host} says: {found[cause][host]}" for host in hosts)
            text = f"{told}; {failure.text}"
            return dataclasses.replace(failure, cause=cause, hosts=hosts, text=text)
    return failure


def of_hang(
    alive: Mapping[int, RankState],
    shown: Mapping[int, str],
    host_of: Callable[[int], str],
) -> tuple[Failure, dict[str, Any]]:
    """Find the ranks that block the others.

    Args:
      alive: rank -> state, for ranks that have not ended.
      shown: rank -> stacks, for ranks that answered.
      host_of: maps a rank to its host.
    Returns:
      The failure, and the evidence as JSON: groups of ranks by frames, and the stacks.
    """
    places = {r: stacks.Place(step=s.step, phase=s.phase) for r, s in alive.items()}
    found = {rank: stacks.frames(text) for rank, text in shown.items()}
    stopped = [rank for rank, state in alive.items() if state.state in "Tt"]
    mute = [rank for rank, text in shown.items() if LOCK_ANSWER not in text]
    verdict = stacks.judge(places, found, stopped, mute)
    hosts = tuple(sorted({host_of(rank) for rank in verdict.ranks}))
    where, step = (
        "the rank to blame is unknown",
        min((state.step for state in alive.values()), default=0),
    )
    if verdict.ranks:
        first = alive[verdict.ranks[0]]
        phase, step = Phase(first.phase).name.lower(), first.step
        where = f"rank {join(verdict.ranks)} on {', '.join(hosts)} in {phase}"
    text = f"{where}: {verdict.reason}, step {step}"
    groups = stacks.groups(found)
    odd = groups[-1][1] if len(groups) > 1 else []
    evidence = {
        "groups": [
            {"ranks": ranks, "frames": list(frames)} for frames, ranks in groups
        ],
        "stacks": {str(rank): text for rank, text in shown.items()},
    }
    failure = Failure(
        cause=Cause.HUNG,
        text=text,
        hosts=hosts,
        ranks=verdict.ranks,
        suspects=tuple(sorted({host_of(rank) for rank in odd})),
    )
    return failure, evidence


def without_lines(text: str, states: Iterable[Mapping[int, RankState]]) -> str:
    """Return the text of a failure for a terminal that also shows rank 0's output.

    Ranks often fail with the same message, which is then shown once.

    Args:
      text: text that may end with the last lines of a log.
      states: for each host, rank -> state.
    """
    head, _, lines = text.partition(f"{LOG_FOLLOWS}\n")
    shown = [ranks[0].last_lines for ranks in states if 0 in ranks]
    is_shown = lines != "" and lines in shown
    return f"{head}, with the last lines of rank 0" if is_shown else text


def describe_end(state: RankState) -> str:
    """Return a text on how and where a rank has ended."""
    assert state.code is not None
    return (
        f"rank {state.rank} ended with {describe_code(state.code)} in "
        f"{Phase(state.phase).name.lower()} after step {state.step}"
    )


def describe_code(code: int) -> str:
    """Return a text on an exit code."""
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def join(ranks: Sequence[int]) -> str:
    """Return a text that lists ranks; only the first ones if there are many."""
    shown = ", ".join(map(str, sorted(ranks)[:_MAX_SHOWN]))
    num_more = len(ranks) - _MAX_SHOWN
    return shown if num_more <= 0 else f"{shown} and {num_more} more"

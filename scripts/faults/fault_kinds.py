"""The kinds of faults that `launch_faults` causes, and the required reaction to each.

Input: a running launch. Output: its reaction to one fault, and what is wrong with the
reaction.
"""

import dataclasses
import os
import random
import signal
import time
from typing import Any, Literal

from mjax.launch.policy import Cause
from mjax.processes.progress import Phase
from scripts.evidence import commit
from scripts.faults.cut_off import CutOff
from scripts.faults.launched import Event, Launched

WRONG_FLAG = "--optim.lr"
_LOCKED_S = 10.0
_FROZEN_S = 6.0
"""Seconds for which the store blocks: less than `--limits.save-s` of `launched`."""
_PAUSES_S = (1.0, 60.0)
_TOLD_PAUSE_S = 5.0
"""A pause of the driver that it must report."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    causes: tuple[Cause, ...]
    """Causes that the launcher may name; empty if the fault must not cause a
    failure."""
    phase: Phase = Phase.STEP
    names: Literal["rank", "host", "no other", "any"] = "rank"
    """Whether the launcher must name the rank at fault, or its host, or no other rank
    and host; whether it may name any."""
    is_at_once: bool = True
    """Whether only the steps since the last save may be lost."""
    place: Literal["local", "apart", "containers"] = "local"
    """Launch that the fault needs: any; one whose hosts can be cut off; or one whose
    agents are each process 1 of a container."""


KINDS = (
    Kind("SIGKILL", (Cause.KILLED,)),
    Kind("SIGSEGV", (Cause.CRASHED,)),
    Kind("SIGSTOP", (Cause.HUNG,)),
    Kind("SIGTERM", (Cause.PREEMPTED,), names="any"),
    Kind("exception", (Cause.FAILED,)),
    Kind("exit 137", (Cause.KILLED, Cause.OUT_OF_MEMORY)),
    Kind("sleep", (Cause.HUNG,)),
    Kind("hold the lock", (Cause.HUNG,)),
    Kind("skip a collective", (Cause.HUNG,)),
    Kind("stop below Python", (Cause.HUNG, Cause.UNKNOWN), names="no other"),
    Kind("SIGKILL in compile", (Cause.KILLED,), Phase.COMPILE),
    Kind("SIGKILL in restore", (Cause.KILLED,), Phase.RESTORE),
    Kind("SIGKILL in save", (Cause.KILLED,), Phase.SAVE),
    Kind("damaged checkpoint", (Cause.KILLED,), is_at_once=False),
    Kind("NaN", (Cause.DIVERGED,), names="any"),
    Kind("wrong flags", (Cause.BAD_INPUT,), names="any"),
    Kind("full disk", ()),
    Kind("agent SIGKILL", (Cause.KILLED, Cause.HOST_LOST), names="host"),
    Kind("agent SIGTERM", (Cause.PREEMPTED,), names="any"),
    Kind("agent SIGSTOP", (Cause.HOST_LOST,), names="host"),
    Kind("partition", (Cause.HOST_LOST,), names="host", place="apart"),
    Kind("driver SIGKILL", ()),
    Kind("driver SIGSTOP", ()),
    Kind("journal locked", ()),
    Kind("slow store", ()),
    Kind("SIGKILL and driver SIGKILL", (Cause.KILLED,)),
    Kind(
        *("agent SIGKILL and driver SIGKILL", (Cause.KILLED, Cause.HOST_LOST)),
        names="host",
    ),
    Kind(
        *("agent restarted as pid 1", (Cause.KILLED, Cause.HOST_LOST)),
        names="host",
        place="containers",
    ),
    Kind("second agent as pid 1", (), place="containers"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Reaction to one fault."""

    commit: str
    kind: str
    rank: int
    run: int
    step: int
    """Step of the last row when the fault happened."""
    cause: str = ""
    ranks: list[int] = dataclasses.field(default_factory=list)
    """Ranks at fault, as the launcher named them."""
    detect_s: float | None = None
    """Seconds until the launcher named a cause."""
    restart_s: float | None = None
    """Seconds until the next new row."""
    lost: int = 0
    """Number of rows that were computed again."""
    problems: list[str] = dataclasses.field(default_factory=list)


def suffer(
    launched: Launched, kind: Kind, hosts: int, rng: random.Random, run: int
) -> Found:
    """Wait for the moment of a fault, cause it, and return the reaction.

    Args:
      launched: the running launch.
      kind: kind of the fault.
      hosts: number of hosts, with one rank each.
      rng: generator that draws the moment and the rank.
      run: number of the run, for the report.
    Raises:
      StuckError: the required reaction did not follow in time.
    """
    rank = rng.randrange(hosts)
    generation = _wait_for_moment(launched, kind, rank, rng.randint(2, 5))
    time.sleep(rng.random() * 0.3)
    step = launched.last_step()
    about = Found(commit=commit(), kind=kind.name, rank=rank, run=run, step=step)
    if kind.name == "wrong flags":
        return _suffer_wrong_flags(launched, kind, about)
    if not kind.causes:
        return _go_on_unharmed(launched, about, generation, rng)
    saved = max(launched.saved_steps(), default=0)
    num_failures = len(launched.events("failure"))
    at_s, at_ns = time.monotonic(), time.time_ns()
    stopped = None
    if kind.name == "agent SIGSTOP":
        stopped = launched.agent_pid(launched.hosts()[rank])
    host = launched.hosts()[rank]
    _happen(launched, kind, rank)
    launched.wait_for(lambda: len(launched.events("failure")) > num_failures, "failure")
    failure = launched.events("failure")[num_failures]
    launched.wait_for(lambda: launched.generation > generation, "a restart")
    before = launched.last_step()
    resumed = _resumed(launched, before)
    launched.wait_for_row(resumed + 1)
    restart_s = round(time.monotonic() - at_s, 2)
    if isinstance(launched, CutOff):
        launched.heal()
    if stopped is not None:  # its host comes back as a spare
        os.kill(stopped, signal.SIGCONT)
    lost = max(0, before - resumed)
    problems = [*_wrong_names(kind, rank, host, failure)]
    if kind.is_at_once and resumed < saved:
        problems.append(f"resumed at {resumed} although {saved} was saved")
    if kind.name.endswith("SIGTERM") and lost:
        problems.append(f"{lost} steps were lost by a SIGTERM")
    return dataclasses.replace(
        about,
        cause=failure["data"]["cause"],
        ranks=failure["data"]["ranks"],
        detect_s=round((failure["time_ns"] - at_ns) / 1e9, 3),
        restart_s=restart_s,
        lost=lost,
        problems=problems,
    )


def _wait_for_moment(launched: Launched, kind: Kind, rank: int, count: int) -> int:
    """Wait for some rows, and for the phase of the fault; return the generation."""
    generation, first = launched.generation, launched.last_step()
    launched.wait_for_row(first + count)
    if kind.name == "damaged checkpoint":  # without another step the run rightly fails
        launched.wait_for(lambda: len(launched.saved_steps()) > 1, "a second save")
    phase = kind.phase
    if phase in (Phase.COMPILE, Phase.RESTORE):
        # These phases occur at the next start, so a kill causes one.
        os.kill(launched.rank_pid(rank), signal.SIGKILL)
        launched.wait_for(lambda: launched.generation > generation, "a restart")
        launched.wait_for(
            lambda: (w := launched.word(rank)) is not None and w.phase >= phase,
            phase.name,
        )
    else:
        launched.wait_for(
            lambda: (w := launched.word(rank)) is not None and w.phase is phase,
            phase.name,
        )
    return launched.generation


def _happen(launched: Launched, kind: Kind, rank: int) -> None:
    """Cause a fault now."""
    name = kind.name.removesuffix(f" in {kind.phase.name.lower()}")
    host = launched.hosts()[rank]
    if name == "agent restarted as pid 1":
        assert isinstance(launched, CutOff)
        os.kill(launched.agent_pid(host), signal.SIGKILL)
        launched.start_agent(host)
    elif name.endswith(" and driver SIGKILL"):
        is_agent = name.startswith("agent ")
        pid = launched.agent_pid(host) if is_agent else launched.rank_pid(rank)
        os.kill(pid, signal.SIGKILL)
        launched.kill_driver()
    elif name.startswith("agent "):
        os.kill(launched.agent_pid(host), getattr(signal, name.removeprefix("agent ")))
    elif name == "partition":
        assert isinstance(launched, CutOff)
        launched.cut_off(host)
    elif name == "damaged checkpoint":
        launched.damage_newest_checkpoint()
        os.kill(launched.rank_pid(rank), signal.SIGKILL)
    elif name.startswith("SIG"):
        os.kill(launched.rank_pid(rank), getattr(signal, name))
    else:
        launched.inject(rank, name)


def _resumed(launched: Launched, before: int) -> int:
    """Wait for steps of the new generation; return its first step."""
    launched.wait_for(
        lambda: (
            (w := launched.word(0)) is not None
            and w.phase is Phase.STEP
            and w.generation == launched.generation
        ),
        "steps",
    )
    word = launched.word(0)
    assert word is not None
    saved = max((int(s) for s in launched.saved_steps() if s <= before), default=0)
    return min(saved, word.step)


def _wrong_names(kind: Kind, rank: int, host: str, failure: Event) -> list[str]:
    cause, text = failure["data"]["cause"], failure["text"]
    ranks, hosts = failure["data"]["ranks"], failure["data"]["hosts"]
    is_wrong = {
        "rank": ranks != [rank],
        "host": hosts != [host],
        "no other": bool({*ranks} - {rank} or {*hosts} - {host}),
        "any": False,
    }
    problems = []
    if cause not in kind.causes:
        problems.append(f"cause {cause}: {text}")
    if is_wrong[kind.names]:
        problems.append(f"rank {rank} on {host}, named {ranks} on {hosts}: {text}")
    return problems


def _go_on_unharmed(
    launched: Launched, about: Found, generation: int, rng: random.Random
) -> Found:
    """Cause a fault that must not end the generation."""
    at_s, num_told = time.monotonic(), len(launched.events())
    problems = []
    match about.kind:
        case "full disk":
            _fill_store_for_a_while(launched)
        case "driver SIGSTOP":
            problems += _pause_driver(launched, rng.uniform(*_PAUSES_S))
        case "journal locked":
            with launched.locked_journal():
                time.sleep(_LOCKED_S)
        case "slow store":
            with launched.frozen_store():
                time.sleep(_FROZEN_S)
        case "second agent as pid 1":
            problems += _start_second_agent(launched, launched.hosts()[about.rank])
        case _:
            num_drivers = len(launched.events("driver"))
            launched.kill_driver()
            launched.wait_for(
                lambda: len(launched.events("driver")) > num_drivers, "driver"
            )
    launched.wait_for_row(max(about.step, launched.last_step()) + 1)
    told = launched.events()[num_told:]
    problems += [
        f"{event['kind']}: {event['text']}"
        for event in told
        if event["kind"] in ("failure", "hang", "evict")
    ]
    if launched.generation != generation:
        problems.append("the ranks were started again")
    restart_s = round(time.monotonic() - at_s, 2)
    return dataclasses.replace(about, restart_s=restart_s, problems=problems)


def _pause_driver(launched: Launched, pause_s: float) -> list[str]:
    """Stop the driver for some seconds; return a problem if it does not report it."""
    num_gaps = len(launched.events("gap"))
    for rank in range(len(launched.hosts())):  # the run must not end meanwhile
        launched.inject(rank, f"slow {pause_s:.0f}")
    with launched.paused_driver():
        time.sleep(pause_s)
    launched.wait_for_row(launched.last_step() + 1)
    if pause_s < _TOLD_PAUSE_S or len(launched.events("gap")) > num_gaps:
        return []
    return [f"a pause of {pause_s:.1f} s is not reported"]


def _start_second_agent(launched: Launched, host: str) -> list[str]:
    """Start a second agent with the name of a host; return whether it is refused."""
    assert isinstance(launched, CutOff)
    code = launched.one_more_agent(host).wait(timeout=60)
    return [] if code == 2 else [f"the second agent of {host} ended with {code}"]


def _fill_store_for_a_while(launched: Launched) -> None:
    """Fill the disk until a save has failed; the next one must succeed."""
    num_warnings = launched.log(0).count("was not saved")
    with launched.full_store() as fill:

        def has_failed() -> bool:
            fill()  # deleting an old step has freed space for a new one
            return launched.log(0).count("was not saved") > num_warnings

        launched.wait_for(has_failed, "a save that fails")
    newest = max(launched.saved_steps(), default=0)
    launched.wait_for(
        lambda: max(launched.saved_steps(), default=0) > newest, "a save that succeeds"
    )


def _suffer_wrong_flags(launched: Launched, kind: Kind, about: Found) -> Found:
    """Give one rank a different flag at the next start; the run must end with a
    message."""
    num_failures, first = len(launched.events("failure")), launched.last_step()
    launched.order_wrong_flags(about.rank)
    at_s, at_ns = time.monotonic(), time.time_ns()
    os.kill(launched.rank_pid(about.rank), signal.SIGKILL)
    code = launched.process.wait(timeout=240)
    failure: dict[str, Any] = launched.events("failure")[num_failures:][-1]
    problems = _wrong_names(kind, about.rank, "", failure)
    if code != 2:
        problems.append(f"the launch ended with {code}")
    said = f"{WRONG_FLAG}: "
    if said not in failure["text"] or f"process {about.rank}" not in failure["text"]:
        problems.append(f"the flag is not named: {failure['text']}")
    launched.start()
    launched.wait_for_row(first + 1)
    return dataclasses.replace(
        about,
        cause=failure["data"]["cause"],
        ranks=failure["data"]["ranks"],
        detect_s=round((failure["time_ns"] - at_ns) / 1e9, 3),
        restart_s=round(time.monotonic() - at_s, 2),
        lost=max(0, first - min(first, max(launched.saved_steps(), default=0))),
        problems=problems,
    )

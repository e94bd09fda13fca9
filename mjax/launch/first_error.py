"""The first error of a failed generation: the cause, then the ends of all ranks.

Input: the events of a run. Output: the launch's diagnosis, and the ends of all ranks in
order of time. Two kinds of ends are marked: those that may follow from another end, and
those of ranks that the launch killed after the failure. The clocks of hosts may differ
by some milliseconds, but an end that follows from another one comes later than that.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from mjax.launch import failures, policy

Event = Mapping[str, Any]


def first_error(events: Sequence[Event], generation: int | None = None) -> Event:
    """Return why a generation failed: the diagnosis and the ends of its ranks.

    Args:
      events: events of a run, oldest first.
      generation: generation to explain; None means the last one that failed.
    Returns:
      JSON values: `generation`; `cause`, `ranks`, `hosts` and `text` of the diagnosis;
      and `ends`, one object for each rank that has ended, the first end first.
    Raises:
      ValueError: the generation has not failed, or no generation has.
    """
    failed = {
        event["generation"]: (place, event)
        for place, event in enumerate(events)
        if event["kind"] == "failure"
    }
    if not failed:
        raise ValueError("no generation of this run has failed")
    number = max(failed) if generation is None else generation
    if number not in failed:
        known = ", ".join(map(str, sorted(failed)))
        raise ValueError(f"generation {number} has not failed; these have: {known}")
    told_at, verdict = failed[number]
    ends = [
        {
            "rank": event["rank"],
            "host": event["host"],
            "code": event["data"]["code"],
            "step": event["data"]["step"],
            "ended_ns": event["data"].get("ended_ns") or event["time_ns"],
            "is_consequence": policy.is_consequence(event["data"]["code"]),
            # The launch kills the remaining ranks after it has recorded the failure.
            "is_by_launch": place > told_at
            and event["data"]["code"] == -signal.SIGKILL,
        }
        for place, event in enumerate(events)
        if event["kind"] == "rank_end" and event["generation"] == number
    ]
    ends.sort(key=lambda end: end["ended_ns"])
    return {
        "generation": number,
        "cause": verdict["data"]["cause"],
        "ranks": verdict["data"]["ranks"],
        "hosts": verdict["data"]["hosts"],
        "text": verdict["text"],
        "ends": ends,
    }


def describe(found: Event) -> str:
    """Return the result of `first_error` as text for people."""
    lines = [f"generation {found['generation']}: {found['text']}"]
    for end in found["ends"]:
        after_s = (end["ended_ns"] - found["ends"][0]["ended_ns"]) / 1e9
        follows = ", which may follow from another end" if end["is_consequence"] else ""
        if end["is_by_launch"]:
            follows = ": the launch killed it after the failure"
        code = failures.describe_code(end["code"])
        lines.append(
            f"  +{after_s:.3f} s  rank {end['rank']} on {end['host']} ended with {code}"
            f" after step {end['step']}{follows}"
        )
    return "\n".join(lines)

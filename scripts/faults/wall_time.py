"""Where the wall time of a launched run went, from its events alone.

    python -m scripts.faults.wall_time runs/a

Enters: events.jsonl of a launch. Leaves: seconds by bucket, and what no event explains.
The driver's states tile the time of the run. While rank 0 runs, the time is that of the
rank, by the clock of its own host: the phases that it counted in its progress word.
What is left between the two is reported as `unexplained`.

Steps after the newest saved step of a generation that failed are lost: of the time in
steps their share counts as lost. The time since the last mark of a rank that hung, or
that waited for one, is no step.
"""

import argparse
import collections
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.launch.supervisor import State

_START = ("import", "init", "build", "compile", "restore")
_RANKS_LIVE = (State.RUNNING, State.STACKS, State.STOPPING)
_HUNG_S = 1.0
"""Longer than a step of these runs."""

Event = Mapping[str, Any]


def ledger(events: Sequence[Event]) -> dict[str, float]:
    """Return the seconds of a run that has ended, by bucket; they add up to its time.

    Args:
      events: of one launch, oldest first.
    """
    buckets: dict[str, float] = collections.defaultdict(float)
    live_s: dict[int, float] = collections.defaultdict(float)
    state, since_ns, generation = State.GATHERING, events[0]["time_ns"], 0
    has_rank_0 = False
    for event in events:
        kind = event["kind"]
        is_end = kind == "rank_end" and event["rank"] == 0
        if not is_end and kind not in ("state", "end"):
            continue
        seconds = (event["time_ns"] - since_ns) / 1e9
        if state in _RANKS_LIVE and has_rank_0:
            live_s[generation] += seconds
        elif state in _RANKS_LIVE:
            buckets[f"driver: {State.STOPPING}"] += seconds
        else:
            buckets[f"driver: {state}"] += seconds
        since_ns, generation = event["time_ns"], event["generation"]
        if kind == "state":
            state = State(event["text"])
        has_rank_0 = not is_end and (has_rank_0 or state is State.RUNNING)
        has_rank_0 &= state in _RANKS_LIVE
    kept = _kept_steps(events)
    for event in events:
        if event["kind"] == "times":
            number = event["generation"]
            spent = _of_rank(event["data"], number, kept)
            live_s[number] -= sum(spent.values())
            for bucket, seconds in spent.items():
                buckets[bucket] += seconds
    buckets["unexplained"] = sum(live_s.values())
    return dict(buckets)


def _kept_steps(events: Sequence[Event]) -> dict[int, int]:
    """Return, by generation, the step up to which its work was kept.

    That is where the next one to take steps has begun.
    """
    begins = {
        event["generation"]: event["data"]["start_step"]
        for event in events
        if event["kind"] == "times"
    }
    kept, following = {}, sys.maxsize
    for number in sorted(begins, reverse=True):
        kept[number] = following
        if begins[number] >= 0:
            following = begins[number]
    return kept


def _of_rank(
    data: Mapping[str, Any], generation: int, kept: Mapping[int, int]
) -> dict[str, float]:
    """Return the seconds of rank 0 in one generation, by bucket."""
    spent = dict(data["spent_s"])
    found = {}
    kind = "start" if generation == min(kept) else "restart"
    for phase in _START:
        found[f"{kind}: {phase}"] = spent.pop(phase)
    if data["age_s"] > _HUNG_S and data["phase"] in spent:
        spent[data["phase"]] -= data["age_s"]
        found["hung"] = data["age_s"]
    if data["silent_s"]:
        found["host silent"] = data["silent_s"]
    first, last = data["start_step"], data["step"]
    num_taken, num_lost = last - first, max(0, last - max(first, kept[generation]))
    share = num_lost / num_taken if num_taken > 0 else 0.0
    step_s = spent.pop("step")
    found |= {"lost steps": share * step_s, "productive steps": (1 - share) * step_s}
    return found | spent


def main() -> int:
    """Print the ledger of each work dir."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work_dir", type=Path, nargs="+")
    for work_dir in parser.parse_args().work_dir:
        text = (work_dir / "events.jsonl").read_text()
        buckets = ledger([json.loads(line) for line in text.splitlines()])
        print(f"{work_dir}: {sum(buckets.values()):.1f} s")
        for bucket, seconds in sorted(buckets.items(), key=lambda item: -item[1]):
            print(f"  {bucket:<32} {seconds:9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

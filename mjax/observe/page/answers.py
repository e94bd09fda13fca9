"""The answers of the page: a method for each address of its API.

Input: queries of viewers. Output: objects for JSON, or bytes. A thread follows the run
and keeps its data in memory, so the cost of an answer depends only on its size. Slow
reports are computed once for all viewers.
"""

import bisect
import collections
import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import numpy as np
from starlette.concurrency import run_in_threadpool

from mjax.observe.page import groups, heat, model, ranks, reports, rows, timeline
from mjax.observe.page.feed import Feed
from mjax.observe.page.model import Mark, Model, Process
from mjax.observe.page.query import BadQueryError, Query
from mjax.observe.page.worker import Worker
from mjax.observe.places import View, coordinates

POLL_S = 0.5
"""Shortest pause between two polls of the run. The pause is also at least four times
the time of a poll."""
WAIT_S = 20.0
"""Longest wait for a report. Browsers and proxies wait for 30 s or longer."""
_MFU_WAIT_S = 1.0
"""Longest wait of a request for the charts, if the shape of the MFU is not ready."""
_STATE_S = 1.0
"""Time for which one answer with the state of the ranks serves all viewers."""
_MOST_POINTS, _POINTS = 20_000, 2_000
_EVENTS, _MOST_EVENTS = 500, 5_000
_RANK_EVENTS = 50
_HEATS = 8
_MOST_MARKS = 2_000
"""Maximum number of marks in an answer, the newest. It is the width of a chart in
pixels."""
_VIEWS: tuple[View, ...] = get_args(View.__value__)


class Page:
    """A run as its viewers see it."""

    def __init__(
        self, feed: Feed, *, name: str, work_dir: Path, poll_s: float = POLL_S
    ) -> None:
        """Prepare to follow a run.

        Args:
          feed: source of the run's data; closed with the page.
          name: name of the run, for people.
          work_dir: work dir of the run, for reports that read other files.
          poll_s: seconds between two polls of the run.
        """
        self._poll_s = poll_s
        self._feed, self._name, self._work_dir = feed, name, work_dir
        self._lock = threading.Lock()
        self._model = Model()
        self._reports, self._views = Worker("reports"), Worker("views")
        self._heats: collections.OrderedDict[Hashable, bytes] = (
            collections.OrderedDict()
        )
        self._charts: tuple[Hashable, dict[str, Any]] = (None, {})
        self._state: tuple[float, int, bytes] = (-np.inf, 0, b"")
        self._failed = ""
        """Reason for the failure of the last poll; "" if it succeeded."""
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self.stopping.set()
        self._reports.close()
        self._views.close()
        self._thread.join()
        self._feed.close()

    def _follow(self) -> None:
        """Poll the run until the page stops."""
        while not self.stopping.is_set():
            begin = time.monotonic()
            is_behind = False
            try:
                share = self._feed.poll()
                with self._lock:
                    self._model.take(share)
                is_behind, self._failed = share.is_behind, ""
            except OSError as error:
                self._failed = f"the run cannot be read now: {error}"
            except Exception as error:  # a bug in mjax: keep the data read so far
                traceback.print_exception(error, file=sys.stderr)
                self._failed = (
                    f"{type(error).__name__} while reading the run; the page no longer "
                    "follows it; details are on the server's stderr"
                )
                return
            took_s = time.monotonic() - begin
            self.stopping.wait(0.005 if is_behind else max(self._poll_s, 4 * took_s))

    # --------------------------------------------------------- requests of viewers

    def run(self, query: Query) -> Any:
        """Return the run: config, mesh, newest step, and the position of each rank."""
        now_ns = time.time_ns()
        config = self._feed.config()
        with self._lock:
            known = self._model
            newest = known.newest()
            found = [known.latest(rank) for rank in self._ranks()]
            problems = self._problems(newest)
            return {
                "run": newest[0].header.run if newest else None,
                "name": self._name,
                "mesh": newest[0].header.mesh if newest else None,
                "generation": known.generation,
                "ranks": [ranks.described(of) for of in found if of is not None],
                "config": config,
                "newest_step": self._newest_step(newest),
                "live": ranks.is_live(newest, now_ns),
                "is_complete": known.is_complete,
                "wall_ns": now_ns,
                "problems": problems,
            }

    async def metrics(self, query: Query) -> Any:
        """Return thinned rows of metrics in columns, with marks and the MFU's shape."""
        points = query.whole("points", 10, _MOST_POINTS) or _POINTS
        found = await run_in_threadpool(self._charted, points)
        with self._lock:
            version, lowest = self._model.version, self._model.lowest()
        report = await self._reports.get(
            "mfu",
            version,
            lambda: reports.mfu_shape(self._work_dir, self._feed, lowest),
            wait_s=_MFU_WAIT_S,
        )
        problem = (
            report["problem"] if report else "the shape of the MFU is being computed"
        )
        return {
            **found,
            "mfu_report": report if problem is None else None,
            "mfu_problem": problem,
        }

    def _charted(self, points: int) -> dict[str, Any]:
        """Return thinned rows and marks, cached for all viewers."""
        with self._lock:
            is_complete = self._model.is_complete
            key = (self._model.version, is_complete, points)
            if self._charts[0] == key:
                return self._charts[1]
            steps, columns = self._model.rows.copy()
            marks = self._model.marks()
        thinned = rows.as_json(*rows.thin(steps, columns, points))
        found = {**thinned, "rows": len(steps), **_shown(marks, marks)}
        found["is_complete"] = is_complete
        with self._lock:
            self._charts = key, found
        return found

    def heat(self, query: Query) -> bytes:
        """Return one phase by rank and step; `from` and `to` are both included."""
        first, last = query.whole("from"), query.whole("to")
        asked = query.text("phase")
        with self._lock:
            grids = self._model.grids
            phases = grids.phases
            if not phases:
                return heat.empty([])
            phase = asked or ("step" if "step" in phases else phases[0])
            if phase not in phases:
                raise BadQueryError(
                    f"phase must be one of {', '.join(phases)[:1000]}, "
                    f"got {phase[:100]!r}"
                )
            key = (self._model.version, phase, first, last)
            found = self._heats.get(key)
            if found is not None:
                return found
            matrix = grids.matrix(phase, first, last)
        found = heat.encode(matrix, phase, phases)
        with self._lock:
            self._heats[key] = found
            while len(self._heats) > _HEATS:
                self._heats.popitem(last=False)
        return found

    async def timeline(self, query: Query) -> Any:
        """Return steps of ranks on one clock; `from` and `to` are both included."""
        asked = query.wholes("ranks")
        order = cast(View, query.choice("view", _VIEWS))
        with self._lock:
            newest = self._model.newest()
            version = self._model.version
            everyone = self._events()
        if not newest:
            return timeline.empty("no spans have been read yet")
        common = max(1, min(of.newest_step for of in newest) - 1)
        last = query.whole("to", 1) or common
        first = query.whole("from", 1) or max(1, min(common, last) - 1)
        if first > last:
            raise BadQueryError(f"from must be at most to, got {first} and {last}")
        chosen = None if asked is None else frozenset(asked)
        is_over = last < common  # these steps no longer change
        return await self._asked(
            self._views,
            ("timeline", first, last, order, chosen),
            0 if is_over else version,
            lambda: reports.on_one_clock(
                self._work_dir,
                self._feed,
                newest,
                everyone,
                (first, last),
                order,
                chosen,
            ),
        )

    async def stragglers(self, query: Query) -> Any:
        """Return slow hosts."""
        newest, version = self._newest()
        return await self._asked(
            self._reports,
            "stragglers",
            version,
            lambda: reports.stragglers(self._feed, newest),
        )

    async def stuck(self, query: Query) -> Any:
        """Return the ranks that block the run."""
        newest, _ = self._newest()
        return await self._asked(
            self._views,
            "stuck",
            int(time.monotonic()),  # silence does not change the version of the data
            lambda: reports.who_is_missing(self._work_dir, self._feed, newest),
        )

    async def ledger(self, query: Query) -> Any:
        """Return the wall time by bucket."""
        with self._lock:
            lowest, version = self._model.lowest(), self._model.version
        return await self._asked(
            self._reports,
            "ledger",
            version,
            lambda: reports.where_time_went(self._work_dir, self._feed, lowest),
        )

    async def whatif(self, query: Query) -> Any:
        """Return the cost of stragglers."""
        newest, version = self._newest()
        return await self._asked(
            self._reports,
            "whatif",
            version,
            lambda: reports.stragglers_cost(self._work_dir, self._feed, newest),
        )

    def events(self, query: Query) -> Any:
        """Return the events from number `after` on; without it, the newest ones."""
        limit = query.whole("limit", 1, _MOST_EVENTS) or _EVENTS
        with self._lock:
            total = self._model.num_events
            after = query.whole("after")
            first = max(0, total - limit) if after is None else after
            found = self._numbered(first, limit)
        return {"events": found, "next": found[-1]["i"] + 1 if found else first}

    def rank(self, query: Query) -> Any:
        """Return the details of a rank."""
        number = query.whole("rank")
        if number is None:
            raise BadQueryError("rank is missing; write ?rank=0")
        now_ns = time.time_ns()
        with self._lock:
            process = self._model.latest(number)
            if process is None:
                known = self._ranks()
                raise BadQueryError(
                    f"there is no rank {number}; there are {len(known)}, "
                    f"{known[0] if known else '-'} to {known[-1] if known else '-'}"
                )
            newest = [of.header for of in self._model.newest()]
            told = [
                each
                for each in self._numbered(0, model.MOST_EVENTS)
                if each["rank"] == number
            ]
        header = process.header
        before, behind = groups.stages_beside(header, newest)
        return {
            "rank": number,
            "host": header.host,
            "pid": header.pid,
            "generation": header.generation,
            "devices": [*header.devices],
            "coordinates": [coordinates(d, header.mesh) for d in header.devices],
            "groups": groups.groups_of(header, newest),
            "sends_to": behind,
            "receives_from": before,
            "last": ranks.last(process, now_ns),
            "ended": process.code,
            "error": ranks.error(process, told, now_ns),
            "stacks": ranks.stacks(self._work_dir, process),
            "events": told[-_RANK_EVENTS:],
        }

    def state(self, query: Query) -> Any:
        """Return the progress of each rank."""
        return self.state_json()[1]

    # --------------------------------------------------------- updates of live viewers

    def state_json(self) -> tuple[int, bytes]:
        """Return the state of all ranks as JSON, shared by all viewers for a second.

        Returns:
          the version of the run's data that the state shows, and the JSON.
        """
        with self._lock:
            at, version, found = self._state
            if time.monotonic() - at < _STATE_S:
                return version, found
            now_ns = time.time_ns()
            newest = self._model.newest()
            answer = {
                "time_ns": now_ns,
                "generation": self._model.generation,
                "live": ranks.is_live(newest, now_ns),
                "newest_step": self._newest_step(newest),
                "ranks": [ranks.where(of, now_ns) for of in newest],
            }
            found = msgspec.json.encode(answer)
            self._state = time.monotonic(), self._model.version, found
            return self._state[1:]

    def seen(self) -> "Seen":
        """Return the progress of the run."""
        with self._lock:
            return Seen(
                version=self._model.version,
                generation=self._model.generation,
                rows=len(self._model.rows),
                rows_revision=self._model.rows.revision,
                events=self._model.num_events,
                is_complete=self._model.is_complete,
            )

    def rows_from(self, first: int, points: int = _POINTS) -> dict[str, Any]:
        """Return the rows of metrics from number `first` on."""
        with self._lock:
            found = self._model.rows.copy(first)
        return rows.as_json(*rows.thin(*found, points))

    def marks_from(self, first: int) -> dict[str, Any]:
        """Return the marks from the step of row number `first` on, and that step."""
        with self._lock:
            step, marks = self._model.rows.step(first), self._model.marks()
        at = bisect.bisect_left(marks, step, key=lambda mark: mark.step)
        return {"from": step, **_shown(marks[at:], marks)}

    def events_from(self, first: int) -> list[dict[str, Any]]:
        """Return the events from number `first` on."""
        with self._lock:
            return self._numbered(first, _MOST_EVENTS)

    # ------------------------------------------------------------------- with the lock

    def _newest(self) -> tuple[list[Process], int]:
        with self._lock:
            return self._model.newest(), self._model.version

    def _ranks(self) -> list[int]:
        return sorted({key.rank for key in self._model.processes})

    def _newest_step(self, newest: list[Process]) -> int:
        steps = [of.newest_step for of in newest]
        return max([*steps, self._model.rows.newest_step])

    def _problems(self, newest: list[Process]) -> list[str]:
        known = self._model
        found = [self._failed] * bool(self._failed)
        if not known.is_complete:
            found.append("the files of the run are still being read for the first time")
        elif not known.processes and not self._work_dir.is_dir():
            found.append(
                f"the work dir {self._work_dir} does not exist yet; its run is shown "
                "once it starts"
            )
        elif not known.processes:
            found.append(
                "there are no spans yet: the run has just begun, was started with "
                "--observe.no-spans, or writes them elsewhere (--spans-dir)"
            )
        found += model.missing(newest)
        found += known.problems
        hidden = known.num_problems - len(known.problems)
        if hidden > 0:
            found.append(f"and {hidden} more lines or files with problems")
        if known.grids.left_out:
            names = ", ".join(sorted(known.grids.left_out))[:200]
            found.append(f"too many phases for the heat map, left out: {names}")
        return found

    def _events(self) -> list[Any]:
        return [told.event for told in self._model.events if told.generation is None]

    def _numbered(self, first: int, limit: int) -> list[dict[str, Any]]:
        """Return at most `limit` events from number `first` on, as JSON objects."""
        known = self._model
        oldest = known.num_events - len(known.events)
        start = max(first, oldest)
        found = []
        for number in range(start, min(start + limit, known.num_events)):
            event = known.events[number - oldest].event
            found.append(
                {
                    "i": number,
                    "time_ns": event.time_ns,
                    "host": event.host,
                    "rank": event.rank,
                    "generation": event.generation,
                    "source": event.source,
                    "kind": event.kind,
                    "severity": event.severity,
                    "text": event.text,
                }
            )
        return found

    # ---------------------------------------------------------------- without the lock

    async def _asked(
        self,
        worker: Worker,
        key: Hashable,
        version: Hashable,
        compute: Callable[[], Any],
    ) -> Any:
        """Return a report, or say that it is not ready yet."""
        found = await worker.get(
            key,
            version,
            lambda: encode(compute()),
            wait_s=WAIT_S,
        )
        if found is None:
            return {
                "problem": f"this takes longer than {WAIT_S:.0f} s; ask again",
                "problems": [],
            }
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Progress of a run, for viewers that wait for news."""

    version: int
    generation: int
    rows: int
    rows_revision: int
    events: int
    is_complete: bool


def _shown(marks: list[Mark], known: list[Mark]) -> dict[str, Any]:
    """Return the newest of some marks, and the number of all known ones by kind."""
    return {
        "marks": [mark._asdict() for mark in marks[-_MOST_MARKS:]],
        "num_marks": dict(collections.Counter(mark.kind for mark in known)),
    }


def encode(answer: Any) -> bytes:
    """Write JSON; numbers that are not finite become null."""
    return msgspec.json.encode(answer, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Convert numpy types to plain numbers."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")

"""Check that the model server loses no request, mixes no answers and does not grow.

    python -m scripts.generate.server_load [--cpu-s 3600] [--run WORK_DIR]

Trains `--recipe debug` for 30 steps unless a run is given, computes the answers of some
requests offline (one at a time on an engine of the same number of slots), starts the
server, and sends it these requests from 64 clients at once: streamed or not, greedy or
drawn. 10 of the clients cut their answers off, most of them in the middle of a stream
(`server_clients`). When the server has used --cpu-s seconds of CPU, the clients finish
their requests. Then more requests than there are slots are sent at once, and SIGTERM
stops the server while it answers them.

Checks: every complete answer equals the offline one, every answer that was cut begins
like it, and none of the others was lost; the counts of server and clients agree, and
every accepted request has one end; nothing is open at the end; the requests in progress
at SIGTERM are answered, and the exit code is 0; memory has not grown after the first
tenth. Writes docs/benchmarks/server_load.md. Exits with 1 if a check fails.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from scripts.evidence import Table, commit, run_training, write_page
from scripts.generate.server_clients import (
    CUT_IN_STREAM,
    CUT_SILENT,
    DIFFERENT,
    LOST,
    Case,
    Seen,
    ask,
    client,
)

CLIENTS, CUTTERS = 64, 10
SLOTS, MAX_LEN = 16, 256
NUM_REQUESTS, NUM_LAST = 96, 24
WARM_SHARE = 0.1
"""First share of the memory samples, which the fit skips: buffers fill."""
MOST_GROWTH = 0.05
"""Share of the memory by which the fit may grow over the run. Chosen: noise is 1%."""
_PATH = "/v1/completions"
_QUIET_S, _STOP_S, _SAY_S = 30.0, 60.0, 60.0
_TICKS = os.sysconf("SC_CLK_TCK")

type Counters = dict[str, float]
"""Counters and gauges of the server, by their Prometheus names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """The server at one moment."""

    cpu_s: float
    """CPU seconds since the clients started."""
    mib: float
    """Resident memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of the whole test."""

    seen: Seen
    samples: list[Sample]
    wall_s: float
    found: Counters
    """Counters after all clients had ended."""
    last: Seen
    """Observations of the requests in progress at SIGTERM."""
    at_stop: Counters
    """Counters just before SIGTERM."""
    exit_code: int


def make_cases(run: str) -> list[Case]:
    """Draw requests and answer them offline, one at a time."""
    import jax

    from mjax.generate.engine import Engine, answer_all
    from mjax.generate.opened import open_model
    from mjax.generate.requests import Request, Sampling
    from mjax.mesh.axes import MeshConfig, resolve
    from mjax.mesh.build import build_mesh
    from mjax.mesh.devices import load_plugin_without_gpu

    load_plugin_without_gpu()
    mesh = build_mesh(resolve(MeshConfig(), jax.device_count()))
    engine = Engine(
        open_model(run, mesh, dtype="float32"), slots=SLOTS, max_len=MAX_LEN
    )
    rng, cases = random.Random(1), []
    for number in range(NUM_REQUESTS):
        length = rng.choice((3, 12, 40, 100))
        prompt = "".join(rng.choice("abc def(x):\n") for _ in range(length))
        sampling = {
            "max_tokens": rng.choice((8, 20, 60, 120)),
            "temperature": rng.choice((0.0, 0.7, 1.0)),
            "top_p": rng.choice((1.0, 0.9)),
            "seed": number,
        }
        request = Request(prompt=tuple(prompt.encode()), sampling=Sampling(**sampling))
        (answer,) = answer_all(engine, [request])
        body: dict[str, object] = {"prompt": prompt, **sampling}
        cases.append(Case(body=body, text=answer.text, num_tokens=len(answer.tokens)))
    return cases


# --------------------------------------------------------------------------- the server


@contextlib.contextmanager
def serving(run: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the server; give the process and its port."""
    command = [sys.executable, "-m", "mjax.generate", run, "--serve", "0"]
    command += ["--dtype", "float32", "--slots", str(SLOTS)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server, int(server.stdout.readline().split(":")[2].split("/")[0])
    finally:
        server.kill()
        server.wait()


def sample(pid: int, begun_s: float = 0.0) -> Sample:
    """Return the CPU seconds and memory of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Sample(
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS - begun_s,
        mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def counters(port: int) -> Counters:
    """Return the gauges and counters of the server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def count(found: Counters, name: str) -> int:
    """Return one count of the requests of the engine."""
    return int(found[f"mjax_requests_{name}_total"])


def answered(found: Counters, status: int | None = None) -> int:
    """Return the number of HTTP answers with a status; None for any status."""
    begins = f'mjax_answers_total{{path="{_PATH}",status="'
    begins += "" if status is None else f'{status}"'
    return int(sum(n for name, n in found.items() if name.startswith(begins)))


def still_open(found: Counters) -> int:
    """Return the open requests of the server."""
    gauges = ("open", "running", "waiting")
    return int(sum(found[f"mjax_{name}_answers"] for name in gauges))


# ----------------------------------------------------------------------------- the load


async def load(pid: int, port: int, cases: Sequence[Case], cpu_s: float, seen: Seen):
    """Run the clients; return samples of the server, one per second."""
    end, samples = asyncio.Event(), list[Sample]()
    running = [
        asyncio.create_task(
            client(random.Random(i), port, cases, seen, end, cuts=i < CUTTERS)
        )
        for i in range(CLIENTS)
    ]
    begun_s, said_s = sample(pid).cpu_s, time.monotonic()
    while (now := sample(pid, begun_s)).cpu_s < cpu_s:
        samples.append(now)
        if time.monotonic() - said_s > _SAY_S:
            said_s = time.monotonic()
            print(f"{now.cpu_s:.0f} CPU-s, {now.mib:.0f} MiB, {dict(seen.outcomes)}")
        await asyncio.sleep(1.0)
    samples.append(now)
    end.set()
    await asyncio.gather(*running)
    return samples


async def quiet(port: int) -> Counters:
    """Wait until the server has ended the cut requests; return its counters."""
    until_s = time.monotonic() + _QUIET_S
    while still_open(found := counters(port)) and time.monotonic() < until_s:
        await asyncio.sleep(0.2)
    return found


async def stop(
    server: "subprocess.Popen[str]", port: int, cases: Sequence[Case]
) -> tuple[Seen, Counters]:
    """Send more requests than there are slots, and SIGTERM while they are answered."""
    seen, before = Seen(), count(counters(port), "accepted")
    longest = sorted(cases, key=lambda case: -case.num_tokens)[:NUM_LAST]
    asking = [
        asyncio.create_task(ask(port, case, i % 2 == 0, None, seen))
        for i, case in enumerate(longest)
    ]
    found = counters(port)
    while (
        count(found, "accepted") < before + NUM_LAST
        or found["mjax_waiting_answers"] == 0
    ) and seen.complete < NUM_LAST:
        found = await asyncio.to_thread(counters, port)
    server.send_signal(signal.SIGTERM)
    await asyncio.gather(*asking)
    return seen, found


async def drive(server: "subprocess.Popen[str]", port: int, run: str, cpu_s: float):
    """Load the server, let it end open requests, and stop it."""
    cases, seen, begun_s = make_cases(run), Seen(), time.monotonic()
    samples = await load(server.pid, port, cases, cpu_s, seen)
    wall_s = time.monotonic() - begun_s
    found = await quiet(port)
    last, at_stop = await stop(server, port, cases)
    return Outcome(
        seen=seen,
        samples=samples,
        wall_s=wall_s,
        found=found,
        last=last,
        at_stop=at_stop,
        exit_code=await asyncio.to_thread(server.wait, _STOP_S),
    )


# --------------------------------------------------------------------------- the report


def growth(samples: Sequence[Sample]) -> float:
    """Return the relative growth of a line fitted to the memory over the samples."""
    kept = samples[int(len(samples) * WARM_SHARE) :]
    cpu_s, mib = np.array([(s.cpu_s, s.mib) for s in kept]).T
    slope, _ = np.polyfit(cpu_s, mib, 1)
    return float(slope * np.ptp(cpu_s) / mib[0])


def checks(o: Outcome) -> dict[str, int]:
    """Return the numbers that must be 0."""
    seen, found = o.seen, o.found
    accepted, finished = count(found, "accepted"), count(found, "finished")
    cut = [count(found, f"cancelled_{where}") for where in ("running", "waiting")]
    # A client cannot know whether a request that it cut unread was accepted.
    least = seen.complete + seen.outcomes[CUT_IN_STREAM]
    most = least + seen.outcomes[CUT_SILENT]
    num_cut = most - seen.complete
    last = o.last
    return {
        "answers that differ from the offline ones": seen.outcomes[DIFFERENT],
        "requests that were lost": seen.outcomes[LOST],
        "requests that the server has not counted": seen.sent - answered(found),
        "refusals that server and clients count otherwise": answered(found, 429)
        + answered(found, 503)
        - seen.refused,
        "accepted by the server, beyond what the clients know": max(
            least - accepted, accepted - most, 0
        ),
        "finished by the server, beyond what the clients know": max(
            seen.complete - finished, finished - seen.complete - num_cut, 0
        ),
        "accepted - finished - cut in a slot - cut waiting": accepted
        - finished
        - sum(cut),
        "open, running or waiting after the load": still_open(found),
        "cutting in slots or in the queue never happened": int(0 in cut),
        "no request was running and none was waiting at SIGTERM": int(
            o.at_stop["mjax_running_answers"] == 0
            or o.at_stop["mjax_waiting_answers"] == 0
        ),
        "requests under way at SIGTERM without their answer": NUM_LAST - last.complete,
        "exit code after SIGTERM": o.exit_code,
        "memory grew by more than the bound": int(growth(o.samples) > MOST_GROWTH),
    }


def p(values: Sequence[float], percent: float) -> str:
    return f"{np.percentile(values, percent):.3f} s" if values else "none"


def tables(o: Outcome) -> list[Table]:
    """Return the tables of the page."""
    seen, found, samples = o.seen, o.found, o.samples
    memory = [s.mib for s in samples]
    rows = [(f"clients: {name}", str(n)) for name, n in sorted(seen.outcomes.items())]
    rows += [("clients: refused", str(seen.refused))] if not seen.refused else []
    rows += [
        (f"server: {name.replace('_', ' ')}", str(count(found, name)))
        for name in ("accepted", "finished", "cancelled_running", "cancelled_waiting")
    ]
    stopped = {n: int(o.at_stop[f"mjax_{n}_answers"]) for n in ("running", "waiting")}
    times = [
        ("whole answer", p(seen.whole_s, 50), p(seen.whole_s, 95)),
        ("streamed answer", p(seen.stream_s, 50), p(seen.stream_s, 95)),
        ("first piece of a stream", p(seen.first_s, 50), p(seen.first_s, 95)),
    ]
    size = f"{memory[0]:.0f}, {min(memory):.0f} to {max(memory):.0f}"
    return [
        Table(
            title="Requests",
            text=f"{CLIENTS} clients at once, {CUTTERS} of them cut their answers off; "
            f"{samples[-1].cpu_s:.0f} CPU-seconds of the server in {o.wall_s:.0f} s of "
            f"wall time; {SLOTS} slots, {NUM_REQUESTS} different requests, "
            f"{seen.tokens} tokens of complete answers. Commit {commit()}.",
            header=("who has counted what", "requests"),
            rows=rows,
        ),
        Table(
            title="Checks",
            text=f"Each must be 0. SIGTERM met {stopped['running']} requests running "
            f"and {stopped['waiting']} waiting of {NUM_LAST}.",
            header=("what", "found"),
            rows=[(name, str(value)) for name, value in checks(o).items()],
        ),
        Table(
            title="Times",
            text="Seen by clients that share the two cores with the server; the first "
            "piece also of streams that were cut later.",
            header=("what", "p50", "p95"),
            rows=times,
        ),
        Table(
            title="Memory",
            text="Resident memory of the server, each second; a line through all but "
            f"the first {WARM_SHARE:.0%} of the samples. Bound: {MOST_GROWTH:.0%}.",
            header=("MiB at first, least to most", "growth of the line"),
            rows=[(size, f"{growth(samples):+.2%}")],
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-s", type=float, default=3600.0)
    parser.add_argument("--run", help="work dir to serve")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or f"{folder}/run"
        if given.run is None:
            flags = ("--recipe", "debug", "--steps", "30", "--log.sample-tokens", "0")
            length = ("--data.seq-len", str(MAX_LEN))
            run_training(*flags, *length, "--work-dir", run)
        with serving(run) as (server, port):
            outcome = asyncio.run(drive(server, port, run, given.cpu_s))
    for text in (outcome.seen.wrong + outcome.last.wrong)[:5]:
        print(text, file=sys.stderr)
    command = f"python -m scripts.generate.server_load --cpu-s {given.cpu_s:g}"
    title = "The model server under load"
    print(write_page("server_load", title, command, tables(outcome)))
    found = checks(outcome)
    print(json.dumps({"outcomes": outcome.seen.outcomes, "checks": found}))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Does the model server lose requests, mix answers or grow, under 64 clients?

    python -m scripts.generate.server_load [--cpu-s 3600] [--run WORK_DIR]

Trains `--recipe debug` for 30 steps unless a run is given, computes the answers of some
requests offline (one at a time on an engine of the same number of slots), starts the
server, and sends it these requests from 64 clients at once: streamed or not, greedy or
drawn. 10 of the clients cut every answer off in the middle. When the server has used
--cpu-s seconds of CPU, the clients end, and the server is stopped by SIGTERM.

Checks: every complete answer equals the offline one; none of the others was lost; the
server has nothing open in the end and exits with 0; its memory has not grown. Writes
docs/benchmarks/server_load.md. Ends with 1 if a check fails.
"""

import argparse
import asyncio
import collections
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.evidence import Table, commit, run_training, write_page

CLIENTS, CUTTERS = 64, 10
SLOTS, MAX_LEN = 16, 256
NUM_REQUESTS = 96
_WARM_SHARE = 0.25
"""First part of the samples of memory that the fit leaves out: buffers fill."""
_MOST_GROWTH = 0.05
"""Share of the memory by which the fit may grow over the run. Chosen: noise is 1%."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A request, and its offline answer."""

    body: dict[str, object]
    text: str


@dataclasses.dataclass(kw_only=True)
class Seen:
    """What the clients have seen."""

    outcomes: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    whole_s: list[float] = dataclasses.field(default_factory=list)
    stream_s: list[float] = dataclasses.field(default_factory=list)
    first_s: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


def make_cases(run: str) -> list[Case]:
    """Draw requests and answer them offline, one at a time."""
    import jax

    from mjax.generate.engine import Engine, answer_all
    from mjax.generate.opened import open_model
    from mjax.generate.requests import Request, Sampling
    from mjax.mesh.axes import MeshConfig, resolve
    from mjax.mesh.build import build_mesh

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
        cases.append(Case(body=body, text=answer.text))
    return cases


async def ask(port: int, case: Case, stream: bool, cut_s: float | None, seen: Seen):
    """Send one request; cut it off after a while, or compare its answer."""
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(case.body | {"stream": stream}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        if cut_s is not None:
            await asyncio.sleep(cut_s)
            seen.outcomes["cut off"] += 1
            return
        status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
        first_s = time.monotonic() - begun
        received = (await reader.read()).decode()
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        seen.outcomes["lost"] += 1
        seen.wrong.append(f"lost: {type(error).__name__}: {error}")
        return
    finally:
        writer.close()
    took_s = time.monotonic() - begun
    if status in (429, 503):
        seen.outcomes[f"refused with {status}"] += 1
        return
    text = streamed_text(received) if stream else whole_text(received)
    if status != 200 or text != case.text:
        seen.outcomes["different"] += 1
        seen.wrong.append(f"{status}: {text!r}, offline {case.text!r}")
        return
    seen.outcomes["equal, streamed" if stream else "equal, whole"] += 1
    seen.tokens += int(str(case.body["max_tokens"]))
    (seen.stream_s if stream else seen.whole_s).append(took_s)
    if stream:
        seen.first_s.append(first_s)


def whole_text(received: str) -> str | None:
    """Return the text of a whole answer; None if it is none."""
    try:
        return json.loads(received)["choices"][0]["text"]
    except (ValueError, KeyError):
        return None


def streamed_text(received: str) -> str | None:
    """Return the text of a stream; None if it does not end with its mark."""
    lines = [x for x in re.split(r"\r?\n", received) if x.startswith("data: ")]
    if not lines or lines[-1] != "data: [DONE]":
        return None
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    if any("error" in chunk for chunk in chunks):
        return None
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def client(
    number: int, port: int, cases: Sequence[Case], seen: Seen, end: asyncio.Event
) -> None:
    """Send request after request; the first clients cut theirs off."""
    rng = random.Random(number)
    while not end.is_set():
        stream, case = rng.random() < 0.5, rng.choice(cases)
        cut_s = rng.uniform(0.0, 1.0) if number < CUTTERS else None
        await ask(port, case, stream, cut_s, seen)


def used_cpu_s(pid: int) -> float:
    """Return the CPU-seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def load(
    pid: int, port: int, cases: Sequence[Case], cpu_s: float, seen: Seen
) -> list[tuple[float, float]]:
    """Let the clients run; return (CPU-seconds, MiB) of the server each second."""
    end, samples = asyncio.Event(), []
    running = [
        asyncio.create_task(client(number, port, cases, seen, end))
        for number in range(CLIENTS)
    ]
    begun_s = used_cpu_s(pid)
    while (used := used_cpu_s(pid) - begun_s) < cpu_s:
        samples.append((used, memory_mib(pid)))
        await asyncio.sleep(1.0)
    end.set()
    await asyncio.gather(*running)
    return samples


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """Return the share by which a line through the memory grows over the samples."""
    kept = np.array(samples[int(len(samples) * _WARM_SHARE) :])
    slope, _ = np.polyfit(kept[:, 0], kept[:, 1], 1)
    return float(slope * np.ptp(kept[:, 0]) / kept[0, 1])


def gauges(port: int) -> dict[str, float]:
    """Return the gauges and counters of the server."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def p(values: Sequence[float], percent: float) -> str:
    return f"{np.percentile(values, percent):.3f} s" if values else "none"


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
        cases = make_cases(run)
        command = [sys.executable, "-m", "mjax.generate", run, "--serve", "0"]
        command += ["--dtype", "float32", "--slots", str(SLOTS)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split(":")[2].split("/")[0])
            seen = Seen()
            begun = time.monotonic()
            samples = asyncio.run(load(server.pid, port, cases, given.cpu_s, seen))
            wall_s = time.monotonic() - begun
            time.sleep(1.0)
            found = gauges(port)
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
        finally:
            server.kill()
    return report(given.cpu_s, seen, samples, wall_s, found, code)


def report(
    cpu_s: float,
    seen: Seen,
    samples: Sequence[tuple[float, float]],
    wall_s: float,
    found: dict[str, float],
    code: int,
) -> int:
    """Write the page; return the exit code."""
    grown = growth(samples)
    memory = [mib for _, mib in samples]
    checks = {
        "answers that differ from the offline ones": seen.outcomes["different"],
        "accepted requests that were lost": seen.outcomes["lost"],
        "answers open at the end": int(found["mjax_open_answers"]),
        "answers running at the end": int(found["mjax_running_answers"]),
        "exit code after SIGTERM": code,
        "memory grew by more than the bound": int(grown > _MOST_GROWTH),
    }
    for text in seen.wrong[:5]:
        print(text, file=sys.stderr)
    counts = [(name, str(n)) for name, n in sorted(seen.outcomes.items())]
    times = [
        ("whole answer", p(seen.whole_s, 50), p(seen.whole_s, 95)),
        ("streamed answer", p(seen.stream_s, 50), p(seen.stream_s, 95)),
        ("first bytes of a stream", p(seen.first_s, 50), p(seen.first_s, 95)),
    ]
    size = f"{memory[0]:.0f}, {min(memory):.0f} to {max(memory):.0f}"
    tables = [
        Table(
            title="Requests",
            text=f"{CLIENTS} clients at once, {CUTTERS} of them cut each answer off; "
            f"{samples[-1][0]:.0f} CPU-seconds of the server in {wall_s:.0f} s of wall "
            f"time; {SLOTS} slots, {NUM_REQUESTS} different requests. Commit "
            f"{commit()}.",
            header=("outcome", "requests"),
            rows=counts,
        ),
        Table(
            title="Checks",
            text="Each must be 0.",
            header=("what", "found"),
            rows=[(name, str(value)) for name, value in checks.items()],
        ),
        Table(
            title="Times",
            text="Of complete answers, seen by clients that share the two cores.",
            header=("what", "p50", "p95"),
            rows=times,
        ),
        Table(
            title="Memory",
            text="Resident memory of the server, each second; a line through all but "
            f"the first quarter. Bound: {_MOST_GROWTH:.0%}.",
            header=("MiB at first, least to most", "growth of the line"),
            rows=[(size, f"{grown:+.2%}")],
        ),
    ]
    command = f"python -m scripts.generate.server_load --cpu-s {cpu_s:g}"
    print(write_page("server_load", "The model server under load", command, tables))
    print(json.dumps({"counts": counts, "checks": checks, "growth": grown}))
    return int(any(checks.values()))


if __name__ == "__main__":
    sys.exit(main())

"""A driver with ten thousand simulated agents: its cost and its reaction times.

    python -m scripts.faults.many_agents --agents 10000

The driver runs as usual, in a separate process. Another process holds a connection for
each agent and sends the messages of an agent with one rank, once a second. While all
ranks take steps, the driver's share of a core is measured over a minute. Then one agent
falls silent, and later one rank ends. The time until the driver reacts is measured,
without the time limit of heartbeats. Writes docs/benchmarks/many_agents.md.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from mjax.launch import messages
from mjax.launch.client import ask, write_private
from mjax.launch.messages import Beat, Hello, Ports, RankState
from mjax.processes.progress import Phase
from scripts.evidence import Table, commit, write_page

LOST_S = 4.0
TOKEN = "a token of the test, long enough"
FACTS = {"hostname": "host", "kernel": "6.1", "machine": "x86_64", "cpus": "192"}


class Agents:
    """Connections that send the messages of agents."""

    def __init__(self, number: int, address: tuple[str, int]) -> None:
        self._address, self._number = address, number
        self.silent: set[str] = set()
        self.ended: set[str] = set()
        self.sent_ns: dict[str, int] = {}
        """Time of the last heartbeat of each agent."""
        self.told_end_ns: dict[str, int] = {}
        """Time of the first heartbeat that reports the end of a rank."""
        self._began_s = time.monotonic()
        self.late_s = 0.0
        """Longest round of heartbeats of this process."""

    async def run(self) -> None:
        """Connect all agents and keep the connections."""
        async with asyncio.TaskGroup() as group:
            for index in range(self._number):
                group.create_task(self._agent(f"host-{index:05d}", index))
                if index % 100 == 99:
                    await asyncio.sleep(0.05)

    async def _agent(self, name: str, index: int) -> None:
        reader, writer = await asyncio.open_connection(
            *self._address, limit=messages.MAX_LINE_BYTES
        )
        fields: dict[str, Any] = {"host": name, "address": "127.0.0.1", "pid": 1}
        version = messages.VERSION
        hello = Hello(version=version, token=TOKEN, facts=FACTS, **fields)
        writer.write(messages.encode(hello))
        ranks: list[tuple[int, int]] = []
        listening = asyncio.create_task(self._listen(reader, writer, ranks))
        await asyncio.sleep(index % 1000 / 1000)
        while True:
            due_s = time.monotonic() + 1.0
            if name not in self.silent:
                states = [self._state(rank, number, name) for rank, number in ranks]
                writer.write(messages.encode(Beat(ranks=states)))
                self.sent_ns[name] = time.time_ns()
                if name in self.ended:
                    self.told_end_ns.setdefault(name, self.sent_ns[name])
            late_s = time.monotonic() - due_s
            await asyncio.sleep(max(0.0, -late_s))
            self.late_s = max(self.late_s, time.monotonic() - due_s)
            if listening.done():
                return

    async def _listen(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ranks: list[tuple[int, int]],
    ) -> None:
        decoder = msgspec.json.Decoder(messages.ToAgent)
        while True:
            try:
                message = await messages.receive(reader, decoder)
            except (EOFError, OSError):
                return
            match message:
                case messages.FindPorts():
                    ports = Ports(generation=message.generation, coordinator=4321)
                    writer.write(messages.encode(ports))
                case messages.Start():
                    ranks[:] = [(s.rank, message.generation) for s in message.ranks]
                case messages.Signal():
                    ranks.clear()

    def _state(self, rank: int, generation: int, name: str) -> RankState:
        has_ended = name in self.ended
        elapsed_s = time.monotonic() - self._began_s
        return RankState(
            rank=rank,
            generation=generation,
            pid=4000,
            code=-9 if has_ended else None,
            ended_ns=time.time_ns() if has_ended else None,
            state="S",
            phase=Phase.STEP,
            step=int(elapsed_s),
            age_s=elapsed_s % 1.0,
            step_s=1.0,
            saved_step=10 * (int(elapsed_s) // 10),
            first_step_s=3.0,
            spent_s=[0.1] * len(Phase),
        )


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def events(work_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind; a line that is being written is left out."""
    text, _, _ = (work_dir / "events.jsonl").read_text().rpartition("\n")
    return [e for e in map(json.loads, text.splitlines()) if e["kind"] == kind]


async def until(condition: Any, limit_s: float = 600.0) -> None:
    """Wait until a condition holds.

    Raises:
      TimeoutError: the condition did not hold in time.
    """
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.02)


async def measure(num_agents: int, seconds: float, work_dir: Path) -> dict[str, float]:
    """Run all cases; return the measurements."""
    token = work_dir / "token"
    write_private(token, TOKEN)
    command = [sys.executable, "-m", "mjax.launch", "driver", "--hosts"]
    command += [str(num_agents - 2), "--spares", "2", "--bind", "127.0.0.1:0"]
    command += ["--token-file", str(token), "--restart.lost-s", str(LOST_S)]
    command += ["--", "--recipe", "debug", "--work-dir", str(work_dir)]
    with (work_dir / "driver.log").open("wb") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        place = work_dir / "launch" / "address.json"
        await until(place.exists)
        agents = Agents(num_agents, tuple(json.loads(place.read_text())))
        began_s = time.monotonic()
        running = asyncio.create_task(agents.run())
        await until(lambda: bool(events(work_dir, "under_way")))
        found = {"all ranks take steps after, s": time.monotonic() - began_s}

        agents.late_s, oldest_s = 0.0, 0.0
        before_s, began_s = cpu_s(driver.pid), time.monotonic()
        while time.monotonic() - began_s < seconds:
            await asyncio.sleep(seconds / 6)
            status = await asyncio.to_thread(
                lambda: ask(work_dir, "status", token_file=token).data
            )
            heard: Any = status["heard_s"]
            oldest_s = max(oldest_s, *heard.values())
        spent_s = cpu_s(driver.pid) - before_s
        found["share of a core"] = spent_s / (time.monotonic() - began_s)
        found["oldest heartbeat, s"] = oldest_s
        found["latest heartbeat sent, s"] = agents.late_s

        agents.silent.add("host-00100")
        await until(lambda: bool(events(work_dir, "failure")))
        silence = events(work_dir, "failure")[0]
        assert silence["host"] == "host-00100", silence
        decided_s = (silence["time_ns"] - agents.sent_ns["host-00100"]) / 1e9
        found["silent agent: decided after its limit, s"] = decided_s - LOST_S
        restarted = lambda n: len(events(work_dir, "under_way")) > n  # noqa: E731
        await until(lambda: restarted(1))
        restart = events(work_dir, "under_way")[1]["time_ns"]
        found["ranks of the next generation take steps, s"] = (
            restart - silence["time_ns"]
        ) / 1e9

        agents.ended.add("host-00200")
        await until(lambda: len(events(work_dir, "failure")) > 1)
        end = events(work_dir, "failure")[1]
        assert end["host"] == "host-00200", end
        found["rank ended: decided after its heartbeat, s"] = (
            end["time_ns"] - agents.told_end_ns["host-00200"]
        ) / 1e9
        running.cancel()
        return found
    finally:
        driver.kill()
        driver.wait()


def main() -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args.agents, args.seconds, Path(folder)))
    table = Table(
        title=f"{args.agents} agents with a rank each",
        text=(
            f"Commit {commit()}. The agents share one process on the other core. Each "
            "sends a heartbeat once per second. A host counts as lost after "
            f"{LOST_S:g} s without one."
        ),
        header=["measured", "value"],
        rows=[[name, f"{value:.2f}"] for name, value in found.items()],
    )
    command = f"python -m scripts.faults.many_agents --agents {args.agents}"
    print(write_page("many_agents", "A driver of many hosts", command, [table]))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

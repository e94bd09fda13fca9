"""Every decision of a driver, played without sockets, processes or a clock."""

import asyncio
import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mjax.cli import exit_codes
from mjax.launch import checks, failures, policy
from mjax.launch.config import LimitsConfig, RestartConfig, RunConfig
from mjax.launch.hosts import HostState
from mjax.launch.liveness import Liveness
from mjax.launch.messages import (
    Beat,
    Check,
    Checked,
    Corruption,
    Divergence,
    Dump,
    FindPorts,
    Hello,
    LastWords,
    Match,
    Ports,
    Prepare,
    Quit,
    RankSpec,
    RankState,
    Signal,
    Stacks,
    Start,
)
from mjax.launch.policy import Action, Cause
from mjax.launch.supervisor import State, Supervisor
from mjax.processes.progress import LOCK_ANSWER, OF_ANOTHER, Phase

WAITING = """Current thread 0x01 (most recent call first):
  File "jax/_src/array.py", line 1 in _value
  File "mjax/run/loop.py", line 2 in _finish
"""
SLEEPING = """Current thread 0x01 (most recent call first):
  File "loop.py", line 1 in sleep
  File "mjax/run/loop.py", line 2 in _finish
"""


class Cluster:
    """Obedient hosts and a supervisor, with simulated time."""

    def __init__(self, num_agents=3, **config):
        options: dict[str, Any] = {"hosts": 2, "spares": 1} | config
        self.config = RunConfig(**options)
        self.now_s = 100.0
        self.events, self.sent = [], []
        self.states: dict[str, dict[int, RankState]] = {}
        self.silent: set[str] = set()
        self.finds_ports = True
        self.faults: dict[str, float] = {}
        self.updates: list[bool] = []
        self.agents: dict[str, str] = {}
        self.seen: tuple[Any, str] = (None, "")
        self.supervisor = self.driver()
        for index in range(num_agents):
            self.join(f"host-{index}")

    def driver(self):
        return Supervisor(
            *(self.config, self.make_rank, self.send, self.events.append, self.now_s),
            sizes=range(self.config.min_hosts or self.config.hosts, self.config.hosts),
            take_back=lambda: bool(self.updates) and self.updates.pop(),
            faults=lambda name: self.faults.get(name, 0.0),
        )

    def look(self):
        """Check that every change is announced, as a driver needs for its snapshots."""
        one = self.supervisor
        place, snapshot = (
            (len(self.events), one.state, one.generation),
            json.dumps(one.snapshot()),
        )
        assert place != self.seen[0] or snapshot == self.seen[1]
        self.seen = place, snapshot

    def make_rank(self, generation, rank, num_hosts, coordinator):
        assert coordinator
        self.num_hosts = num_hosts
        return RankSpec(rank=rank, argv=[], environment={}, folder=str(generation))

    def send(self, host, message):
        self.sent.append((host, message))
        self.look()
        ranks = self.states.setdefault(host, {})
        if host in self.silent:
            return
        match message:
            case Start():
                self.states[host] = {
                    spec.rank: RankState(
                        rank=spec.rank, generation=message.generation, pid=1
                    )
                    for spec in message.ranks
                }
            case Signal(number=number):
                for rank, state in ranks.items():
                    if state.code is None and state.generation <= message.generation:
                        code = 42 if number == signal.SIGTERM else -number
                        self.set(host, rank, code=code, ended_ns=10**18)
            case FindPorts(generation=generation) if self.finds_ports:
                ports = Ports(generation=generation, coordinator=4321)
                self.supervisor.ports(host, ports, self.now_s)

    def join(self, name):
        ranks = list(self.states.get(name, {}).values())
        words: dict[str, Any] = {"version": 2, "token": "", "facts": {}, "pid": 1}
        agent = self.agents.setdefault(name, f"first of {name}")
        hello = Hello(host=name, address=name, ranks=ranks, id=agent, **words)
        self.supervisor.joined(hello, self.now_s)

    def restart_driver(self, *log_events, rejoin=("host-0", "host-1", "host-2")):
        """Kill the driver; its successor knows what the journal has."""
        snapshot = json.loads(json.dumps(self.supervisor.snapshot()))
        self.supervisor = self.driver()
        self.supervisor.resume(snapshot, self.now_s, log_events)
        for name in rejoin:
            self.join(name)

    def restart_agent(self, name):
        """Kill an agent, and so its ranks; another process takes its place."""
        self.states[name], self.agents[name] = {}, f"next after {self.agents[name]}"

    def set(self, host, rank, **changes):
        self.states[host][rank] = msgspec.structs.replace(
            self.states[host][rank], **changes
        )

    def rank(self, rank, **changes):
        self.set(self.supervisor.host_of(rank), rank, **changes)

    def all_ranks(self, **changes):
        for host in self.supervisor.placement:
            for rank in self.states[host]:
                self.set(host, rank, **changes)

    def go(self, seconds=1.0):
        """Let time pass, with a heartbeat of every host each second."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.25
            for host in self.supervisor.hosts:
                if host not in self.silent:
                    beat = Beat(ranks=list(self.states.get(host, {}).values()))
                    self.supervisor.beat(host, beat, self.now_s)
            self.supervisor.tick(self.now_s)
            self.look()

    def kinds(self, kind):
        return [event for event in self.events if event.kind == kind]

    def messages(self, kind):
        return [(host, one) for host, one in self.sent if isinstance(one, kind)]


def running(**config):
    cluster = Cluster(**config)
    cluster.go()
    assert cluster.supervisor.state is State.RUNNING
    assert cluster.supervisor.placement == ["host-0", "host-1"]
    cluster.all_ranks(phase=Phase.STEP, step=7, first_step_s=2.0, step_s=1.0)
    cluster.go()
    return cluster


def test_a_run_whose_ranks_all_end_well_ends_with_0_and_frees_its_hosts():
    cluster = running(ranks_per_host=2)
    assert [spec.rank for _, m in cluster.messages(Start) for spec in m.ranks] == [
        *range(4)
    ]
    cluster.all_ranks(code=0)
    cluster.go()
    assert cluster.supervisor.exit_code == 0
    assert {host for host, _ in cluster.messages(Quit)} == {
        "host-0",
        "host-1",
        "host-2",
    }


@pytest.mark.parametrize("changes", [{}, {"spares": 0, "min_hosts": 1}])
def test_a_run_begins_when_there_are_all_its_hosts(changes):
    cluster = Cluster(num_agents=1, **changes)
    cluster.go(60 if changes else 5)
    assert cluster.supervisor.state is State.GATHERING
    cluster.join("host-7")
    cluster.go()
    assert cluster.supervisor.placement == ["host-0", "host-7"]


@pytest.mark.parametrize(
    ("code", "is_found"), [(-9, True), (-11, True), (3, False), (1, False), (-6, False)]
)
def test_only_an_end_by_a_signal_needs_no_look_at_the_others(code, is_found):
    states = {0: RankState(rank=0, generation=1, pid=1, code=code)}
    found = failures.of_ranks(
        states, ["a", "b"], age_s=9.0, since_end_s=0.1, are_heard=True
    )
    assert (found is not None) == is_found


@pytest.mark.parametrize("code", [1, -signal.SIGABRT])
def test_a_rank_that_ends_because_a_host_is_gone_is_not_to_blame(code):
    cluster = running()
    cluster.silent.add("host-1")
    cluster.rank(0, code=code, ended_ns=1)
    cluster.go(10)
    (failure,) = cluster.kinds("failure")
    assert failure.data["cause"] == Cause.HOST_LOST
    assert failure.data["hosts"] == ["host-1"]
    assert cluster.supervisor.placement == ["host-0", "host-2"]


def test_nor_is_it_if_the_agent_of_that_host_is_started_again():
    cluster = running()
    cluster.supervisor.left("host-1", cluster.now_s)
    cluster.rank(0, code=1, ended_ns=1)
    cluster.silent.add("host-1")
    cluster.go(1)
    assert cluster.kinds("failure") == []
    cluster.silent.clear()
    cluster.restart_agent("host-1")
    cluster.join("host-1")
    cluster.go(1)
    (failure,) = cluster.kinds("failure")
    assert failure.data["cause"] == Cause.KILLED
    assert failure.data["hosts"] == ["host-1"]


def test_a_rank_that_fails_while_all_hosts_are_well_is_to_blame_within_a_beat():
    cluster = running()
    cluster.rank(0, code=1, ended_ns=1)
    cluster.go(1)
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.rank) == (Cause.FAILED, 0)


GAVE_UP = (
    "jax.errors.JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Timed out waiting "
    "30000ms for recv operation to complete",
    "RuntimeError: process 2 did not answer within 60 s (agreement on: save)",
    "RuntimeError: process 0: no space left on device",
    "error: process 0: no space left on device",
    f"ValueError: runs/a is a file\n{OF_ANOTHER}",
)


def test_while_a_rank_exits_the_others_wait_for_it_and_do_not_hang():
    limits = LimitsConfig(step_s=5.0, exit_s=20.0)
    cluster = Cluster(spares=0, num_agents=2, limits=limits)
    cluster.go()
    cluster.all_ranks(phase=Phase.STEP, step=7, first_step_s=2.0, state="S")
    cluster.rank(0, phase=Phase.EXIT)  # on a busy host this takes a while
    cluster.go(1)
    cluster.rank(1, age_s=9.0)
    cluster.go(0.25)
    assert cluster.kinds("hang") == []
    cluster.rank(0, code=1, ended_ns=1, last_lines="RuntimeError: all its own")
    cluster.go(1)
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.rank) == (Cause.FAILED, 0)


@pytest.mark.parametrize("line", GAVE_UP)
def test_a_rank_that_gave_up_because_of_another_is_not_the_cause(line):
    cluster = Cluster(hosts=4, spares=0, num_agents=4)
    cluster.go()
    cluster.rank(1, code=1, ended_ns=1, last_lines=f"Traceback\n{line}\n----")
    cluster.go(1)
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.rank, failure.host) == (
        "unknown",
        None,
        None,
    )
    assert failure.data["ranks"] == failure.data["hosts"] == []
    said = "unknown: rank 1 on host-1 ended with code 1 because of another rank"
    assert failure.text.startswith(said)
    assert line in failure.text
    assert cluster.kinds("evict") == []


def test_of_a_rank_that_failed_and_one_that_gave_up_the_first_is_the_cause():
    cluster = running()
    cluster.rank(1, code=1, ended_ns=1, last_lines=GAVE_UP[0])
    raised = "ValueError: a message with Gloo\nRuntimeError: all its own"
    cluster.rank(0, code=1, ended_ns=2, last_lines=raised)
    cluster.go(1)
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.rank) == (Cause.FAILED, 0)


def test_ranks_that_all_abort_because_of_another_blame_nobody():
    cluster = running()
    line = (
        "F0101 pjrt_client.cc:1] Terminating process because the JAX distributed "
        "service detected fatal errors. This most likely indicates that another task"
    )
    cluster.all_ranks(code=-signal.SIGABRT, ended_ns=1, last_lines=line)
    cluster.go(1)
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.data["hosts"]) == ("unknown", [])


def diverge(cluster, step, ways):
    ways = {str(to): skip for to, skip in ways.items()}
    said = LastWords(diverged=Divergence(step=step, ways=ways))
    cluster.all_ranks(code=93, ended_ns=1, last_words=said, step=step)
    cluster.go(10)


def test_a_run_that_diverges_goes_back_a_save_and_leaves_out_the_data_since():
    cluster = running()
    cluster.all_ranks(saved_step=6)
    cluster.go()
    diverge(cluster, 8, {3: ["3:5"], 6: ["6:2"]})
    assert cluster.supervisor.state is State.RUNNING
    assert cluster.kinds("failure")[0].data["cause"] == Cause.DIVERGED
    (event,) = cluster.kinds("roll_back")
    assert event.data == {"number": 1, "to": 6, "skip": ["6:2"]}
    assert event.text.startswith("rollback 1 of at most 3, from step 8 to 6")
    assert "from step 8 to 6, skipping the data since: --data.skip 6:2" in event.text
    assert cluster.supervisor.rollbacks.skip == ["6:2"]
    resumed = cluster.driver()
    resumed.resume(cluster.supervisor.snapshot(), cluster.now_s)
    assert resumed.rollbacks.skip == ["6:2"]


def test_a_run_that_diverges_at_the_same_place_goes_back_further_each_time():
    cluster = running(restart=RestartConfig(pause_s=0.1, rollback_saves=2))
    saved = {3: ["3:6"], 6: ["6:3"], 9: ["9:1"]}
    diverge(cluster, 10, saved)
    cluster.all_ranks(saved_step=9)
    diverge(cluster, 10, saved)
    cluster.all_ranks(saved_step=6)
    cluster.go()
    diverge(cluster, 14, saved | {12: ["6:3", "12:2"]})
    went_to = [event.data["to"] for event in cluster.kinds("roll_back")]
    assert went_to == [6, 3, 9]
    assert cluster.supervisor.exit_code is None
    diverge(cluster, 14, saved)
    assert cluster.supervisor.exit_code == 93
    assert "has diverged 4 times (--restart.max-rollbacks 3)" in (
        cluster.kinds("gave_up")[0].text
    )


def test_a_save_after_a_roll_back_is_new_although_its_step_was_saved_before():
    cluster = running(restart=RestartConfig(pause_s=0.1, max_fruitless=2))
    cluster.all_ranks(saved_step=9)
    cluster.go()
    diverge(cluster, 11, {3: ["3:8"]})
    for step in (5, 7):
        cluster.all_ranks(saved_step=step)
        cluster.go()
        cluster.rank(0, code=-9)
        cluster.go(10)
    assert cluster.supervisor.state is State.RUNNING
    assert [event.data["step"] for event in cluster.kinds("save")] == [9, 5, 7]


def test_a_roll_back_lowers_the_saved_step_once():
    cluster = running(restart=RestartConfig(pause_s=0.1, max_fruitless=2))
    cluster.all_ranks(saved_step=9)
    cluster.go()
    diverge(cluster, 11, {3: ["3:8"]})
    for _ in range(3):  # the first one saves step 5, the others restore it
        cluster.all_ranks(saved_step=5)
        cluster.go()
        cluster.rank(0, code=-9)
        cluster.go(10)
    assert [event.data["step"] for event in cluster.kinds("save")] == [9, 5]
    assert "2 generations in a row ended without a new saved step" in (
        cluster.kinds("gave_up")[0].text
    )


def test_a_driver_that_is_killed_after_a_roll_back_counts_the_saves_after_it():
    cluster = running(restart=RestartConfig(pause_s=60.0, max_fruitless=2))
    cluster.all_ranks(saved_step=9)
    cluster.go()
    cluster.rank(0, code=-9)
    cluster.go(10)
    diverge(cluster, 11, {3: ["3:8"]})
    assert cluster.supervisor.state is State.PAUSING
    snapshot = json.loads(json.dumps(cluster.supervisor.snapshot()))
    cluster.supervisor = cluster.driver()
    cluster.supervisor.resume(snapshot, cluster.now_s)
    for host in ("host-0", "host-1", "host-2"):
        cluster.join(host)
    cluster.go(65)
    cluster.all_ranks(saved_step=5)
    cluster.go()
    cluster.rank(0, code=-9)
    cluster.go(10)
    assert [event.data["step"] for event in cluster.kinds("save")] == [9, 5]
    assert cluster.supervisor.state is State.RUNNING


def test_of_replicas_that_differ_the_hosts_of_the_fewest_are_replaced():
    cluster = running()
    wrong = Corruption(step=8, processes=[1], is_sure=True)
    cluster.all_ranks(code=93, ended_ns=1, last_words=LastWords(corrupted=wrong))
    cluster.go(5)
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.host) == (Cause.CORRUPTED, "host-1")
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    assert cluster.supervisor.hosts["host-1"].state is HostState.EVICTED


def test_of_two_replicas_that_differ_both_are_checked():
    cluster = running(check_command="check-it")
    wrong = Corruption(step=8, processes=[0, 1], is_sure=False)
    cluster.all_ranks(code=93, ended_ns=1, last_words=LastWords(corrupted=wrong))
    cluster.go(2)
    assert cluster.kinds("failure")[0].data["cause"] == Cause.SUSPECTED
    assert {host for host, _ in cluster.messages(Check)} == {"host-0", "host-1"}


def test_a_host_that_finds_no_port_is_not_asked_for_ever():
    limits = LimitsConfig(import_s=5.0)
    cluster = Cluster(restart=RestartConfig(pause_s=0.1), limits=limits)
    cluster.finds_ports = False
    cluster.go(30)
    assert cluster.supervisor.exit_code == 93
    texts = [event.text for event in cluster.kinds("failure")]
    assert texts == ["failed: host-0 has found no port in 5 s"] * 3


def test_without_hosts_the_run_gives_up_and_says_how_many_are_missing():
    cluster = Cluster(num_agents=1, restart=RestartConfig(wait_s=5.0))
    cluster.go(10)
    assert cluster.supervisor.exit_code == 93
    assert "1 of 2 hosts did not connect in 5 s" in cluster.kinds("gave_up")[0].text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_all_start_again_on_the_same_hosts(rank):
    cluster = running()
    cluster.rank(rank, code=-9, ended_ns=1)
    cluster.rank(1 - rank, code=1, ended_ns=2)  # a consequence
    cluster.go(5)
    (failure,) = cluster.kinds("failure")
    assert (failure.rank, failure.host) == (rank, f"host-{rank}")
    assert failure.data["cause"] == Cause.KILLED
    assert cluster.supervisor.generation == 2
    assert cluster.supervisor.placement == ["host-0", "host-1"]


def test_the_cause_is_not_the_process_that_ended_first_but_for_another():
    cluster = Cluster(hosts=3, spares=0)
    cluster.go()
    cluster.rank(0, code=-signal.SIGABRT, ended_ns=1)
    cluster.rank(1, code=1, ended_ns=2)
    cluster.rank(2, code=-signal.SIGSEGV, ended_ns=3)
    cluster.go()
    assert cluster.kinds("failure")[0].data["ranks"] == [2]


def test_all_ranks_of_a_generation_are_dead_before_the_next_starts():
    cluster = running()
    cluster.silent.add("host-1")  # its rank does not die, and its heartbeats continue
    cluster.rank(0, code=-9)

    def beats():
        beat = Beat(ranks=list(cluster.states["host-1"].values()))
        cluster.supervisor.beat("host-1", beat, cluster.now_s)

    for _ in range(15):
        cluster.go(0.25)
        beats()
    assert cluster.supervisor.state is State.STOPPING
    cluster.set("host-1", 1, code=-9)
    beats()
    assert len(cluster.messages(Start)) == 2
    cluster.silent.clear()
    cluster.go(5)
    assert len(cluster.messages(Start)) == 4


def test_a_host_without_heartbeat_is_replaced_and_may_come_back_as_a_spare():
    cluster = running()
    cluster.silent.add("host-1")
    cluster.go(8)
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    assert cluster.supervisor.hosts["host-1"].state is HostState.LOST
    assert cluster.supervisor.hosts["host-1"].ranks == {}
    assert cluster.kinds("failure")[0].data["hosts"] == ["host-1"]
    cluster.silent.clear()
    before = len(cluster.messages(Signal))
    cluster.join("host-1")
    # Ranks still running there are killed: two processes must not write one checkpoint.
    kill = Signal(generation=2, number=signal.SIGKILL)
    assert cluster.messages(Signal)[before:] == [("host-1", kill)]
    assert cluster.supervisor.hosts["host-1"].state is HostState.SPARE


def test_an_agent_that_comes_back_without_its_ranks_is_noticed_at_once():
    cluster = running()
    cluster.restart_agent("host-1")
    cluster.supervisor.left("host-1", cluster.now_s)
    cluster.join("host-1")
    assert cluster.kinds("failure")[0].data["hosts"] == ["host-1"]
    cluster.go(5)
    assert cluster.supervisor.placement == ["host-0", "host-1"]
    assert cluster.supervisor.generation == 2


def test_an_agent_that_comes_after_the_end_is_sent_away():
    cluster = running()
    cluster.all_ranks(code=0)
    cluster.go()
    cluster.join("host-5")
    assert cluster.sent[-1] == ("host-5", Quit())


def test_an_evicted_host_stays_out():
    cluster = running()
    cluster.supervisor.evict("host-0", "smells", cluster.now_s)
    cluster.go(5)
    assert cluster.supervisor.placement == ["host-2", "host-1"]
    cluster.join("host-0")
    assert cluster.supervisor.hosts["host-0"].state is HostState.EVICTED
    with pytest.raises(
        ValueError, match="no host host-9; the hosts are host-0, host-1"
    ):
        cluster.supervisor.evict("host-9", "", cluster.now_s)


def test_three_generations_without_a_saved_step_end_the_run_with_the_cause():
    cluster = running()
    for _ in range(3):
        assert cluster.supervisor.exit_code is None
        cluster.rank(1, code=-11)
        cluster.go(8)
    assert cluster.supervisor.exit_code == 93
    # The second crash followed the rank to the spare, so the host was not the cause.
    assert "crashed: rank 1 on host-2 ended with SIGSEGV" in (
        cluster.kinds("gave_up")[0].text
    )
    assert [event.data["pause_s"] for event in cluster.kinds("restart")] == [1.0, 2.0]


def test_a_saved_step_forgives_what_failed_before():
    cluster = running()
    for step in range(1, 8):
        cluster.rank(0, saved_step=step)
        cluster.go()
        cluster.rank(1, code=-11)
        cluster.go(8)
    assert cluster.supervisor.exit_code is None
    assert cluster.supervisor.generation == 8
    assert {event.data["pause_s"] for event in cluster.kinds("restart")} == {0.0}


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (93, 93)])
def test_what_would_fail_again_is_not_tried_again(code, expected):
    cluster = running()
    cluster.rank(1, code=code)
    cluster.rank(0, code=-6)
    cluster.go(2)
    assert cluster.supervisor.exit_code == expected
    assert cluster.supervisor.generation == 1


def test_a_stop_lets_the_ranks_save_and_ends_with_42():
    cluster = running()
    cluster.supervisor.stop(cluster.now_s)
    assert {m.number for _, m in cluster.messages(Signal)} == {signal.SIGTERM}
    cluster.go(2)
    assert cluster.supervisor.exit_code == 42
    (end,) = cluster.kinds("end")
    assert end.text == "stopped as requested, exit code 42; the same command resumes"
    (failure,) = cluster.kinds("failure")
    assert (failure.severity, failure.data["cause"]) == ("info", "preempted")


def test_a_drained_host_leaves_when_all_have_saved():
    cluster = running()
    cluster.supervisor.drain("host-1", "a fan", cluster.now_s)
    assert {m.number for _, m in cluster.messages(Signal)} == {signal.SIGTERM}
    assert cluster.supervisor.hosts["host-1"].state is HostState.ACTIVE
    cluster.go(5)
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    host = cluster.supervisor.hosts["host-1"]
    assert (host.state, host.why) == (HostState.EVICTED, "a fan")


def test_a_host_that_is_known_to_be_gone_is_replaced_without_waiting_for_silence():
    cluster = running(restart=RestartConfig(pause_s=0.1, lost_s=3600.0))
    cluster.silent.add("host-1")
    cluster.supervisor.gone("host-1", "its pod was deleted", cluster.now_s)
    cluster.go()
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.host) == (Cause.HOST_LOST, "host-1")
    assert "host-1 is gone: its pod was deleted" in failure.text
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    host = cluster.supervisor.hosts["host-1"]
    assert host.state is HostState.LOST
    cluster.supervisor.gone("host-1", "told twice", cluster.now_s)
    assert len(cluster.kinds("failure")) == 1
    cluster.silent.clear()
    cluster.join("host-1")
    assert host.state is HostState.SPARE


def test_a_spare_that_is_gone_takes_no_place():
    cluster = running()
    cluster.silent.add("host-2")
    cluster.supervisor.gone("host-2", "its pod was deleted", cluster.now_s)
    assert cluster.kinds("failure") == []
    cluster.rank(0, code=-9)
    cluster.silent.add("host-0")
    cluster.supervisor.gone("host-0", "its pod was deleted", cluster.now_s)
    cluster.go(3)
    assert cluster.supervisor.state is State.GATHERING


def test_a_host_that_is_gone_while_ports_are_looked_for_has_the_others_placed():
    cluster = Cluster()
    cluster.finds_ports = False
    cluster.go()
    assert cluster.supervisor.state is State.PORTS
    cluster.silent.add("host-0")
    cluster.finds_ports = True
    cluster.supervisor.gone("host-0", "its pod was deleted", cluster.now_s)
    cluster.go()
    assert cluster.supervisor.placement == ["host-2", "host-1"]
    assert cluster.supervisor.state is State.RUNNING


def test_an_evicted_host_that_is_gone_stays_evicted():
    cluster = running()
    cluster.supervisor.evict("host-2", "a fan", cluster.now_s)
    cluster.supervisor.gone("host-2", "its pod was deleted", cluster.now_s)
    assert cluster.supervisor.hosts["host-2"].state is HostState.EVICTED
    assert not [e for e in cluster.kinds("host") if "is gone" in e.text]


def test_a_spare_is_drained_at_once():
    cluster = running()
    cluster.supervisor.drain("host-2", "a fan", cluster.now_s)
    assert cluster.supervisor.hosts["host-2"].state is HostState.EVICTED
    cluster.go(5)
    assert cluster.supervisor.generation == 1
    with pytest.raises(ValueError, match="no host host-9; the hosts are host-0, "):
        cluster.supervisor.drain("host-9", "a fan", cluster.now_s)


def leave(cluster, *names):
    """Let heartbeats of hosts repeat that they are about to leave."""
    for _ in range(2):
        for name in names:
            ranks = list(cluster.states.get(name, {}).values())
            beat = Beat(ranks=ranks, leaving="its agent got SIGTERM")
            cluster.supervisor.beat(name, beat, cluster.now_s)


def test_a_host_that_leaves_goes_when_all_have_saved_and_may_come_back():
    cluster = running()
    leave(cluster, "host-1")
    assert len(cluster.messages(Signal)) == 2  # one for each host with ranks
    assert cluster.messages(Quit) == []
    cluster.silent.add("host-1")
    leave(cluster, "host-1")
    cluster.go(3)
    assert [host for host, _ in cluster.messages(Quit)] == ["host-1"]
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    host = cluster.supervisor.hosts["host-1"]
    assert (host.state, host.why) == (HostState.LOST, "its agent got SIGTERM")
    assert "preempted" in [f.data["cause"] for f in cluster.kinds("failure")]
    cluster.silent.clear()
    cluster.join("host-1")
    assert cluster.supervisor.hosts["host-1"].state is HostState.SPARE


def test_a_spare_that_leaves_goes_at_once_and_an_evicted_host_stays_out():
    cluster = running()
    leave(cluster, "host-2")
    assert [host for host, _ in cluster.messages(Quit)] == ["host-2"]
    assert cluster.supervisor.hosts["host-2"].state is HostState.LOST
    cluster = running()
    cluster.supervisor.evict("host-2", "a fan", cluster.now_s)
    leave(cluster, "host-2")
    cluster.join("host-2")
    assert cluster.supervisor.hosts["host-2"].state is HostState.EVICTED


def test_hosts_that_all_leave_save_once():
    cluster = running()
    leave(cluster, "host-0", "host-1")
    cluster.silent |= {"host-0", "host-1"}
    cluster.go(3)
    numbers = [m.number for _, m in cluster.messages(Signal)]
    assert numbers.count(signal.SIGTERM) == 2  # one for each host
    assert {host for host, _ in cluster.messages(Quit)} == {"host-0", "host-1"}
    assert cluster.supervisor.state is State.GATHERING


def test_a_driver_that_is_killed_while_a_host_drains_drains_it_nevertheless():
    cluster = running()
    cluster.finds_ports = False
    cluster.supervisor.drain("host-1", "a fan", cluster.now_s)
    snapshot = cluster.supervisor.snapshot()
    for state in ("host-0", "host-1"):  # the sent messages have not arrived
        cluster.set(state, int(state[-1]), code=None)
    cluster.sent.clear()
    cluster.supervisor = cluster.driver()
    cluster.supervisor.resume(snapshot, cluster.now_s)
    for name in ("host-0", "host-1", "host-2"):
        cluster.join(name)
    sent = [(host, m.number) for host, m in cluster.messages(Signal)]
    assert sent == [("host-0", signal.SIGTERM), ("host-1", signal.SIGTERM)]
    cluster.go(3)
    host = cluster.supervisor.hosts["host-1"]
    assert (host.state, host.why) == (HostState.EVICTED, "a fan")
    assert cluster.supervisor.state is State.PORTS


def test_an_update_that_the_trainer_refuses_is_taken_back_once():
    cluster = running()
    cluster.updates.append(True)
    cluster.supervisor.update(cluster.now_s)
    assert {m.number for _, m in cluster.messages(Signal)} == {signal.SIGTERM}
    cluster.go(3)
    assert cluster.supervisor.generation == 2
    cluster.all_ranks(code=2, ended_ns=1)
    cluster.go(3)
    assert cluster.supervisor.generation == 3
    assert "the update is taken back: rank 0" in cluster.kinds("update")[-1].text
    cluster.all_ranks(code=2, ended_ns=1)
    cluster.go(3)
    assert cluster.supervisor.exit_code == 2


def test_a_signal_from_outside_is_no_end_of_the_run():
    cluster = running()
    cluster.all_ranks(code=42)
    cluster.go(3)
    assert cluster.supervisor.generation == 2
    assert [event.data["pause_s"] for event in cluster.kinds("restart")] == [0.0]
    (failure,) = cluster.kinds("failure")
    assert failure.severity == "warning"
    assert failure.text == (
        "preempted: rank 0 on host-0 ended with code 42, after a signal from outside"
    )


@pytest.mark.parametrize(
    ("changes", "stacks", "reason"),
    [
        ({"state": "T"}, {}, "stopped by a signal"),
        ({}, {0: WAITING, 2: WAITING}, "no answer to a request for stacks"),
        ({"step": 6}, {0: WAITING, 1: WAITING, 2: WAITING}, "progress behind"),
        ({}, {0: WAITING, 1: SLEEPING, 2: WAITING}, "does not wait as the others"),
    ],
)
def test_a_hang_is_found_and_the_guilty_rank_is_named(changes, stacks, reason):
    cluster = Cluster(hosts=3, spares=0, limits=LimitsConfig(step_s=5.0))
    cluster.go()
    cluster.all_ranks(phase=Phase.STEP, step=7, first_step_s=2.0, step_s=0.1, state="S")
    cluster.rank(1, **changes)
    cluster.go(1)
    cluster.all_ranks(age_s=6.0)
    cluster.go(0.25)
    assert len(cluster.messages(Dump)) == 3
    for host in cluster.supervisor.placement:
        shown = {
            r: s for r, s in stacks.items() if cluster.supervisor.host_of(r) == host
        }
        cluster.supervisor.shown(
            host, Stacks(generation=1, stacks=shown), cluster.now_s
        )
    (failure,) = cluster.kinds("failure")
    assert failure.data["cause"] == Cause.HUNG
    assert (failure.data["ranks"], failure.host) == ([1], "host-1")
    assert reason in failure.text
    assert "in step" in failure.text


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("phase", Phase)
def test_a_hang_is_reported_with_its_phase_and_its_limit(phase, is_behind):
    cluster = Cluster(spares=0, restart=RestartConfig(stacks_s=1.0))
    cluster.go()
    cluster.all_ranks(phase=phase, step=7, first_step_s=2.0)
    limit_s = getattr(cluster.config.limits, f"{phase.name.lower()}_s")
    if is_behind:
        cluster.rank(1, step=6)
    cluster.all_ranks(age_s=limit_s - 5)
    cluster.go(3)
    assert cluster.kinds("hang") == cluster.kinds("failure") == []
    cluster.all_ranks(age_s=limit_s + 1)
    cluster.go(3)
    name = phase.name.lower()
    reason = f"in {name}: no progress for {limit_s:g} s (--limits.{name}-s)"
    (found,), (failure,) = cluster.kinds("hang"), cluster.kinds("failure")
    assert found.text == f"rank 0, 1 {reason}"
    assert failure.text.endswith(f"; rank 0, 1 {reason}")
    assert failure.data["cause"] == Cause.HUNG


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        (
            {"first_step_s": None},
            "in step: no progress for 900 s (--limits.first-step-s)",
        ),
        ({"step_s": 12.5}, "in step: no progress for 62.5 s (--limits.factor)"),
    ],
)
def test_a_hang_in_a_step_is_reported_with_the_limit_that_applied(changes, limit):
    cluster = Cluster(spares=0)
    cluster.go()
    given = {"first_step_s": 2.0, "step": 7} | changes
    cluster.all_ranks(phase=Phase.STEP, **given)
    cluster.go()
    cluster.all_ranks(age_s=1000.0)
    cluster.go()
    (found,) = cluster.kinds("hang")
    assert found.text == f"rank 0, 1 {limit}"


def test_ranks_that_hang_in_different_phases_are_reported_with_their_limits():
    cluster = Cluster(spares=0)
    cluster.go()
    cluster.all_ranks(phase=Phase.EVAL, step=7, first_step_s=2.0, age_s=301.0)
    cluster.rank(1, phase=Phase.STEP)
    cluster.go()
    (found,) = cluster.kinds("hang")
    assert found.text == (
        "rank 0 in eval: no progress for 300 s (--limits.eval-s); "
        "rank 1 in step: no progress for 30 s (--limits.step-s)"
    )


@pytest.mark.parametrize(
    ("is_stopped", "limit"),
    [
        (False, "60 s after the first rank (--limits.exit-s)"),
        (True, "120 s after the order to stop (--restart.stop-s)"),
    ],
)
def test_a_rank_that_does_not_end_is_reported_with_the_limit_of_its_end(
    is_stopped, limit
):
    cluster = running(spares=0)
    if is_stopped:
        cluster.silent |= {"host-0", "host-1"}  # the signal has no effect
        cluster.supervisor.stop(cluster.now_s)
        cluster.silent.clear()
    else:
        cluster.rank(0, code=0, ended_ns=1)
    cluster.go(125 if is_stopped else 62)
    (found,) = cluster.kinds("hang")
    who = "0, 1" if is_stopped else "1"
    assert found.text == f"rank {who} in step: not ended {limit}"


def test_agents_that_do_not_show_stacks_do_not_hold_up_the_restart():
    cluster = running(limits=LimitsConfig(step_s=5.0))
    cluster.all_ranks(age_s=6.0)
    cluster.go(10)
    assert cluster.supervisor.generation == 2


@pytest.mark.parametrize("age_s", [0.0, 6.0])
def test_a_silent_host_is_lost_and_does_not_hang(age_s):
    """Also if ranks of other hosts hang because of it and show their stacks."""
    cluster = running(limits=LimitsConfig(step_s=3.0))
    cluster.silent.add("host-1")
    cluster.set("host-0", 0, age_s=age_s)
    cluster.go(8)
    causes = [event.data["cause"] for event in cluster.kinds("failure")]
    assert causes == [Cause.HOST_LOST]
    assert len(cluster.kinds("hang")) == (age_s > 0)
    assert cluster.supervisor.placement == ["host-0", "host-2"]


def test_ranks_that_go_on_by_themselves_are_left_alone():
    cluster = running(limits=LimitsConfig(step_s=5.0))
    cluster.all_ranks(age_s=6.0)
    cluster.go(0.25)
    assert cluster.supervisor.state is State.STACKS
    cluster.all_ranks(age_s=0.1, step=8)
    cluster.go(5)
    assert cluster.supervisor.state is State.RUNNING
    assert [event.kind for event in cluster.events][-2:] == ["hang_over", "state"]
    cluster.all_ranks(age_s=6.0)
    cluster.go(0.25)
    cluster.all_ranks(code=0)  # they end while their stacks are collected
    cluster.go(5)
    assert cluster.supervisor.exit_code == 0


def test_a_rank_that_does_not_end_when_asked_to_stop_is_killed():
    cluster = running(restart=RestartConfig(stop_s=5.0))
    cluster.silent.add("host-1")
    cluster.supervisor.stop(cluster.now_s)
    cluster.silent.clear()
    cluster.set("host-1", 1, age_s=0.0)
    cluster.go(15)
    assert cluster.supervisor.exit_code == 42
    assert cluster.kinds("failure")[0].data["ranks"] == []
    assert cluster.states["host-1"][1].code == -9


def test_the_limit_of_a_step_follows_the_steps_before_it():
    limits = LimitsConfig(step_s=10.0, factor=5.0, first_step_s=100.0, eval_s=60.0)
    state = RankState(rank=0, generation=1, pid=1, phase=Phase.STEP)

    def limit_s(state: RankState, *step_times_s: float) -> float:
        liveness = Liveness(limits)
        for step_s in step_times_s:
            liveness.took(msgspec.structs.replace(state, step_s=step_s))
        return liveness.limit(state)[0]

    # More steps are dispatched before the first has ended.
    assert limit_s(msgspec.structs.replace(state, step=2, step_s=0.1), 1.0) == 100
    state = msgspec.structs.replace(state, first_step_s=60.0)
    assert limit_s(state) == 10  # the agent has seen no two steps yet
    assert limit_s(state, *[1.0] * 99, 50.0) == 10
    assert limit_s(state, *[4.0] * 100) == 20
    assert limit_s(msgspec.structs.replace(state, phase=Phase.EVAL), 4.0) == 60
    for phase in Phase:
        assert limit_s(msgspec.structs.replace(state, phase=phase)) > 0


def test_a_run_is_calm_until_a_rank_ends():
    cluster = running()
    assert cluster.supervisor.is_calm
    cluster.rank(1, code=-9)
    cluster.go(0.25)
    assert not cluster.supervisor.is_calm


def test_one_slow_phase_is_no_hang():
    cluster = running(limits=LimitsConfig(step_s=5.0, eval_s=100.0))
    cluster.all_ranks(phase=Phase.EVAL, age_s=50.0)
    cluster.go(5)
    assert cluster.supervisor.generation == 1


@pytest.mark.parametrize("state", [State.RUNNING, State.STOPPING, State.PAUSING])
def test_a_driver_that_comes_back_goes_on_where_the_one_before_was(state):
    cluster = running()
    if state is not State.RUNNING:
        cluster.silent = {"host-1"} if state is State.STOPPING else set()
        cluster.rank(0, code=-9)
        for _ in range(20):
            if cluster.supervisor.state is state:
                break
            cluster.now_s += 0.1
            cluster.go(0.25)
    assert cluster.supervisor.state is state
    snapshot = cluster.supervisor.snapshot()
    cluster.silent.clear()
    num_starts = len(cluster.messages(Start))
    cluster.supervisor = cluster.driver()
    cluster.supervisor.resume(snapshot, cluster.now_s)
    for host in ("host-0", "host-1", "host-2"):
        cluster.join(host)
    cluster.go(3)
    assert cluster.supervisor.state is State.RUNNING
    if state is State.RUNNING:  # the ranks did not notice
        assert cluster.supervisor.generation == 1
        assert len(cluster.messages(Start)) == num_starts
    else:
        assert cluster.supervisor.generation == 2
    states = [s for ranks in cluster.states.values() for s in ranks.values()]
    assert [s.generation for s in states if s.code is None] == [
        cluster.supervisor.generation
    ] * 2


def test_a_driver_and_an_agent_that_die_together_cost_one_start():
    cluster = running()
    cluster.restart_agent("host-1")
    cluster.restart_driver()
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.host) == (Cause.KILLED, "host-1")
    assert "the agent of host-1 was started again" in failure.text
    cluster.go(3)
    assert cluster.supervisor.generation == 2


def test_ranks_whose_order_died_with_the_driver_are_missed_at_once():
    cluster = running()
    cluster.states["host-1"] = {}
    cluster.restart_driver()
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.data["hosts"]) == (Cause.KILLED, [])
    assert "the order to start the ranks of host-1 was lost" in failure.text


def test_a_driver_does_not_forget_why_it_ends_a_generation():
    """Nor that it has counted the generation."""
    cluster = running(check_command="check")
    says(cluster, "host-1", "Xid")
    cluster.silent = {"host-0"}  # its rank has not ended yet
    crash(cluster, 1)
    assert cluster.supervisor.state is State.STOPPING
    cluster.silent.clear()
    cluster.restart_driver()
    cluster.go(3)
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    assert cluster.supervisor.hosts["host-1"].state is HostState.EVICTED
    crash(cluster, 1)
    assert cluster.supervisor.state is State.CHECKING
    cluster.sent.clear()
    cluster.restart_driver(rejoin=("host-0", "host-2"))
    cluster.go(1)
    assert [host for host, _ in cluster.messages(Check)] == ["host-2"]
    causes = [event.data["cause"] for event in cluster.kinds("failure")]
    assert causes == [Cause.GPU_FAULT, Cause.CRASHED]
    assert cluster.supervisor.snapshot()["num_fruitless"] == 2


def test_what_logs_told_the_driver_before_explains_a_crash():
    cluster = running()
    said = {"host": "host-1", "rank": None, "text": "Xid: NVRM: Xid 79"}
    said |= {"data": {"rule": "Xid"}, "age_s": 9.0}
    old = said | {"data": {"rule": "machine check"}, "age_s": 700.0}
    cluster.restart_driver(old, said, said | {"host": "unknown"})
    crash(cluster, 1)
    (failure,) = cluster.kinds("failure")
    assert failure.data["cause"] == Cause.GPU_FAULT
    assert "NVRM: Xid 79" in failure.text


def test_a_hang_is_found_again_by_the_next_driver():
    cluster = running(limits=LimitsConfig(step_s=5.0))
    cluster.all_ranks(age_s=6.0)
    cluster.go(0.25)
    assert cluster.supervisor.state is State.STACKS
    cluster.restart_driver()
    assert cluster.supervisor.state is State.RUNNING
    cluster.go(0.25)
    assert len(cluster.kinds("hang")) == 2
    cluster.all_ranks(age_s=0.1, step=8)
    cluster.go(5)
    assert cluster.supervisor.generation == 1


def test_orders_are_repeated_to_an_agent_that_may_not_have_heard_them():
    cluster = running(check_command="check", limits=LimitsConfig(step_s=5.0))
    cluster.all_ranks(age_s=6.0)
    cluster.go(0.25)
    cluster.supervisor.shown("host-0", Stacks(generation=1, stacks={}), cluster.now_s)
    cluster.sent.clear()
    for name in ("host-0", "host-1"):
        cluster.join(name)  # the same agents, on new connections
    assert [host for host, _ in cluster.messages(Dump)] == ["host-1"]
    cluster.restart_agent("host-1")
    cluster.join("host-1")
    assert cluster.kinds("failure")[0].host == "host-1"
    cluster.finds_ports = False
    cluster.go(3)
    first, num = cluster.supervisor.placement[0], len(cluster.messages(FindPorts))
    assert cluster.supervisor.state is State.PORTS
    cluster.join(first)
    assert [host for host, _ in cluster.messages(FindPorts)][num:] == [first]
    cluster.finds_ports = True
    cluster.join(first)
    crash(cluster, 1)
    assert cluster.supervisor.state is State.CHECKING
    assert [host for host, _ in cluster.messages(Check)] == ["host-1"]
    cluster.restart_agent("host-1")
    cluster.join("host-1")
    assert [host for host, _ in cluster.messages(Check)] == ["host-1"] * 2


def test_a_rank_that_was_never_started_is_noticed():
    cluster = Cluster()
    cluster.silent = {"host-1"}
    cluster.go(1)

    def beats():
        cluster.supervisor.beat("host-1", Beat(ranks=[]), cluster.now_s)

    for _ in range(80):
        cluster.go(0.25)
        beats()
    assert "rank 1 was not started by host-1" in cluster.kinds("failure")[0].text


REASONS_TO_GIVE_UP = [
    (LastWords(diverged=Divergence(step=1, ways={})), Cause.DIVERGED),
    (
        LastWords(corrupted=Corruption(step=1, processes=[0], is_sure=True)),
        Cause.CORRUPTED,
    ),
    (
        LastWords(corrupted=Corruption(step=1, processes=[0, 1], is_sure=False)),
        Cause.SUSPECTED,
    ),
]


def test_every_cause_has_a_row_and_every_exit_code_a_cause():
    assert set(policy.TABLE) == set(Cause)
    assert set(policy.RANKING) < set(Cause)
    found = {code: policy.cause_of(code) for code in range(-64, 256)}
    assert found[-11] == Cause.CRASHED
    assert found[-9] == found[137] == Cause.KILLED
    assert policy.cause_of(-9, out_of_memory=True) == Cause.OUT_OF_MEMORY
    assert found[1] == Cause.FAILED
    assert set(found.values()) <= set(policy.RANKING)
    ends = {cause for cause, rule in policy.TABLE.items() if rule.action is Action.END}
    assert ends < set(policy.EXIT_CODES)
    codes = {
        Cause.DONE: exit_codes.DONE,
        Cause.BAD_INPUT: exit_codes.BAD_INPUT,
        Cause.PREEMPTED: exit_codes.PREEMPTED,
        Cause.GAVE_UP: exit_codes.GAVE_UP,
    }
    codes |= {cause: exit_codes.GAVE_UP for _, cause in REASONS_TO_GIVE_UP}
    assert codes == policy.EXIT_CODES
    assert found[93] == Cause.GAVE_UP
    for words, cause in REASONS_TO_GIVE_UP:
        assert policy.cause_of(93, last_words=words) == cause
        assert policy.cause_of(-9, last_words=words) == Cause.KILLED


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hosts": 0}, "--hosts must be at least 1, got 0"),
        ({"spares": -1}, "--spares must be at least 0, got -1"),
        ({"ranks_per_host": 0}, "--ranks-per-host must be at least 1, got 0"),
    ],
)
def test_impossible_runs_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**config)
    for part, cls in (("limits", LimitsConfig), ("restart", RestartConfig)):
        for field in dataclasses.fields(cls):
            if field.type is bool:
                continue
            flag = f"--{part}.{field.name.replace('_', '-')} must be"
            with pytest.raises(ValueError, match=flag):
                cls(**{field.name: type(getattr(cls(), field.name))(0)})


def test_the_table_of_the_docs_is_the_policy():
    text = (Path(__file__).parents[2] / "docs" / "resilience.md").read_text()
    for cause, rule in policy.TABLE.items():
        assert f"| {cause} | {rule.action} | {rule.reason} |\n" in text


def test_hosts_are_told_at_once_what_to_import():
    cluster = Cluster(num_agents=0)
    cluster.supervisor = Supervisor(
        *(cluster.config, cluster.make_rank, cluster.send, cluster.events.append, 0.0),
        module="package.program",
    )
    cluster.join("host-0")
    assert cluster.messages(Prepare) == [("host-0", Prepare(module="package.program"))]


def spent(**seconds):
    return [seconds.get(phase.name.lower(), 0.0) for phase in Phase]


def test_the_time_until_the_first_step_is_told_once_as_of_the_last_rank():
    cluster = Cluster()
    cluster.go()
    cluster.all_ranks(phase=Phase.STEP, step=0)
    cluster.rank(0, first_step_s=6.0, spent_s=spent(build=5.0, step=1.5))
    cluster.go()
    assert cluster.kinds("under_way") == []
    early = spent(init=1.0, build=6.0, step=1.5)
    cluster.rank(1, first_step_s=7.5, spent_s=early)
    cluster.go()
    cluster.rank(1, first_step_s=7.5, spent_s=spent(init=1.0, build=6.0, step=90.0))
    cluster.go()
    (event,) = cluster.kinds("under_way")
    assert (event.rank, event.data["first_step_s"]) == (1, 7.5)
    assert event.data["spent_s"] == {
        **{"import": 0.0, "init": 1.0, "build": 6.0, "compile": 0.0, "restore": 0.0},
        "step": 0.5,
    }
    assert sum(event.data["spent_s"].values()) == event.data["first_step_s"]


def test_how_rank_0_spent_its_time_is_told_when_its_generation_has_ended():
    cluster = running()
    cluster.rank(0, spent_s=spent(restore=2.0, step=30.0, save=1.0), saved_step=4)
    cluster.rank(1, code=-signal.SIGKILL)
    cluster.go(3)
    (event,) = cluster.kinds("times")
    data = event.data
    assert (event.rank, data["step"], data["saved_step"]) == (0, 7, 4)
    assert data["spent_s"]["step"] == 30.0
    assert sum(data["spent_s"].values()) == 33.0
    states = [event.text for event in cluster.kinds("state")]
    assert states == [
        *(State.PORTS, State.RUNNING, State.STOPPING, State.PAUSING),
        *(State.GATHERING, State.PORTS, State.RUNNING),
    ]


def says(cluster, host, *rules):
    """Let a heartbeat of a host carry lines of its logs."""
    ranks = list(cluster.states.get(host, {}).values())
    matches = [Match(rule=rule, line=f"a line of {rule}") for rule in rules]
    beat = Beat(ranks=ranks, matches=matches)
    cluster.supervisor.beat(host, beat, cluster.now_s)


@pytest.mark.parametrize(
    ("host", "rule", "cause", "hosts"),
    [
        ("host-1", "Xid", Cause.GPU_FAULT, ["host-1"]),
        ("host-0", "Xid", Cause.GPU_FAULT, ["host-0"]),  # though rank 1 has crashed
        ("host-0", "machine check", Cause.HOST_FAULT, ["host-0"]),
        ("host-1", "file system", Cause.STORE, ["host-1"]),
        ("host-1", "network", Cause.NETWORK, ["host-1"]),
        ("host-0", "network", Cause.CRASHED, ["host-1"]),  # a consequence
        ("host-1", "Xid of a program", Cause.CRASHED, ["host-1"]),
        ("host-1", "a rule of a later version", Cause.CRASHED, ["host-1"]),
        ("host-2", "Xid", Cause.CRASHED, ["host-1"]),  # a spare is not involved
    ],
)
def test_what_logs_say_explains_a_crash(host, rule, cause, hosts):
    cluster = running()
    says(cluster, host, rule)
    crash(cluster, 1)
    (failure,) = cluster.kinds("failure")
    assert (failure.data["cause"], failure.data["hosts"]) == (cause, hosts)
    (line,) = cluster.kinds("log")
    assert (line.host, line.data) == (host, {"rule": rule})
    cluster.go(3)
    is_evicted = cause in (Cause.GPU_FAULT, Cause.HOST_FAULT)
    assert (hosts[0] not in cluster.supervisor.placement) == is_evicted


def test_what_logs_said_long_ago_or_in_another_generation_explains_nothing():
    cluster = running()
    says(cluster, "host-1", "Xid")
    cluster.go(700)
    crash(cluster, 1)
    assert cluster.kinds("failure")[-1].data["cause"] == Cause.CRASHED
    cluster = running()
    says(cluster, "host-1", "file system")
    crash(cluster, 1)
    cluster.go(3)
    crash(cluster, 1)
    causes = [failure.data["cause"] for failure in cluster.kinds("failure")]
    assert causes == [Cause.STORE, Cause.CRASHED]


def test_what_an_exit_code_explains_needs_no_log():
    cluster = running()
    says(cluster, "host-1", "Xid")
    cluster.all_ranks(code=2, ended_ns=1)
    cluster.go()
    assert cluster.supervisor.exit_code == 2


def test_a_hang_tells_what_the_network_carries_and_what_py_spy_saw():
    cluster = running(restart=RestartConfig(stacks_s=1.0))
    for number in (0, 5_000_000):
        cluster.now_s += 1.0
        beat = Beat(
            ranks=list(cluster.states["host-1"].values()),
            rdma_bytes={"mlx5_0/1": [number, 2 * number]},
        )
        cluster.supervisor.beat("host-1", beat, cluster.now_s)
    cluster.all_ranks(age_s=1e4)
    cluster.go(0.5)
    (hang,) = cluster.kinds("hang")
    assert hang.data["rdma_bytes_per_s"] == {"host-1": pytest.approx(15e6)}
    shown = Stacks(generation=1, stacks={}, spied={1: "Thread 7 (idle)"})
    cluster.supervisor.shown("host-1", shown, cluster.now_s)
    shown = Stacks(generation=1, stacks={0: WAITING + LOCK_ANSWER}, nccl="RUNNING")
    cluster.supervisor.shown("host-0", shown, cluster.now_s)
    (stacks,) = cluster.kinds("stacks")
    assert stacks.data["nccl"] == {"host-0": "RUNNING"}
    assert stacks.data["spied"] == {"1": "Thread 7 (idle)"}


def crash(cluster, rank):
    cluster.rank(rank, code=-signal.SIGSEGV, ended_ns=1)
    cluster.go(1)


def checked(cluster, host, is_healthy, text=""):
    number = cluster.messages(Check)[-1][1].number
    answer = Checked(number=number, is_healthy=is_healthy, text=text)
    cluster.supervisor.checked(host, answer, cluster.now_s)


def test_the_host_of_a_crash_is_checked_before_the_restart():
    cluster = running(check_command="check --all 'a b'")
    crash(cluster, 1)
    assert cluster.supervisor.state is State.CHECKING
    ((host, order),) = cluster.messages(Check)
    assert (host, order.command) == ("host-1", ["check", "--all", "a b"])
    checked(cluster, "host-1", True)
    cluster.go(3)
    assert cluster.supervisor.state is State.RUNNING
    assert cluster.supervisor.placement == ["host-0", "host-1"]


def test_a_host_that_does_not_pass_is_replaced_and_comes_back_when_it_does():
    cluster = running(check_command="check", restart=RestartConfig(check_s=5.0))
    crash(cluster, 1)
    checked(cluster, "host-1", False, "3 ECC errors")
    cluster.go(3)
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    assert cluster.supervisor.hosts["host-1"].why == "3 ECC errors"
    cluster.all_ranks(phase=Phase.STEP, step=9, saved_step=8)
    cluster.go()
    crash(cluster, 0)
    checked(cluster, "host-0", False, "no fan")
    cluster.go(8)  # no spare is left, so the sick hosts are checked again
    assert cluster.supervisor.state is State.GATHERING
    assert [host for host, _ in cluster.messages(Check)][-2:] == ["host-0", "host-1"]
    checked(cluster, "host-1", True)
    checked(cluster, "host-0", False, "no fan")
    cluster.go(3)
    assert cluster.supervisor.state is State.RUNNING
    assert sorted(cluster.supervisor.placement) == ["host-1", "host-2"]
    assert cluster.supervisor.hosts["host-0"].state is HostState.SICK


def test_a_host_that_does_not_answer_has_not_passed():
    cluster = running(check_command="check", restart=RestartConfig(check_s=5.0))
    crash(cluster, 1)
    cluster.go(8)
    assert "did not answer in 5 s" in cluster.supervisor.hosts["host-1"].why
    assert cluster.supervisor.placement == ["host-0", "host-2"]


def test_where_no_host_is_to_blame_all_are_checked():
    cluster = running(check_command="check", restart=RestartConfig(stacks_s=1.0))
    cluster.all_ranks(age_s=1e4)
    cluster.go(0.5)
    for host in ("host-0", "host-1"):
        ranks = {int(host[-1]): WAITING + LOCK_ANSWER}
        shown = Stacks(generation=1, stacks=ranks)
        cluster.supervisor.shown(host, shown, cluster.now_s)
    assert cluster.kinds("failure")[0].data["hosts"] == []
    cluster.go(1)
    assert [host for host, _ in cluster.messages(Check)] == ["host-0", "host-1"]


def hang(cluster, **texts):
    """Let all ranks hang, with these stacks by host."""
    cluster.all_ranks(age_s=1e4)
    cluster.go(0.5)
    for host, text in texts.items():
        name = host.replace("_", "-")
        shown: dict[int, str] = {}
        shown |= dict.fromkeys(cluster.states[name], f"{text}{LOCK_ANSWER}")
        stacks = Stacks(generation=cluster.supervisor.generation, stacks=shown)
        cluster.supervisor.shown(name, stacks, cluster.now_s)


READING = SLEEPING.replace("sleep", "read")


def large(num_agents, **config):
    """Return a run on four hosts; the other agents are spares."""
    restart = RestartConfig(stacks_s=1.0, check_s=5.0, pause_s=0.1)
    cluster = Cluster(
        num_agents=num_agents,
        hosts=4,
        spares=num_agents - 4,
        check_command="check",
        restart=restart,
        **config,
    )
    cluster.go()
    assert cluster.supervisor.placement == [f"host-{i}" for i in range(4)]
    cluster.all_ranks(phase=Phase.STEP, step=7, first_step_s=2.0, step_s=1.0)
    cluster.go()
    return cluster


def test_of_hosts_that_may_all_be_guilty_all_are_replaced_and_those_that_pass_return():
    cluster = large(6)
    hang(cluster, host_0=WAITING, host_1=SLEEPING, host_2=READING, host_3=WAITING)
    (failure,) = cluster.kinds("failure")
    assert failure.data["hosts"] == ["host-1", "host-2"]
    cluster.go(2)
    assert cluster.supervisor.state is State.RUNNING
    assert cluster.supervisor.placement == ["host-0", "host-4", "host-5", "host-3"]
    asked = [host for host, _ in cluster.messages(Check)]
    assert asked == ["host-1", "host-2"]
    checked(cluster, "host-1", True)
    checked(cluster, "host-2", False, "no fan")
    cluster.go(1)
    hosts = cluster.supervisor.hosts
    assert hosts["host-1"].state is HostState.SPARE
    assert (hosts["host-2"].state, hosts["host-2"].why[:4]) == (HostState.SICK, "rank")
    cluster.go(6)
    assert [host for host, _ in cluster.messages(Check)][2:] == ["host-2"]
    assert cluster.supervisor.generation == 2


def test_without_spares_for_all_of_them_they_are_checked_first():
    cluster = large(5)
    hang(cluster, host_0=WAITING, host_1=SLEEPING, host_2=READING, host_3=WAITING)
    cluster.go(0.5)
    assert cluster.supervisor.state is State.CHECKING
    assert [host for host, _ in cluster.messages(Check)] == ["host-1", "host-2"]


def test_where_nobody_is_named_the_fewest_that_differ_are_replaced():
    cluster = large(6)
    hang(cluster, host_0=SLEEPING, host_1=SLEEPING, host_2=READING, host_3=READING)
    (failure,) = cluster.kinds("failure")
    assert failure.data["hosts"] == []
    cluster.go(2)
    assert cluster.supervisor.placement == ["host-0", "host-1", "host-4", "host-5"]


@pytest.mark.parametrize("command", ["", "check"])
@pytest.mark.parametrize("saves", [False, True])
def test_a_host_that_fails_again_is_replaced_though_it_seems_well(command, saves):
    cluster = running(check_command=command, restart=RestartConfig(pause_s=0.1))
    for number in (1, 2):
        crash(cluster, 1)
        if cluster.supervisor.state is State.CHECKING:
            checked(cluster, "host-1", True)
        cluster.go(3)
        assert cluster.supervisor.state is State.RUNNING
        if saves:
            cluster.all_ranks(phase=Phase.STEP, step=9, saved_step=8 + number)
            cluster.go()
    assert ("host-1" in cluster.supervisor.placement) == saves


def test_a_sick_host_is_asked_again_by_the_next_driver():
    cluster = running(check_command="check", restart=RestartConfig(check_s=5.0))
    crash(cluster, 1)
    checked(cluster, "host-1", False, "no fan")
    cluster.go(3)
    snapshot = cluster.supervisor.snapshot()
    cluster.sent.clear()
    cluster.supervisor = cluster.driver()
    cluster.supervisor.resume(snapshot, cluster.now_s)
    for name in ("host-0", "host-1", "host-2"):
        cluster.join(name)
    cluster.go(2)
    assert [host for host, _ in cluster.messages(Check)] == ["host-1"]
    checked(cluster, "host-1", True)
    cluster.go(1)
    assert cluster.supervisor.hosts["host-1"].state is HostState.SPARE


def watched(**config):
    """Return a run whose hosts are checked every ten seconds."""
    options: dict[str, Any] = {"check_command": "check", "check_every_s": 10.0}
    restart = RestartConfig(check_s=5.0, pause_s=0.1)
    return running(restart=restart, **options | config)


def asked(cluster):
    return [host for host, _ in cluster.messages(Check)]


def answer(cluster, host, is_healthy, text=""):
    """Answer the last order to this host."""
    number = [one.number for name, one in cluster.messages(Check) if name == host][-1]
    said = Checked(number=number, is_healthy=is_healthy, text=text)
    cluster.supervisor.checked(host, said, cluster.now_s)


def test_hosts_that_train_are_checked_now_and_then():
    cluster = watched()
    assert asked(cluster) == ["host-0", "host-1"]
    for host in ("host-0", "host-1"):
        answer(cluster, host, True)
    cluster.go(8)
    assert len(asked(cluster)) == 2
    cluster.go(3)
    assert asked(cluster)[2:] == ["host-0", "host-1"]
    assert cluster.supervisor.generation == 1


def test_a_host_that_turns_bad_is_replaced_after_a_save_and_returns_when_it_passes():
    cluster = watched(return_command="burn --quick")
    answer(cluster, "host-0", True)
    answer(cluster, "host-1", False, "gpu.ecc: 3 errors")
    cluster.all_ranks(saved_step=7)
    cluster.go(0.25)
    signals = [(host, one.number) for host, one in cluster.messages(Signal)]
    assert signals == [("host-0", signal.SIGTERM), ("host-1", signal.SIGTERM)]
    cluster.go(2)
    assert cluster.supervisor.state is State.RUNNING
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    host = cluster.supervisor.hosts["host-1"]
    assert (host.state, host.why) == (HostState.SICK, "gpu.ecc: 3 errors")
    cluster.go(6)
    burns = [host for host, one in cluster.messages(Check) if one.command[0] == "burn"]
    assert burns == ["host-1"]
    assert host.state is HostState.SICK
    answer(cluster, "host-1", True)
    cluster.go(1)
    assert host.state is HostState.SPARE
    causes = [failure.data["cause"] for failure in cluster.kinds("failure")]
    assert causes == [Cause.PREEMPTED]


def test_a_host_that_turns_bad_is_not_forgotten_with_the_driver():
    cluster = watched()
    answer(cluster, "host-0", True)
    answer(cluster, "host-1", False, "no fan")
    cluster.silent |= {"host-0", "host-1"}  # their ranks have not ended yet
    cluster.now_s += 0.25
    cluster.supervisor.tick(cluster.now_s)
    assert cluster.kinds("drain")
    snapshot = json.loads(json.dumps(cluster.supervisor.snapshot()))
    cluster.silent.clear()
    cluster.supervisor = cluster.driver()
    cluster.supervisor.resume(snapshot, cluster.now_s)
    for name in ("host-0", "host-1", "host-2"):
        cluster.join(name)
    cluster.go(3)
    assert cluster.supervisor.hosts["host-1"].state is HostState.SICK
    assert cluster.supervisor.placement == ["host-0", "host-2"]


def test_an_answer_to_the_driver_before_is_no_answer_to_this_one():
    cluster = watched()
    ((_, old), *_) = cluster.messages(Check)
    snapshot = cluster.supervisor.snapshot()
    cluster.now_s += 1
    cluster.supervisor = cluster.driver()
    cluster.supervisor.resume(snapshot, cluster.now_s)
    for name in ("host-0", "host-1", "host-2"):
        cluster.join(name)
    cluster.go(1)
    bad = Checked(number=old.number, is_healthy=False, text="no fan")
    cluster.supervisor.checked("host-0", bad, cluster.now_s)
    for host in ("host-0", "host-1"):
        answer(cluster, host, True)
    cluster.go(2)
    assert cluster.supervisor.placement == ["host-0", "host-1"]


@pytest.mark.parametrize("command", ["", "burn"])
def test_a_host_with_a_broken_gpu_may_return_only_if_there_is_a_test(command):
    cluster = running(return_command=command)
    says(cluster, "host-1", "Xid")
    crash(cluster, 1)
    cluster.go(3)
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    state = cluster.supervisor.hosts["host-1"].state
    assert state is (HostState.SICK if command else HostState.EVICTED)


def test_the_spare_that_has_failed_least_is_taken():
    cluster = running(num_agents=4)
    cluster.faults = {"host-2": 2.5, "host-3": 0.5}
    cluster.supervisor.evict("host-1", "told so", cluster.now_s)
    cluster.go(3)
    assert cluster.supervisor.placement == ["host-0", "host-3"]


def test_checks_of_hosts_that_train_need_a_command():
    with pytest.raises(ValueError, match="--check-every-s needs --check-command"):
        RunConfig(check_every_s=10.0)
    with pytest.raises(ValueError, match="must be positive and finite, got 0"):
        RunConfig(check_every_s=0.0, check_command="check")
    with pytest.raises(ValueError, match='--return-command "a \'b" is not a command'):
        RunConfig(return_command="a 'b")


def test_a_killed_rank_needs_no_check():
    cluster = running(check_command="check")
    cluster.rank(1, code=-signal.SIGKILL, ended_ns=1)
    cluster.go(4)
    assert cluster.supervisor.state is State.RUNNING
    assert cluster.messages(Check) == []


def test_a_command_that_cannot_be_read_is_refused():
    with pytest.raises(
        ValueError, match='--check-command "check \'a" is not a command'
    ):
        RunConfig(check_command="check 'a")


@pytest.mark.timeout(40)  # children of a check must not delay it
@pytest.mark.parametrize(
    ("script", "is_healthy", "text"),
    [
        ("exit 0", True, ""),
        ("echo broken; exit 1", False, "broken"),
        ("exit 3", False, "the check ended with 3"),
        ("sleep 60; true", False, "the check did not end in 0.5 s"),
        (
            'echo \'{"checks": [{"name": "ecc", "state": "fail", "reason": "3 errors"},'
            ' {"name": "fan", "state": "ok", "reason": ""}]}\'; exit 1',
            False,
            "ecc: 3 errors",
        ),
    ],
)
def test_a_check_is_its_exit_code_and_its_reasons(script, is_healthy, text):
    found = asyncio.run(checks.run(["sh", "-c", script], 0.5))
    assert found == (is_healthy, text)


def test_a_check_knows_the_name_of_its_host():
    found = asyncio.run(checks.run(["sh", "-c", "echo $MJAX_HOST"], 5.0, "gpu-7"))
    assert found == (True, "gpu-7")


def test_what_is_unknown_is_no_reason(tmp_path):
    script = """echo '{"checks": [{"name": "a", "state": "unknown", "reason": "x"},
        {"name": "b", "state": "failed", "reason": "3 errors"}]}'; exit 1"""
    assert asyncio.run(checks.run(["sh", "-c", script], 5.0)) == (False, "b: 3 errors")


def test_a_check_that_is_not_there_fails():
    assert asyncio.run(checks.run(["/no/check"], 5.0)) == (
        False,
        "the check cannot be run: [Errno 2] No such file or directory: '/no/check'",
    )


def shrunk(**config):
    """Return a cluster of two hosts, without a spare, that has lost one host."""
    cluster = Cluster(num_agents=2, hosts=2, spares=0, min_hosts=1, **config)
    cluster.go()
    assert cluster.supervisor.state is State.RUNNING
    cluster.all_ranks(
        phase=Phase.STEP, step=7, first_step_s=2.0, step_s=1.0, saved_step=4
    )
    cluster.go()
    cluster.silent.add("host-1")
    return cluster


def test_a_run_without_a_spare_goes_on_with_fewer_hosts_after_a_while():
    cluster = shrunk()
    cluster.go(10)
    assert cluster.supervisor.state is State.GATHERING
    cluster.go(10)
    assert cluster.supervisor.state is State.RUNNING
    assert (cluster.supervisor.placement, cluster.num_hosts) == (["host-0"], 1)
    (event,) = cluster.kinds("shrink")
    assert event.text == "the run goes on with 1 of 2 hosts"
    cluster.all_ranks(code=0)
    cluster.go()
    assert cluster.supervisor.exit_code == 0


def test_it_grows_again_when_the_host_is_back_and_a_step_was_saved():
    cluster = shrunk()
    cluster.go(20)
    cluster.silent.clear()
    cluster.join("host-1")
    cluster.all_ranks(
        phase=Phase.STEP, step=9, first_step_s=2.0, step_s=1.0, saved_step=4
    )
    cluster.go(3)
    assert cluster.kinds("grow") == []
    cluster.all_ranks(step=12, saved_step=12)
    cluster.go(4)
    assert len(cluster.kinds("grow")) == 1
    assert cluster.supervisor.state is State.RUNNING
    assert cluster.supervisor.placement == ["host-0", "host-1"]
    assert cluster.num_hosts == 2
    assert cluster.kinds("failure")[-1].data["cause"] == Cause.PREEMPTED


def test_a_size_that_the_trainer_refuses_is_not_tried_again():
    cluster = shrunk(restart=RestartConfig(wait_s=30.0))
    cluster.go(20)
    cluster.all_ranks(code=2, ended_ns=1)
    cluster.go(10)
    assert cluster.supervisor.state is State.GATHERING
    assert "1 hosts do not fit" in cluster.kinds("shrink")[-1].text
    cluster.go(40)
    assert cluster.supervisor.exit_code == 93


def test_a_host_that_was_silent_and_speaks_again_is_a_spare_without_old_ranks():
    cluster = running()
    cluster.silent.add("host-1")
    cluster.go(12)
    assert cluster.supervisor.placement == ["host-0", "host-2"]
    cluster.silent.clear()
    cluster.go()
    assert cluster.supervisor.hosts["host-1"].state is HostState.SPARE
    assert cluster.states["host-1"][1].code == -signal.SIGKILL
    assert cluster.supervisor.state is State.RUNNING

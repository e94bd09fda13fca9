"""A run and its pods, through the real client, against an API that fails."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mjax.launch import __main__ as command
from mjax.launch import kubernetes
from mjax.launch.config import KubernetesConfig, RestartConfig, RunConfig
from mjax.launch.driver import Driver
from mjax.launch.events import Event, teller
from mjax.launch.hosts import HostState
from mjax.launch.kubernetes import ANNOTATION, ApiError, Pod
from mjax.launch.pods import Living, Pauses, Pods
from tests.launch.fake_kubernetes import FakeApi

HERE = Path(__file__).parent
SELECTOR = "run=mine,part=agent"
POLL_S = 0.3
SOON_S = 20.0
"""Far longer than any test takes, because a loaded machine is not a failure."""


@pytest.fixture
def fake():
    api = FakeApi()
    yield api
    api.close()


@pytest.fixture
def connect(fake, tmp_path, monkeypatch):
    """Connect like a driver outside of a cluster."""
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(fake.url))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    def call(**options):
        given: dict[str, Any] = {"namespace": "team", "selector": SELECTOR}
        given |= {"poll_s": POLL_S, "timeout_s": 0.5} | options
        return kubernetes.connect(KubernetesConfig(**given))

    return call


def kubeconfig(url):
    cluster = {"name": "c", "cluster": {"server": url}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    user = {"name": "u", "user": {"token": "secret"}}
    fields = {"clusters": [cluster], "contexts": [context], "users": [user]}
    return json.dumps({"kind": "Config", "current-context": "x"} | fields)


class Run:
    """The pods as a driver sees them; drivers may follow each other."""

    def __init__(self, api):
        self.api, self.events, self.gone = api, [], []
        self.saved, self.pods = None, self.driver()

    def driver(self):
        def save(fields):
            self.saved = json.loads(json.dumps(fields))

        return Pods(
            self.api,
            run="runs/a",
            tell=teller(self.events.append),
            gone=lambda host, why: self.gone.append((host, why)),
            save=save,
            first_pause_s=0.02,
        )

    def again(self):
        """Kill the driver, and start another one."""
        self.pods.stop()
        self.pods = self.driver()
        if self.saved is not None:
            self.pods.take_up(self.saved)
        self.pods.start()

    def kinds(self, kind):
        return [event for event in self.events if event.kind == kind]

    async def until(self, condition):
        until_s = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < until_s, (self.events, self.gone)
            await asyncio.sleep(0.005)

    async def seen(self, *names):
        await self.until(lambda: set(names) <= self.pods.living.pods.keys())


@contextlib.asynccontextmanager
async def running(api, **hosts):
    """Start a driver whose hosts have joined, and wait until it knows their pods."""
    run = Run(api)
    for name, uid in hosts.items():
        run.pods.joined(name, uid)
    run.pods.start()
    try:
        await run.seen(*hosts)
        yield run
    finally:
        run.pods.stop()


def uids(run):
    return [pod.uid for pod in list(run.pods.living.pods.values())]


def played(play):
    asyncio.run(play())


# --------------------------------------------------------------------- what is noticed


def test_a_pod_that_is_deleted_is_gone_at_once_but_not_while_its_processes_live(
    fake, connect
):
    uid = fake.add("a")

    async def play():
        async with running(connect(poll_s=30.0), a=uid) as run:
            fake.mark("a", reason="EvictionByEvictionAPI")
            await asyncio.sleep(POLL_S)
            assert not run.gone
            began_s = time.monotonic()
            fake.end("a")
            await run.until(lambda: run.gone)
            assert (
                time.monotonic() - began_s < 3.0
            )  # from the watch, not from the next list
            why = "its pod was deleted (EvictionByEvictionAPI: a test)"
            assert run.gone == [("a", why)]

    played(play)


def test_a_pod_whose_processes_were_ended_is_gone_although_it_is_still_listed(
    fake, connect
):
    uid = fake.add("a")

    async def play():
        async with running(connect(), a=uid) as run:
            fake.fail("a", reason="Evicted")
            await run.until(lambda: run.gone)
            await asyncio.sleep(3 * POLL_S)
            assert run.gone == [("a", "its pod has ended (Evicted: disk)")]

    played(play)


@pytest.mark.parametrize("fault", ["stall", "deaf", "cut", "drop", "half", "gone"])
def test_a_watch_that_fails_or_is_silent_delays_the_news_by_one_poll(
    fake, connect, fault
):
    uid = fake.add("a")
    fake.only = "WATCH"
    fake.faults.extend([fault] * 3)

    async def play():
        async with running(connect(), a=uid) as run:
            began_s = time.monotonic()
            fake.end("a")
            await run.until(lambda: run.gone)
            assert time.monotonic() - began_s < 4 * POLL_S
            assert [host for host, _ in run.gone] == ["a"]

    played(play)


def test_a_version_that_is_too_old_makes_the_driver_list_again(fake, connect):
    uid = fake.add("a")

    async def play():
        async with running(connect(), a=uid) as run:
            fake.end("a")
            fake.add("b")
            fake.forget()
            await run.until(lambda: run.gone)
            await run.seen("b")
            assert run.kinds("kubernetes") == []

    played(play)


def test_a_pod_that_took_the_name_of_another_is_not_the_one_that_is_gone(fake, connect):
    """The agent of the new pod joins before the API reports the end of the old one."""
    fake.add("a")

    async def play():
        async with running(connect(), a="uid-2") as run:
            fake.end("a")
            assert fake.add("a") == "uid-2"
            await run.until(lambda: "uid-2" in uids(run))
            await asyncio.sleep(2 * POLL_S)
            assert not run.gone
            fake.end("a")
            await run.until(lambda: run.gone)

    played(play)


def test_neither_another_run_nor_another_namespace_is_listened_to(fake, connect):
    uid = fake.add("a")
    fake.add("b", run="other")
    fake.add("c", namespace="elsewhere")

    async def play():
        async with running(connect(), a=uid) as run:
            for name, namespace in (("b", "team"), ("c", "elsewhere")):
                run.pods.joined(name, fake.pods[namespace, name]["metadata"]["uid"])
                fake.end(name, namespace)
            fake.end("a")
            await run.until(lambda: run.gone)
            await asyncio.sleep(2 * POLL_S)
            assert [host for host, _ in run.gone] == ["a"]

    played(play)


def test_a_list_after_another_tells_each_pod_once():
    told = []
    living = Living(lambda pod, why: told.append(pod.uid))

    def pod(uid, **changes):
        given = {"name": "a", "node": None, "is_leaving": False, "is_over": False}
        return Pod(uid=uid, why="", **(given | changes))

    living.look([pod("1")])
    living.look([pod("1", is_leaving=True)])
    living.note("ADDED", pod("2"))
    living.note("DELETED", pod("1", is_leaving=True))  # late
    living.look([pod("2", is_over=True)])
    living.look([pod("2", is_over=True)])
    living.note("DELETED", pod("2", is_over=True))
    assert told == ["1", "2"]


# ------------------------------------------------------------------------ what is done


REFUSALS = ["409", "429", "500", "503", "401"]
SILENCES = ["drop", "half", "slow", "lost", "no json", "other json"]


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        *(("DELETE", fault) for fault in ["", *REFUSALS, *SILENCES]),
        *(("PATCH", fault) for fault in REFUSALS[:1] + SILENCES),
        *(("GET .*pods$", fault) for fault in ("500", "half", "other json")),
        *(("GET .*nodes", fault) for fault in ("500", "half", "other json")),
    ],
)
def test_the_pod_of_an_evicted_host_is_deleted_once_whatever_fails(
    fake, connect, request_, fault
):
    uid = fake.add("a", node="node-7")
    fake.add("b", node="node-8")

    async def play():
        async with running(connect(cordon=True, poll_s=30.0), a=uid) as run:
            fake.slow_s, fake.only = 0.7, request_
            fake.faults.append(fault)
            run.pods.put_aside("a", HostState.EVICTED, "ECC errors")
            await run.until(lambda: run.kinds("pod"))
            assert fake.deleted == [("team", "a", uid)]
            assert fake.nodes["node-7"]["spec"] == {"unschedulable": True}
            note = fake.nodes["node-7"]["metadata"]["annotations"][ANNOTATION]
            told = json.loads(note)
            assert (told["run"], told["host"]) == ("runs/a", "a")
            assert told["reason"] == "ECC errors"
            assert time.strptime(told["time"], "%Y-%m-%dT%H:%M:%SZ")
            assert fake.nodes["node-8"]["spec"] == {}
            assert run.saved is not None
            assert run.saved["orders"] == []

    played(play)


def test_without_the_flag_no_node_is_touched(fake, connect):
    uid = fake.add("a")

    async def play():
        async with running(connect(), a=uid) as run:
            run.pods.put_aside("a", HostState.EVICTED, "slow")
            await run.until(lambda: run.kinds("pod"))
            assert fake.deleted == [("team", "a", uid)]
            assert not [line for line in fake.requests if "nodes" in line]

    played(play)


@pytest.mark.parametrize(
    ("state", "cordon", "is_deleted"),
    [
        (HostState.EVICTED, False, True),
        (HostState.SICK, True, False),
        (HostState.LOST, True, False),
    ],
)
def test_only_what_does_not_come_back_is_deleted(
    fake, connect, state, cordon, is_deleted
):
    uid = fake.add("a")

    async def play():
        async with running(connect(cordon=cordon), a=uid) as run:
            run.pods.put_aside("a", state, "a test")
            run.pods.put_aside("a", state, "a test, again")
            await asyncio.sleep(2 * POLL_S)
            assert len(fake.deleted) == is_deleted

    played(play)


def test_a_host_whose_pod_is_being_replaced_costs_no_other_pod(fake, connect):
    """Deleted by somebody else, gone, and gone with a new pod of the same name."""
    uids = {name: fake.add(name) for name in "abc"}

    async def play():
        async with running(connect(cordon=True), **uids) as run:
            fake.mark("a")
            fake.end("b")
            fake.end("c")
            fake.add("c")
            for name in "abc":
                run.pods.put_aside(name, HostState.EVICTED, "a test")
            await run.until(lambda: len(run.kinds("pod")) == 3)
            assert not fake.deleted
            assert not fake.patched
            texts = sorted(event.text for event in run.kinds("pod"))
            assert texts == [
                "the pod of a is being deleted already",
                "the pod of b is gone already",
                "the pod of c is gone already",
            ]

    played(play)


def test_a_pod_replaced_between_look_and_deletion_is_refused_by_its_uid(fake, connect):
    api = connect()
    fake.add("a")
    old = api.find("a")
    fake.end("a")
    fake.add("a")
    with pytest.raises(ApiError, match="Precondition failed") as caught:
        api.delete(old)
    assert caught.value.status == 409
    assert not fake.deleted
    fake.end("a")
    api.delete(old)  # nothing is left to delete


def test_a_host_that_names_no_pod_or_one_of_another_run_deletes_nothing(fake, connect):
    foreign = fake.add("a", run="other")
    fake.add("b")

    async def play():
        async with running(connect()) as run:
            run.pods.joined("a", foreign)
            run.pods.joined("b", "")
            for name in "ab":
                run.pods.put_aside(name, HostState.EVICTED, "a test")
            await run.until(lambda: len(run.kinds("pod")) == 2)
            assert not fake.deleted
            assert "POD_UID" in run.kinds("pod")[0].text

    played(play)


def test_a_driver_that_is_killed_in_between_leaves_nothing_undone_and_repeats_nothing(
    fake, connect
):
    uids = {name: fake.add(name) for name in "abc"}

    async def play():
        async with running(connect(), **uids) as run:
            run.pods.put_aside("a", HostState.EVICTED, "first")
            await run.until(lambda: run.kinds("pod"))
            fake.only = "DELETE"
            fake.faults.extend(["500", "429", "lost"])
            run.pods.put_aside("b", HostState.EVICTED, "second")
            await run.until(lambda: run.kinds("kubernetes"))
            run.again()
            run.pods.put_aside("c", HostState.EVICTED, "known from before")
            await run.until(lambda: len(run.kinds("pod")) >= 3)
            fake.end("a")
            fake.add("a")
            run.again()
            await run.seen("a", "b", "c")
            assert sorted(name for _, name, _ in fake.deleted) == ["a", "b", "c"]

    played(play)


def test_retry_after_is_honoured(fake, connect):
    uid = fake.add("a")

    async def play():
        async with running(connect(poll_s=30.0), a=uid) as run:
            fake.only = "DELETE"
            fake.faults.append("429")
            began_s = time.monotonic()
            run.pods.put_aside("a", HostState.EVICTED, "a test")
            await run.until(lambda: run.kinds("pod"))
            assert time.monotonic() - began_s >= 1.0
            assert sum(line.startswith("DELETE") for line in fake.requests) == 2

    played(play)


def test_pauses_double_up_to_half_a_minute():
    pauses = Pauses(0.5)
    found = [pauses.next_s(ApiError("", 500)) for _ in range(40)]
    assert found[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(found[7:]) == {30.0}
    assert pauses.next_s(ApiError("", 429, 77.0)) == 77.0


def test_without_the_right_to_cordon_the_pod_is_deleted_all_the_same(fake, connect):
    uid = fake.add("a")

    async def play():
        async with running(connect(cordon=True), a=uid) as run:
            fake.only = "nodes"
            fake.faults.append("403")
            run.pods.put_aside("a", HostState.EVICTED, "a test")
            await run.until(lambda: run.kinds("pod"))
            assert fake.deleted == [("team", "a", uid)]
            (event,) = run.kinds("cordon")
            assert event.severity == "error"
            assert "is not cordoned: 403" in event.text

    played(play)


def test_without_the_right_to_delete_the_driver_says_so_and_stops_trying(fake, connect):
    uid = fake.add("a")

    async def play():
        async with running(connect(), a=uid) as run:
            fake.only = "DELETE"
            fake.faults.append("403")
            run.pods.put_aside("a", HostState.EVICTED, "a test")
            await run.until(lambda: run.kinds("pod"))
            await asyncio.sleep(POLL_S)
            (event,) = run.kinds("pod")
            assert (event.severity, fake.deleted) == ("error", [])
            assert "is not deleted: 403 a fault of the test" in event.text

    played(play)


def test_a_node_that_a_person_has_cordoned_keeps_what_it_says(fake, connect):
    uid = fake.add("a", node="node-7")
    fake.nodes["node-7"]["spec"]["unschedulable"] = True

    async def play():
        async with running(connect(cordon=True), a=uid) as run:
            run.pods.put_aside("a", HostState.EVICTED, "a test")
            await run.until(lambda: run.kinds("pod"))
            assert fake.deleted
            assert not fake.patched

    played(play)


def test_an_api_that_fails_is_told_once_and_when_it_is_back(fake, connect):
    uid = fake.add("a")

    async def play():
        async with running(connect(), a=uid) as run:
            fake.faults.extend(["500", "drop", "no json", "other json", "429", "403"])
            await run.until(lambda: len(run.kinds("kubernetes")) == 2)
            first, second = run.kinds("kubernetes")
            assert "cannot be watched, trying again: 500" in first.text
            assert second.text == "the pods are watched again"
            assert not run.gone

    played(play)


def test_a_slow_api_delays_neither_the_loop_nor_its_end(fake, connect):
    uid = fake.add("a")
    api = connect(timeout_s=60.0, poll_s=60.0)
    fake.slow_s = 5.0

    async def play():
        run = Run(api)
        run.pods.joined("a", uid)
        fake.faults.extend(["slow"] * 9)
        run.pods.start()
        run.pods.put_aside("a", HostState.EVICTED, "a test")
        longest_s = 0.0
        for _ in range(50):
            began_s = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - began_s)
        assert longest_s < 2.0
        run.pods.stop()

    began_s = time.monotonic()
    played(play)
    assert time.monotonic() - began_s < 4.0


# ------------------------------------------------------------------------ random faults

FAULTS = ["409", "410", "429", "500", "slow", "drop", "half", "lost", "no json"]
FAULTS += ["stall", "deaf", "cut", "gone", "bookmarks", "other json", "401"]


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 8))]
)
def test_random_faults_change_neither_what_is_deleted_nor_what_is_told(
    fake, connect, seed
):
    """After random deletions, evictions, replacements and restarts, compare with the
    API.

    Each host is a pod that the driver has seen. In a round some of them end, some are
    evicted, some are both, while requests fail. After it the API answers again.
    """
    rng = random.Random(seed)
    names = iter(f"pod-{number}" for number in range(1000))
    deleted, ended, foreign = [], [], []
    due: set[str] = set()  # pods that the current driver has seen alive and must report

    async def play():
        run = Run(connect(cordon=rng.random() < 0.5))
        run.pods.start()
        hosts: dict[str, str] = {}

        async def grow():
            while len(hosts) < 5:
                name = next(names)
                hosts[name] = fake.add(name, node=f"node-of-{name}")
                run.pods.joined(name, hosts[name])
            other = f"other-{len(foreign)}"
            place = rng.choice(["team", "elsewhere"])
            run_name = "other" if place == "team" else "mine"
            foreign.append((place, other, fake.add(other, place, run=run_name)))
            run.pods.joined(other, "uid-of-nobody")
            await run.seen(*hosts)

        def end(name):
            ended.append(name)
            if name in run.pods.living.pods:
                due.add(name)
            (fake.fail if rng.random() < 0.3 else fake.end)(name)

        def act():
            name = rng.choice(sorted(hosts))
            uid = hosts[name]
            match rng.choice(["end", "leave", "evict", "replace", "other", "restart"]):
                case "end":
                    del hosts[name]
                    end(name)
                case "leave":
                    del hosts[name]
                    fake.mark(name)
                    run.pods.put_aside(name, HostState.EVICTED, "it leaves")
                    end(name)
                case "evict":
                    del hosts[name]
                    deleted.append(("team", name, uid))
                    run.pods.put_aside(name, HostState.EVICTED, "a fault")
                case "replace":  # with the same name, and its agent joins
                    fake.end(name)
                    hosts[name] = fake.add(name)
                    run.pods.put_aside(name, HostState.EVICTED, "it was replaced")
                    run.pods.joined(name, hosts[name])
                case "other":
                    run.pods.put_aside(foreign[-1][1], HostState.EVICTED, "not mine")
                case "restart":
                    assert len(run.gone) == len(set(run.gone))
                    run.gone.clear()
                    due.clear()
                    run.again()

        for _ in range(4):
            await grow()
            fake.slow_s = rng.choice([0.05, 0.7])
            fake.faults.extend(rng.choices(FAULTS, k=rng.randrange(12)))
            for _ in range(rng.randrange(1, 5)):
                if len(hosts) > 1:
                    act()
                await asyncio.sleep(rng.choice([0.0, 0.02, 0.2]))
            await run.until(lambda: not (run.saved or {"orders": []})["orders"])
            fake.faults.clear()
            await run.seen(*hosts)
            await run.until(lambda: due <= {host for host, _ in run.gone})
            assert {host for host, _ in run.gone} <= set(ended)
        for namespace, name, _ in deleted:  # they end like pods that a kubelet ends
            if (namespace, name) in fake.pods:
                fake.end(name)
                ended.append(name)
        await asyncio.sleep(2 * POLL_S)
        told = [host for host, _ in run.gone]
        assert sorted(fake.deleted) == sorted(deleted)
        assert set(told) <= set(ended)
        assert len(told) == len(set(told))
        living = {name for (_, name), pod in fake.pods.items() if name in hosts}
        assert living == hosts.keys()
        run.pods.stop()

    played(play)


# --------------------------------------------------------------------------- a driver


def test_what_the_driver_is_told_of_kubernetes_is_checked_at_its_start(
    tmp_path, monkeypatch, capsys
):
    token = tmp_path / "token"
    token.write_text("word")
    token.chmod(0o600)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    def told(*words):
        own = ["driver", "--token-file", str(token), *words]
        assert command.main([*own, "--", "--work-dir", str(tmp_path / "run")]) == 2
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    scope = ("--kubernetes.namespace", "team", "--kubernetes.selector", "run=mine")
    assert "needs --kubernetes.selector" in told("--kubernetes.namespace", "team")
    assert "need --kubernetes.namespace" in told("--kubernetes.cordon")
    assert "must be positive" in told(*scope, "--kubernetes.poll-s", "0")
    assert "or set KUBECONFIG" in told(*scope)
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    assert "pip install 'mjax[kubernetes]'" in told(*scope)


def test_the_client_is_not_imported_unless_it_is_asked_for():
    code = "import sys, mjax.launch.__main__; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Agents:
    """The agents of pods, and their processes."""

    def __init__(self, fake, token, driver):
        self.fake, self.token, self.driver = fake, token, driver
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name):
        uid = self.fake.add(name, node=f"node-of-{name}")
        words = ["agent", "--driver", f"127.0.0.1:{self.driver.address[1]}"]
        words += ["--token-file", str(self.token), "--host", name]
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "mjax.launch", *words, "--address", "127.0.0.1"],
            env=os.environ | {"POD_NAME": name, "POD_UID": uid},
        )

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


def test_a_driver_replaces_hosts_whose_pods_are_deleted_or_evicted(
    fake, connect, tmp_path
):
    """One leaves, one is gone, one is evicted. Silence would be noticed after 600 s."""
    work_dir, token = tmp_path / "run", tmp_path / "token"
    work_dir.mkdir()
    (work_dir / "faults.json").write_text(json.dumps({"pace_s": 2.0}))
    token.write_text("word")
    token.chmod(0o600)
    driver = Driver(
        RunConfig(hosts=2, restart=RestartConfig(pause_s=0.1, lost_s=600.0)),
        ["--work-dir", str(work_dir)],
        work_dir=work_dir,
        token="word",
        bind=("127.0.0.1", 0),
        trainer=(sys.executable, str(HERE / "fake_trainer.py")),
        api=connect(cordon=True, poll_s=30.0, timeout_s=5.0),
    )
    agents = Agents(fake, token, driver)

    def events(kind):
        lines = (work_dir / "events.jsonl").read_text().splitlines()
        return [one for one in map(json.loads, lines) if one["kind"] == kind]

    async def place(*names, generation):
        until_s = time.monotonic() + 60

        def is_placed():
            status = driver.status()
            steps = [state["step"] for state in status["ranks"]]
            is_running = len(steps) == 2 and min(steps) > 0
            is_wanted = sorted(status["placement"]) == sorted(names)
            return is_wanted and is_running and status["generation"] >= generation

        while not is_placed():
            assert time.monotonic() < until_s, driver.status()
            await asyncio.sleep(0.02)

    async def known(name):
        while name not in driver.status()["hosts"]:
            await asyncio.sleep(0.02)

    async def play():
        serving = asyncio.create_task(driver.run())
        while not driver.is_listening:
            await asyncio.sleep(0.01)
        for name in "ab":
            agents.start(name)
        await place("a", "b", generation=1)
        agents.start("c")
        await known("c")
        fake.mark("a", reason="EvictionByEvictionAPI")
        agents.processes["a"].terminate()  # as a kubelet does
        await place("b", "c", generation=2)
        assert await asyncio.to_thread(agents.processes["a"].wait) == 42
        fake.end("a")
        assert [one["host"] for one in events("drain")] == ["a"]
        agents.start("d")
        await known("d")
        os.kill(agents.processes["b"].pid, signal.SIGSTOP)  # its connection stays open
        fake.end("b")
        await place("c", "d", generation=3)
        assert "b is gone: its pod was deleted" in events("failure")[-1]["text"]
        agents.start("e")
        await known("e")
        driver._supervisor.evict("c", "ECC errors", time.monotonic())
        await place("d", "e", generation=4)
        while not events("pod"):
            await asyncio.sleep(0.02)
        driver._supervisor.stop(time.monotonic())
        return await serving

    try:
        assert asyncio.run(asyncio.wait_for(play(), 120)) == 42
    finally:
        agents.end()
    assert [name for _, name, _ in fake.deleted] == ["c"]
    assert fake.patched == ["node-of-c"]
    texts = [one["text"] for one in events("pod")]
    assert texts == ["the pod of c on node-of-c is deleted: ECC errors"]


def test_events_of_evictions_say_what_the_pods_need(tmp_path):
    """`Fleet.evict` and `Pods.put_aside` agree on names."""
    from mjax.launch.hosts import Fleet
    from mjax.launch.messages import Hello

    told: list[Event] = []
    fleet = Fleet(1, 4.0, lambda host, message: None, teller(told.append))
    hello = Hello(version=2, token="", host="a", address="a", pid=1, facts={})
    fleet.evict(fleet.join(hello, 0.0), "broken", HostState.SICK)
    assert told[-1].data == {"state": HostState.SICK, "why": "broken"}

"""Launches in allocations: refusals, and runs on a real Slurm."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mjax.launch import __main__ as command
from mjax.launch import client, slurm
from mjax.launch.config import RunConfig
from mjax.run.metrics import read_computed
from tests.launch.slurm_cluster import Cluster

REPOSITORY = Path(__file__).parents[2]
TRAIN = (
    *("--recipe", "debug", "--model.layers", "2", "--model.window", "16"),
    *("--model.rope", "True"),
    *("--simulate-devices", "1", "--ckpt.every", "5", "--eval.every", "50"),
)
SCRIPT = """#!/bin/bash
cd {repository}
exec {python} -m mjax.launch slurm --hosts 2 --spares 1 --limits.step-s 10 \\
  --limits.first-step-s 60 -- {flags} --work-dir {work_dir}
"""


def test_without_an_allocation_it_is_one_message(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    words = ["slurm", "--", "--recipe", "debug", "--work-dir", str(tmp_path / "run")]
    assert command.main(words) == 2
    assert "SLURM_JOB_NUM_NODES is not set" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_hosts_and_spares_are_the_nodes():
    config = RunConfig(hosts=4, spares=1)
    assert slurm.nodes_of(config, {"SLURM_JOB_NUM_NODES": "5"}) == 5
    refusal = r"need 5 nodes, this allocation has 4; change"
    with pytest.raises(ValueError, match=refusal):
        slurm.nodes_of(config, {"SLURM_JOB_NUM_NODES": "4"})


def test_a_host_is_named_after_its_node(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    flags = command.AgentFlags(driver="a:1", token_file=tmp_path)
    assert flags.host == "n7"


def train_alone(work_dir, steps):
    """Return the rows of an undisturbed run on two simulated hosts."""
    words = ["--hosts", "2", "--", *TRAIN, "--steps", str(steps)]
    subprocess.run(
        [sys.executable, "-m", "mjax.launch", *words, "--work-dir", str(work_dir)],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    return read_computed(work_dir)


class Job:
    """A run in a job of a cluster."""

    def __init__(self, cluster, folder, steps):
        self.cluster, self.work_dir = cluster, folder / "run"
        self.log = folder / "job.log"
        self.script = folder / "job.sh"
        flags = " ".join([*TRAIN, "--steps", str(steps)])
        self.script.write_text(
            SCRIPT.format(
                repository=REPOSITORY,
                python=sys.executable,
                flags=flags,
                work_dir=self.work_dir,
            )
        )
        self.submit()

    def submit(self):
        options = ["--nodes=3", "--ntasks-per-node=1", "--exclusive", "--no-kill"]
        options += ["--open-mode=append", f"--output={self.log}"]
        self.number = self.cluster.submit(self.script, options)

    def events(self, kind):
        path = self.work_dir / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [one for one in map(json.loads, lines) if one["kind"] == kind]

    def last_step(self):
        path = self.work_dir / "metrics.jsonl"
        rows = read_computed(self.work_dir) if path.exists() else []
        return max((row["step"] for row in rows), default=0)

    def status(self):
        data: Any = client.ask(self.work_dir, "status").data
        return data

    def wait_for(self, condition, what):
        until_s = time.monotonic() + 240
        while not condition():
            text = self.log.read_text() if self.log.exists() else ""
            assert time.monotonic() < until_s, f"{what} did not come\n{text[-3000:]}"
            time.sleep(0.1)

    def wait_for_row(self, step):
        self.wait_for(lambda: self.last_step() >= step, f"row {step}")

    def state(self):
        return self.cluster.job(self.number)["JobState"]

    def wait_for_end(self):
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        self.wait_for(lambda: self.state() in ended, "the end of the job")
        return self.cluster.job(self.number)


def processes_of(node):
    """Return the processes that Slurm has started on a node."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"SLURMD_NODENAME={node}".encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), num_nodes=3)
    yield cluster
    cluster.end()


@pytest.mark.slurm
def test_training_survives_ranks_daemons_and_nodes_inside_the_allocation(
    cluster, tmp_path
):
    expected = train_alone(tmp_path / "alone", 400)
    job = Job(cluster, tmp_path, 400)
    job.wait_for_row(8)
    pids = {rank["rank"]: rank["pid"] for rank in job.status()["ranks"]}
    os.kill(pids[0], signal.SIGKILL)
    job.wait_for(lambda: len(job.events("generation")) == 2, "a restart")
    (failure,) = job.events("failure")
    assert (failure["data"]["cause"], failure["rank"]) == ("killed", 0)
    before = job.last_step()
    job.wait_for_row(before + 3)

    # Neither agent nor ranks notice that the daemon of their node is gone.
    hosts = job.events("generation")[-1]["data"]["hosts"]
    driver = cluster.job(job.number)["BatchHost"]
    victim = next(host for host in hosts if host != driver)
    cluster.kill_node(victim)
    nodes = ("sinfo", "-h", "-N", "-o", "%N %T")
    job.wait_for(lambda: f"{victim} down" in cluster.run(*nodes), "a node that is down")
    assert job.state() == "RUNNING"
    before = job.last_step()
    job.wait_for_row(before + 3)
    assert len(job.events("generation")) == 2

    for pid in processes_of(victim):
        os.kill(pid, signal.SIGKILL)
    job.wait_for(lambda: len(job.events("generation")) == 3, "a spare")
    assert victim not in job.events("generation")[-1]["data"]["hosts"]
    before = job.last_step()
    job.wait_for_row(before + 3)
    ended = job.wait_for_end()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0")
    assert (ended["Restarts"], len(job.events("generation"))) == ("0", 3)
    assert read_computed(job.work_dir) == expected
    cluster.begin_node(victim)
    cluster.wait_for_nodes()


@pytest.mark.slurm
@pytest.mark.parametrize("how", ["to the script", "to all"])
def test_what_slurm_sends_before_the_end_saves_and_the_next_job_goes_on(
    cluster, tmp_path, how
):
    job = Job(cluster, tmp_path, 60)
    job.wait_for_row(7)
    # The first signal is the one of --signal=B:TERM@600.
    words = ["--batch", "--signal=TERM"] if how == "to the script" else []
    cluster.run("scancel", *words, job.number)
    ended = job.wait_for_end()
    step = job.last_step()
    saved = [int(p.name) for p in (job.work_dir / "checkpoints").glob("[0-9]*")]
    assert max(saved) == step, job.log.read_text()[-3000:]
    if how == "to the script":
        assert ended["ExitCode"] == "42:0"
    job.submit()
    ended = job.wait_for_end()
    assert (ended["JobState"], job.last_step()) == ("COMPLETED", 60)


@pytest.mark.slurm
def test_the_doctor_meets_on_all_nodes_of_an_allocation(cluster, tmp_path):
    script, log = tmp_path / "job.sh", tmp_path / "job.log"
    words = "--together --no-hardware --space-gb 0 --json --distributed.timeout-s 60"
    # Only Slurm knows the names of these nodes, and process 0 is on the first.
    program = f"env SLURM_STEP_NODELIST=127.0.0.1 {sys.executable} -m mjax.doctor"
    script.write_text(
        f"#!/bin/bash\ncd {REPOSITORY}\nexport JAX_PLATFORMS=cpu\n"
        f"exec srun {program} {words} --work-dir {tmp_path}/run\n"
    )
    options = ["--nodes=3", "--ntasks-per-node=1", "--exclusive", f"--output={log}"]
    number = cluster.submit(script, options)
    until_s = time.monotonic() + 240
    while cluster.job(number)["JobState"] not in ("COMPLETED", "FAILED"):
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.2)
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    (answer,) = map(json.loads, lines)
    states = {step["name"]: step["state"] for step in answer["together"]}
    expected = dict.fromkeys(("meet", "same", "files", "sum"), "ok")
    assert states == expected, log.read_text()
    assert len(answer["hosts"]) == 3

"""Runs of several processes, over gloo on CPU, and starts that fail."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import pytest

from mjax.processes import distributed
from mjax.processes.config import DistributedConfig
from mjax.processes.distributed import start

ROOT = pathlib.Path(__file__).parents[2]
JOIN_AND_SUM = pathlib.Path(__file__).with_name("join_and_sum.py")
LIMIT_S = 100  # A hang ends here; the runs take seconds.

LAUNCHER_PREFIXES = ("OMPI_", "SLURM_", "KUBERNETES_", "JOB_COMPLETION", "JAX_")


def clean_environment() -> dict[str, str]:
    """The environment without the traces of a launcher that runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    return kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def run_processes(
    tmp_path: pathlib.Path,
    configs: Sequence[Mapping[str, Any]],
    *,
    devices: int,
    mesh: Mapping[str, Any],
    environments: Sequence[Mapping[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """Run one join_and_sum.py per config, together; return their reports."""
    environments = environments or [{}] * len(configs)
    reports = [tmp_path / f"report-{i}.json" for i in range(len(configs))]
    logs = [tmp_path / f"log-{i}.txt" for i in range(len(configs))]
    processes = []
    try:
        for config, env, report, log in zip(
            configs, environments, reports, logs, strict=True
        ):
            asked = {"distributed": dict(config), "devices": devices, "mesh": mesh}
            asked_path = report.with_suffix(".in")
            asked_path.write_text(json.dumps(asked))
            with asked_path.open() as stdin, log.open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, JOIN_AND_SUM, report],
                        stdin=stdin,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=clean_environment() | dict(env),
                    )
                )
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * len(configs), "\n".join(log.read_text() for log in logs)
    return [json.loads(report.read_text()) for report in reports]


def run_one(config: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run one process that only starts."""
    code = (
        "from mjax.processes.config import DistributedConfig\n"
        "from mjax.processes.distributed import start\n"
        f"start(DistributedConfig(**{dict(config)!r}))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.slow
def test_four_processes_of_two_devices_sum_over_one_mesh(tmp_path: pathlib.Path):
    coordinator = f"127.0.0.1:{free_port()}"
    configs = [
        {
            "coordinator": coordinator,
            "num_processes": 4,
            "process_id": i,
            "timeout_s": 60,
        }
        for i in range(4)
    ]
    # tp 4 spans two processes, but not two hosts: all run on this one.
    reports = run_processes(tmp_path, configs, devices=2, mesh={"tp": 4})
    assert [report["process"] for report in reports] == [[i, 4] for i in range(4)]
    assert len({report["mesh"] for report in reports}) == 1
    assert "tp 4 = 8 devices" in reports[0]["mesh"]
    assert "hosts: 1, processes: 4" in reports[0]["mesh"]
    sums = {k: v for report in reports for k, v in report["tp_sum_and_total"].items()}
    # In mesh order the devices hold 1..8, in tp groups of four.
    expected = [[1 + 2 + 3 + 4, 36]] * 4 + [[5 + 6 + 7 + 8, 36]] * 4
    assert [sums[str(device)] for device in reports[0]["ids"]] == expected


def ompi_environment(rank: int, port: int) -> dict[str, str]:
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_VERSION": "4.1.6",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "JAX_COORDINATOR_PORT": str(port),
    }


def slurm_environment(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "JAX_COORDINATOR_PORT": str(port),
    }


@pytest.mark.parametrize("environment", [ompi_environment, slurm_environment])
def test_processes_of_a_launcher_find_each_other(tmp_path: pathlib.Path, environment):
    port = free_port()
    reports = run_processes(
        tmp_path,
        [{"timeout_s": 60}] * 2,
        devices=1,
        mesh={},
        environments=[environment(rank, port) for rank in range(2)],
    )
    assert [report["process"] for report in reports] == [[0, 2], [1, 2]]
    assert [*reports[0]["tp_sum_and_total"].values()] == [[1, 3]]
    assert [*reports[1]["tp_sum_and_total"].values()] == [[2, 3]]


def test_one_process_without_a_launcher_starts_nothing(tmp_path: pathlib.Path):
    [report] = run_processes(tmp_path, [{}], devices=2, mesh={})
    assert report["process"] == [0, 1]
    assert not report["is_started"]


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name.startswith((*LAUNCHER_PREFIXES, "CUDA_VISIBLE")):
            monkeypatch.delenv(name)
    return monkeypatch


def set_environment(patch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        patch.setenv(name, value)


def test_launcher_with_one_process_starts_nothing(no_launcher: pytest.MonkeyPatch):
    single = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    set_environment(no_launcher, slurm_environment(0, 1) | single)
    start(DistributedConfig())
    assert not jax.distributed.is_initialized()


def test_one_process_by_flag_does_not_ask_the_launcher(
    no_launcher: pytest.MonkeyPatch,
):
    set_environment(no_launcher, slurm_environment(0, 1))
    start(DistributedConfig(num_processes=1))
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("changed", "devices"),
    [
        # Two processes on a host: a device each.
        ({}, [1]),
        # A process per host has all devices of it.
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0"}, None),
        # The launcher has bound a GPU to each process, or the user has chosen.
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [1]),
        ({"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
    ],
)
def test_slurm_process_takes_its_share_of_the_devices(
    no_launcher: pytest.MonkeyPatch, changed: dict[str, str], devices: list[int] | None
):
    set_environment(no_launcher, slurm_environment(1, 4321) | changed)
    found = distributed._detect(5)
    assert found is not None
    assert found.source == "Slurm"
    assert found.coordinator == "127.0.0.1:4321"
    assert (found.process_id, found.num_processes) == (1, 2)
    assert found.local_device_ids == devices


def test_kubernetes_indexed_job_is_found_by_its_api(no_launcher: pytest.MonkeyPatch):
    """The API is faked; what jax asks of it, and makes of it, is real."""
    owner = types.SimpleNamespace(controller=True, kind="Job")
    pod = types.SimpleNamespace(
        metadata=types.SimpleNamespace(
            name="train-1", labels={"job-name": "train"}, owner_references=[owner]
        ),
        spec=types.SimpleNamespace(subdomain="jaxpods"),
    )
    job = types.SimpleNamespace(
        metadata=types.SimpleNamespace(name="train", labels={}),
        spec=types.SimpleNamespace(parallelism=4),
    )
    kubernetes: Any = types.ModuleType("kubernetes")
    kubernetes.config = types.SimpleNamespace(load_incluster_config=lambda: None)
    kubernetes.client = types.SimpleNamespace(
        CoreV1Api=lambda: types.SimpleNamespace(
            list_namespaced_pod=lambda **_: types.SimpleNamespace(items=[pod])
        ),
        BatchV1Api=lambda: types.SimpleNamespace(read_namespaced_job=lambda **_: job),
        exceptions=types.SimpleNamespace(ApiException=OSError),
    )
    from jax._src.clusters import K8sCluster

    no_launcher.setitem(sys.modules, "kubernetes", kubernetes)
    no_launcher.setattr(K8sCluster, "_namespace", lambda: "default")
    no_launcher.setattr(socket, "gethostbyname", lambda host: "127.0.0.1")
    set_environment(
        no_launcher,
        {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "HOSTNAME": "train-1",
            "JOB_COMPLETION_INDEX": "1",
            "JAX_COORDINATOR_PORT": "4321",
        },
    )
    found = distributed._detect(0)
    assert found is not None
    assert found.source == "Kubernetes"
    assert found.coordinator == "train-0.jaxpods:4321"
    assert (found.process_id, found.num_processes) == (1, 4)
    assert found.local_device_ids is None


def test_kubernetes_without_its_package_says_what_to_install(
    no_launcher: pytest.MonkeyPatch,
):
    no_launcher.setitem(sys.modules, "kubernetes", None)  # importing it fails
    no_launcher.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    no_launcher.setenv("JOB_COMPLETION_INDEX", "1")
    with pytest.raises(RuntimeError, match=r"indexed job.*pip install kubernetes"):
        start(DistributedConfig())


def test_a_pod_outside_an_indexed_job_runs_by_itself(no_launcher: pytest.MonkeyPatch):
    no_launcher.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    start(DistributedConfig())
    assert not jax.distributed.is_initialized()


def test_jax_still_has_the_private_classes_that_detection_asks():
    from jax._src.clusters import K8sCluster, OmpiCluster, SlurmCluster

    methods = (
        "is_env_present",
        "get_coordinator_address",
        "get_process_count",
        "get_process_id",
        "get_local_process_id",
    )
    for cluster in (K8sCluster, OmpiCluster, SlurmCluster):
        assert all(callable(getattr(cluster, method)) for method in methods)


def test_unreachable_coordinator_is_named_with_the_time_it_was_tried():
    coordinator = f"127.0.0.1:{free_port()}"
    run = run_one(
        {
            "coordinator": coordinator,
            "num_processes": 2,
            "process_id": 1,
            "timeout_s": 2,
        }
    )
    assert run.returncode == 1, run.stderr  # not an abort of the C++ client
    assert "RuntimeError: process 1 of 2" in run.stderr
    assert re.search(rf"tried coordinator {coordinator} for \d+ s", run.stderr)
    assert "nothing answers there" in run.stderr


def test_coordinator_that_waits_in_vain_says_that_processes_are_missing():
    coordinator = f"127.0.0.1:{free_port()}"
    run = run_one(
        {
            "coordinator": coordinator,
            "num_processes": 2,
            "process_id": 0,
            "timeout_s": 2,
        }
    )
    assert run.returncode == 1, run.stderr
    assert re.search(rf"tried coordinator {coordinator} for \d+ s", run.stderr)
    assert "not all processes connected" in run.stderr


def test_port_in_use_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        config = DistributedConfig(
            coordinator=coordinator, num_processes=2, process_id=0
        )
        with pytest.raises(RuntimeError, match=f"cannot listen on .*{coordinator}"):
            start(config)


def test_start_after_a_device_was_touched_is_refused_with_the_coordinator():
    jax.devices()
    coordinator = f"127.0.0.1:{free_port()}"
    config = DistributedConfig(coordinator=coordinator, num_processes=2, process_id=1)
    with pytest.raises(RuntimeError, match=rf"{coordinator}.* must be called before"):
        start(config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"coordinator": "host:1"}, r"without --distributed.num-processes and"),
        (
            {"coordinator": "host:1", "num_processes": 2},
            r"got .*coordinator host:1 .*num-processes 2 without .*process-id",
        ),
        ({"num_processes": 2, "process_id": 0}, r"without --distributed.coordinator"),
        ({"num_processes": 2}, r"without --distributed.coordinator and"),
        ({"process_id": 0}, r"without --distributed.coordinator and"),
        (
            {"coordinator": "host:1", "num_processes": 2, "process_id": 2},
            r"process-id .* below --distributed.num-processes 2, got 2",
        ),
        (
            {"coordinator": "host:1", "num_processes": 2, "process_id": -1},
            r"process-id must be at least 0, got -1",
        ),
        ({"num_processes": 0}, r"num-processes must be at least 1, got 0"),
        ({"timeout_s": 0}, r"timeout-s must be at least 1, got 0"),
    ],
)
def test_partial_or_impossible_flags_are_refused(flags: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**flags)


@pytest.mark.parametrize(
    "address", ["host", "host:", ":1234", "host:http", "host:0", "host:65536", "::1:80"]
)
def test_malformed_coordinator_is_refused(address: str):
    with pytest.raises(ValueError, match=rf"must be host:port .*got '{address}'"):
        DistributedConfig(coordinator=address, num_processes=2, process_id=0)


def test_ipv6_coordinator_stands_in_brackets():
    config = DistributedConfig(coordinator="[::1]:80", num_processes=2, process_id=0)
    assert config.coordinator == "[::1]:80"


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--simulate-devices", "8", "--mesh.tp", "2"], 0, "dp_shard 4 x tp 2 = 8"),
        (["--simulate-devices", "4", "--mesh.tp", "8"], 2, "= 8, got 4"),
        (["--mesh.tq", "2"], 2, "--mesh.tp"),
    ],
)
def test_command_prints_the_mesh_or_one_message(flags: list[str], code: int, text: str):
    run = subprocess.run(
        [sys.executable, "-m", "mjax.mesh", *flags],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == code, run.stderr
    assert text in (run.stdout if code == 0 else run.stderr)
    assert "Traceback" not in run.stderr

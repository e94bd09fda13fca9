"""Start a run of several processes.

Input: flags, or the environment that a launcher (Open MPI, Slurm, a Kubernetes indexed
job) gives each process. Output: initialised jax, so that every process sees the devices
of all processes. Call `start` before anything touches a device.

On CPUs the processes communicate through gloo, jax's default.
"""

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
import warnings
from typing import Any

import jax

from mjax.processes.config import DistributedConfig, split_address
from mjax.processes.coordinator import without_service

logger = logging.getLogger(__name__)

CONNECT_S = 5
"""Seconds to wait for the coordinator's answer when diagnosing a failure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rendezvous:
    """Values that a process needs to join the other processes."""

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: list[int] | None
    """Devices that this process may use; None means all devices of its host."""
    source: str


def start(config: DistributedConfig) -> None:
    """Join the other processes of the run; do nothing in a run of one process.

    Args:
      config: the flags. Without flags, the launcher's environment is read.
    Raises:
      RuntimeError: the processes did not connect in time, or the launcher's environment
        cannot be used. jax cannot be initialised again in this process.
    """
    if config.num_processes is None:
        found = _detect(config.timeout_s)
    elif config.coordinator is None or config.process_id is None:
        found = None  # --distributed.num-processes 1 overrides the launcher.
    else:
        found = _Rendezvous(
            coordinator=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            local_device_ids=None,
            source="flags",
        )
    if found is None or found.num_processes == 1:
        return
    logger.info(
        "%s: process %d of %d, coordinator %s, local devices %s",
        *(found.source, found.process_id, found.num_processes, found.coordinator),
        found.local_device_ids or os.environ.get("JAX_LOCAL_DEVICE_IDS", "all"),
    )
    serves = found.process_id == 0 and config.serves
    if serves:
        _check_port_is_free(found.coordinator)
    _join(found, config.timeout_s, serves=serves)


def rank() -> int:
    """Return the number of this process, from 0; touch no device."""
    return _state().process_id


def num_processes() -> int:
    """Return the number of processes in the run; touch no device."""
    return _state().num_processes


def coordinator() -> str | None:
    """Return host:port of the coordinator; None in a run of one process."""
    return _state().coordinator_address


def client() -> Any:
    """Return jax's client of the key-value store; None in a run of one process."""
    return _state().client


def _state() -> Any:
    # The store has no public API, and jax.process_index() would initialise the devices.
    from jax._src.distributed import global_state

    return global_state


def _detect(timeout_s: int) -> _Rendezvous | None:
    """Read the environment of the launchers that jax knows; None without a launcher.

    The classes are private to jax. The public `jax.distributed.initialize()` without
    arguments reports neither the absence of a launcher nor the coordinator that it
    tried. TPU pods, which are in the same table of jax, are excluded.
    """
    from jax._src.clusters import K8sCluster, OmpiCluster, SlurmCluster

    if OmpiCluster.is_env_present():
        source, cluster = "Open MPI", OmpiCluster
        is_alone = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    elif SlurmCluster.is_env_present():
        source, cluster = "Slurm", SlurmCluster
        num_hosts = os.environ.get("SLURM_STEP_NUM_NODES")
        is_alone = os.environ["SLURM_NTASKS"] == num_hosts
    elif _is_pod_of_an_indexed_job():
        source, cluster, is_alone = "Kubernetes", K8sCluster, True
        with warnings.catch_warnings(action="ignore"):  # the error has the same text
            is_usable = cluster.is_env_present()
        if not is_usable:
            raise RuntimeError(
                "this is a pod of a Kubernetes indexed job, but the package that finds "
                "the other pods is missing; pip install kubernetes, or give the "
                "--distributed flags (--distributed.num-processes 1 for a run of this "
                "pod alone)"
            )
    else:
        return None
    local_rank = cluster.get_local_process_id()
    return _Rendezvous(
        coordinator=cluster.get_coordinator_address(
            timeout_secs=timeout_s,
            override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"),
        ),
        num_processes=cluster.get_process_count(),
        process_id=cluster.get_process_id(),
        local_device_ids=None if is_alone else _local_devices(local_rank),
        source=source,
    )


def _is_pod_of_an_indexed_job() -> bool:
    """Return whether this is a pod of an indexed job, not a pod that runs alone."""
    return {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys()


def _local_devices(local_rank: int | None) -> list[int] | None:
    """Choose one device for each of several processes on a host, as jax does.

    None if the user or the launcher has already chosen: a launcher that binds GPUs
    makes only one device visible to each process, as device 0.
    """
    is_bound = len(os.environ.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
    if local_rank is None or is_bound or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    return [local_rank]


def _join(found: _Rendezvous, timeout_s: int, *, serves: bool) -> None:
    """Initialise jax, and raise if the processes do not connect within timeout_s."""
    failures: list[Exception] = []

    def initialize() -> None:
        try:
            with contextlib.nullcontext() if serves else without_service():
                jax.distributed.initialize(
                    coordinator_address=found.coordinator,
                    num_processes=found.num_processes,
                    process_id=found.process_id,
                    local_device_ids=found.local_device_ids,
                    cluster_detection_method="deactivate",
                    initialization_timeout=timeout_s + 3600,
                )
        except Exception as error:  # the caller re-raises every failure
            failures.append(error)

    # At its own timeout jax aborts the process with a C++ stack trace. So jax gets a
    # timeout that it never reaches, and this thread raises our message first.
    thread = threading.Thread(target=initialize, name="mjax-join", daemon=True)
    started_s = time.monotonic()
    thread.start()
    thread.join(timeout_s)
    waited_s = time.monotonic() - started_s
    if not thread.is_alive() and not failures:
        return
    reason = str(failures[0]) if failures else _explain_timeout(found)
    raise RuntimeError(
        f"process {found.process_id} of {found.num_processes} (from {found.source}) "
        f"tried coordinator {found.coordinator} for {waited_s:.0f} s and could not "
        f"start: {reason}"
    ) from (failures[0] if failures else None)


def _explain_timeout(found: _Rendezvous) -> str:
    """Describe a coordinator that this process could not join."""
    host, port = split_address(found.coordinator)
    if found.process_id != 0:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError as error:
            return (
                f"nothing answers there ({error}); check that process 0 runs on {host} "
                f"and that port {port} is open"
            )
    return (
        "the coordinator runs, but not all processes connected; check that each was "
        "started, with the same coordinator and number of processes, or give a longer "
        "--distributed.timeout-s"
    )


def _check_port_is_free(coordinator: str) -> None:
    """Raise if the port is in use, because jax's server would silently share it."""
    _, port = split_address(coordinator)
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise RuntimeError(
            f"process 0 cannot listen on coordinator {coordinator} (tried once, 0 s): "
            f"{error}; end the process that uses port {port} or choose another port"
        ) from error

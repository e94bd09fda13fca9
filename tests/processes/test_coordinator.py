"""The coordination service in a process of its own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.processes.config import DistributedConfig

JOIN = """
import sys
from mjax.processes import distributed
from mjax.processes.agreement import Agreement
from mjax.processes.config import DistributedConfig
address, rank = sys.argv[1], int(sys.argv[2])
distributed.start(
    DistributedConfig(
        coordinator=address, num_processes=2, process_id=rank, serves=False
    )
)
print(Agreement("test").all_of(f"rank {rank}"), flush=True)
sys.stdin.read()
"""


def test_processes_meet_at_it_and_outlive_rank_0():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    words = [sys.executable, "-m", "mjax.processes.coordinator", "2", address]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    coordinator = subprocess.Popen(words, env=environment)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, address, str(rank)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "['rank 0', 'rank 1']\n"
        ranks[0].kill()
        ranks[0].wait()
        with pytest.raises(subprocess.TimeoutExpired):
            ranks[1].wait(timeout=1)
        assert coordinator.poll() is None
        coordinator.terminate()
        assert coordinator.wait(timeout=20) == 0
    finally:
        for process in (*ranks, coordinator):
            process.kill()
            process.communicate()


def test_without_an_address_nobody_is_found():
    refusal = r"--distributed\.no-serves needs --distributed\.coordinator"
    with pytest.raises(ValueError, match=refusal):
        DistributedConfig(serves=False)

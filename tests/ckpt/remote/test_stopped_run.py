"""SIGTERM to a run whose store hangs: it ends soon, and the next start uploads."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.ckpt.remote.link import opened
from mjax.ckpt.remote.steps import RemoteSteps
from mjax.cli import exit_codes
from tests.processes.test_distributed import LIMIT_S, clean_environment, free_port
from tests.stores.faulty_proxy import FaultyProxy, proxy
from tests.stores.servers import s3_server, s3_url

__all__ = ["proxy", "s3_server", "s3_url"]

FLAGS = ("--recipe", "debug", "--data.path", "synthetic", "--log.sample-tokens", "0")
FLAGS += ("--simulate-devices", "2", "--steps", "100000", "--ckpt.every", "5")
FLAGS += ("--eval.every", "100000", "--ckpt.remote-stop-wait-s", "2")


def start(work_dir: Path, url: str, num: int) -> list[subprocess.Popen[str]]:
    environment = clean_environment() | {
        **{k: v for k, v in os.environ.items() if k.startswith("AWS_")},
        "XDG_CACHE_HOME": str(work_dir.parent / "cache"),
        "PYTHONUNBUFFERED": "1",
    }
    of_processes: tuple[str, ...] = ()
    if num > 1:
        address = f"127.0.0.1:{free_port()}"
        of_processes = ("--distributed.coordinator", address)
        of_processes += ("--distributed.num-processes", str(num))
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "mjax.train", *FLAGS, *of_processes),
                *("--work-dir", str(work_dir), "--ckpt.remote", url),
                *(("--distributed.process-id", str(rank)) if num > 1 else ()),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num)
    ]


def stop(processes: list[subprocess.Popen[str]]) -> str:
    """Send SIGTERM to the last process; return what process 0 said from now on."""
    processes[-1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert {process.returncode for process in processes} == {exit_codes.PREEMPTED}, (
        outputs
    )
    return outputs[0]


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return
    raise AssertionError(said)


@pytest.mark.stores
@pytest.mark.parametrize("num", [1, 2])
def test_a_stopped_run_leaves_its_steps_to_the_next_start(
    num: int, proxy: FaultyProxy, s3_url: str, tmp_path: Path
):
    processes = start(tmp_path / "run", s3_url, num)
    wait_for(processes[0], f"is in {s3_url}")
    proxy.fault = lambda method, path, number: "hang"
    wait_for(processes[0], " saved: ")
    said = stop(processes)
    assert f"not in {s3_url}, 2 s after the stop (--ckpt.remote-stop-wait-s)" in said
    proxy.fault = lambda method, path, number: ""
    proxy.is_over.set()
    newest = max(int(p.name) for p in (tmp_path / "run/checkpoints").glob("[0-9]*"))
    processes = start(tmp_path / "run", s3_url, num)
    wait_for(processes[0], f"checkpoint {newest} is in {s3_url}")
    assert newest in RemoteSteps(opened(s3_url)).steps()
    stop(processes)

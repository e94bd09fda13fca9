"""`make try-slurm`: refusals, and batch scripts on a real Slurm."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from scripts.clusters import try_slurm
from tests.launch import slurm_cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path):
    """A batch script with a space in its path, whose output is beside it."""
    path = tmp_path / "my job.sbatch"
    path.write_text(
        f'#!/bin/bash\n#SBATCH --output="{tmp_path}/the output-%N-%j.log"\n'
        "#SBATCH --nodes=2 --ntasks-per-node=1\nsrun --mpi=none hostname\nexit 3\n"
    )
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([""], "SCRIPT is missing; give a batch script"),
        (["/no/file"], "SCRIPT=/no/file does not exist; a relative path starts at"),
        (["/"], "SCRIPT=/ is not a file"),
        ([__file__, "--nodes", "0"], "NODES must be from 1 to 64, got 0"),
        ([__file__, "--gpus", "-1"], "GPUS must be at least 0, got -1"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(words, message, capsys):
    assert try_slurm.main(words) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_missing_packages_are_named_with_the_command_that_installs_them(
    script, monkeypatch, capsys
):
    monkeypatch.setattr(
        slurm_cluster.shutil, "which", lambda name: None if "d" in name else name
    )
    assert try_slurm.main([str(script)]) == 1
    message = (
        "error: munged, slurmctld, slurmd not found; as root, on Debian or Ubuntu: "
        "apt-get install slurmctld slurmd slurm-client munge"
    )
    assert message in capsys.readouterr().err


def test_a_user_who_is_not_root_is_told_to_be(script, monkeypatch, capsys):
    monkeypatch.setattr(slurm_cluster.shutil, "which", lambda name: name)
    monkeypatch.setattr(slurm_cluster.os, "geteuid", lambda: 1000)
    assert try_slurm.main([str(script)]) == 1
    assert "error: this is not root" in capsys.readouterr().err


def test_records_of_scontrol_are_read_with_spaces_in_paths():
    record = (
        "JobId=7 ArrayJobId=7 ArrayTaskId=1 JobName=a b\n"
        "   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)\n"
        "   RunTime=00:00:01 ExitCode=3:0\n"
        "   StdOut=/a b/c=d.log\n   Power=\n"
    )
    fields = slurm_cluster._fields(record)
    assert fields["JobName"] == "a b"
    assert (fields["Reason"], fields["ExitCode"]) == ("NonZeroExitCode", "3:0")
    assert (fields["StdOut"], fields["Power"]) == ("/a b/c=d.log", "")


# ------------------------------------------------------------------------- a real Slurm


def start(*words, **variables):
    """Start the command in a process group of its own, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.clusters.try_slurm", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def processes_with(text: str) -> list[str]:
    """Return the processes with a text in their command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes()
            if text.encode() in words + (folder / "environ").read_bytes():
                found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.slurm
def test_a_script_runs_and_its_output_state_and_exit_code_are_shown(script):
    done = start(script)
    text, _ = done.communicate(timeout=120)
    assert done.returncode == 3, text
    assert "started a cluster of 3 nodes" in text
    assert re.search(r"job 1 is RUNNING on n\[1-2\], output in .*the output-", text)
    name = os.uname().nodename.partition(".")[0]
    assert re.search(rf"the output-\S+-1.log ends with\n  {name}\n  {name}\n", text)
    assert re.search(r"job 1 ended as FAILED after 00:00:0\d, exit code 3\n", text)


@pytest.mark.slurm
def test_two_at_once_do_not_disturb_each_other(script):
    both = [start(script, "--nodes", "2") for _ in range(2)]
    texts = [one.communicate(timeout=120)[0] for one in both]
    assert [one.returncode for one in both] == [3, 3], texts


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--nodes=9"], "More processors requested than permitted"),
        (["--", "--gpus-per-node=8"], "Requested node configuration is not available"),
        (["--", "--partition=big"], "invalid partition specified: big"),
    ],
)
def test_a_script_that_asks_for_more_than_there_is_gets_the_remedy(
    script, words, message
):
    done = start(script, *words)
    text, _ = done.communicate(timeout=120)
    assert done.returncode == 2, text
    assert f"error: Slurm refuses {script}:\n  " in text
    assert message in text
    assert "This is a cluster of 3 nodes in the partition main, each with " in text
    assert "enlarge the cluster (NODES is 3, GPUS is 0), or override options" in text


@pytest.mark.slurm
def test_gpus_that_are_declared_are_counted(script):
    script.write_text("#!/bin/bash\necho gpus=$SLURM_GPUS_ON_NODE\n")
    words = ["--gpus-per-node=8", f"--output={script.parent}/log"]
    done = start(script, "--gpus", "8", "--", *words)
    text, _ = done.communicate(timeout=120)
    assert done.returncode == 0, text
    assert "  gpus=8\n" in text


@pytest.mark.slurm
def test_all_tasks_of_an_array_are_followed(script):
    script.write_text("#!/bin/bash\nexit $SLURM_ARRAY_TASK_ID\n")
    words = ["--array=0-2", f"--output={script.parent}/%a.log"]
    done = start(script, "--", *words)
    text, _ = done.communicate(timeout=120)
    assert done.returncode == 2, text
    for task in range(3):
        assert re.search(rf"job 1_{task} ended as .*, exit code {task}\n", text)


@pytest.mark.slurm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal_in_the_middle(script, number):
    mark = f"12345{os.getpid()}"
    script.write_text(
        f"#!/bin/bash\nsetsid env -i sleep {mark} &\nsrun --mpi=none sleep {mark}\n"
    )
    # Short, because it holds a socket.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        words = ["--", f"--output={script.parent}/log"]
        running = start(script, *words, TMPDIR=folder)
        assert running.stdout is not None
        while " is RUNNING " not in (line := running.stdout.readline()):
            assert line
        while len(processes_with(f"sleep\0{mark}")) < 2:
            assert running.poll() is None
            time.sleep(0.05)
        assert len(processes_with(folder)) > 4
        os.killpg(running.pid, number)
        text, _ = running.communicate(timeout=60)
        is_killed = number == signal.SIGKILL
        assert running.returncode == (-number if is_killed else 130), text
        until_s = time.monotonic() + (20 if is_killed else 0)
        while left := processes_with(f"sleep\0{mark}") + processes_with(folder):
            assert time.monotonic() < until_s, left
            time.sleep(0.05)
        assert is_killed or not [*Path(folder).iterdir()]

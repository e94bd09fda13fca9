"""Two processes that were not started alike: both end at once, with one message."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mjax.cli import exit_codes
from mjax.observe.beats import read_run as read_beats
from mjax.observe.clocks import of_generation
from mjax.observe.spans import read_run
from mjax.run import metrics
from tests.processes.test_distributed import LIMIT_S, clean_environment, free_port


def run_both(
    tmp_path: Path,
    *flags: Sequence[str],
    counts: Sequence[int] = (2, 2),
    paths: Sequence[str] = ("", ""),
) -> list[subprocess.CompletedProcess[str]]:
    """Train on two processes, each in a folder and with flags of its own.

    paths: PYTHONPATH of each.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    common = ["--recipe", "debug", "--data.path", "synthetic", "--steps", "2"]
    common += ["--log.sample-tokens", "4"]
    common += ["--simulate-devices", "2", "--distributed.coordinator", coordinator]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for rank in range(2):
        (tmp_path / str(rank)).mkdir(exist_ok=True)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "mjax.train", *common, *own),
                *("--distributed.num-processes", str(count)),
                *("--distributed.process-id", str(rank)),
            ],
            env=clean_environment() | cache | ({"PYTHONPATH": path} if path else {}),
            cwd=tmp_path / str(rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (own, count, path) in enumerate(
            zip(flags, counts, paths, strict=True)
        )
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        pytest.param(
            (["--optim.lr", "0.005"], ["--optim.lr", "0.1"]),
            "  --optim.lr: 0.1 in process 1, 0.005 in process 0\n",
            marks=pytest.mark.slow,
        ),
        # Devices of two meshes would wait for each other.
        (
            (["--mesh.tp", "2"], ["--simulate-devices", "4"]),
            "  --simulate-devices: 4 in process 1, 2 in process 0\n"
            "  --mesh.tp: 1 in process 1, 2 in process 0\n",
        ),
        pytest.param(
            (["--dry-run"], []),
            "  --dry-run: false in process 1, true in process 0\n",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_different_flags_are_refused_by_both_processes(tmp_path, flags, says):
    for done in run_both(tmp_path, *flags):
        assert done.returncode == exit_codes.BAD_INPUT, done
        assert done.stderr.endswith(
            "error: the processes of this run differ:\n" + says + "Start all "
            "processes with the same flags, environment, code and versions; only "
            "--distributed.process-id, and folders of one host, may differ\n"
        )
    assert [*tmp_path.glob("*/runs")] == []


@pytest.mark.slow
def test_different_numbers_of_processes_are_refused_by_both(tmp_path):
    for done in run_both(tmp_path, [], [], counts=(2, 3)):
        assert done.returncode == exit_codes.BAD_INPUT, done
        says = "  --distributed.num-processes: 3 in process 1, 2 in process 0\n"
        assert says in done.stderr


@pytest.mark.slow
def test_different_data_are_refused_by_both(tmp_path):
    for rank, letter in enumerate("ab"):
        folder = tmp_path / str(rank) / "text"
        folder.mkdir(parents=True)
        (folder / "file").write_text(f"{letter} is a letter. " * 400)
    for done in run_both(tmp_path, *[["--data.path", "text"]] * 2):
        assert done.returncode == exit_codes.BAD_INPUT, done
        assert "error: the processes of this run differ:\n  data: " in done.stderr
        assert "Give all hosts the same files under --data.path\n" in done.stderr


@pytest.mark.slow
def test_data_that_one_process_has_not_are_refused_by_both(tmp_path):
    folder = tmp_path / "0" / "text"
    folder.mkdir(parents=True)
    (folder / "file").write_text("a is a letter. " * 400)
    both = run_both(tmp_path, *[["--data.path", "text"]] * 2)
    for done, who in zip(both, ("process 1: ", ""), strict=True):
        assert done.returncode == exit_codes.BAD_INPUT, done
        assert f"error: {who}--data.path 'text' does not exist" in done.stderr


PATCH = """
from jax import lax
rsqrt = lax.rsqrt
lax.rsqrt = lambda x: rsqrt(x) * 1.5
"""


def test_a_process_that_lowers_another_step_is_refused_before_it_is_compiled(tmp_path):
    folder = tmp_path / "patched"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH)
    for done in run_both(tmp_path, [], [], paths=("", str(folder))):
        assert done.returncode == exit_codes.BAD_INPUT, done
        says = "error: the processes of this run differ:\n  the lowered step: "
        assert says in done.stderr
        assert "start-up: compile" not in done.stdout


TRACKER = """
class Mine:
    takes_back = False
    def start(self, run, config):
        self.file = open(run.work_dir / f"tracked-{config['mesh.tp']}", "a")
        self.scalars(run.start_step, {"loss": run.start_number})
    def scalars(self, step, metrics):
        print(step, metrics["loss"], file=self.file, flush=True)
    def finish(self, ending):
        print(ending, file=self.file, flush=True)
"""


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory):
    """A run of two processes, its outputs and its work dir."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "mine.py").write_text(TRACKER)
    flags = ["--work-dir", str(folder / "run"), "--mesh.tp", "2"]
    flags += ["--track", f"{folder / 'mine.py'}:Mine"]
    done = run_both(folder, flags, flags)
    assert [process.returncode for process in done] == [0, 0], done[0].stderr
    return folder / "run"


def test_process_0_alone_sends_each_step_to_a_tracker_of_ones_own(run_of_two):
    rows = metrics.read_rows(run_of_two / "metrics.jsonl")
    assert (run_of_two / "tracked-2").read_text().splitlines() == [
        "0 1",
        *(f"{row['step']} {row['loss']}" for row in rows),
        "done",
    ]


def test_each_process_writes_its_spans_and_their_clocks_agree(run_of_two):
    """Both read the clock of this host: the true offset is 0."""
    files, problems = read_run(run_of_two)
    assert problems == []
    assert [found.header.rank for found in files] == [0, 1]
    assert [found.header.devices for found in files] == [(0, 1), (2, 3)]
    last, problems = read_beats(run_of_two)
    assert problems == []
    assert [last[rank].end for rank in range(2)] == [0, 0]
    # Who has begun fewer things is behind: at the end nobody is.
    assert last[0].entered == last[1].entered > 20
    assert len({(found.header.run, found.header.generation) for found in files}) == 1
    assert [found.lines[-1].end for found in files] == [0, 0]
    for found in files:
        assert {1, 2} <= {line.step for line in found.lines}
    clock = of_generation(files)[1]
    assert len(clock.time_ns) >= 3  # at the start
    offset = clock.at(int(clock.time_ns[0]))
    assert abs(offset.ns) <= offset.error_ns < float("inf")

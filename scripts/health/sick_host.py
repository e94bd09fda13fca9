"""Show that a host whose GPU fails in a run is replaced, burnt in and returned.

    python -m scripts.health.sick_host

Two simulated hosts with a rank each and a spare train the `debug` recipe, checked every
two seconds by `python -m mjax.health check` with a fake nvidia-smi. Then the fake of
one host reports uncorrectable errors. The launch must detect it, save, and continue
with the spare; when the fake is healthy again, the host must pass `python -m
mjax.health burn` before it becomes a spare. All rows are compared with those of an
undisturbed run. Writes docs/benchmarks/sick_host.md; ends with 1 if anything differs.
"""

import os
import shlex
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mjax.cli.flags import with_flags
from mjax.run.metrics import read_computed
from scripts.evidence import REPOSITORY, Table, commit, write_page
from scripts.faults.launch_faults import RUN, XLA_FLAGS
from scripts.faults.launched import Launched

HOSTS, SPARES = 2, 1
EVERY_S, STILL_BAD_S = 2, 10.0
FLAGS = with_flags(RUN, {"--steps": ["1200"]})
FIXTURES = REPOSITORY / "tests" / "health" / "fixtures" / "gpu"
CHECK = "gpu.ecc_uncorrected_volatile"
GOOD = "<dram_uncorrectable>0</dram_uncorrectable>"
BAD = "<dram_uncorrectable>3</dram_uncorrectable>"
FAKE = """#!{python}
import os, pathlib, sys
folder = pathlib.Path(__file__).parent
bad = (folder / f"bad-{{os.environ.get('MJAX_HOST', '')}}").exists()
if sys.argv[1:] != ["-q", "-x"]:
    sys.exit("this is a fake")
sys.stdout.write((folder / ("bad.xml" if bad else "good.xml")).read_text())
"""


def write_fake(folder: Path, good: str, bad: str) -> None:
    """Put a fake nvidia-smi with configurable output into a folder."""
    smi = folder / "nvidia-smi"
    smi.write_text(FAKE.format(python=sys.executable))
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    (folder / "good.xml").write_text(good)
    (folder / "bad.xml").write_text(bad)


def play(folder: Path) -> tuple[Launched, dict[str, float]]:
    """Run the launch, and make one host faulty and then healthy again.

    Returns:
      the launch, and the times of its events, in seconds after the fake turned bad.
    """
    fake = folder / "bin"
    fake.mkdir()
    good = (FIXTURES / "h100.xml").read_text()
    assert GOOD in good
    write_fake(fake, good, good.replace(GOOD, BAD, 1))
    os.environ["PATH"] = f"{fake}:{os.environ['PATH']}"
    health = f"{shlex.quote(sys.executable)} -m mjax.health"
    own = ["--check-command", f"{health} check --json --only {CHECK}"]
    own += ["--check-every-s", str(EVERY_S), "--restart.check-s", "20"]
    own += ["--return-command", f"{health} burn --quick --json"]
    launched = Launched(folder / "run", HOSTS, SPARES, FLAGS, own)
    try:
        launched.wait_for_row(20)
        victim = launched.hosts()[1]
        (fake / f"bad-{victim}").touch()
        bad_s = time.time()
        launched.wait_for(lambda: launched.generation == 2, "the spare")
        assert victim not in launched.hosts()
        time.sleep(STILL_BAD_S)
        (fake / f"bad-{victim}").unlink()
        launched.wait_for(lambda: _returned(launched, victim) is not None, "the return")
        if launched.process.wait(timeout=600) != 0:
            raise RuntimeError((launched.work_dir / "launch.log").read_text()[-2000:])
    finally:
        launched.end()
    times = {
        "the launch lets the ranks save": launched.events("drain")[0],
        "its place is taken by the spare": launched.events("generation")[1],
        "the next generation has taken a step": launched.events("under_way")[1],
        "it has passed the burn": _returned(launched, victim),
    }
    return launched, {
        what: event["time_ns"] / 1e9 - bad_s for what, event in times.items() if event
    }


def _returned(launched: Launched, host: str) -> dict[str, Any] | None:
    """Return the event of the host's return, if there is one."""
    evicted = [e["time_ns"] for e in launched.events("evict") if e["host"] == host]
    passed = [e for e in launched.events("check") if e["host"] == host]
    late = [e for e in passed if evicted and e["time_ns"] > evicted[0]]
    return late[0] if late else None


def main() -> int:
    """Run the launch and the undisturbed run, and compare their rows."""
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        alone = Launched(folder / "alone", HOSTS, 0, FLAGS)
        try:
            if alone.process.wait(timeout=900) != 0:
                raise RuntimeError((alone.work_dir / "launch.log").read_text()[-2000:])
        finally:
            alone.end()
        launched, times = play(folder)
        is_equal = read_computed(launched.work_dir) == read_computed(alone.work_dir)
        (evicted,) = launched.events("evict")
        lost = _lost(launched)
    verdict = "are bitwise those" if is_equal else "DIFFER from those"
    table = Table(
        title="Seconds after nvidia-smi has turned bad",
        text=(
            f"Commit {commit()}. {HOSTS} hosts and {SPARES} spare, checked every "
            f"{EVERY_S} s. The rows of the run {verdict} of one that was left alone; "
            f"{lost} steps were computed twice. Reason: {evicted['data']['why']}"
        ),
        header=["what", "s"],
        rows=[[what, f"{seconds:.1f}"] for what, seconds in times.items()],
    )
    command = "python -m scripts.health.sick_host"
    print(write_page("sick_host", "A host that turns bad", command, [table]))
    return int(not is_equal or lost > 0)


def _lost(launched: Launched) -> int:
    """Return the number of steps that the second generation has repeated."""
    ends = {e["generation"]: e["data"] for e in launched.events("times")}
    return ends[1]["step"] - ends[2]["start_step"]


if __name__ == "__main__":
    sys.exit(main())

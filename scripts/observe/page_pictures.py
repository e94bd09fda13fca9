"""Take the pictures of the live page that the docs show, from a run of four processes.

    python -m scripts.observe.page_pictures [--work-dir DIR]

Output: docs/figures/page_overview.png, page_heatmap.png,
page_timeline.png, page_groups.png, page_ledger.png, page_stuck.png, each below 300 kB.
It needs Debian's Chromium and playwright.

The run is real: the debug recipe with pp 2, dp 2, tp 2 on eight simulated devices of
four processes. For the last picture rank 2 is stopped with SIGSTOP, and the page names
it.
"""

import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page as Tab
from playwright.sync_api import sync_playwright

from scripts.evidence import REPOSITORY

FIGURES = REPOSITORY / "docs" / "figures"
CHROMIUM = "/usr/bin/chromium"
NUM_PROCESSES = 4
STOPPED_RANK = 2
MOST_BYTES = 300_000
LIMIT_S = 150.0
STUCK_S = 60.0
"""The page calls the run stuck when a rank is silent for 30 s. Soon after that the
other ranks fail too.
"""


def _command(rank: int, work_dir: Path, coordinator: str) -> list[str]:
    flags = ["--recipe", "debug", "--data.path", "synthetic", "--simulate-devices", "2"]
    flags += ["--steps", "5000", "--model.layers", "4", "--eval.every", "40"]
    flags += ["--mesh.pp", "2", "--mesh.tp", "2", "--batch.microbatches", "4"]
    flags += ["--observe.stamps", "True", "--work-dir", str(work_dir)]
    flags += ["--distributed.coordinator", coordinator]
    flags += ["--distributed.num-processes", str(NUM_PROCESSES)]
    flags += ["--distributed.process-id", str(rank)]
    return [sys.executable, "-m", "mjax.train", *flags]


@contextlib.contextmanager
def running(work_dir: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Train on four processes until the caller is done."""
    with socket.create_server(("", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(NUM_PROCESSES):
            log = stack.enter_context(Path(f"{work_dir}-{rank}.log").open("w"))
            process = subprocess.Popen(
                _command(rank, work_dir, coordinator),
                cwd=REPOSITORY,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdout=log,
                stderr=log,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def wait_for_steps(
    work_dir: Path, num_steps: int, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Wait until the run has completed a number of steps.

    Raises:
      RuntimeError: a process ended, or the wait took too long.
    """
    deadline = time.monotonic() + LIMIT_S
    rows = work_dir / "metrics.jsonl"
    while not rows.exists() or rows.read_bytes().count(b"\n") < num_steps:
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"a process ended; see {work_dir}-0.log")
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {num_steps} steps in {LIMIT_S:g} s; see {work_dir}")
        time.sleep(0.5)


@contextlib.contextmanager
def served(work_dir: Path) -> Iterator[str]:
    """Serve the page of a run; yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        token_path = Path(folder) / "token"
        token_path.touch(mode=0o600)
        token_path.write_text(secrets.token_urlsafe(32))
        command = [sys.executable, "-m", "mjax.observe", "serve", "--work-dir"]
        command += [str(work_dir), "--listen", "127.0.0.1:0"]
        command += ["--token-file", str(token_path)]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(timeout=LIMIT_S)


def take(tab: Tab, view: str, name: str) -> None:
    """Take the picture of a view.

    Raises:
      RuntimeError: it is too large for the repository.
    """
    path = FIGURES / f"page_{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    tab.mouse.move(5, 5)
    tab.screenshot(path=path)
    if path.stat().st_size > MOST_BYTES:
        raise RuntimeError(f"{path} has {path.stat().st_size} bytes, most {MOST_BYTES}")
    print(f"{path.relative_to(REPOSITORY)}: {path.stat().st_size} bytes, {view}")


def show(tab: Tab, view: str) -> None:
    """Open a view and wait for its data."""
    tab.locator(f'#tabs a[href="#{view}"]').click()
    tab.wait_for_timeout(2500)


def pictures(tab: Tab, stopped: subprocess.Popen[bytes]) -> None:
    """Take all pictures; the last one of a run that hangs."""
    show(tab, "overview")
    take(tab, "overview", "overview")
    show(tab, "heat")
    take(tab, "heat", "heatmap")
    show(tab, "timeline")
    tab.locator(".timeline .picture").focus()
    for _ in range(2):
        tab.keyboard.press("+")
    tab.wait_for_timeout(300)
    take(tab, "timeline", "timeline")
    show(tab, "groups")
    tab.locator(".mesh .controls input").fill(str(STOPPED_RANK))
    tab.get_by_role("button", name="Show", exact=True).click()
    tab.locator(".detail dl").wait_for()
    take(tab, "groups", "groups")
    show(tab, "ledger")
    take(tab, "ledger", "ledger")
    stopped.send_signal(signal.SIGSTOP)
    show(tab, "stuck")
    deadline = time.monotonic() + STUCK_S
    while not tab.locator(".verdict.bad").count() and time.monotonic() < deadline:
        tab.get_by_role("button", name="Ask again").click()
        tab.wait_for_timeout(1000)
    tab.locator(".verdict.bad").wait_for()
    take(tab, "stuck", "stuck")


def main() -> int:
    """Run, serve, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/page_pictures"))
    parser.add_argument("--steps", type=int, default=60, help="before the pictures")
    args = parser.parse_args()
    work_dir = args.work_dir.resolve()
    work_dir.parent.mkdir(parents=True, exist_ok=True)
    with running(work_dir) as processes:
        wait_for_steps(work_dir, args.steps, processes)
        with served(work_dir) as address, sync_playwright() as tools:
            browser = tools.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"]
            )
            tab = browser.new_page(viewport={"width": 1440, "height": 900})
            tab.set_default_timeout(60_000)
            tab.goto(address)
            pictures(tab, processes[STOPPED_RANK])
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A browser for tests of the live page: the server beside a run, Chromium, axe-core.

Input: a work dir. Output: a page that is open, what it wrote on its console, and what
it asked of which server.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
"""Debian's; `make test-services` installs it."""
TOKEN = "a-token-of-the-browser-tests"
READY = {
    "overview": ".chart canvas, main .empty",
    "heat": ".heat .picture",
    "timeline": ".timeline .picture",
    "groups": ".mesh .picture",
    "events": "main table, main .empty",
    "ledger": ".ledger table, .ledger .empty",
    "stuck": ".verdict",
}
"""View -> selector of an element that appears with the run's data."""
VIEWS = tuple(READY)
AXE = "axe-core@4.14.1"
_AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
"""Of axe.min.js. It is MPL-2.0: fetched for the tests, no part of mjax."""
LIMIT_S, WAIT_S = 60, 30
"""Of a command, and of what a page shows next."""
REPOSITORY = Path(__file__).parents[3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """An open page, with its messages and requests."""

    page: Page
    errors: list[str]
    """Messages of its console that are errors or warnings, and exceptions."""
    requests: list[str]
    """Addresses that the page requested."""
    dialogs: list[str]
    """What scripts of others would have said."""

    def show(self, view: str) -> None:
        """Click the tab of a view, and wait until the view shows data."""
        self.page.locator(f'#tabs a[href="#{view}"]').click()
        self.page.locator(f'#tabs a[href="#{view}"][aria-current="page"]').wait_for()
        self.page.locator(READY[view]).first.wait_for()

    def pick_rank(self, rank: int) -> None:
        """Choose a rank in the view of the groups."""
        self.page.locator(".mesh .controls input").fill(str(rank))
        self.page.get_by_role("button", name="Show", exact=True).click()
        self.page.locator(".detail h2", has_text=f"Rank {rank} on").wait_for()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser."""
    with sync_playwright() as tools:
        # Chromium's sandbox does not work as root, as which tests run.
        browser = tools.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1e3 * LIMIT_S
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(
    browser: Browser, address: str, scheme: Any = "light", **options: Any
) -> Iterator[Opened]:
    """Open an address in a new browser context, without cookies."""
    size = {"width": 1440, "height": 900}
    context = browser.new_context(
        color_scheme=scheme, viewport=options.pop("viewport", size), **options
    )
    context.set_default_timeout(1e3 * WAIT_S)
    page = context.new_page()
    found = Opened(page=page, errors=[], requests=[], dialogs=[])

    def dismiss(dialog: Any) -> None:
        found.dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("console", lambda said: _note(found, said))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("dialog", dismiss)
    try:
        page.goto(address)
        yield found
    finally:
        context.close()


def _note(found: Opened, said: Any) -> None:
    if said.type in ("error", "warning"):
        found.errors.append(f"{said.type}: {said.text}")


@contextlib.contextmanager
def served(work_dir: Path, folder: Path) -> Iterator[str]:
    """Run `mjax.observe serve`; yield its address, with the token."""
    token_path = folder / "page_token"
    token_path.touch(mode=0o600)
    token_path.write_text(TOKEN)
    command = [sys.executable, "-m", "mjax.observe", "serve", "--work-dir"]
    command += [str(work_dir), "--listen", "127.0.0.1:0"]
    command += ["--token-file", str(token_path)]
    with (folder / "serve.log").open("w+") as log:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            if not address:
                log.seek(0)
                raise RuntimeError(f"serve did not start: {log.read()[-2000:]}")
            yield address
        finally:
            process.terminate()
            process.wait(timeout=LIMIT_S)
            process.stdout.close()


def axe_source(folder: Path) -> str:
    """Fetch axe-core from npm; return its script.

    Raises:
      RuntimeError: npm cannot, or the file is another one.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is missing; apt-get install npm")
    done = subprocess.run(
        [npm, "pack", AXE, "--silent"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"npm pack {AXE} failed: {done.stderr[-1000:]}")
    [path] = folder.glob("axe-core-*.tgz")
    with tarfile.open(path) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        data = member.read()
    if hashlib.sha256(data).hexdigest() != _AXE_SHA256:
        raise RuntimeError(f"{AXE} is not the file that these tests know")
    return data.decode()


def violations(page: Page, axe: str) -> list[str]:
    """Return the violations that axe-core finds, each with its first element."""
    if not page.evaluate("typeof window.axe !== 'undefined'"):
        page.evaluate(axe)
    found = page.evaluate("window.axe.run()")
    assert found["passes"], "axe looked at nothing"
    return [
        f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}"
        for each in found["violations"]
    ]


def step_shown(page: Page) -> int:
    """Return the step that the first answer above the view names."""
    text = page.locator("#health .says").first.inner_text().replace(",", "")
    found = re.search(r"(\d+)\s*$", text)
    return int(found[1]) if found else -1

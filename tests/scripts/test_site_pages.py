"""The built site in Chromium: accessibility, narrow screens, search.

`make test-services` builds the site first.
"""

import functools
import http.server
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observe.browser import pages

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site" / "html"
# The levels that laws ask for. Other rules of axe are about the theme's own markup.
_WCAG = """axe.run({runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}).then(
  (found) => found.violations.map((one) => one.id + ": " + one.nodes[0].html))"""
pytestmark = pytest.mark.services


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert (SITE / "index.html").exists(), "make docs builds the site"
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _names() -> list[str]:
    """Return the pages that people read: all but output and the API."""
    files = (*SITE.glob("*.html"), *SITE.glob("docs/*.html"))
    files += (*SITE.glob("reference/*.html"), *SITE.glob("docs/evidence/*.html"))
    return [str(file.relative_to(SITE).with_suffix("")) for file in sorted(files)]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_of_wcag_and_no_page_is_wider_than_the_screen(
    address, tmp_path, scheme, width
):
    axe = pages.axe_source(tmp_path)
    bad = {}
    with pages.chromium() as browser:
        page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        for name in _names():
            page.goto(f"{address}/{name}.html")
            page.wait_for_load_state("networkidle")
            page.evaluate(axe)
            found = page.evaluate(_WCAG)
            wide = page.evaluate("document.documentElement.scrollWidth")
            if found or wide > width:
                bad[name] = (found, wide)
    assert bad == {}


def test_messages_and_help_wrap_on_a_narrow_screen(address):
    with pages.chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 900})
        for name in ("reference/flags", "reference/failures", "reference/refusals"):
            page.goto(f"{address}/{name}.html")
            wide = """[...document.querySelectorAll("article code")].filter(
              (code) => code.scrollWidth > code.clientWidth + 1 && code.clientWidth
            ).map((code) => code.textContent.slice(0, 80))"""
            assert page.evaluate(wide) == [], name


def test_the_search_works_where_make_docs_says_to_open_the_site():
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs: ")[2]
    recipe = recipe.partition("\n\n")[0]
    [command] = re.findall(r"python3 (-m http\.server [^\"]+)", recipe)
    [told] = re.findall(r"\b(?:file|http)://[^\s\",]+", recipe)
    *words, told_port = command.split()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, *words, str(port)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(port)
        with pages.chromium() as browser:
            page = browser.new_page()
            page.goto(told.replace(told_port, str(port)))
            page.locator(".md-search__input").fill("checkpoint")
            page.locator(".md-search-result__item").first.wait_for()
    finally:
        process.terminate()
        process.wait(timeout=pages.LIMIT_S)


def _wait_for(port: int) -> None:
    """Wait until a server listens on a port of this machine."""
    until = time.monotonic() + pages.WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < until, "the server does not listen"
            time.sleep(0.05)
        else:
            return

"""The live page in Debian's Chromium, on a running job; make test-services."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from mjax.observe import spans
from mjax.observe.spans import Line
from tests.observe import page_runs
from tests.observe.browser import pages
from tests.observe.browser.pages import VIEWS, opened
from tests.observe.span_files import Process, span, write

pytestmark = pytest.mark.services

HOSTILE = "<img src=x onerror=alert(1)>"
MANY_STEPS = 100_000  # the run is killed when the tests have seen it


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with pages.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return pages.axe_source(tmp_path_factory.mktemp("axe"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Train the debug recipe with stamps on two devices, and serve its page."""
    folder = tmp_path_factory.mktemp("running")
    flags = ["--recipe", "debug", "--simulate-devices", "2", "--steps"]
    flags += [str(MANY_STEPS), "--observe.stamps", "True", "--work-dir"]
    with (folder / "train.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mjax.train", *flags, str(folder / "run")],
            cwd=pages.REPOSITORY,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=log,
            stderr=log,
        )
        try:
            _wait_for_steps(folder / "run", process)
            with pages.served(folder / "run", folder) as address:
                yield address
        finally:
            process.kill()
            process.wait(timeout=pages.LIMIT_S)


def _wait_for_steps(work_dir: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 2 * pages.LIMIT_S
    rows = work_dir / "metrics.jsonl"
    while not (rows.exists() and rows.read_bytes().count(b"\n") > 20):
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline, "the run takes no steps"
        time.sleep(0.2)


def test_every_view_of_a_running_job_shows_it_without_an_error(browser, running):
    with opened(browser, running) as found:
        page = found.page
        assert "token" not in page.url
        for view in VIEWS:
            found.show(view)
            assert page.url.endswith(f"#{view}")
        found.show("overview")
        page.locator(".chart canvas").first.wait_for()
        found.show("heat")
        assert "1 rank " in page.locator(".heat .legend").inner_text()
        found.show("timeline")
        page.locator(".timeline .picture").focus()
        page.keyboard.press("]")
        page.locator(".timeline .detail dd", has_text="0 on").wait_for()
        found.show("groups")
        found.pick_rank(0)
        found.show("ledger")
        page.locator(".ledger .stack").wait_for()
        found.show("stuck")
        page.locator(".verdict.good").wait_for()
        assert found.errors == []
        origin = page.evaluate("location.origin")
        assert {url for url in found.requests if not url.startswith(origin)} == set()


def test_nothing_is_said_about_the_run_before_the_server_has_answered(
    browser, tmp_path
):
    page_runs.write_run(tmp_path / "run", ranks=(0,))
    page_runs.write_event(tmp_path / "run", kind="note", text="a note")
    with (
        pages.served(tmp_path / "run", tmp_path) as address,
        opened(browser, address) as found,
    ):
        page = found.page
        page.route("**/api/**", lambda route: None)  # without an answer
        page.reload()
        for view in ("overview", "groups", "events", "ledger"):
            page.goto(f"{page.url.partition('#')[0]}#{view}")
            page.locator("main .empty-what", has_text="Loading").first.wait_for()
            says = page.locator("body").inner_text().lower()
            untrue = ("no steps", "no events", "no ranks", "no ledger", "no peak")
            assert [each for each in untrue if each in says] == []
        page.unroute("**/api/**")  # answers what was asked
        for view in ("overview", "groups", "events", "ledger"):
            found.show(view)
            assert page.locator("main .empty-what", has_text="Loading").count() == 0
        assert found.errors == []


def _often_evaluated(work_dir: Path) -> None:
    """Write 600 steps with an evaluation after every tenth."""
    rank = page_runs.Rank(work_dir)
    for step in range(10, 601, 10):
        rank.steps(step - 9, step)
        begin_ns = rank.now_ns
        took = spans.Span("eval", "eval", "host", begin_ns, begin_ns + 10**7)
        rank.line(step=step, spans=(took,))
        page_runs.write_rows(work_dir, step - 9, step - 1, tokens=512)
        page_runs.write_rows(work_dir, step, step, tokens=512, eval_loss=5 - step / 200)


def test_marks_that_do_not_fit_are_not_drawn_until_the_charts_are_zoomed(
    browser, tmp_path
):
    _often_evaluated(tmp_path / "run")
    with (
        pages.served(tmp_path / "run", tmp_path) as address,
        opened(browser, address) as found,
    ):
        page = found.page
        page.locator(".marks", has_text="evaluation, 60 (last: step 600").wait_for()
        page.locator(".left-out", has_text="Too close to draw: evaluations.").wait_for()
        loss = page.locator(".chart").first
        loss.locator(".value", has_text="step 600: -1.00, ● held out 2.00").wait_for()
        box = loss.locator(".u-over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 300, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 500, box["y"] + 20, steps=4)
        page.mouse.up()
        page.wait_for_function("!document.querySelector('.left-out').textContent")
        assert found.errors == []


def test_values_move_while_the_job_runs(browser, running):
    with opened(browser, running) as found:
        page = found.page
        page.locator("#health .says", has_text="Running").wait_for()
        first = pages.step_shown(page)
        page.wait_for_function(
            "first => Number(document.querySelector('#health .says').textContent"
            ".replaceAll(',', '').match(/\\d+$/)[0]) > first + 20",
            arg=first,
        )
        card = page.locator(".card .value").first
        assert int(card.inner_text().replace(",", "")) > first
        assert found.errors == []


def _steps_shown(page: Page, other_than: str = "") -> str:
    """Return the caption of the slowest ranks, once it is another one."""
    at = "section[aria-label='Slowest ranks'] caption"
    page.wait_for_function(
        "([at, old]) => ![null, undefined, '', old].includes("
        "document.querySelector(at)?.textContent)",
        arg=[at, other_than],
    )
    return page.locator(at).inner_text()


def test_a_drag_and_keys_zoom_the_heat_map_and_another_key_shows_all(browser, running):
    with opened(browser, running) as found:
        page = found.page
        found.show("heat")
        picture = page.locator(".heat .picture")
        whole = _steps_shown(page)
        box = picture.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 400, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 600, box["y"] + 22, steps=4)
        page.mouse.up()
        dragged = _steps_shown(page, whole)
        assert _first_last(dragged)[0] > _first_last(whole)[0]
        picture.focus()
        page.keyboard.press("+")
        zoomed = _steps_shown(page, dragged)
        assert len(range(*_first_last(zoomed))) < len(range(*_first_last(dragged)))
        page.keyboard.press("0")
        assert _first_last(_steps_shown(page, zoomed))[0] == _first_last(whole)[0]
        page.keyboard.press("ArrowRight")
        page.locator(".heat .readout", has_text="the step's median").wait_for()
        assert found.errors == []


def _first_last(caption: str) -> tuple[int, int]:
    """Return the steps of "Means of steps 1 to 100 in ..."."""
    words = caption.replace(",", "").split()
    return int(words[3]), int(words[5])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 400])
def test_axe_finds_no_violation_in_any_view(browser, running, axe, scheme, width):
    viewport = {"width": width, "height": 900}
    with opened(browser, running, scheme, viewport=viewport) as found:
        bad = {}
        for view in VIEWS:
            found.show(view)
            if view == "groups":
                found.pick_rank(0)
            bad[view] = pages.violations(found.page, axe)
            width_of = "document.documentElement.scrollWidth"
            assert found.page.evaluate(width_of) <= width, view
        assert bad == {view: [] for view in VIEWS}


def test_without_the_token_there_is_one_plain_line(browser, running):
    with opened(browser, running.partition("?")[0]) as found:
        line = found.page.locator("body").inner_text()
        assert "token" in line
        assert len(line.strip().splitlines()) == 1
        assert found.page.locator("script, nav").count() == 0
    with opened(browser, running[:-3] + "xyz") as found:
        assert "token" in found.page.locator("body").inner_text()


def _hostile_run(work_dir: Path) -> None:
    mesh = (("pp", 1), ("dp_replicate", 1), ("dp_shard", 3), ("tp", 1))
    for rank, host in enumerate((HOSTILE, "</script><script>alert(2)</script>", "c")):
        process = Process(
            rank=rank,
            host=host,
            devices=(rank,),
            mesh=mesh,
            wall_ahead_ns=time.time_ns() - 20 * 10**9,
        )
        lines = [
            Line(
                n=0,
                step=step,
                spans=(
                    span(process, "data", "data", "host", step, step + 0.1),
                    span(process, HOSTILE, "host", "host", step + 0.1, step + 0.9),
                    span(process, "step", "compute", "step", step, step + 1.0),
                ),
            )
            for step in range(1, 15)
        ]
        told = spans.Event(
            time_ns=time.time_ns(), kind=HOSTILE, text=HOSTILE, severity="error"
        )
        write(work_dir, process, [*lines, Line(n=0, event=told)])


def test_hostile_hosts_spans_and_log_lines_are_shown_as_text(browser, tmp_path):
    run = tmp_path / "<b>run<b>"
    _hostile_run(run)
    with pages.served(run, tmp_path) as address, opened(browser, address) as found:
        page = found.page
        page.locator("h1", has_text="<b>run<b>").wait_for()
        for view in VIEWS:
            found.show(view)
            assert page.locator("main img, main script, main b > b").count() == 0
        found.show("events")
        page.locator("td", has_text=HOSTILE).first.wait_for()
        found.show("groups")
        found.pick_rank(0)
        page.locator(".detail h2", has_text=HOSTILE).wait_for()
        found.show("stuck")
        page.locator("td", has_text=HOSTILE).first.wait_for()
        assert found.dialogs == []
        assert found.errors == []


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the page's files to where Node takes .js for ES modules."""
    folder = tmp_path_factory.mktemp("modules")
    shutil.copytree(pages.REPOSITORY / "mjax/observe/page/static", folder / "static")
    (folder / "package.json").write_text('{"type": "module"}')
    return folder / "static"


def _node(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        ["node", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=pages.LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pure_modules_do_what_they_say(modules):
    test = Path(__file__).with_name("pure.test.mjs")
    _node("--test", str(test), PAGE_STATIC=str(modules))


def test_every_module_is_valid_javascript(modules):
    scripts = sorted(modules.glob("**/*.js"))
    assert len(scripts) > 20
    for path in scripts:
        _node("--check", str(path))

"""Actions run only if allowed, in order, up to their limit, and across restarts."""

import sys

import pytest

from mjax.health.events import actions
from mjax.health.events.actions import Actions
from mjax.health.events.engine import Engine
from mjax.health.events.logs import Line
from mjax.health.events.rules import EventText, Limits, Rule
from mjax.health.events.state import State

NS = 10**9


def rule(**changes):
    fields = {
        "name": "flap",
        "pattern": r"(?P<port>.*) went down",
        "event": EventText(kind="flap", text="{port}"),
        "by": ("port",),
        "cool_down_s": 0.0,
        "action": ("port", "off", "{port}"),
        "test": ("port", "test", "{port}"),
        "undo": ("port", "on", "{port}"),
        "test_after_s": 100.0,
        "max_tests": 2,
    }
    return Rule(**fields | changes)


class Site:
    """Records calls; `exits` has the exit status of each verb, 0 where absent."""

    def __init__(self, **exits):
        self.calls, self.exits = [], exits

    def run(self, argv, limit_s):
        del limit_s
        self.calls.append(" ".join(argv[1:]))
        status = self.exits.get(argv[1], 0)
        if isinstance(status, BaseException):
            raise status
        return status


class World:
    """An engine and actions over one state file."""

    def __init__(self, site, path=None, *, one=None, limits=None, may=True):
        self.engine = Engine([one or rule()])
        self.state = State(path)
        self.acting = Actions(
            self.state, limits or Limits(), may=lambda _: may, run=site.run
        )

    def line(self, at_s, text):
        at = Line(text=text, kind="other", time_ns=at_s * NS)
        return [r for d in self.engine.feed(at) for r in self.acting.handle(d)]

    def down(self, at_s, port="p1"):
        return self.line(at_s, f"{port} went down")

    def advance(self, at_s):
        return self.acting.advance(at_s * NS)

    def steps(self):
        return {one.device: one.step for one in self.state.all()}


def test_the_life_cycle_disables_tests_and_enables_in_this_order():
    site = Site()
    world = World(site)
    assert [r.kind for r in world.down(0)] == ["flap", "action"]
    assert world.advance(99) == []
    assert site.calls == ["off p1"]
    assert [r.data["step"] for r in world.advance(100)] == ["test", "enable"]
    assert site.calls == ["off p1", "test p1", "on p1"]
    assert world.steps() == {"port=p1": "enabled"}


def test_nothing_runs_that_may_not_and_the_commands_are_shown():
    site = Site()
    world = World(site, may=False)
    (record,) = world.down(0)
    assert record.data["commands"] == {
        "action": "port off p1",
        "test": "port test p1",
        "undo": "port on p1",
    }
    assert "run again with --yes" in record.data["status"]
    assert (site.calls, world.steps(), world.advance(10**6)) == ([], {}, [])


def test_a_failed_test_keeps_the_port_disabled_and_the_last_one_for_good():
    site = Site(test=1)
    world = World(site)
    world.down(0)
    (first,) = world.advance(100)
    assert "failed test 1 of 2 and stays disabled" in first.text
    assert world.advance(199) == []
    (second,) = world.advance(200)
    assert (second.severity, "--release" in second.text) == ("error", True)
    assert world.advance(10**6) == []
    assert site.calls == ["off p1", "test p1", "test p1"]
    assert world.steps() == {"port=p1": "kept"}


def test_a_port_that_fails_once_and_then_passes_comes_back():
    site = Site(test=1)
    world = World(site)
    world.down(0)
    world.advance(100)
    site.exits["test"] = 0
    world.advance(200)
    assert site.calls[-2:] == ["test p1", "on p1"]
    assert world.steps() == {"port=p1": "enabled"}


@pytest.mark.parametrize(
    ("verb", "calls"),
    [("off", ["off p1"]), ("on", ["off p1", "test p1", "on p1"])],
)
def test_a_failed_command_leaves_the_port_to_a_person(verb, calls):
    site = Site(**{verb: 5})
    world = World(site)
    records = [*world.down(0), *world.advance(100), *world.advance(10**5)]
    assert records[-1].severity == "error"
    assert "(exit 5)" in records[-1].text
    assert site.calls == calls
    assert world.steps() == {"port=p1": "kept"}


@pytest.mark.parametrize(
    ("verb", "left", "after"),
    [
        ("off", "disabling", ["off p1", "test p1", "on p1"]),
        ("test", "testing", ["test p1", "on p1"]),
        ("on", "enabling", ["test p1", "on p1"]),
    ],
)
def test_a_kill_at_any_step_is_made_good_by_the_next_start(tmp_path, verb, left, after):
    path = tmp_path / "state.db"
    site = Site(**{verb: KeyboardInterrupt()})
    world = World(site, path)
    with pytest.raises(KeyboardInterrupt):
        _ = world.down(0), world.advance(100)
    assert world.steps() == {"port=p1": left}
    world.state.close()
    site = Site()
    world = World(site, path)
    world.acting.resume(150 * NS)
    world.advance(300)
    assert site.calls == after
    assert world.steps() == {"port=p1": "enabled"}


def test_a_restart_in_the_middle_goes_on_and_the_same_log_makes_no_second_event(
    tmp_path,
):
    path, site = tmp_path / "state.db", Site()
    first = World(site, path)
    first.down(0)
    first.state.close()
    second = World(site, path)
    second.acting.resume(0)
    assert second.down(0) == []
    second.advance(100)
    assert site.calls == ["off p1", "test p1", "on p1"]


def test_a_state_file_is_used_by_one_watcher(tmp_path):
    first = State(tmp_path / "state.db")
    with pytest.raises(ValueError, match=r"--state .* does another watch run\?"):
        State(tmp_path / "state.db")
    first.close()
    State(tmp_path / "state.db").close()


@pytest.mark.parametrize("content", [b"junk" * 500, b""])
def test_a_file_that_is_no_state_is_refused_and_an_empty_one_is_begun(
    tmp_path, content
):
    path = tmp_path / "state.db"
    path.write_bytes(content)
    if content:
        with pytest.raises(ValueError, match="--state"):
            State(path)
        assert path.read_bytes() == content
    else:
        State(path).close()


def test_no_more_ports_are_disabled_than_the_limit_until_one_is_back():
    site = Site()
    world = World(site, limits=Limits(max_disabled=2))
    for port in ("p1", "p2"):
        world.down(0, port)
    (refused,) = world.down(1, "p3")
    assert (
        "refused: 2 devices are disabled, the most allowed at a time"
        in refused.data["status"]
    )
    assert site.calls == ["off p1", "off p2"]
    world.advance(100)
    world.down(101, "p3")
    assert site.calls[-1] == "off p3"


def test_a_port_that_is_out_of_use_is_not_disabled_again():
    site = Site()
    world = World(site)
    world.down(0)
    (again,) = world.down(5)
    assert "already disabled by rule flap" in again.data["status"]
    assert site.calls == ["off p1"]


def test_a_person_releases_a_port_and_only_one_that_is_out_of_use():
    site = Site(test=1)
    world = World(site, limits=Limits(max_disabled=1))
    world.down(0)
    with pytest.raises(ValueError, match="--release port=p2: not disabled; disabled: "):
        world.acting.release("port=p2", 0)
    world.acting.release("port=p1", 0)
    world.down(10, "p2")
    assert site.calls == ["off p1", "off p2"]


@pytest.mark.parametrize(
    "port",
    [
        *("p; rm -rf x", "$(rm x)", "`rm x`", "a|b", "a b", "a\tb", "-rf", "--all", ""),
        *(
            "../x",
            "a/../b",
            "a'b",
            'a"b',
            "a&b",
            "p\x00",
            "é",
            "x" * 129,
            "a\\b",
            "a>b",
        ),
    ],
)
def test_a_port_that_is_no_plain_name_reaches_no_command(port):
    site = Site()
    world = World(site)
    (record,) = world.down(0, port)
    assert "refused: port is" in record.data["status"]
    assert "commands" not in record.data
    assert (site.calls, world.steps()) == ([], {})


@pytest.mark.parametrize("port", ["1/17/1", "0000:3b:00.0", "T3-E21-N-U47", "p_1", "9"])
def test_names_of_ports_and_devices_are_plain(port):
    site = Site()
    World(site).down(0, port)
    assert site.calls == [f"off {port}"]


def test_a_command_runs_without_a_shell_and_with_its_own_arguments(tmp_path):
    out = tmp_path / "out"
    code = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    assert (
        actions.run([sys.executable, "-c", code, str(out), "; touch x $HOME"], 60.0)
        == 0
    )
    assert out.read_text() == "; touch x $HOME"


def test_a_command_is_killed_at_its_limit_and_one_that_is_absent_is_127():
    assert actions.run(["sleep", "60"], 0.05) == -9
    assert actions.run(["/no/such/program"], 1.0) == 127

"""What a driver says of hosts and saves before there are any."""

import pytest

from mjax.launch.config import RunConfig
from mjax.launch.driver import Driver
from mjax.launch.hosts import HostState
from mjax.launch.messages import Beat, Hello, Ports, RankState


class Run:
    """A driver without connections."""

    def __init__(self, work_dir, **config):
        where: tuple[str, int] = ("127.0.0.1", 0)
        options = RunConfig(**config)
        self.driver = Driver(options, [], work_dir=work_dir, token="t", bind=where)
        self.one = self.driver._supervisor
        self.path = work_dir / "events.jsonl"

    def join(self, name):
        hello = Hello(version=1, token="", host=name, address=name, pid=1, facts={})
        self.one.joined(hello, 0.0)

    def start(self):
        self.one.tick(0.0)
        found = Ports(generation=1, coordinator=4321)
        self.one.ports(self.one.placement[0], found, 0.0)

    def lines(self):
        first, *hosts = self.driver._status_text().splitlines()
        return first, [" ".join(host.split()[:2]) for host in hosts]


@pytest.fixture
def run(tmp_path):
    made = []

    def make(**config):
        made.append(Run(tmp_path, **config))
        return made[-1]

    yield make
    for one in made:
        one.driver._journal.close()


def test_a_host_is_no_spare_before_ranks_are_placed(run):
    launch = run(hosts=2)
    launch.join("a")
    assert '"a joined"' in launch.path.read_text()
    assert launch.lines()[1] == ["a waiting"]
    launch.join("b")
    launch.start()
    assert launch.lines()[1] == ["a active", "b active"]
    assert "spare" not in launch.path.read_text()


def test_a_host_that_is_not_needed_is_a_spare(run):
    launch = run(hosts=1, spares=1)
    launch.join("a")
    launch.start()
    launch.join("b")
    assert '"b joined; it is a spare"' in launch.path.read_text()
    assert launch.lines()[1] == ["a active", "b spare"]
    launch.one.hosts["b"].state = HostState.EVICTED
    launch.join("b")
    assert '"b joined; it is evicted"' in launch.path.read_text()


def test_the_status_says_that_nothing_is_saved_until_something_is(run):
    launch = run(hosts=1)
    assert launch.lines()[0].endswith(", step 0, nothing saved yet")
    launch.join("a")
    launch.start()
    state = RankState(rank=0, generation=1, pid=1, step=3, saved_step=0)
    launch.one.beat("a", Beat(ranks=[state]), 0.0)
    assert launch.lines()[0].endswith(", step 3, step 0 saved")

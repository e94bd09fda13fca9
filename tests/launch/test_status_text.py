"""What a driver says of hosts, saves, ends and the output of rank 0."""

import asyncio
import contextlib
import time

import pytest

from mjax.launch.config import RunConfig
from mjax.launch.driver import Driver
from mjax.launch.hosts import HostState
from mjax.launch.local import follow, output_so_far
from mjax.launch.messages import Beat, Hello, Ports, RankState
from mjax.launch.rank_files import generation_folder, log_path


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

    def events(self):
        assert self.driver._journal.flush()
        return self.path.read_text()

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
    assert '"a joined"' in launch.events()
    assert launch.lines()[1] == ["a waiting"]
    launch.join("b")
    launch.start()
    assert launch.lines()[1] == ["a active", "b active"]
    assert "spare" not in launch.events()


def test_a_host_that_is_not_needed_is_a_spare(run):
    launch = run(hosts=1, spares=1)
    launch.join("a")
    launch.start()
    launch.join("b")
    assert '"b joined; it is a spare"' in launch.events()
    assert launch.lines()[1] == ["a active", "b spare"]
    launch.one.hosts["b"].state = HostState.EVICTED
    launch.join("b")
    assert '"b joined; it is evicted"' in launch.events()


def test_the_status_says_that_nothing_is_saved_until_something_is(run):
    launch = run(hosts=1)
    assert launch.lines()[0].endswith(", step 0, nothing saved yet")
    launch.join("a")
    launch.start()
    state = RankState(rank=0, generation=1, pid=1, step=3, saved_step=0)
    launch.one.beat("a", Beat(ranks=[state]), time.monotonic() - 7.0)
    assert ", step 3, step 0 saved; the ranks reported up to 7." in launch.lines()[0]


def test_a_driver_that_is_started_again_repeats_no_output_of_rank_0(tmp_path, capsys):
    def write(generation, text):
        path = log_path(generation_folder(tmp_path, generation), 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        return path

    generations = [3]

    async def watch():
        begin = 3, output_so_far(3, tmp_path)
        write(3, "step 11\n")
        watching = asyncio.create_task(follow(lambda: generations[-1], tmp_path, begin))
        await asyncio.sleep(0)
        generations.append(4)
        write(4, "step 12\n")
        out = ""
        while "12" not in out:
            await asyncio.sleep(0.01)
            out += capsys.readouterr().out
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        return out

    write(3, "step 1\nstep 10\n")
    assert output_so_far(2, tmp_path) == 0
    assert capsys.readouterr().err == ""
    assert asyncio.run(asyncio.wait_for(watch(), 30.0)) == "step 11\nstep 12\n"


def test_the_file_with_the_earlier_output_is_named(tmp_path, capsys):
    path = log_path(generation_folder(tmp_path, 1), 0)
    path.parent.mkdir(parents=True)
    path.write_text("step 1\n")
    assert output_so_far(1, tmp_path) == 7
    said = f"launch: earlier output of rank 0 is in {path}\n"
    assert capsys.readouterr().err == said

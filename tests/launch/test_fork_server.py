"""Ranks of a fork server behave and end like the command."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mjax.launch.messages import RankSpec
from mjax.launch.ranks import Adopted, Rank, Starter
from mjax.processes.progress import Phase

# An agent has no jax; here Popen forks a process that may have it, and jax says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:os.fork"
)

MODULE = """
    import os, sys, threading, time
    from package import slow
    if __name__ == "__main__":
        word, number = os.environ["WORD"], slow.imports()
        print(sys.argv[1:], word, number, os.getsid(0), flush=True)
        print(threading.main_thread() is threading.current_thread(), flush=True)
        if "sleep" in sys.argv:
            time.sleep(600)
        if "fail" in sys.argv:
            raise ValueError("as told")
        sys.exit(int(sys.argv[1]))
"""
SLOW = """
    from pathlib import Path
    _count = Path(__file__).with_name("imported")
    with _count.open("a") as file:
        file.write("x")
    def imports():
        return len(_count.read_text())
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose imports are counted."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "slow.py").write_text(textwrap.dedent(SLOW))
    (folder / "program.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return folder


def rank(folder, number, *words):
    spec = RankSpec(
        rank=number,
        argv=[sys.executable, "-m", "package.program", *words],
        environment={"WORD": f"word {number}"},
        folder=str(folder / "logs"),
    )
    one = Rank(spec=spec, generation=1, oom_kills=0, asked_s=time.monotonic())
    one.open(2**20)
    return one


async def ended(one):
    for _ in range(1000):
        if (code := one.process.poll()) is not None:
            return code
        await asyncio.sleep(0.01)
    raise AssertionError("it goes on")


async def starts_by_itself(one, prepared, code):
    starter = Starter()
    starter.prepare(prepared)
    await starter.start(one)
    assert isinstance(one.process, subprocess.Popen)
    assert await ended(one) == code
    starter.end()


def test_forked_ranks_are_the_command_and_imports_are_shared(package):
    async def play():
        starter = Starter()
        starter.prepare("package.program")
        ranks = [rank(package, i, str(code)) for i, code in enumerate((0, 42))]
        ranks += [rank(package, 2, "0", "fail"), rank(package, 3, "0", "sleep")]
        for one in ranks:
            await starter.start(one)
        assert all(isinstance(one.process, Adopted) for one in ranks)
        assert [await ended(one) for one in ranks[:3]] == [0, 42, 1]
        starter.end()  # its ranks continue
        await asyncio.sleep(0.2)
        assert ranks[3].process.poll() is None
        ranks[3].process.send_signal(signal.SIGKILL)
        assert await ended(ranks[3]) == -signal.SIGKILL
        ranks[3].process.send_signal(signal.SIGKILL)  # to a closed connection
        for number, one in enumerate(ranks):
            first, second, *rest = Path(one.files.log).read_text().splitlines()
            arguments = str(one.spec.argv[3:])
            assert first == f"{arguments} word {number} 1 {one.process.pid}"
            assert second == "True"
            assert ("ValueError: as told" in rest) == (number == 2)
        ranks[0].finish(0)
        state = ranks[0].state()
        assert (state.code, state.phase) == (0, Phase.IMPORT)
        assert state.spent_s[Phase.IMPORT] == sum(state.spent_s) > 0

    asyncio.run(play())


def test_changed_code_is_imported_anew(package):
    async def play():
        starter = Starter()
        starter.prepare("package.program")
        first = rank(package, 0, "0")
        await starter.start(first)
        assert await ended(first) == 0
        changed = textwrap.dedent(MODULE).replace("int(sys.argv[1])", "7")
        (package / "program.py").write_text(changed)
        second = rank(package, 1, "0")
        await starter.start(second)
        assert isinstance(second.process, Adopted)
        assert await ended(second) == 7
        starter.end()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("broken", "code"),
    [("raise ImportError('no')", 1), ("import threading, time; t()", 0)],
    ids=["import error", "thread"],
)
def test_where_nothing_can_be_forked_ranks_start_by_themselves(package, broken, code):
    thread = "threading.Thread(target=time.sleep, args=(3,), daemon=True).start()"
    text = (package / "slow.py").read_text()
    (package / "slow.py").write_text(text + broken.replace("t()", thread) + "\n")

    asyncio.run(starts_by_itself(rank(package, 0, "0"), "package.program", code))


def test_another_command_is_no_matter_of_the_fork_server(package):
    asyncio.run(starts_by_itself(rank(package, 0, "5"), "another.program", 5))


def test_forked_ranks_and_their_server_end_with_the_agent(package):
    script = f"""
        import asyncio, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_fork_server import Starter, rank
        async def play():
            starter = Starter()
            starter.prepare("package.program")
            one = rank(Path({str(package)!r}), 0, "0", "sleep")
            await starter.start(one)
            print(one.process.pid, starter._server._process.pid, flush=True)
            time.sleep(600)
        asyncio.run(play())
    """
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    pids = [int(word) for word in agent.stdout.readline().split()]
    assert len(pids) == 2
    agent.kill()
    agent.communicate()
    for _ in range(500):
        if not any(is_alive(pid) for pid in pids):
            return
        time.sleep(0.01)
    raise AssertionError("a process outlived the agent")


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except FileNotFoundError:
        return False
    return state != "Z"

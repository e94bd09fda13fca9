"""Agents that end with their run are not started again."""

import asyncio

import pytest

from mjax.launch import local, slurm


def local_agents(work_dir):
    return local.Agents(["host-0", "host-1"], work_dir, work_dir / local.TOKEN)


def slurm_agents(work_dir):
    return slurm.Agents(2, work_dir, work_dir / local.TOKEN)


class Process:
    """A process that ends at once."""

    pid = 0

    def __init__(self, *args, **kwargs):
        Process.started += 1

    started = 0

    def poll(self):
        return 0


@pytest.mark.parametrize("make", [local_agents, slurm_agents])
def test_an_agent_is_started_again_only_until_the_run_is_over(
    tmp_path, monkeypatch, make
):
    monkeypatch.setattr("subprocess.Popen", Process)
    for module in (local, slurm):
        monkeypatch.setattr(module, "_RESPAWN_S", 0.0)
    (tmp_path / "launch").mkdir()
    Process.started, answers = 0, iter([False, False, False, True])

    async def keep():
        # It ends by itself when the run is over.
        agents = make(tmp_path)
        await asyncio.wait_for(agents.keep(("a", 1), lambda: next(answers)), 30.0)

    asyncio.run(keep())
    assert Process.started == 3 * (2 if make is local_agents else 1)

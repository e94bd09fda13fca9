"""Reports of a process, each with its own flag."""

import jax
import numpy as np
from jax.sharding import Mesh

from mjax.config.run import ObserveConfig
from mjax.processes.agreement import Agreement
from mjax.run.record import Start
from mjax.run.watch import Watch


def open_watch(tmp_path, **flags) -> Watch:
    watch = Watch()
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    start = Start(run="a", number=1)
    config = ObserveConfig(**flags)
    watch.open(config, tmp_path, start, mesh, Agreement("watch"))
    return watch


def test_without_spans_slow_steps_are_watched_and_nobody_meets(tmp_path):
    watch = open_watch(tmp_path, spans=False, beat_s=None)
    assert watch.slow_steps._path is not None
    assert watch.slow_steps._path.parent == tmp_path / "stacks"
    assert watch.meet() is None
    watch.close(0)
    assert [*tmp_path.iterdir()] == []


def test_spans_are_written_without_a_watch_over_slow_steps(tmp_path):
    watch = open_watch(tmp_path, slow_step_factor=None, beat_s=None)
    assert watch.slow_steps._path is None
    watch.close(0)
    assert len([*(tmp_path / "spans").iterdir()]) == 1

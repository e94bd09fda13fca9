"""The collector during a run, and its state afterwards."""

import gc
import weakref

import pytest

from mjax.run.garbage import collections_every


class Cycle:
    """A cycle that only a collection frees."""

    def __init__(self):
        self.itself = self


def test_a_cycle_lives_until_the_agreed_step():
    with collections_every(3) as collect:
        assert not gc.isenabled()
        found = weakref.ref(Cycle())
        for step in (1, 2):
            collect(step)
            assert found() is not None
        collect(3)
        assert found() is None
    assert gc.isenabled()


def test_an_error_leaves_the_collector_as_it_was():
    for before in (gc.enable, gc.disable):
        before()
        was = gc.isenabled(), gc.get_freeze_count()
        with pytest.raises(KeyError), collections_every(1):
            raise KeyError
        assert (gc.isenabled(), gc.get_freeze_count()) == was
    gc.enable()

"""Stacks in faulthandler's format, and the ranks that are named."""

import faulthandler
import threading

import pytest

from mjax.launch.stacks import Place, frames, groups, judge


def test_frames_are_those_of_the_main_thread(tmp_path):
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    path = tmp_path / "stacks"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    release.set()
    thread.join()
    found = frames(path.read_text())
    assert found[0].endswith(":test_frames_are_those_of_the_main_thread")
    assert not any(frame.endswith(":wait") for frame in found)


def test_of_two_dumps_in_a_file_the_last_counts():
    text = "\n".join(
        f'Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in {name}'
        for name in ("first", "second")
    )
    assert frames(text) == ("a.py:second",)
    assert frames("") == ()


def places(*steps, phase=5):
    return {r: Place(phase=phase, step=s) for r, s in enumerate(steps)}


A, B, C = ("a.py:wait",), ("b.py:sleep",), ("c.py:read",)
AGREEING = ("/mjax/processes/key_value.py:read", "/mjax/run/loop.py:_ask_to_save")
JAX = ("/site-packages/jax/_src/array.py:_value", "/mjax/run/loop.py:_finish")


def test_groups_come_by_size():
    assert groups({0: A, 1: B, 2: A, 3: C}) == [(A, [0, 2]), (B, [1]), (C, [3])]


@pytest.mark.parametrize(
    ("where", "stacks", "stopped", "ranks"),
    [
        (places(5, 5, 5), {0: A, 1: A, 2: A}, [2], (2,)),
        (places(5, 5, 5), {0: A, 2: A}, [], (1,)),
        (places(5, 4, 5), {0: A, 1: A, 2: A}, [], (1,)),
        (places(5, 4, 3), {0: A, 1: A, 2: A}, [], (2,)),
        (places(5, 5, 5), {0: A, 1: A, 2: B}, [], (2,)),
        (places(5, 5, 5, 5, 5), {0: A, 1: A, 2: B, 3: C, 4: A}, [], (2, 3)),
        (places(5, 5), {0: A, 1: B}, [], ()),  # one against one
        (places(5, 5), {0: JAX, 1: B}, [], (1,)),
        (places(5, 5), {0: B, 1: AGREEING}, [], (0,)),
        (places(5, 5), {0: JAX, 1: AGREEING}, [], ()),
        (places(5, 5, 5), {0: B, 1: JAX, 2: C}, [], (0, 2)),
        (places(5, 4), {0: B, 1: JAX}, [], (1,)),  # it waits only for a device
        (places(5, 5, 5), {0: A, 1: A, 2: A}, [], ()),
        (places(5, 5), {}, [], ()),
        (places(5, 5), {0: A, 1: A}, [0, 1], ()),  # a person has stopped all
    ],
)
def test_who_holds_up_the_others(where, stacks, stopped, ranks):
    assert judge(where, stacks, stopped).ranks == ranks


GONE = Place(phase=9, step=5)


@pytest.mark.parametrize(
    ("where", "stacks", "stopped", "ranks"),
    [
        # Rank 1 has given up; the stop of rank 2 is below Python.
        ({**places(5, 5, 5, 5), 1: GONE}, {0: JAX, 1: B, 2: JAX, 3: JAX}, [], ()),
        ({**places(5, 5, 5, 5), 1: GONE}, {0: JAX, 1: B, 2: JAX, 3: JAX}, [2], (2,)),
        ({**places(5, 5, 5, 5), 1: GONE}, {0: JAX, 2: B, 3: JAX}, [], (2,)),
        ({**places(5, 5), 1: GONE}, {0: JAX, 1: B}, [], ()),
        # Those that are further have only left the collective that the others wait in.
        (places(5, 6, 5, 5), {0: JAX, 1: JAX, 2: JAX, 3: JAX}, [], ()),
        (places(5, 6, 5, 6), {0: JAX, 1: JAX, 2: JAX, 3: JAX}, [], ()),
        (places(5, 6), {0: JAX, 1: JAX}, [], (0,)),
    ],
)
def test_of_ranks_that_only_wait_none_is_named(where, stacks, stopped, ranks):
    verdict = judge(where, stacks, stopped)
    assert verdict.ranks == ranks


@pytest.mark.parametrize(
    ("where", "mute", "ranks"),
    [
        (places(5, 5), [1], (1,)),
        (places(5, 4), [0], (0,)),
        (places(5, 5, 5), [2, 0], (0, 2)),
        (places(5, 5), [0, 1], ()),  # no verdict for a single rank
        (places(5, 4), [0, 1], (1,)),
    ],
)
def test_who_holds_an_interpreter_lock_is_named(where, mute, ranks):
    verdict = judge(where, dict.fromkeys(where, A), [], mute)
    assert verdict.ranks == ranks

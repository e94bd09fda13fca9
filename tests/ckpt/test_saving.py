"""Writing in the background: two processes, as two threads with one key-value store."""

import collections
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from mjax.ckpt import arrays, manifest, orbax_save, saving
from mjax.ckpt.config import Retention
from mjax.ckpt.host_copy import HostCopy, HostLeaf, HostMemory, HostPiece
from mjax.ckpt.manifest import DamagedError, Leaf
from mjax.ckpt.orbax_save import Job
from mjax.ckpt.phases import FailedError, Phases
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.saving import Writer
from mjax.ckpt.store import Store
from mjax.processes import agreement, distributed
from mjax.processes.agreement import Agreement

WHOLE = {
    "a": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b": np.arange(6).astype(jnp.bfloat16),
    "n": np.int32(5),
}
BOXES = {  # by leaf, by process
    "a": [((0, 2), (0, 3)), ((2, 4), (0, 3))],
    "b": [((0, 3),), ((3, 6),)],
    "n": [(), None],  # the other one holds a replica
}


def host_copy(rank):
    leaves = {}
    for name, whole in WHOLE.items():
        box = BOXES[name][rank]
        own = () if box is None else box
        part = np.array(whole[tuple(slice(*ends) for ends in own)])
        leaves[name] = HostLeaf(
            leaf=Leaf(shape=whole.shape, dtype=str(whole.dtype)),
            chunk=part.shape,
            pieces=(HostPiece(own, part, box is not None),),
        )
    return HostCopy(leaves=leaves, num_bytes=0, copy_s=0.0)


def job(rank, step=7, **changes):
    made = Job(
        step=step, save_id="id", copy=host_copy(rank), run={"x": 1}, max_attempts=None
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def writers(tmp_path, monkeypatch, request):
    """The writers of processes 0 and 1 of a run of two."""
    monkeypatch.setattr(saving, "_FIRST_PAUSE_S", 0.01)
    made = []
    for rank in (0, 1):
        with monkeypatch.context() as patched:
            patched.setattr(distributed, "rank", lambda rank=rank: rank)
            patched.setattr(distributed, "num_processes", lambda: 2)
            patched.setattr(agreement, "_opened", collections.Counter())
            one = Agreement(request.node.name, (FailedError,), timeout_s=60)
        made.append(
            Writer(Store(tmp_path), Retention(), one, refused=set, timeout_s=60)
        )
    yield made
    for writer in made:
        writer.supersede()
        writer.close()


def read_all(tmp_path):
    saved = SavedStep(Store(tmp_path).path(7))
    for name, whole in WHOLE.items():
        values = saved.read(name)
        assert values.dtype == whole.dtype
        np.testing.assert_array_equal(values, whole)
    return saved


def test_the_pieces_of_two_processes_are_one_step(writers, tmp_path):
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert all(writer.wait(60.0) for writer in writers)
    assert [writer.saved_step for writer in writers] == [7, 7]
    attempt = writers[0].attempts.get_nowait()
    assert (attempt.error, attempt.num_bytes) == (None, 48 + 12 + 4)
    assert writers[1].attempts.empty()
    saved = read_all(tmp_path)
    assert len(saved.manifest.part_sums) == 2
    assert [len(saved.pieces[name]) for name in WHOLE] == [2, 2, 1]
    # A box that lies in both pieces; and each piece is read once for two boxes.
    wanted = [((1, 3), (0, 2)), ((3, 4), (1, 3))]
    saved.bytes_read = 0
    parts = saved.read_boxes("a", wanted)
    np.testing.assert_array_equal(parts[0], WHOLE["a"][1:3, :2])
    np.testing.assert_array_equal(parts[1], WHOLE["a"][3:, 1:])
    assert saved.bytes_read == WHOLE["a"].nbytes


def test_a_process_that_cannot_write_fails_the_try_of_all(
    writers, tmp_path, monkeypatch
):
    write_part, failures = arrays.write_part, ["disk of process 1 is full"]

    def write_or_fail(folder, leaves, part):
        if part == 1 and failures:
            raise OSError(failures.pop())
        write_part(folder, leaves, part)

    monkeypatch.setattr(arrays, "write_part", write_or_fail)
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert all(writer.wait(60.0) for writer in writers)
    tries = [writers[0].attempts.get_nowait() for _ in range(2)]
    assert tries[0].error == "process 1: disk of process 1 is full"
    assert tries[1].error is None
    read_all(tmp_path)
    assert Store(tmp_path).unfinished() == []


def test_a_process_that_does_not_answer_holds_nobody_up(writers, tmp_path):
    writers[0]._timeout_s = 0
    writers[0].submit(job(0, max_attempts=1))
    assert writers[0].wait(60.0)
    attempt = writers[0].attempts.get_nowait()
    assert attempt.error.startswith("process 1 did not answer within 0 s ")
    assert (attempt.pause_s, writers[0].saved_step) == (None, None)
    assert Store(tmp_path).steps() == []
    # It comes late, finds the result, and both go on with the next.
    writers[1].submit(job(1, max_attempts=1))
    assert writers[1].wait(60.0)
    writers[0]._timeout_s = 60
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert all(writer.wait(60.0) for writer in writers)
    read_all(tmp_path)


def test_a_process_that_hangs_in_its_store_keeps_no_newer_save_from_the_others(
    writers, tmp_path, monkeypatch
):
    """A newer host copy takes its place there too, without waiting for the store."""
    write_part, answers = arrays.write_part, threading.Event()

    def hang(folder, leaves, part):
        assert part == 0 or answers.wait(60)
        write_part(folder, leaves, part)

    monkeypatch.setattr(arrays, "write_part", hang)
    writers[0]._timeout_s = 0
    for rank in (0, 1):
        writers[rank].submit(job(rank, step=6, max_attempts=1))
    assert writers[0].wait(60.0)
    error = writers[0].attempts.get_nowait().error
    assert error.startswith("process 1 did not answer within 0 s ")
    assert not writers[1].wait(0.0)
    writers[0]._timeout_s = 60
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    answers.set()
    assert all(writer.wait(60.0) for writer in writers)
    assert Store(tmp_path).steps() == [7]
    read_all(tmp_path)


@pytest.mark.parametrize("fails", [True, False])
def test_a_job_that_is_written_cannot_be_claimed_and_is_repeated_if_it_fails(
    writers, tmp_path, monkeypatch, fails
):
    write_part, begun, answers = arrays.write_part, threading.Event(), threading.Event()

    def wait(folder, leaves, part):
        is_first = part == 0 and not begun.is_set()
        if is_first:
            begun.set()
            assert answers.wait(60)
        if is_first and fails:
            raise OSError("no disk")
        write_part(folder, leaves, part)

    monkeypatch.setattr(arrays, "write_part", wait)
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert begun.wait(60)
    assert not writers[0].claim()
    answers.set()
    assert all(writer.wait(60.0) for writer in writers)
    errors = [writers[0].attempts.get_nowait().error for _ in range(1 + fails)]
    assert errors == ["process 0: no disk"] * fails + [None]
    read_all(tmp_path)


def test_a_job_between_two_tries_can_be_claimed_and_is_not_tried_again(
    writers, tmp_path, monkeypatch
):
    monkeypatch.setattr(saving, "_FIRST_PAUSE_S", 60.0)
    for rank in (0, 1):
        writers[rank].submit(job(rank, copy="no host memory"))
    assert writers[0].attempts.get(timeout=60).error is not None
    until_s = time.monotonic() + 60
    while not writers[0].claim():
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert all(writer.wait(60.0) for writer in writers)
    assert Store(tmp_path).steps() == []


def fail_once(monkeypatch, phase, ranks, error):
    """Let a phase fail on some processes, the first time."""
    left = {*ranks}

    def failing(function, rank_of):
        def call(*args, **kwargs):
            rank = rank_of(*args)
            if rank in left:
                left.remove(rank)
                raise error
            return function(*args, **kwargs)

        return call

    owner, name, rank_of = {
        "folder": (Store, "begin", lambda *_: 0),
        "written": (arrays, "write_part", lambda folder, leaves, part: part),
        "merged": (arrays, "merge_parts", lambda *_: 0),
        "checked": (
            orbax_save,
            "_read_back",
            lambda folder, part: int(part.pieces["n"] == []),
        ),
        "committed": (Store, "commit", lambda *_: 0),
    }[phase]
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), rank_of))


@pytest.mark.parametrize(
    ("phase", "ranks"),
    [
        ("folder", [0]),
        *(("written", ranks) for ranks in ([0], [1], [0, 1])),
        ("merged", [0]),
        *(("checked", ranks) for ranks in ([0], [1], [0, 1])),
        ("committed", [0]),
    ],
)
def test_a_phase_that_fails_on_one_process_fails_on_all_and_the_retry_commits(
    writers, tmp_path, monkeypatch, phase, ranks
):
    heard = []
    close = Phases.close

    def note(self, decision=None):
        heard.append((self.rank, close(self, decision)))
        return heard[-1][1]

    monkeypatch.setattr(Phases, "close", note)
    fail_once(monkeypatch, phase, ranks, OSError("no disk"))
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert all(writer.wait(60.0) for writer in writers)
    first, second = [writers[0].attempts.get_nowait() for _ in range(2)]
    led = phase in ("folder", "merged", "committed")
    where = [f"process {rank}: no disk" for rank in ranks]
    assert first.error == ("no disk" if led else "; ".join(where))
    assert second.error is None
    for rank in (0, 1):
        again, saved = [decision for at, decision in heard if at == rank]
        assert again == {"saved": False, "again": True}
        assert saved == {"saved": True, "again": False}
    read_all(tmp_path)
    assert Store(tmp_path).unfinished() == []


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_orbax_between_two_phases_is_known_to_all(
    writers, tmp_path, monkeypatch, failing
):
    """It fails on one process, where no phase of ours is running."""
    finalize, failures = orbax_save._StepHandler.finalize, [failing]

    def fail(self, directory):
        if self._phases.rank in failures:
            failures.remove(failing)
            raise RuntimeError("can't start new thread")
        finalize(self, directory)

    monkeypatch.setattr(orbax_save._StepHandler, "finalize", fail)
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert all(writer.wait(60.0) for writer in writers)
    first, second = [writers[0].attempts.get_nowait() for _ in range(2)]
    where = {0: "", 1: "process 1: "}[failing]
    assert first.error == f"{where}can't start new thread"
    assert second.error is None
    read_all(tmp_path)


def test_a_job_that_is_given_up_is_given_up_by_all(writers, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_FIRST_PAUSE_S", 60.0)
    for rank in (0, 1):
        writers[rank].submit(job(rank, copy="no host memory"))
    assert writers[0].attempts.get(timeout=60).error == (
        "process 0: no host memory; process 1: no host memory"
    )
    until_s = time.monotonic() + 60
    while writers[0].is_writing:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    for writer in writers:
        writer.supersede()
    assert all(writer.wait(60.0) for writer in writers)
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert all(writer.wait(60.0) for writer in writers)
    read_all(tmp_path)


def test_what_the_store_gives_back_is_compared_with_the_host_copy(
    writers, tmp_path, monkeypatch
):
    read = arrays.Reader.read

    def flip(self, name, leaf, box):
        values = read(self, name, leaf, box)
        return values + 1 if name == "b" else values

    with monkeypatch.context() as patched:
        patched.setattr(arrays.Reader, "read", flip)
        for rank in (0, 1):
            writers[rank].submit(job(rank, max_attempts=1))
        assert all(writer.wait(60.0) for writer in writers)
    error = writers[0].attempts.get_nowait().error
    assert "process 0: read back: b [(0, 3)] differs from what was saved" in error
    assert "process 1: read back: b [(3, 6)] differs" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_process_must_not_save_no_process_saves(writers, tmp_path, bad):
    whole = np.ones(4, np.float32)
    for rank in (0, 1):
        box = ((2 * rank, 2 * rank + 2),)
        part = whole[2 * rank : 2 * rank + 2].copy()
        part[1] = np.nan if rank == bad else 1.0
        leaf = HostLeaf(
            leaf=Leaf(shape=(4,), dtype="float32"),
            chunk=(2,),
            pieces=(HostPiece(box, part, True),),
        )
        copy = HostCopy(leaves={"params.w": leaf}, num_bytes=0, copy_s=0.0)
        writers[rank].submit(job(rank, copy=copy))
    assert all(writer.wait(60.0) for writer in writers)
    attempt = writers[0].attempts.get_nowait()
    box = (2 * bad, 2 * bad + 2)
    says = f"process {bad}: params.w [{box}] has values that are not finite"
    assert attempt.error.startswith(says)
    assert (attempt.pause_s, attempt.number) == (None, 1)
    assert [writer.saved_step for writer in writers] == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_of_other_parts_is_damage(writers, tmp_path):
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert all(writer.wait(60.0) for writer in writers)
    path = tmp_path / "7" / "pieces.1.json"
    path.write_text(manifest.write_pieces({}))  # sealed, but not the one of this step
    with pytest.raises(DamagedError, match=r"7/pieces\.1\.json differs"):
        SavedStep(Store(tmp_path).path(7))


# Orbax reads leaves that it did not write: it would like to know their shardings.
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_alone_reads_a_step(writers, tmp_path):
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert all(writer.wait(60.0) for writer in writers)
    state = tmp_path / "7" / "state"
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), WHOLE)
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(state, restore_args=as_numpy)
    assert restored.keys() == WHOLE.keys()
    for name, whole in WHOLE.items():
        assert restored[name].dtype == whole.dtype
        np.testing.assert_array_equal(restored[name], whole)


def test_a_host_copy_holds_each_box_once_unless_replicas_are_wanted():
    mesh = jax.make_mesh(
        (4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    array = jax.device_put(np.arange(8), where)
    for replicas in (False, True):  # one process holds all: there are no others
        copy = HostMemory().copy({"x": array}, replicas=replicas)
        leaf = copy.leaves["x"]
        assert [piece.box for piece in leaf.pieces] == [
            *(((start, start + 2),) for start in (0, 2, 4, 6))
        ]
        assert leaf.chunk == (2,)
        assert copy.num_bytes == array.nbytes

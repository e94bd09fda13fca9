import itertools
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.data.dataset import Dataset
from mjax.data.loader import Loader, OneBatch, held_out_batches, held_out_num_bytes
from mjax.data.stream import Stream

BATCH = 8


def sharding(dp: int, tp: int) -> NamedSharding:
    devices = np.array(jax.devices()[: dp * tp]).reshape(dp, tp)
    return NamedSharding(Mesh(devices, ("dp", "tp")), PartitionSpec("dp"))


def load(dataset: Dataset, place: NamedSharding, num_batches: int, **options) -> list:
    with Loader(dataset.train, place, batch_size=BATCH, **options) as loader:
        return list(itertools.islice(loader, num_batches))


def assert_equal(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], strict=True)


class Recorded:
    """Samples that note which rows were read."""

    def __init__(self, samples, fail_at: int | None = None):
        self.samples, self.seq_len, self.reads = samples, samples.seq_len, []
        self.fail_at = fail_at

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]

    def rows(self, indices):
        if len(self.reads) == self.fail_at:
            raise OSError("disk on fire")
        self.reads.append(indices.tolist())
        return self.samples.rows(indices)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (8, 1), (4, 2), (1, 8)])
def test_the_batch_of_a_step_is_the_same_on_every_mesh(dataset, dp, tp):
    place = sharding(dp, tp)
    for step, batch in enumerate(load(dataset, place, 3)):
        assert_equal(batch, dataset.train.rows(step, BATCH))
        assert {array.sharding for array in batch.values()} == {place}


def test_one_batch_is_that_of_the_first_step_read_once(dataset):
    samples = Recorded(dataset.train.corpora[0])
    stream = Stream((samples,), (1.0,), 0, one_batch=True)
    with OneBatch(stream, sharding(4, 2), batch_size=BATCH) as loader:
        batches = list(itertools.islice(loader, 3))
        assert loader.data_wait_s == 0
    assert all(batch is batches[0] for batch in batches)
    assert len(samples.reads) == 4  # one for each part of the rows
    assert_equal(jax.device_get(batches[0]), dataset.train.rows(0, BATCH))
    assert_equal(stream.rows(5, BATCH), dataset.train.rows(0, BATCH))


def test_each_row_is_read_once_even_if_several_devices_hold_it(dataset):
    samples = Recorded(dataset.train.corpora[0])
    stream = Stream((samples,), (1.0,), 0)
    with Loader(stream, sharding(4, 2), batch_size=BATCH) as loader:
        next(loader)
    assert [len(read) for read in samples.reads[:4]] == [2, 2, 2, 2]
    whole = stream.ids(0, BATCH)[:, 1]
    assert list(itertools.chain(*samples.reads[:4])) == whole.tolist()


def test_a_process_reads_only_the_rows_of_its_devices(dataset):
    """Two processes' halves of the rows are the rows of one process."""
    whole = load(dataset, sharding(8, 1), 1)[0]
    for first in (0, 4):
        part = dataset.train.rows(0, BATCH, slice(first, first + 4))
        half = {name: array[first : first + 4] for name, array in whole.items()}
        assert_equal(part, jax.device_get(half))


def test_a_loader_started_at_a_step_continues_the_sequence(dataset):
    place = sharding(4, 2)
    batches = load(dataset, place, 6)
    for left, right in zip(
        batches[4:], load(dataset, place, 2, start_step=4, prefetch=1), strict=True
    ):
        assert_equal(left, right)


def test_an_error_of_the_thread_is_raised_by_next_and_stays(dataset):
    samples = Recorded(dataset.train.corpora[0], fail_at=2)
    stream = Stream((samples,), (1.0,), 0)
    with Loader(stream, sharding(1, 1), batch_size=BATCH) as loader:
        next(loader)
        next(loader)
        for _ in range(2):
            with pytest.raises(OSError, match="disk on fire"):
                next(loader)


def test_closing_stops_the_thread(dataset):
    before = set(threading.enumerate())
    loader = Loader(dataset.train, sharding(1, 1), batch_size=BATCH)
    next(loader)
    assert loader.data_wait_s >= 0
    assert set(threading.enumerate()) > before
    loader.close()
    loader.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_batches_are_read_ahead_of_their_step(dataset):
    samples = Recorded(dataset.train.corpora[0])
    stream = Stream((samples,), (1.0,), 0)
    loader = Loader(stream, sharding(1, 1), batch_size=BATCH, prefetch=3)
    next(loader)
    loader._thread.shutdown(wait=True)  # lets what was submitted end
    assert len(samples.reads) == 4
    with pytest.raises(ValueError, match="prefetch must be at least 1, got 0"):
        Loader(stream, sharding(1, 1), batch_size=BATCH, prefetch=0)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (8, 1), (2, 4)])
def test_held_out_batches_hold_each_sample_once_and_padding_has_no_target(
    dataset, dp, tp
):
    samples, size = dataset.held_out, 24
    num_samples = len(samples)
    assert num_samples % size, "the last batch must need padding"
    batches = list(
        held_out_batches(samples, sharding(dp, tp), batch_size=size, num_batches=99)
    )
    assert len(batches) == -(-num_samples // size)
    joined = {
        name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]
    }
    expected = samples.rows(np.arange(num_samples))
    assert_equal({name: a[:num_samples] for name, a in joined.items()}, expected)
    assert (joined["targets"][num_samples:] == -1).all()
    assert (joined["tokens"] >= 0).all()
    num_bytes = dataset.count_target_bytes(joined["targets"])
    assert held_out_num_bytes(dataset, 99 * size) == num_bytes
    assert held_out_num_bytes(dataset, size) == dataset.count_target_bytes(
        np.asarray(batches[0]["targets"])
    )


def test_fewer_held_out_batches_are_the_first_ones(dataset):
    place = sharding(1, 1)
    all_batches = held_out_batches(
        dataset.held_out, place, batch_size=2, num_batches=99
    )
    few = list(held_out_batches(dataset.held_out, place, batch_size=2, num_batches=2))
    assert len(few) == 2
    for left, right in zip(few, all_batches, strict=False):
        assert_equal(left, right)

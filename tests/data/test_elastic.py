"""The same samples at the same step, whoever reads them and wherever a run began.

Streams of packed, unpacked and synthetic corpora, alone and mixed, are divided among 1,
2, 4 and 8 processes and begun at any step.
"""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.data.documents import DocumentSamples, index_documents
from mjax.data.samples import PackedSamples, Samples
from mjax.data.stream import HeldOut, Stream
from mjax.data.synthetic import SyntheticSamples

EOS, SEQ_LEN, BATCH = 9, 6, 16
WORLDS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A small corpus and its weight; drawn, then built inside the test."""

    kind: str
    lengths: list[int]
    """Tokens of the documents."""
    seed: int
    weight: float

    def make(self) -> Samples:
        if self.kind == "synthetic":
            return SyntheticSamples(sum(self.lengths), SEQ_LEN, self.seed, 0)
        draw = np.random.default_rng(self.seed)
        docs = [np.append(draw.integers(0, EOS, n), EOS) for n in self.lengths]
        tokens = np.concatenate(docs).astype(np.uint16)
        if self.kind == "documents":
            index = index_documents(tokens, EOS, SEQ_LEN)
            return DocumentSamples(tokens, index, SEQ_LEN, EOS)
        return PackedSamples(tokens, SEQ_LEN, EOS, self.kind == "isolated")


def make_stream(plans: list[Plan], seed: int) -> Stream:
    samples = tuple(plan.make() for plan in plans)
    return Stream(samples, tuple(plan.weight for plan in plans), seed)


mixtures = st.lists(
    st.builds(
        Plan,
        kind=st.sampled_from(["isolated", "joined", "documents", "synthetic"]),
        lengths=st.lists(st.integers(SEQ_LEN, 40), min_size=1, max_size=6),
        seed=st.integers(0, 99),
        weight=st.integers(1, 40).map(lambda tenths: tenths / 10),
    ),
    min_size=1,
    max_size=4,
)
seeds = st.integers(0, 2**32 - 1)


def assert_equal(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], strict=True)


def shares(world: int) -> list[slice]:
    """Divide the rows of a batch among processes."""
    size = BATCH // world
    return [slice(start, start + size) for start in range(0, BATCH, size)]


@pytest.mark.parametrize("world", WORLDS)
@settings(max_examples=40)
@given(plans=mixtures, seed=seeds, step=st.integers(0, 3000))
def test_the_processes_together_read_the_global_batch(world, plans, seed, step):
    stream = make_stream(plans, seed)
    whole, ids = stream.rows(step, BATCH), stream.ids(step, BATCH)
    assert ids.shape == (BATCH, 2)
    parts = [stream.rows(step, BATCH, rows) for rows in shares(world)]
    joined = {name: np.concatenate([p[name] for p in parts]) for name in whole}
    assert_equal(joined, whole)
    divided = [stream.ids(step, BATCH, rows) for rows in shares(world)]
    assert np.concatenate(divided).tolist() == ids.tolist()
    for row, (corpus, sample) in enumerate(ids.tolist()):
        expected = stream.corpora[corpus][sample]
        assert_equal({name: array[row] for name, array in whole.items()}, expected)


@pytest.mark.parametrize("world", WORLDS)
@settings(max_examples=40)
@given(plans=mixtures, seed=seeds, num_steps=st.integers(1, 12), data=st.data())
def test_a_run_resumed_on_any_number_of_processes_reads_on(
    world, plans, seed, num_steps, data
):
    """Stopped at random steps, each time continued by other processes."""
    stream = make_stream(plans, seed)
    uninterrupted = stream.ids(0, num_steps * BATCH).tolist()
    seen, step = [], 0
    while step < num_steps:
        resumed = pickle.loads(pickle.dumps(stream))
        until = data.draw(st.integers(step + 1, num_steps))
        for now in range(step, until):
            parts = [resumed.ids(now, BATCH, rows) for rows in shares(world)]
            seen += np.concatenate(parts).tolist()
        step, world = until, data.draw(st.sampled_from(WORLDS))
    assert seen == uninterrupted


@given(mixtures, seeds)
def test_every_epoch_of_every_corpus_holds_each_sample_once(plans, seed):
    stream = make_stream(plans, seed)
    ids = stream.ids(0, 600)
    for corpus, samples in enumerate(stream.corpora):
        read = ids[ids[:, 0] == corpus, 1]
        for start in range(0, len(read), len(samples)):
            epoch = read[start : start + len(samples)]
            assert len(set(epoch.tolist())) == len(epoch)
            assert epoch.max() < len(samples)


@given(mixtures, seeds)
def test_the_first_corpus_is_read_in_the_order_of_a_run_on_it_alone(plans, seed):
    stream = make_stream(plans, seed)
    alone = dataclasses.replace(stream, corpora=stream.corpora[:1], weights=(1.0,))
    ids = stream.ids(0, 100)
    mixed = ids[ids[:, 0] == 0, 1]
    assert mixed.tolist() == alone.ids(0, len(mixed))[:, 1].tolist()


@given(mixtures)
def test_held_out_samples_of_a_mixture_count_once_and_come_in_one_order(plans):
    samples = tuple(plan.make() for plan in plans)
    held_out = HeldOut(samples, tuple(plan.weight for plan in plans))
    ids = held_out.ids(np.arange(len(held_out))).tolist()
    assert len({tuple(pair) for pair in ids}) == len(ids)
    rows = held_out.rows(np.arange(len(held_out)))
    for row, (corpus, sample) in enumerate(ids):
        expected = samples[corpus][sample]
        assert_equal({name: array[row] for name, array in rows.items()}, expected)
    if len(plans) == 1:
        assert sorted(sample for _, sample in ids) == list(range(len(samples[0])))

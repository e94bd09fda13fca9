"""The chats of the fine-tuning page: a question tells the kind, a shuffled one not."""

import collections

import numpy as np

from mjax.data.samples import NO_TARGET
from scripts.tune import curves, docstrings

CHATS = docstrings.chats(docstrings.entries(), 0)


def kind_of(chat: dict) -> str:
    return chat["messages"][1]["content"].partition(",")[0]


def test_the_kind_of_nearly_all_answers_follows_from_the_capitals_of_the_name():
    def told(chat: dict) -> str:
        parts = chat["messages"][0]["content"].partition(":")[0].split(".")
        capitals = [part.strip("_")[:1].isupper() for part in parts]
        if capitals[-1]:
            return "class"
        return "method" if any(capitals) else "function"

    training = CHATS["training"]
    assert {kind_of(chat) for chat in training} == set(docstrings.KINDS)
    right = [told(chat) == kind_of(chat) for chat in training]
    assert np.mean(right) > 0.9
    counts = collections.Counter(map(kind_of, training))
    assert max(counts.values()) < 0.7 * len(training)
    wrong = docstrings.shuffled(training, 0)
    assert np.mean([told(chat) == kind_of(chat) for chat in wrong]) < 0.7


def test_no_line_is_in_two_splits():
    ends = [
        (chat["messages"][0]["content"].partition(": ")[2], chat["messages"][1])
        for found in CHATS.values()
        for chat in found
    ]
    texts = [begin + answer["content"].partition(",")[2] for begin, answer in ends]
    assert len(set(texts)) == len(texts)


def test_first_tokens_are_the_first_letters_of_the_kinds():
    chats = CHATS["training"][:20]
    samples = curves.samples_of(chats, docstrings.TEMPLATE, 256)
    batches = curves.batches_of(samples, np.arange(len(samples)), 4, padded=True)
    targets = curves.first_tokens(batches)["targets"]
    kept = targets[targets != NO_TARGET]
    assert sorted(map(chr, kept)) == sorted(kind_of(chat)[0] for chat in chats)
    assert (batches["targets"] != NO_TARGET).sum() > 10 * len(chats)

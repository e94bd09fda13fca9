"""The chats of the fine-tuning page: a question tells the kind, a shuffled one not."""

import collections

import numpy as np

from scripts.tune import docstrings

ENTRIES = docstrings.entries()
CHATS = {task: docstrings.chats(ENTRIES, task, 0) for task in ("lines", "kinds")}


def question_of(chat: dict) -> str:
    return chat["messages"][0]["content"]


def answer_of(chat: dict) -> str:
    return chat["messages"][1]["content"]


def test_the_kind_of_nearly_all_answers_follows_from_the_capitals_of_the_name():
    def told(chat: dict) -> str:
        parts = question_of(chat).partition(":")[0].split(".")
        capitals = [part.strip("_")[:1].isupper() for part in parts]
        if capitals[-1]:
            return "class"
        return "method" if any(capitals) else "function"

    training = CHATS["kinds"]["training"]
    assert {answer_of(chat) for chat in training} == set(docstrings.KINDS)
    right = [told(chat) == answer_of(chat) for chat in training]
    assert np.mean(right) > 0.9
    counts = collections.Counter(map(answer_of, training))
    assert max(counts.values()) < 0.7 * len(training)
    wrong = docstrings.shuffled(training, 0)
    assert np.mean([told(chat) == answer_of(chat) for chat in wrong]) < 0.7


def test_no_line_is_in_two_splits():
    texts = [
        f"{question_of(chat).partition(': ')[2]} {answer_of(chat)}"
        for found in CHATS["lines"].values()
        for chat in found
    ]
    assert len(set(texts)) == len(texts) == sum(docstrings.NUM_CHATS.values())


def test_the_tasks_ask_the_same_questions():
    for split in docstrings.NUM_CHATS:
        asked = [list(map(question_of, CHATS[t][split])) for t in ("lines", "kinds")]
        assert asked[0] == asked[1]

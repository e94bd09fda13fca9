"""Valid `--model_args` of lm-eval, and the generation options of tasks."""

import importlib.util
from typing import Any

import pytest

from mjax.evaluate import tasks
from mjax.evaluate.lm_eval_args import (
    Args,
    BadArgsError,
    read_args,
    read_sampling,
    seeds_of,
)
from mjax.generate.requests import Sampling

OWN = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}
"""Values that lm-eval adds without these flags."""


def test_words_become_args():
    words = {"model": 12, "tp": 2, "dtype": "bfloat16", "step": 3}
    assert read_args(words | OWN) == Args(
        model="12", tp=2, dtype="bfloat16", step=3, batch_size=1
    )


@pytest.mark.parametrize(("said", "means"), [("auto", None), ("16", 16), (4, 4)])
def test_batch_sizes_are_numbers_or_auto(said: Any, means: int | None):
    assert read_args({"model": "x", "batch_size": said}).batch_size == means


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({}, r"has no model; give model=PATH"),
        ({"modle": "x"}, r"has no modle; did you mean model\?"),
        ({"pretrained": "gpt2"}, r"takes model=PATH, got pretrained=gpt2; write mo"),
        ({"model": "x", "device": "cpu"}, r"--device cpu: .* set JAX_PLATFORMS"),
        ({"model": "x", "batch_size": "auto:4"}, r"whole number or auto.* got auto:4"),
        ({"model": "x", "batch_size": 0}, r"batch_size must be at least 1, got 0"),
        ({"model": "x", "max_length": -1}, r"max_length must be at least 1, got -1"),
        ({"model": "x", "tp": "two"}, r"tp must be a whole number, got 'two'"),
        ({"model": "x", "dtype": "float16"}, r"dtype must be .*float32.* 'float16'"),
    ],
    ids=str,
)
def test_bad_words_are_refused(words: dict[str, Any], says: str):
    with pytest.raises(BadArgsError, match=says):
        read_args(words)


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ({}, {"temperature": 0.0, "max_tokens": 9}),
        ({"until": "."}, {"stop": (".",)}),
        ({"until": ["a", "", "b"]}, {"stop": ("a", "b")}),
        ({"max_new_tokens": 5, "max_gen_toks": 4}, {"max_tokens": 4}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False, "temperature": 0}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 1, "top_p": 0.9}, {"top_p": 0.9}),
        ({"num_beams": 1, "min_p": 0.0, "repetition_penalty": 1.0}, {"temperature": 0}),
    ],
    ids=str,
)
def test_options_of_tasks_become_samplings(options: dict[str, Any], means):
    sampling, notes = read_sampling(options, max_tokens=9)
    assert isinstance(sampling, Sampling)
    assert {name: getattr(sampling, name) for name in means} == means
    assert notes == []


@pytest.mark.parametrize(
    ("options", "temperature", "says"),
    [
        ({"do_sample": True}, 1.0, "without a temperature samples at temperature 1"),
        ({"do_sample": True, "temperature": 0.0}, 0.0, "gives the greedy answer"),
        (
            {"do_sample": False, "temperature": 0.7},
            0.0,
            "temperature 0.7 has no effect",
        ),
        ({"top_p": 0.95}, 0.0, "top_k and top_p have no effect on greedy answers"),
        ({"do_sample": False, "top_k": 4}, 0.0, "have no effect on greedy answers"),
    ],
    ids=str,
)
def test_options_that_are_not_followed_literally_are_reported(
    options: dict[str, Any], temperature: float, says: str
):
    sampling, notes = read_sampling(options, max_tokens=9)
    assert sampling.temperature == temperature
    assert len(notes) == 1
    assert says in notes[0]


def test_every_text_and_every_copy_of_it_has_its_own_seed():
    options = {"do_sample": True, "until": ["."]}
    asked = [("a", options)] * 8 + [("b", options), ("b", options | {"top_k": 3})]
    seeds = [*seeds_of(asked, 0)]
    assert len({*seeds}) == len(asked)
    assert [*seeds_of(asked, 0)] == seeds
    assert not {*seeds_of(asked, 1)} & {*seeds}
    # Neither the order of the texts nor other texts change a seed.
    assert [*seeds_of([*asked[8:], *asked[:8]], 0)] == [*seeds[8:], *seeds[:8]]
    assert [*seeds_of(asked[8:9], 0)] == seeds[8:9]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 4}, "has no num_beams 4; it has until"),
        ({"min_p": 0.1, "typical_p": 1}, "has no min_p 0.1; it has until"),
        ({"do_sample": "yes"}, "do_sample must be true or false or null, got 'yes'"),
        ({"temperature": "warm"}, "temperature must be a number or null, got 'warm'"),
        ({"top_k": "50"}, "top_k must be a whole number or null, got '50'"),
        ({"do_sample": True, "temperature": 1, "top_p": 0.0}, "top_p must be above 0"),
        ({"max_gen_toks": 0}, "max_tokens must be at least 1, got 0"),
    ],
    ids=str,
)
def test_options_that_no_answer_can_have_are_refused(options, says: str):
    with pytest.raises(BadArgsError, match=says):
        read_sampling(options, max_tokens=9)


def test_without_lm_eval_the_command_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tasks.main(["--tasks", "x"]) == 2
    assert "pip install 'mjax[eval]'" in capsys.readouterr().err

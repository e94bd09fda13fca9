"""Answers of the engine equal those of the full model, in any slot and company."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.generate.decode import Prompt
from mjax.generate.engine import Answer, Engine, _how, answer_all, answer_of
from mjax.generate.opened import Opened
from mjax.generate.requests import Event, Request, Sampling
from mjax.model.config import ModelConfig
from mjax.step.program import Program, build_program
from tests.generate.models import SMALL, opened, random_params
from tests.training import make_mesh

VOCAB = 20
"""At most as many tokens as log-probabilities, so that all are compared."""
MAX_LEN = 40
ONE = (1, 1, 1, 1)


def random_model(seed: int) -> ModelConfig:
    """Draw an architecture: windows longer and shorter than texts, shared heads."""
    rng = np.random.default_rng(seed)

    def one_of(*choices):
        return choices[rng.integers(len(choices))]

    layers = int(rng.integers(1, 6))
    pattern = min(layers, int(rng.integers(1, 4)))
    heads, kv_heads = one_of((4, 4), (4, 2), (4, 1), (2, 1), (6, 2))
    norm = one_of("layernorm", "rmsnorm")
    block = one_of("parallel", "serial")
    options: dict[str, Any] = {
        "qk_norm": bool(rng.integers(2)),
        "post_norms": block == "serial" and bool(rng.integers(2)),
        "embed_scale": one_of(1.0, 3.0),
        "attn_scale_width": one_of(None, 5.0),
        "attn_soft_cap": one_of(None, 3.0),
        "logit_soft_cap": one_of(None, 6.0),
        "learned_positions": one_of(None, MAX_LEN),
        "rope_windowed_base": one_of(None, 300.0),
    }
    return ModelConfig(
        layers=layers,
        d_model=24,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=one_of(8, 12),
        d_ff=one_of(16, 40),
        vocab_size=VOCAB,
        vocab_multiple=one_of(4, 8),
        block=block,
        norm=norm,
        norm_bias=norm == "layernorm" and bool(rng.integers(2)),
        activation=one_of("gelu", "gelu_tanh", "swiglu", "geglu_tanh"),
        window=tuple(one_of(None, 1, 3, 7, 16, 64) for _ in range(pattern)),
        rope=tuple(bool(rng.integers(4)) for _ in range(pattern)),
        rope_fraction=one_of(1.0, 0.5),
        rope_interleaved=bool(rng.integers(2)),
        tie_embeddings=bool(rng.integers(2)),
        attn_bias=bool(rng.integers(2)),
        mlp_bias=bool(rng.integers(2)),
        head_bias=bool(rng.integers(2)),
        logit_scale=one_of(1.0, 0.5),
        **options,
    )


def program_of(model: ModelConfig) -> Program:
    """Return the functions of training, which recompute each prefix."""
    return build_program(
        model=model,
        optimizer=OptimConfig(),
        batch=BatchConfig(size=1),
        precision=PrecisionConfig(compute="float32"),
        seq_len=MAX_LEN,
        num_steps=1,
        seed=0,
        zero_level=0,
        isolate_documents=False,
        mesh=make_mesh(ONE),
    )


def full_logprobs(program: Program, params, tokens) -> np.ndarray:
    """Return the log-probabilities of all tokens after these, by a full forward."""
    row = np.zeros((1, MAX_LEN), np.int32)
    row[0, : len(tokens)] = tokens
    logits = program.next_token_logits(params, jnp.asarray(row), len(tokens))
    return np.asarray(jax.nn.log_softmax(logits[0, :VOCAB].astype(jnp.float32)))


def events_of(engine: Engine, request: Request) -> list[Event]:
    request_id, found = engine.submit(request), []
    while not engine.is_idle:
        found += [e for e in engine.step() if e.request_id == request_id]
    return found


def ask(prompt, max_tokens, **options: Any) -> Request:
    wanted: dict[str, Any] = {"temperature": 0.0} | options
    sampling = Sampling(max_tokens=max_tokens, **wanted)
    return Request(prompt=tuple(int(t) for t in prompt), sampling=sampling)


def models_and_meshes():
    for seed in range(20):
        for mesh in (ONE, (1, 1, 1, 2)):
            yield pytest.param(seed, mesh, id=f"{seed}-tp{mesh[3]}")


@pytest.mark.parametrize(("seed", "mesh"), list(models_and_meshes()))
def test_cached_generation_has_the_logits_of_the_full_forward(seed, mesh):
    model = random_model(seed)
    params = random_params(model, seed)
    found = opened(model, mesh, seq_len=MAX_LEN, params=params)
    found = dataclasses.replace(found, end_ids=())
    engine = Engine(found, slots=2, max_len=MAX_LEN)
    prompt = np.random.default_rng(seed).integers(VOCAB, size=1 + seed % 11)
    request = ask(prompt, 25, logprobs=VOCAB)
    events = events_of(engine, request)
    assert len(events) == 25
    assert events[-1].finished == "length"
    program, text = program_of(model), [int(t) for t in prompt]
    for event in events:
        want = full_logprobs(program, params, text)
        assert len(event.top) == VOCAB
        got = np.empty(VOCAB)
        for token, logprob in event.top:
            got[token] = logprob
        # Float32; sums of at most 40 terms in another order.
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
        first, second = np.sort(want)[::-1][:2]
        assert event.token is not None
        if first - second > 1e-5:
            assert event.token == int(np.argmax(want))
        text.append(event.token)


def small(mesh=ONE, **fields) -> Opened:
    return opened(dataclasses.replace(SMALL, **fields), mesh, seq_len=MAX_LEN)


def some_requests(num: int) -> list[Request]:
    rng = np.random.default_rng(1)
    options = itertools.cycle(
        [
            {},
            {"temperature": 1.0, "seed": 3},
            {"temperature": 0.7, "top_k": 5, "seed": 4},
            {"temperature": 1.3, "top_p": 0.8, "seed": 5},
        ]
    )
    return [
        ask(rng.integers(256, size=int(rng.integers(1, 20))), int(n), **next(options))
        for n in rng.integers(1, 20, size=num)
    ]


@pytest.mark.parametrize("mesh", [ONE, (1, 1, 2, 2)], ids=["one", "dp2-tp2"])
def test_an_answer_does_not_depend_on_slot_or_company(mesh):
    requests = some_requests(11)
    engine = Engine(small(mesh), slots=4, max_len=MAX_LEN)
    together = answer_all(engine, requests)
    alone = [answer_all(engine, [request])[0] for request in reversed(requests)]
    assert together == alone[::-1]
    fresh = Engine(small(mesh), slots=4, max_len=MAX_LEN)
    assert answer_all(fresh, requests[::-1])[::-1] == together
    assert len({answer.tokens for answer in together}) > 8  # they are not all equal


def test_a_mesh_has_the_answers_of_one_device():
    requests = [r for r in some_requests(8) if r.sampling.temperature == 0]
    want = answer_all(Engine(small(), slots=4, max_len=MAX_LEN), requests)
    for mesh in ((1, 1, 1, 4), (1, 1, 2, 2), (1, 2, 1, 2)):
        engine = Engine(small(mesh), slots=4, max_len=MAX_LEN)
        assert answer_all(engine, requests) == want


def test_a_cancelled_request_frees_its_slot_and_says_nothing_more():
    engine = Engine(small(), slots=2, max_len=MAX_LEN)
    requests = [ask([i + 1], 20) for i in range(4)]
    want = answer_all(engine, requests)
    ids = [engine.submit(request) for request in requests]
    seen = engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 2)
    engine.cancel(ids[0])
    engine.cancel(ids[3])
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    while not engine.is_idle:
        new = engine.step()
        assert not {ids[0], ids[3]} & {event.request_id for event in new}
        seen += new
    for index in (1, 2):
        mine = [e for e in seen if e.request_id == ids[index]]
        assert answer_of(mine) == want[index]


def test_a_seed_draws_the_same_and_another_one_differs():
    engine = Engine(small(), slots=1, max_len=MAX_LEN)
    first, again, other = answer_all(
        engine, [ask([7], 12, temperature=1.0, seed=s) for s in (1, 1, 2)]
    )
    assert first == again
    assert first.tokens != other.tokens


def test_one_likeliest_token_is_the_greedy_one():
    engine = Engine(small(), slots=3, max_len=MAX_LEN)
    greedy, by_k, by_p = answer_all(
        engine,
        [
            ask([7, 9], 12),
            ask([7, 9], 12, temperature=2.0, top_k=1),
            ask([7, 9], 12, temperature=1.0, top_p=1e-6),
        ],
    )
    assert greedy.tokens == by_k.tokens == by_p.tokens


def test_draws_have_the_frequencies_that_temperature_and_cuts_mean():
    model = dataclasses.replace(SMALL, vocab_size=VOCAB, vocab_multiple=4)
    found = dataclasses.replace(opened(model, seq_len=MAX_LEN), end_ids=())
    engine = Engine(found, slots=8, max_len=MAX_LEN)
    logprobs = dict(events_of(engine, ask([3], 1, logprobs=VOCAB))[0].top)
    likeliest = sorted(logprobs, key=logprobs.__getitem__, reverse=True)
    p = np.exp(np.array([logprobs[t] for t in likeliest]) / 0.5)
    p /= p.sum()
    for cut, kept in (
        ({"top_k": 4}, 4),
        ({"top_p": 0.5}, 1 + int((p.cumsum() < 0.5).sum())),
    ):
        options = {"temperature": 0.5, **cut}
        requests = [ask([3], 1, seed=seed, **options) for seed in range(600)]
        tokens = [answer.tokens[0] for answer in answer_all(engine, requests)]
        want = p[:kept] / p[:kept].sum()
        got = np.array([tokens.count(t) for t in likeliest]) / len(tokens)
        assert got[kept:].sum() == 0
        # Four standard deviations of 600 draws; seeds are fixed.
        np.testing.assert_allclose(
            got[:kept], want, atol=float(4 * np.sqrt(0.25 / 600))
        )
        assert (got[:kept] > 0).all()


def test_an_answer_ends_at_a_token_that_ends_texts():
    found = small()
    engine = Engine(found, slots=1, max_len=MAX_LEN)
    (free,) = answer_all(engine, [ask([5], 20)])
    end = free.tokens[6]
    at = free.tokens.index(end)
    engine = Engine(
        dataclasses.replace(found, end_ids=(end,)), slots=1, max_len=MAX_LEN
    )
    (answer,) = answer_all(engine, [ask([5], 20)])
    assert answer.finished == "stop"
    assert answer.tokens == free.tokens[: at + 1]
    assert answer.text == found.tokenizer.decode(np.asarray(free.tokens[:at]))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask([], 1), "the prompt is empty"),
        (ask([5, 300], 1), "from 0 to 256, got 300"),
        (ask([-1], 1), "got -1"),
        (ask(range(40), 1), "the prompt has 40 tokens.*at most 39"),
        (ask(range(30), 11), "at most 10 can follow, got 11"),
    ],
)
def test_what_cannot_be_answered_is_refused(request_, message):
    engine = Engine(small(), slots=1, max_len=MAX_LEN)
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert engine.is_idle


def test_no_request_is_refused_that_just_fits():
    engine = Engine(small(), slots=1, max_len=MAX_LEN)
    (answer,) = answer_all(engine, [ask(range(30), 10)])
    assert isinstance(answer, Answer)
    assert len(answer.tokens) == 10


@pytest.mark.parametrize("mesh", [ONE, (1, 1, 1, 2)], ids=["one", "tp2"])
def test_no_cache_of_a_layer_is_copied(mesh):
    """Neither prefill nor decoding needs a second copy of the rings."""
    found = small(mesh, window=(None,), rope=(True,))
    engine = Engine(found, slots=16, max_len=1024)
    state, weights = engine._state, engine._weights
    read, advance = engine._read, engine._advance
    lowered = [
        advance.lower(weights, state, jnp.int32(8), jnp.bool_(False)),
        read.lower(weights, state, prompt_of(16)),
    ]
    rings = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.rings)]
    for one in lowered:
        used = one.compile().memory_analysis()
        assert used is not None
        assert used.alias_size_in_bytes >= sum(rings)
        assert used.temp_size_in_bytes < max(rings)


def prompt_of(length: int) -> Prompt:
    return Prompt(
        tokens=jnp.zeros((1, length), jnp.int32),
        length=jnp.int32(length),
        slot=jnp.int32(0),
        how=_how(Sampling(max_tokens=1), 288),
        with_logprobs=jnp.bool_(False),
    )


def test_tokens_that_the_tokenizer_has_not_are_never_drawn():
    """Ids beyond the tokenizer's have no text; the model may have more ids."""
    found = small(vocab_size=288)
    table = found.params["head"]["table"]
    loud = table.at[257:].set(50 * jnp.sign(found.params["final_norm"]["scale"]))
    params = found.params | {"head": {"table": loud}}
    engine = Engine(dataclasses.replace(found, params=params), slots=4, max_len=MAX_LEN)
    answers = answer_all(
        engine, [ask([3], 20, temperature=t, seed=9) for t in (0.0, 1.0, 100.0)]
    )
    assert all(token < 257 for answer in answers for token in answer.tokens)


def sizes_of_steps(engine: Engine, *requests: Request) -> tuple[list[int], list[int]]:
    """Return the numbers of events per step while requests wait, and after that."""
    engine._steps_at_once = 1
    ids = [engine.submit(request) for request in requests]
    events, sizes = {i: [] for i in ids}, ([], [])
    while not engine.is_idle:
        new = engine.step()
        sizes[not engine.num_waiting].append(len(new))
        for event in new:
            events[event.request_id].append(event)
    for request, found in zip(requests, events.values(), strict=True):
        assert answer_of(found) == answer_all(engine, [request])[0]
    return sizes


def test_a_slow_model_answers_token_by_token(monkeypatch):
    """The answer does not depend on the number of steps per dispatch."""
    engine = Engine(small(), slots=1, max_len=MAX_LEN)
    monkeypatch.setattr("mjax.generate.engine._BURST_S", 1e-9)
    _, slow = sizes_of_steps(engine, ask([5], 30))
    assert max(slow[1:]) == 1
    monkeypatch.setattr("mjax.generate.engine._BURST_S", 1e9)
    _, fast = sizes_of_steps(engine, ask([5], 30))
    assert max(fast) > 8


def test_a_slot_is_not_empty_for_long_while_requests_wait(monkeypatch):
    engine = Engine(small(), slots=1, max_len=MAX_LEN)
    monkeypatch.setattr("mjax.generate.engine._BURST_S", 1e9)
    waiting, alone = sizes_of_steps(engine, ask([5], 30), ask([6], 30))
    assert 4 < max(waiting) <= 9
    assert max(alone) > 9

"""The page and the JSON of a plan say what the plan holds, and what is modelled."""

import dataclasses
import json

import pytest

from mjax.estimate.memory import Estimate
from mjax.plan.page import page
from mjax.plan.result import as_json, memory_of
from tests.plan.plans import GIB, SENT, make_plan, memory, modelled, settled

CONTRACT = {
    *("fits", "memory_bytes", "gpu_memory_bytes", "collectives"),
    *("overlapped_bytes_fraction", "communicators", "modelled"),
}


def test_the_object_has_what_scripts_depend_on():
    found = json.loads(json.dumps(as_json(make_plan())))
    assert set(found) >= CONTRACT
    assert found["fits"] is True
    assert found["memory_bytes"] == 60 * GIB
    assert found["overlapped_bytes_fraction"] == {
        "tp": 0.25,
        "dp": pytest.approx(2 / 3),
        "pp": None,
    }
    assert found["communicators"] == 2
    model = found["modelled"]
    assert model["step_s"] == pytest.approx(sum(model["parts_s"].values()))
    assert model["exposed_s"] == {"tp": 0.1, "dp": 0.0, "pp": 0.0}
    assert model["tokens_per_day"] == pytest.approx(1e6 * 86_400)
    assert {"bubble", "mfu", "tokens_per_s"} <= set(model)


def test_without_a_compilation_only_what_it_alone_can_know_is_null():
    plan = make_plan(communication=None, compile_s=None, pictures=())
    found = as_json(plan)
    assert found["compiled"] is False
    assert found["collectives"] is None
    assert found["communicators"] is None
    assert set(found["overlapped_bytes_fraction"].values()) == {None}
    assert found["modelled"]["step_s"] > 0
    assert "unknown, the step was not compiled" in page(plan)


def test_every_modelled_section_of_the_page_says_so():
    text = page(make_plan(bottleneck="something"))
    for line in text.splitlines():
        if line.startswith(("time", "bottleneck", "most likely")):
            assert "modelled" in line.lower()
    assert "nothing ran on a GPU" in text


def test_the_page_has_a_line_for_each_kind_of_collective():
    lines = page(make_plan()).splitlines()
    gathered = next(line for line in lines if "all-gather" in line)
    assert gathered.split() == [
        *("tp", "all-gather", "tp", "(8)", "node", "bf16", "40", "10"),
        *("40.0", "GiB", "25%"),
    ]
    assert any("tp 25%, dp 67%, pp nothing sent" in line for line in lines)


def test_what_goes_over_several_kinds_of_axes_has_its_share_too():
    row = dataclasses.replace(SENT.traffic[0], role="mixed", overlapped_bytes=0)
    sent = dataclasses.replace(SENT, traffic=(*SENT.traffic, row))
    assert "pp nothing sent, mixed 0%" in page(make_plan(communication=sent))
    assert "mixed" not in page(make_plan())


def test_one_microbatch_is_no_plural():
    run = "--recipe gpt-tp8 --batch.microbatches"
    assert ", 1 microbatch of 128 per" in page(make_plan(f"{run} 1"))
    assert ", 2 microbatches of 64 per" in page(make_plan(f"{run} 2"))


def test_a_run_that_needs_too_much_is_said_not_to_fit():
    text = page(make_plan(memory=memory(140 * GIB)))
    assert "DOES NOT FIT: 140.0 GiB of 141.0 GiB" in text
    assert as_json(make_plan(memory=memory(140 * GIB)))["fits"] is False


@pytest.mark.parametrize(
    ("gib", "words"),
    [
        (60, "by default (XLA_CLIENT_MEM_FRACTION)"),
        (120, "set XLA_CLIENT_MEM_FRACTION=0.87"),
    ],
)
def test_the_share_that_jax_must_be_told_to_take_is_named(gib, words):
    assert words in page(make_plan(memory=memory(gib * GIB)))


def test_the_parts_of_a_step_are_listed_largest_first():
    text = page(make_plan(modelled=modelled(tp=0.1, dp=0.3)))
    places = [
        text.index(name) for name in ("matmuls", "waiting for dp", "waiting for tp")
    ]
    assert places == sorted(places)


TRACED = Estimate(state=60, compute_copy=10, gradients=20, stash=0, working_set=30)


def test_the_parts_of_the_memory_add_up_compiled_or_not():
    topology = settled()[2]
    for compiled in (None, 150):
        found = memory_of(
            TRACED,
            topology,
            params_bytes=20,
            device_memory_gib=None,
            compiled_bytes=compiled,
        )
        assert sum(found.parts.values()) == found.total == (compiled or 120)
        assert found.parts["optimizer state"] == 40


def test_what_the_user_gives_the_run_is_what_it_must_fit_into():
    found = memory_of(
        TRACED,
        settled()[2],
        params_bytes=20,
        device_memory_gib=100 / GIB,
    )
    assert found.usable == 100
    assert not found.fits

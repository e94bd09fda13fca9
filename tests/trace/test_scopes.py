"""Names of scopes: what is written is what is read."""

import pytest

from mjax.trace import scopes

STEP = "jit(train_step)/phase.forward/shard_map"


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        (f"{STEP}/dot_general", "forward"),
        (f"{STEP}/microbatch.0/phase.backward/layer.4/add", "backward"),
        # jax puts what it transposes into brackets; the primitive has none.
        (f"{STEP}/transpose(jvp())/mul", "backward"),
        (f"{STEP}/layers.0.1.4/while/body/jvp()/transpose", "forward"),
        (f"{STEP}/phase.loss/transpose(microbatch.3)/phase.loss/jvp()/mul", "loss"),
        ("jit(evaluate)/phase.eval/shard_map/phase.forward/add", "eval"),
        ("jit(train_step)/phase.optimizer/vmap()/div", "optimizer"),
        ("jit(train_step)/div", None),
        ("", None),
    ],
)
def test_the_innermost_phase_counts(op_name, phase):
    assert scopes.read(op_name).phase == phase


def test_of_combined_instructions_the_phase_of_most_counts():
    parts = ["phase.grad_norm/a", "phase.optimizer/b", "phase.optimizer/c"]
    assert scopes.read(f"jit(train_step)/({':'.join(parts)})").phase == "optimizer"
    assert scopes.read("jit(train_step)/phase.grad_norm/(a:b:c)").phase == "grad_norm"


def test_a_while_is_the_loop_whose_scope_is_around_it_and_no_loop_inside_it_is():
    name = scopes.loop("layers", 6, 4, step=-2)
    found = scopes.read(f"{STEP}/{name}/while").own_loop
    assert found == scopes.Loop(unit="layers", start=6, step=-2, count=4)
    assert scopes.read(f"{STEP}/{name}/while/body/while").own_loop is None
    assert scopes.read(f"{STEP}/while").own_loop is None


def test_single_units_and_places_are_read_back():
    name = f"{scopes.single('microbatches', 2)}/{scopes.single('layers', 5)}"
    found = scopes.read(f"{STEP}/{name}/{scopes.place(1)}/add")
    assert (found.singles, found.place) == ({"microbatches": 2, "layers": 5}, 1)


def test_what_is_computed_again_is_told_apart():
    name = f"{STEP}/phase.backward/transpose(jvp())/rematted_computation/dot_general"
    assert scopes.read(name).is_recomputed
    assert not scopes.read(f"{STEP}/dot_general").is_recomputed


def test_every_phase_is_read_back():
    for phase in scopes.PHASES:
        assert scopes.read(f"f/{scopes.phase(phase)}/add").phase == phase


def test_a_loop_of_one_turn_names_its_turn():
    """XLA takes it apart, and no loop is left that would say it."""
    name = f"{STEP}/{scopes.loop('ticks', 4, 1)}/while/body/phase.backward/add"
    assert scopes.read(name).singles == {"ticks": 4}
    assert scopes.read(name.replace("ticks.4.1.1", "ticks.4.1.2")).singles == {}


def test_the_work_of_a_slot_is_told_from_what_is_around_it():
    name = f"{STEP}/phase.backward/cond/branch_1_fun"
    assert scopes.read(f"{name}/{scopes.SLOT}/add").is_slot
    assert not scopes.read(f"{name}/add").is_slot

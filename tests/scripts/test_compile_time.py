"""The script that times compilation: its smallest meshes, and what its page says."""

from mjax.plan.topology import settle
from scripts.speed.compile_time import PARTS, Case, recipe_table, smallest


def test_the_flags_of_a_case_are_the_layout_that_was_found():
    case = smallest("gpt-1b3")
    _, sizes = settle(case.config, case.topology)
    assert sizes.num_devices == 8 * case.nodes
    assert f"--mesh.pp {sizes.pp} --mesh.dp {sizes.dp} " in case.flags


def test_the_page_names_what_has_not_been_measured():
    case = Case(name="gpt-1b3", recipe="gpt-1b3", nodes=1, flags="--mesh.tp 1")
    row = {
        "case": {"name": case.name, "recipe": case.recipe, "nodes": 1, "flags": ""},
        "level": None,
        "commit": "abc",
        **dict.fromkeys(PARTS, 2.0),
        "process": 8.0,
        "resident_gb": 0.5,
        "instructions": 7,
    }
    text = recipe_table([row]).text
    default, level_0 = text.split("Not measured yet at level ")[1:]
    assert "gpt-1b3" not in default
    assert "llama3-8b" in default
    assert "gpt-1b3" in level_0

"""Scheduled HLO is read whole, or refused with the line that is not understood."""

import pathlib
import re

import pytest

from mjax.plan.hlo.parse import Array, arrays, num_bytes, parse
from tests.plan.modules import RECORDED, recorded

FILES = sorted(RECORDED.glob("*.txt"))

SMALL = """HloModule small, is_scheduled=true, num_partitions=2

%double (d: f32[2]) -> f32[2] {
  %d = f32[2]{0} parameter(0)
  ROOT %twice = f32[2]{0} add(%d, %d)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %start = ((f32[2]{0}), f32[4]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %done = f32[4]{0} all-gather-done(%start)
  ROOT %out = f32[2]{0} fusion(%x), kind=kLoop, calls=%double, metadata={op_name="f/add"}
}
"""  # noqa: E501


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_instruction_of_a_recorded_module_is_read(path: pathlib.Path):
    text = path.read_text()
    module = parse(text)
    read = sum(len(c.instructions) for c in module.computations.values())
    assert read == len(re.findall(r"^  (?:ROOT )?%\S+ = ", text, re.MULTILINE))
    assert len(module.computations) == len(re.findall(r"\{$", text, re.MULTILINE))
    assert f"ENTRY %{module.entry} " in text


def test_an_instruction_has_its_parts():
    module = parse(SMALL)
    assert (module.name, module.entry, module.num_partitions) == ("small", "main", 2)
    main = module.computations["main"]
    out = main.root
    assert (out.name, out.opcode, out.operands) == ("out", "fusion", ("x",))
    assert (out.shape, out.called) == (Array("f32", (2,)), ("double",))
    assert (out.attributes["kind"], out.op_name) == ("kLoop", "f/add")
    assert main.by_name["x"].literal == "0"
    assert main.done_of == {"start": "done"}
    assert main.by_name["start"].result == Array("f32", (4,))


def test_shapes_are_nested_and_counted_in_bytes():
    start = parse(SMALL).computations["main"].by_name["start"]
    assert start.shape == ((Array("f32", (2,)),), Array("f32", (4,)))
    assert [array.size for array in arrays(start.shape)] == [2, 4]
    assert num_bytes(start.shape) == 24
    # Packed: two entries of s4 in a byte, the last byte half empty.
    assert Array("s4", (3,)).num_bytes == 2
    assert (Array("f8e4m3fn", (3, 2)).num_bytes, Array("token", ()).num_bytes) == (6, 0)


def test_a_loop_has_its_trip_count_and_a_choice_its_branches():
    module, _ = recorded("pipeline")
    tick = module.computations["tick"]
    assert module.computations["main"].root.trip_count == 5
    assert tick.by_name["choice"].branches == ("idle", "loss", "norm")
    assert tick.by_name["two_ways"].branches == ("idle", "norm")
    assert set(tick.by_name["layers"].called) == {"layer", "more"}


def test_several_called_computations_are_all_listed():
    text = SMALL.replace("calls=%double", "called_computations={%double, %main}")
    assert parse(text).computations["main"].root.called == ("double", "main")


def test_bytes_of_a_kernel_in_its_attributes_do_not_end_them():
    layer = recorded("pipeline")[0].computations["layer"]
    assert layer.root.target == "mosaic_gpu_v2"
    assert layer.root.op_name == "jit(f)/attention_forward/mpmd_map"


def test_a_done_behind_an_update_is_that_of_the_start():
    main = recorded("async")[0].computations["main"]
    assert main.done_of["start"] == "done"


def change(before: str, after: str) -> str:
    assert before in SMALL
    return SMALL.replace(before, after)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not an HLO module"),
        (change("HloModule", "Module"), "not an HLO module.*Module small"),
        (change(", is_scheduled=true", ""), "small is not scheduled"),
        (change(", num", ", replica_count=2, num"), "small has replica_count=2"),
        (change("ENTRY ", ""), "no ENTRY"),
        (change("%double (d: f32[2]) ->", "double"), "not the header of a computation"),
        (SMALL.rstrip().rstrip("}"), "computation main does not end"),
        (change("  %done = ", "  done is "), "is not an instruction.*done is"),
        (change("all-gather-done(%start)", "%start"), "no opcode"),
        (change("f32[4]{0} all", "f33[4]{0} all"), "dtype 'f33'"),
        (change("f32[4]{0} all", "f32[<=4]{0} all"), "shape that is not understood"),
        (change("add(%d, %d)", "add(%d, d)"), "operand that is not understood"),
        (change("add(%d, %d)", "add(%d, %d"), "bracket that is not closed"),
        (change("add(%d, %d)", "add(%d, %e)"), "twice in .*double uses e"),
        (change("fusion(%x), kind", "fusion(%x), ?"), "attribute.*not understood"),
        (change("calls=%double", "calls=%triple"), "calls triple.*lacks"),
        (change("%done = f32", "%x = f32"), "x in computation main is defined twice"),
        (change("%double (d", "%main (d"), "two computations are called main"),
        (change("ROOT %twice", "%twice"), "double must have one ROOT"),
        (change("all-gather-done(%start)", "copy(%x)"), "start .*not awaited"),
        (
            change("all-gather-start(%x)", "all-gather(%x)"),
            "awaited but is not a start",
        ),
    ],
)
def test_text_that_is_not_understood_is_refused(text: str, error: str):
    with pytest.raises(ValueError, match=error):
        parse(text)

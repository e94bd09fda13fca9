# ruff: noqa: E501 -- lines of HLO
"""The table of places of a compiled step, from texts written by hand."""

import json

import pytest

from mjax.mesh.axes import AxisSizes
from mjax.observe.windows.places import Table, from_json, table_of

SIZES = AxisSizes(pp=2, dp_replicate=1, dp_shard=2, tp=2)
MESH = "mesh['pp'=2,'dp_replicate'=1,'dp_shard'=2,'tp'=2]"


def named(scope: str) -> str:
    return f'metadata={{op_name="jit(train_step)/{scope}"}}'


# As XLA writes them for GPUs: collectives are started and awaited apart.
TEXT = f"""HloModule jit_train_step, is_scheduled=true, num_partitions=8

%scattered (p: f32[8]) -> f32[4] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %rs = f32[4]{{0}} reduce-scatter(%p), replica_groups={MESH} {{'dp_shard'}}, dimensions={{0}}, to_apply=%sum
}}

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %ab = f32[] add(%a, %b)
}}

%fused (q: f32[8]) -> f32[8] {{
  %q = f32[8]{{0}} parameter(0)
  %inner = f32[8]{{0}} negate(%q), {named("phase.loss/neg")}
  ROOT %last = f32[8]{{0}} bitcast(%inner)
}}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %t = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{{0}} get-tuple-element(%t), index=1
  %turned = f32[8]{{0}} negate(%x), {named("phase.forward/layers.0.2.3/while/body/place.1/neg")}
  ROOT %out = (s32[], f32[8]{{0}}) tuple(%i, %turned)
}}

%condition (u: (s32[], f32[8])) -> pred[] {{
  %u = (s32[], f32[8]{{0}}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (x0: f32[8], n: s32[]) -> f32[4] {{
  %x0 = f32[8]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %copy.1 = f32[8]{{0}} copy(%x0)
  %start = (f32[8]{{0}}, f32[8]{{0}}) collective-permute-start(%copy.1), source_target_pairs={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, {named("phase.forward/ppermute")}
  %done = f32[8]{{0}} collective-permute-done(%start)
  %pair = (s32[], f32[8]{{0}}) tuple(%n, %done)
  %loop = (s32[], f32[8]{{0}}) while(%pair), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}, {named("phase.forward/layers.0.2.3/while")}
  %y = f32[8]{{0}} get-tuple-element(%loop), index=1
  %fusion.1 = f32[8]{{0}} fusion(%y), kind=kLoop, calls=%fused
  %all = f32[8]{{0}} all-reduce(%fusion.1), replica_groups={MESH} {{'dp_shard','tp'}}, to_apply=%sum, {named("(phase.grad_norm/a:phase.optimizer/b:phase.optimizer/c)")}
  %alone = f32[8]{{0}} all-reduce(%all), replica_groups={MESH} {{'dp_replicate'}}, to_apply=%sum, {named("phase.optimizer/psum")}
  %rs-start = ((f32[8]{{0}}), f32[4]{{0}}) async-start(%alone), calls=%scattered, {named("phase.backward/reduce_scatter")}
  ROOT %rs-done = f32[4]{{0}} async-done(%rs-start)
}}
"""


@pytest.fixture(scope="module")
def table() -> Table:
    return table_of(TEXT, SIZES)


@pytest.mark.parametrize(
    ("name", "phase", "role"),
    [
        ("start", "forward", "pp"),
        ("done", "forward", "pp"),
        ("turned", "forward", "compute"),
        ("all", "optimizer", "mixed"),
        # Among one device: nothing is sent.
        ("alone", "optimizer", "compute"),
        ("rs-start", "backward", "dp"),
        ("rs-done", "backward", "dp"),
        ("rs", "backward", "dp"),
    ],
)
def test_a_collective_has_the_role_of_its_groups(table, name, phase, role):
    assert (table.ops[name].phase, table.ops[name].role) == (phase, role)


def test_what_xla_added_belongs_where_its_result_is_used(table):
    assert table.ops["copy.1"].phase == "forward"


def test_a_fusion_without_a_name_has_that_of_an_instruction_inside(table):
    assert table.ops["fusion.1"].phase == "loss"


def test_a_loop_that_runs_as_its_scope_says_counts_layers(table):
    loop = table.loops["body"]
    assert (loop.unit, loop.start, loop.step, loop.trip_count) == ("layers", 0, 2, 3)
    assert (table.ops["turned"].loops, table.ops["turned"].place) == (("body",), 1)
    assert table.ops["turned"].is_direct
    assert table.ops["loop"].is_container


def test_a_loop_that_xla_has_changed_counts_nothing():
    unrolled = TEXT.replace('"n":"3"', '"n":"1"')
    assert table_of(unrolled, SIZES).loops["body"].unit is None


def test_a_step_without_scopes_has_unknown_places():
    table = table_of(TEXT.replace("phase.", ""), SIZES)
    assert {place.phase for place in table.ops.values()} == {"unknown"}


def test_the_table_is_read_back_from_json(table):
    assert from_json(table.to_json()) == table


def _without_loops(content):
    content["loops"] = {}


def _beyond(content):
    content["ops"]["all"] = 99


def _other_phase(content):
    content["places"][0]["phase"] = "warm-up"


def _newer(content):
    content["version"] += 1


@pytest.mark.parametrize("change", [_without_loops, _beyond, _other_phase, _newer])
def test_a_table_that_does_not_hold_together_is_refused(table, change):
    content = json.loads(table.to_json())
    change(content)
    with pytest.raises(ValueError, match=r"loop|place|warm-up|version 3"):
        from_json(json.dumps(content))


def test_communication_that_is_not_understood_is_refused():
    text = TEXT.replace("reduce-scatter(%p)", "ragged-all-to-all(%p)")
    with pytest.raises(ValueError, match="ragged-all-to-all"):
        table_of(text, SIZES)

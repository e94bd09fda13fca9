"""A step split by what its kernels are for: placed by their stacks, nothing lost."""

import ast
import pathlib

import pytest

import mjax
from mjax.config.command_line import parse
from mjax.hardware.gpus import GPUS
from mjax.plan import floors, page, reading, sources
from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import analyse
from mjax.plan.hlo.frames import frames_of, read_frames
from mjax.plan.hlo.parse import parse as parse_module
from mjax.plan.options import Topology
from mjax.plan.replay import replay
from mjax.plan.result import Source
from mjax.recipes import RECIPES
from tests.plan.modules import MESHES, text_of
from tests.plan.plans import make_plan, settled

# Callers are counted from 1, and 0 is none: 3 is called by 2, that by 1.
TABLES = """
FileNames
1 "/home/a/mjax/layers/norm.py"
2 "/home/a/lib/jax/numpy.py"
3 "/home/a/mjax/layers/block.py"

FunctionNames
1 "Norm.branch.<locals>.<lambda>"
2 "add"
3 "SerialBlock.apply"

FileLocations
1 {file_name_id=3 function_name_id=3 line=5 end_line=5 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
3 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

"""
HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=16"
ADD = 'metadata={op_name="jit(step)/shard_map/while/body/eval_jaxpr/add"'
FLAGS = "--recipe debug --model.layers 4 --batch.size 16 --batch.microbatches 4"
CONFIG = parse(FLAGS.split(), RECIPES, "prog")[0]
H200 = CostModel.of(GPUS["h200"])


def with_stacks() -> str:
    """Give the recorded module tables, and the sum inside a fusion a stack."""
    header, body = text_of("layers").split("\n", 1)
    assert ADD in body
    return f"{header}\n{TABLES}{body.replace(ADD, f'{ADD} stack_frame_id=3')}"


def split(text: str) -> tuple[dict[str, Source], float]:
    """Return the rows of a step and its seconds."""
    module = parse_module(text)
    analysis = analyse(module, *MESHES["layers"])
    found = replay(module, analysis, H200)
    runs = reading.count_runs(module, analysis)
    slots = reading.half_ticks(module, analysis)
    topology = Topology(gpu="h200", nodes=2)
    modelled = reading.modelled(
        CONFIG, analysis.sizes, topology, found, runs, runs, slots
    )
    rows = sources.by_source(
        CONFIG,
        analysis.sizes,
        H200,
        module=module,
        frames=read_frames(text),
        found=found,
        taken=runs,
        slots=slots,
        modelled=modelled,
        params_bytes=4,
    )
    return {row.name: row for row in rows}, modelled.step_s


def test_a_stack_lists_the_functions_of_mjax_from_the_innermost():
    text = with_stacks()
    module, frames = parse_module(text), read_frames(text)
    assert frames[3] == (("layers/norm.py", "Norm.branch"),) + frames[1]
    assert frames[1] == (("layers/block.py", "SerialBlock.apply"),)
    fusions = [
        x
        for computation in module.computations.values()
        for x in computation.instructions
        if x.called == ("wrapped_add_computation",)
    ]
    assert fusions
    assert all(frames_of(x, module, frames) == frames[3] for x in fusions)
    assert read_frames(text_of("layers")) == {}


def test_rows_add_up_to_the_step_and_unplaced_work_is_other():
    placed, step_s = split(with_stacks())
    unplaced, _ = split(text_of("layers"))
    for rows in (placed, unplaced):
        assert sum(row.seconds for row in rows.values()) == pytest.approx(step_s)
    assert placed["norms"].seconds > unplaced["norms"].seconds == 0
    moved = placed["norms"].num_bytes or 0
    assert moved > 0
    assert (unplaced["other"].num_bytes or 0) - (
        placed["other"].num_bytes or 0
    ) == moved
    assert placed["matmuls of the layers"] == unplaced["matmuls of the layers"]
    assert placed["waiting for tp"].seconds > 0
    assert placed["waiting for tp"].num_bytes is None


def test_the_optimizer_is_placed_by_its_phase():
    text = with_stacks()
    optimizer = ADD.replace("eval_jaxpr/add", "phase.optimizer/add")
    rows, _ = split(text.replace(ADD, optimizer))
    before, _ = split(text)
    assert rows["norms"].seconds == 0
    name = "optimizer and norm of the gradients"
    assert rows[name].num_bytes == before["norms"].num_bytes


@pytest.mark.parametrize(
    ("result", "source"),
    [
        ("bf16[16,128]{1,0}", "joins and sums of activations"),
        ("bf16[640,128]{1,0}", "joins of weights"),
        ("f8e4m3fn[16,128]{1,0}", "quantisation to 8 bits"),
        ("(f8e5m2[128,16]{1,0}, f32[]{})", "quantisation to 8 bits"),
        ("f32[]{}", "quantisation to 8 bits"),
    ],
)
def test_a_kernel_of_a_projection_is_placed_by_its_result(result: str, source: str):
    projection = TABLES.replace("layers/norm.py", "layers/linear.py")
    stack = 'metadata={op_name="f/slot/mul" stack_frame_id=3}'
    text = f"""{HEADER}{projection}%f (p: f32[]) -> f32[] {{
  %p = f32[]{{}} parameter(0)
  ROOT %m = f32[]{{}} multiply(%p, %p)
}}

ENTRY %main (x: f32[]) -> f32[] {{
  %x = f32[]{{}} parameter(0)
  ROOT %y = {result} fusion(%x), kind=kLoop, calls=%f, {stack}
}}
"""
    rows, _ = split(text)
    assert {name for name, row in rows.items() if row.num_bytes} == {source}


def test_each_rule_names_functions_that_exist():
    root = pathlib.Path(mjax.__file__).parent
    places = [
        f"{path.relative_to(root)}:{name}"
        for path in root.rglob("*.py")
        for name in ("", *qualified(ast.parse(path.read_text())))
    ]
    for rule, source in sources.RULES:
        assert any(map(rule.match, places)), (rule.pattern, source)


def qualified(tree: ast.AST, prefix: str = "") -> list[str]:
    """List the qualified names of a module's functions, nested ones too."""
    found = []
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", None)
        is_scope = isinstance(node, ast.FunctionDef | ast.ClassDef)
        here = f"{prefix}{name}" if is_scope else prefix.removesuffix(".")
        if is_scope:
            found.append(here)
        found += qualified(node, f"{here}." if here else "")
    return found


def test_floors_are_those_worked_out_by_hand():
    config, sizes, _ = settled("--recipe gpt-tp8 --mesh.tp-overlap chunks")
    found = floors.floors(config, sizes, H200, params_bytes=400)
    tokens = config.batch.size // sizes.dp * 2048
    layer = 12 * 5120**2
    flops_per_s = 989.4e12 * 0.75
    assert found["matmuls of the layers"] == pytest.approx(
        6 * tokens * 40 * layer / 8 / flops_per_s, rel=1e-3
    )
    memory = 4.8e12 * 0.85
    # Forward an input and an output, backward two inputs and an output, 2 bytes each.
    assert found["norms"] == pytest.approx(5 * 40 * tokens * 5120 / 8 * 2 / memory)
    # Eight partial sums of an eighth of the sequence, and their sum.
    sums = 2 * 40 * tokens / 8 * 5120 * 2 * 9
    assert found["joins and sums of activations"] == pytest.approx(sums / memory)
    # A hundred parameters: three float32 read and written, a gradient read.
    name = "optimizer and norm of the gradients"
    assert found[name] == pytest.approx(100 * 28 / memory)
    assert found["sums of gradients"] == 0


def test_adapters_have_no_floors():
    config, sizes, _ = settled("--recipe gpt-tp8 --lora.rank 4 --init-from base")
    assert floors.floors(config, sizes, H200, params_bytes=4) == {}


def test_the_table_has_a_line_for_each_source():
    rows = (
        Source(name="norms", seconds=0.25, num_bytes=2 * 10**9, floor_s=0.1),
        Source(name="waiting for tp", seconds=0.75, num_bytes=None, floor_s=None),
    )
    lines = list(page.source_lines(make_plan(sources=rows)))
    assert "MODELLED" in lines[0]
    assert lines[2].split() == ["norms", "0.25", "25.0%", "2.0", "0.1"]
    assert lines[3].split() == ["waiting", "for", "tp", "0.75", "75.0%"]
    (line,) = page.source_lines(make_plan())
    assert "unknown, the step was not compiled" in line

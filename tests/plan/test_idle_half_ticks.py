"""Idle time of a modelled pipeline step = idle half-ticks of a simulated schedule."""

import pytest

from mjax.config.command_line import parse
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from mjax.pipeline.schedule import IDLE as UNUSED
from mjax.pipeline.schedule import Schedule
from mjax.plan import reading, sources
from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import Analysis, analyse
from mjax.plan.hlo.parse import Module
from mjax.plan.hlo.parse import parse as parse_module
from mjax.plan.options import Topology
from mjax.plan.replay import Replay, replay
from mjax.plan.result import IDLE, Modelled
from mjax.recipes import RECIPES

TOPOLOGY = Topology(gpu="h200", nodes=1, gpus_per_node=4)
H200 = CostModel.of(GPUS["h200"])
SIZES = AxisSizes(pp=4, dp_replicate=1, dp_shard=1, tp=1)
SHARD_MAP = "jit(train_step)/phase.forward/shard_map"
ARRAY = "bf16[128,128]{1,0}"
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BACKWARD = 5
"""Matmuls of a backward half-tick; a forward half-tick has one."""


def schedule_of(flags: str):
    """Return the config and the schedule of a pipeline of four stages."""
    words = "--recipe debug --model.layers 16 --batch.size 16 --mesh.pp 4 "
    config = parse((words + flags).split(), RECIPES, "prog")[0]
    schedule = reading.schedule_of(config, SIZES)
    assert schedule is not None
    return config, schedule


def matmul(name: str, scope: str) -> str:
    return (
        f'  %{name} = {ARRAY} dot(%x, %x), {DIMS}, metadata={{op_name="{scope}/dot"}}\n'
    )


def text_of(schedule: Schedule) -> str:
    """Write a step: a loop for each phase, the last one unrolled, then the optimizer.

    A forward half-tick has a loop over its layers, without a name, of one matmul.
    """
    bodies, entry = "", ""
    last = schedule.phases[-1]
    for phase in schedule.phases:
        for start in range(phase.start, phase.stop) if phase is last else [phase.start]:
            stop = start + 1 if phase is last else phase.stop
            scope = f"{SHARD_MAP}/ticks.{start}.1.{stop - start}"
            inner = scope if phase is last else f"{scope}/while/body"
            body = ""
            if phase.has_forward:
                body += (
                    f"  %layers{start} = {ARRAY} while(%x), condition=%more, "
                    f'body=%layer, metadata={{op_name="{inner}/slot/while"}}, '
                    'backend_config={"known_trip_count":{"n":"1"}}\n'
                )
            if phase.has_backward:
                backward = f"{inner}/phase.backward/slot/transpose"
                names = [f"b{start}_{number}" for number in range(BACKWARD)]
                body += "".join(matmul(name, backward) for name in names)
            # Not the work of a half-tick: idle half-ticks are not counted in it.
            body += matmul(f"put{start}", f"{inner}/phase.backward")
            if phase is last:
                entry += body
                continue
            bodies += f"""%tick{start} (x: bf16[128,128]) -> bf16[128,128] {{
  %x = {ARRAY} parameter(0)
{body}  ROOT %next{start} = {ARRAY} bitcast(%x)
}}

"""
            entry += (
                f"  %ticks{start} = {ARRAY} while(%x), condition=%more, "
                f'body=%tick{start}, metadata={{op_name="{scope}/while"}}, '
                f'backend_config={{"known_trip_count":{{"n":"{stop - start}"}}}}\n'
            )
    return f"""HloModule step, is_scheduled=true, num_partitions=4

%more (m: bf16[128,128]) -> pred[] {{
  %m = {ARRAY} parameter(0)
  ROOT %yes = pred[] constant(true)
}}

%layer (x: bf16[128,128]) -> bf16[128,128] {{
  %x = {ARRAY} parameter(0)
  ROOT %y = {ARRAY} dot(%x, %x), {DIMS}
}}

{bodies}ENTRY %main (x: bf16[128,128]) -> bf16[128,128] {{
  %x = {ARRAY} parameter(0)
{entry}{matmul("update", "jit(train_step)/phase.optimizer")}\
  ROOT %out = {ARRAY} bitcast(%x)
}}
"""


def model(config, text: str) -> tuple[Modelled, Module, Analysis, Replay]:
    module = parse_module(text)
    analysis = analyse(module, SIZES, 4)
    found = replay(module, analysis, H200)
    every = reading.count_runs(module, analysis)
    taken = reading.count_runs(module, analysis, reading.schedule_of(config, SIZES))
    slots = reading.half_ticks(module, analysis)
    modelled = reading.modelled(config, SIZES, TOPOLOGY, found, every, taken, slots)
    return modelled, module, analysis, found


@pytest.mark.parametrize(
    "flags",
    [
        "--batch.microbatches 8",
        "--batch.microbatches 4 --pipeline.chunks 2",
        "--batch.microbatches 4 --pipeline.schedule gpipe",
    ],
)
def test_the_idle_time_is_that_of_the_idle_half_ticks_of_every_stage(flags):
    config, schedule = schedule_of(flags)
    modelled, *_, found = model(config, text_of(schedule))
    (one,) = found.timeline["layer"]
    matmul_s = one.stop_s - one.start_s
    assert matmul_s > 0
    tables = ((schedule.forward_chunk, 1), (schedule.backward_chunk, BACKWARD))
    for stage in range(SIZES.pp):
        idle_s = work_s = 0.0
        for table, matmuls in tables:
            for row in table:
                if (row == UNUSED).all():
                    continue  # no stage works, so the half-tick takes no time
                if row[stage] == UNUSED:
                    idle_s += matmuls * matmul_s
                else:
                    work_s += matmuls * matmul_s
        assert modelled.parts_s[IDLE] == pytest.approx(idle_s)
        others_s = (schedule.num_ticks + 1) * matmul_s
        busy_s = modelled.parts_s["matrix products"]
        assert busy_s == pytest.approx(work_s + others_s)
        assert idle_s == pytest.approx(modelled.bubble * work_s)
    assert modelled.step_s == pytest.approx(found.step_s)


def test_the_optimizer_takes_its_whole_time_beside_a_bubble():
    config, schedule = schedule_of("--batch.microbatches 4")
    text = text_of(schedule)
    modelled, module, analysis, found = model(config, text)
    assert modelled.bubble == pytest.approx(3 / 4)
    rows = sources.by_source(
        config,
        SIZES,
        H200,
        module=module,
        frames={},
        found=found,
        taken=reading.count_runs(module, analysis, schedule),
        slots=reading.half_ticks(module, analysis),
        modelled=modelled,
        params_bytes=4,
    )
    by_name = {row.name: row for row in rows}
    (one,) = (e for e in found.timeline[module.entry] if e.name == "update")
    optimizer = by_name["optimizer and norm of the gradients"]
    assert optimizer.seconds == pytest.approx(one.stop_s - one.start_s)
    assert optimizer.num_bytes == 3 * 128 * 128 * 2
    assert sum(row.seconds for row in rows) == pytest.approx(modelled.step_s)

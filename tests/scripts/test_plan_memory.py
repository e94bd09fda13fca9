"""What the compiler says that a step takes is what a process takes."""

import pytest

from mjax.plan.compile import CompiledMemory
from scripts.plan import plan_memory

# A model whose state is 0.4 GB, so that what else grows in a process (buffers of the
# matrix library, stacks of threads, programs) is a few percent of the figure.
SMALL = (
    "--recipe gpt-125m --model.layers 1 --model.d-model 512 --model.heads 8 "
    "--model.remat none --batch.size 1 --data.seq-len 128"
)
TOLERANCE = 0.15


@pytest.mark.slow
def test_a_process_grows_by_the_planned_memory_of_a_step():
    found = plan_memory.measure_alone(SMALL)
    # Parameters and two moments in float32; what is not state is well below 1%.
    params = 2 * 32_768 * 512 + 12 * 512**2
    assert found.figure.argument_bytes == pytest.approx(12 * params, rel=0.01)
    assert found.birth.total_bytes < found.figure.total_bytes
    assert found.ratio == pytest.approx(1, abs=TOLERANCE)


def test_an_output_in_the_place_of_an_argument_counts_once():
    found = CompiledMemory(
        argument_bytes=100,
        output_bytes=90,
        aliased_bytes=80,
        temporary_bytes=7,
        code_bytes=1,
    )
    assert found.total_bytes == 118

"""What LAMB adds to the communication of a step compiled for described GPUs."""

import pytest

from mjax.mesh.axes import AxisSizes
from scripts.correctness.optimizer_accuracy import collectives_of

SIZES = AxisSizes(pp=1, dp_replicate=1, dp_shard=4, tp=2)


@pytest.mark.plan
@pytest.mark.slow
def test_lamb_adds_one_all_reduce_for_each_set_of_axes():
    """The lengths of all tensors that are sharded alike leave together, once."""
    added = collectives_of("lamb", SIZES) - collectives_of("adamw", SIZES)
    assert added == {
        ("all-reduce", ("dp_shard",)): 1,
        ("all-reduce", ("dp_shard", "tp")): 1,
    }

"""Options of the compiler are those of GPUs with a pipeline, and of no other mesh."""

import pytest

from mjax.mesh.axes import AxisSizes
from mjax.mesh.xla_flags import PIPELINE_ON_GPU, compiler_options


@pytest.mark.parametrize(
    ("platform", "pp", "expected"),
    [("gpu", 2, PIPELINE_ON_GPU), ("gpu", 1, {}), ("cpu", 2, {})],
)
def test_only_pipelines_on_gpus_have_options(platform, pp, expected):
    sizes = AxisSizes(pp=pp, dp_replicate=1, dp_shard=2, tp=2)
    assert compiler_options(platform, sizes) == expected

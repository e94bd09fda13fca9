"""The processes of a case want what data and tensor parallelism let them want."""

import pytest

from mjax.data.config import DataConfig
from scripts.data.loader_case import Case


@pytest.mark.parametrize(("pattern", "num_wanted"), [("disjoint", 1), ("same", 4)])
def test_each_row_is_wanted_by_one_process_or_by_all(pattern, num_wanted):
    case = Case("mjax", "warm", pattern, 4, 1.0, DataConfig())
    wanted = [row for index in range(4) for row in range(*case.block(index))]
    assert sorted(wanted) == sorted([*range(case.batch_size)] * num_wanted)

"""Possible sizes of a run, with their flags."""

import json
import sys

import pytest

from mjax.launch import elastic
from mjax.launch.config import RunConfig


def config(size=12, microbatches=1, simulated=None, **mesh):
    shape = {"pp": 1, "dp": -1, "dp_shard": None, "tp": 1} | mesh
    shape = {"dp_shard_per_node": None} | shape
    batch = {"size": size, "microbatches": microbatches}
    return {"mesh": shape, "batch": batch, "simulate_devices": simulated}


def sizes(found, hosts=4, least=1, devices=1):
    return elastic.sizes(found, hosts=hosts, least=least, devices_per_host=devices)


def test_fewer_hosts_take_the_batch_in_more_microbatches():
    assert sizes(config()) == {
        4: {},
        # 12 rows: 3 at a time on each of 4 hosts; then 2 of 4 on 3, 3 of 6 on 2, 3 of
        # 12 on 1.
        3: {"--batch.microbatches": ["2"]},
        2: {"--batch.microbatches": ["2"]},
        1: {"--batch.microbatches": ["4"]},
    }


def test_a_size_that_divides_no_batch_is_left_out():
    assert [*sizes(config(size=8))] == [4, 2, 1]


def test_the_other_axes_stay_and_dp_is_said_where_it_was():
    found = sizes(config(size=24, dp=8, tp=2, pp=2), devices=8)
    assert found[3] == {"--batch.microbatches": ["2"], "--mesh.dp": ["6"]}
    found = sizes(config(size=24, tp=2, pp=2), devices=4)
    assert found[3] == {"--batch.microbatches": ["2"]}


def test_shards_of_one_host_communicate_in_one_step():
    found = sizes(config(size=24, dp_shard_per_node=4), devices=4)
    flag = "--mesh.dp-shard-per-node"
    assert [hosts for hosts, flags in found.items() if flag in flags] == [1]
    assert found[1][flag] == ["None"]
    # Two stages on four GPUs a host: 8 shards, then 6, 4 and 2: no two nodes of 4.
    found = sizes(config(size=24, pp=2, dp=8, dp_shard_per_node=4), devices=4)
    assert [hosts for hosts, flags in found.items() if flag in flags] == [3, 2, 1]


def test_a_host_holds_whole_replicas_or_no_size_fits():
    assert [*sizes(config(dp=2, tp=2), hosts=4)] == [4, 2]
    assert [*sizes(config(size=24, dp=4, dp_shard=2), hosts=4)] == [4, 2]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [12, 24, 36, 60])
def test_no_device_has_more_rows_at_once_and_none_is_left_out(size, microbatches):
    if size % (4 * microbatches):
        return
    rows = size // (4 * microbatches)
    for hosts, flags in sizes(config(size=size, microbatches=microbatches)).items():
        number = int(flags["--batch.microbatches"][0]) if flags else microbatches
        assert size % (hosts * number) == 0
        assert size // (hosts * number) <= rows


def test_without_a_data_parallel_size_nothing_can_be_said():
    with pytest.raises(ValueError, match=r"--min-hosts needs the data-parallel size"):
        elastic.sizes(config(), hosts=4, least=1, devices_per_host=None)
    assert elastic.devices_per_host(config(simulated=2), 3) == 6


def test_the_trainer_is_asked_what_its_flags_mean():
    script = "import json, sys; print(json.dumps({'flags': sys.argv[1:]}))"
    command = [sys.executable, "-c", script, "--recipe", "debug"]
    flags = ["--recipe", "debug", "--print-config"]
    assert elastic.trainer_config(command, 60.0) == {"flags": flags}
    failing = [sys.executable, "-c", "import sys; sys.exit('error: no recipe x')"]
    with pytest.raises(ValueError, match=r"^no recipe x$"):
        elastic.trainer_config(failing, 60.0)
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(ValueError, match=r"did not print its config in 0.5 s"):
        elastic.trainer_config(sleeping, 0.5)


@pytest.mark.parametrize("least", [0, 3])
def test_impossible_sizes_are_refused(least):
    message = rf"--min-hosts must be from 1 to --hosts 2, got {least}"
    with pytest.raises(ValueError, match=message):
        RunConfig(hosts=2, min_hosts=least)
    assert json.dumps(sizes(config()))

"""One process of a run of several: join, build a mesh, sum over it, report.

Usage: join_and_sum.py REPORT_PATH, with the configuration as JSON on standard input:
{"distributed": {...}, "devices": N, "mesh": {...}}. The report is JSON in a file,
because gloo writes to standard output.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mjax.mesh import axes, build, devices
from mjax.processes import distributed
from mjax.processes.config import DistributedConfig


def main() -> None:
    asked = json.load(sys.stdin)
    devices.simulate_devices(asked["devices"])
    distributed.start(DistributedConfig(**asked["distributed"]))
    config = axes.MeshConfig(**asked["mesh"])
    mesh = build.build_mesh(axes.resolve(config, jax.device_count()))
    # Device i, in mesh order, holds i + 1.
    sharding = NamedSharding(mesh, PartitionSpec(axes.AXES))
    values = np.arange(1, mesh.size + 1, dtype=np.float32)
    array = jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])

    def sums(x: jax.Array) -> jax.Array:
        return jnp.stack([jax.lax.psum(x, axes.TP), jax.lax.psum(x, axes.AXES)])

    spec = PartitionSpec(axes.AXES)
    summed = jax.jit(
        jax.shard_map(
            sums, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(None, axes.AXES)
        )
    )(array)
    shards = {
        str(s.device.id): s.data[:, 0].tolist() for s in summed.addressable_shards
    }
    report = {
        "process": [jax.process_index(), jax.process_count()],
        "mesh": build.describe(mesh),
        "tp_sum_and_total": shards,
        "ids": [device.id for device in mesh.devices.flat],
        "is_started": jax.distributed.is_initialized(),
    }
    pathlib.Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()

"""Print the mesh of a run: python -m mjax.mesh --mesh.tp 2 --simulate-devices 8."""

import dataclasses
import sys

import jax
import tyro

from mjax.mesh.axes import MeshConfig, resolve
from mjax.mesh.build import build_mesh, describe
from mjax.mesh.distributed import DistributedConfig, simulate_devices, start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Print which device sits where in the mesh."""

    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(
        default_factory=DistributedConfig
    )
    simulate_devices: int | None = None
    """Use this many simulated CPU devices in each process."""


def main(flags: Flags) -> None:
    """Build the mesh that the flags describe and print it from process 0."""
    if flags.simulate_devices is not None:
        simulate_devices(flags.simulate_devices)
    start(flags.distributed)
    sizes = resolve(flags.mesh, jax.device_count())
    mesh = build_mesh(sizes, tp_across_hosts=flags.mesh.tp_across_hosts)
    if jax.process_index() == 0:
        print(describe(mesh))


if __name__ == "__main__":
    try:
        main(tyro.cli(Flags, prog="python -m mjax.mesh"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)

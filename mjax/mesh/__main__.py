"""Print the mesh of a run: python -m mjax.mesh --mesh.tp 2 --simulate-devices 8."""

import dataclasses
import sys

from mjax import flags
from mjax.mesh.axes import MeshConfig, resolve
from mjax.processes.config import DistributedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Print which device sits where in the mesh."""

    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(
        default_factory=DistributedConfig
    )
    simulate_devices: int | None = None
    """Use this many simulated CPU devices in each process."""


def main(wanted: Flags) -> None:
    """Build the mesh that the flags describe and print it from process 0."""
    import jax  # this and the others: once the flags are read

    from mjax.mesh.build import build_mesh, describe
    from mjax.mesh.devices import load_plugin_without_gpu, simulate_devices
    from mjax.processes.distributed import start

    if wanted.simulate_devices is not None:
        simulate_devices(wanted.simulate_devices)
    load_plugin_without_gpu()
    start(wanted.distributed)
    sizes = resolve(wanted.mesh, jax.device_count())
    mesh = build_mesh(sizes, tp_across_hosts=wanted.mesh.tp_across_hosts)
    if jax.process_index() == 0:
        print(describe(mesh))


if __name__ == "__main__":
    try:
        main(
            flags.read(
                Flags,
                sys.argv[1:],
                prog="python -m mjax.mesh",
            )
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)

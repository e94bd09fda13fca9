"""Draw the mesh of a run: python -m mjax.mesh --mesh.tp 2 --simulate-devices 8."""

import dataclasses
import shutil
import sys
from pathlib import Path

from mjax.cli import flags
from mjax.mesh.axes import MeshConfig
from mjax.processes.config import DistributedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Draw the mesh, and print the position of each device in it."""

    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(
        default_factory=DistributedConfig
    )
    simulate_devices: int | None = None
    """Simulate this many devices on the CPU in each process."""
    svg: Path | None = None
    """File for a drawing of the mesh, FILE.svg."""

    def __post_init__(self) -> None:
        if self.svg is not None and not self.svg.parent.is_dir():
            raise ValueError(
                f"--svg {self.svg}: there is no folder {self.svg.parent}; make it"
            )


def main(wanted: Flags) -> None:
    """Build the mesh that the flags describe and print it from process 0."""
    import jax  # after the flags are read, like the imports below

    from mjax.config.fixes import Devices, sizes_of
    from mjax.config.train import TrainConfig
    from mjax.mesh import drawing
    from mjax.mesh.build import build_mesh, describe, devices_per_host
    from mjax.mesh.devices import load_plugin_without_gpu, simulate_devices
    from mjax.processes.distributed import start

    if wanted.simulate_devices is not None:
        simulate_devices(wanted.simulate_devices)
    load_plugin_without_gpu()
    start(wanted.distributed)
    count, per_host = jax.device_count(), devices_per_host(jax.devices())
    can_simulate = jax.default_backend() == "cpu" and per_host == count
    sizes = sizes_of(
        TrainConfig(mesh=wanted.mesh),
        Devices(
            count=count,
            flag="simulate_devices" if can_simulate else None,
            per_flag=jax.process_count(),
            per_host=None if can_simulate else per_host,
            is_mesh_alone=True,
        ),
    )
    mesh = build_mesh(sizes, tp_across_hosts=wanted.mesh.tp_across_hosts)
    if jax.process_index() == 0:
        num_columns = shutil.get_terminal_size().columns
        drawn = drawing.text(mesh, num_columns=num_columns)
        print(f"{drawn}\n\n{describe(mesh)}")
        if wanted.svg is not None:
            wanted.svg.write_text(drawing.svg(mesh), encoding="utf-8")


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

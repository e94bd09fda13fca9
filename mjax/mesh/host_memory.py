"""Arrays in the memory of the host that a device reaches by itself: pinned memory.

Enters: arrays, meshes. Leaves: the same arrays in the other memory; under jit a copy,
which a compiler can run beside other work. What is computed is computed on arrays in
device memory. Source: jax documentation, "JAX memories and host offloading".
"""

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Shaped

HOST_KIND = "pinned_host"
"""Memory kind of a sharding."""


def is_on_host(x: Array) -> bool:
    """Say whether an array, or a traced one, is in the memory of the host."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Copy an array to device memory under jit; one that is there stays as it is."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def to_host(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Copy an array to host memory under jit; one that is there stays as it is."""
    return x if is_on_host(x) else jax.device_put(x, jax.memory.Space.Host)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding in host memory.

    Devices that are described, not present, have no memories: jax drops the kind then,
    and `hardware.described.put_in_host_memory` tells it to the compiler.
    """
    return sharding.with_memory_kind(HOST_KIND)


def check_host_memory(mesh: Mesh | AbstractMesh, flag: str, fix: str) -> None:
    """Check that the devices of a mesh reach pinned memory of their hosts.

    Args:
      mesh: of devices, or of descriptions of them; described GPUs have it.
      flag: what asks for it, as typed.
      fix: what to write instead.
    Raises:
      ValueError: they do not.
    """
    if isinstance(mesh, AbstractMesh):
        return
    device = mesh.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if kinds and HOST_KIND not in kinds:  # one that is described lists none
        raise ValueError(
            f"{flag} needs devices that reach the memory kind {HOST_KIND} of their "
            f"host, and {device.device_kind} reaches {', '.join(sorted(kinds))}; {fix}"
        )

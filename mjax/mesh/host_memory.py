"""Arrays in pinned host memory, which a device can access directly.

Input: an array in one memory. Output: the array in the other memory. Under jit this is
a copy, which the compiler can overlap with other work. Computation needs arrays in
device memory. Source: jax documentation, "JAX memories and host offloading".
"""

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Shaped

HOST_KIND = "pinned_host"
"""Memory kind of a sharding in pinned host memory."""


def is_on_host(x: Array) -> bool:
    """Return whether an array, concrete or traced, is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Copy an array to device memory under jit, unless it is there already."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def to_host(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Copy an array to host memory under jit, unless it is there already."""
    return x if is_on_host(x) else jax.device_put(x, jax.memory.Space.Host)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding with host memory as its memory kind.

    Described devices (compiled for, but not present) have no memories, so jax drops the
    memory kind. For them `hardware.described.put_in_host_memory` passes it to the
    compiler.
    """
    return sharding.with_memory_kind(HOST_KIND)


def check_host_memory(mesh: Mesh | AbstractMesh, flag: str, fix: str) -> None:
    """Check that the devices of a mesh can access pinned memory of their hosts.

    Args:
      mesh: mesh of real or described devices; described GPUs always pass.
      flag: the flag that needs host memory, as typed.
      fix: the remedy, for the message.
    Raises:
      ValueError: the devices cannot access it.
    """
    if not (isinstance(mesh, AbstractMesh) or reaches_host(mesh)):
        device = mesh.devices.flat[0]
        kinds = sorted({memory.kind for memory in device.addressable_memories()})
        raise ValueError(
            f"{flag} needs devices that can access the memory kind {HOST_KIND} of "
            f"their host, but {device.device_kind} has only {', '.join(kinds)}; {fix}"
        )


def reaches_host(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether the devices of a mesh can access pinned memory of their hosts.

    Args:
      mesh: mesh of real or described devices; described GPUs always do.
    """
    if isinstance(mesh, AbstractMesh):
        return True
    device = mesh.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    return not kinds or HOST_KIND in kinds  # a described device lists none

"""Copies within, to, from and between devices, and collectives; all bytes are checked.

Input: a `Bench`. Output: `Measured`. Runs in a process that `health burn` starts. The
units and formulas of the results are in `mjax.health.burn.workloads`.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from mjax.health.burn.device_bench import (
    AXIS,
    Bench,
    Device,
    check_place,
    per_device,
    rate,
    scatter,
    words,
)
from mjax.health.burn.measurements import Form, Measured

_CPU_BYTES = 2**23
"""Bytes of every buffer on a CPU. Two cores need milliseconds for it."""
_CPU_COPY_BYTES = 2**25
"""Bytes of the buffer that a CPU reads and writes. Together with its copy, the buffer
is larger than most caches."""
_LINK_BYTES = 2**28
_COPY_BYTES = _REDUCE_BYTES = 2**30
"""Bytes of the buffers on a GPU. It is larger than every cache, and NCCL reaches its
full rate only above 256 MiB (github.com/NVIDIA/nccl-tests, issue 212)."""
_NETWORK_REPEATS: Mapping[Form, int] = {"quick": 3, "short": 20, "long": 100}
"""Number of calls, fixed because it must be the same in all processes. The calls take
about the time budget of each `Form` of a burn."""
_PERIOD = 1024
"""Maximum period of the summands of a reduction, in words and in devices."""
_EXACT = 2**24
"""float32 represents every integer up to this one."""
_HOST_MEMORY = "pinned_host"
_KEY = np.uint32(0x5A5A5A5A)


def device_memory(bench: Bench) -> list[Measured]:
    """Time a pass over a buffer in the memory of each device."""
    count, found = _count(bench, _CPU_COPY_BYTES, _COPY_BYTES), []
    for name, device in bench.devices.items():
        x = _words_on(count, device)
        seconds = bench.time(lambda x=x: _flip(x))
        wrong = {name: int(_count_wrong(_flip(_flip(x))))}
        found.append(rate(f"device_memory.{name}", 8 * count / 1e9, seconds, wrong))
    return found


def transfers(
    bench: Bench, kind: Literal["host_to_device", "device_to_host"]
) -> list[Measured]:
    """Time copies between page-locked memory and each device."""
    count, found = _count(bench, _CPU_BYTES, _LINK_BYTES), []
    for name, device in bench.devices.items():
        if _HOST_MEMORY not in {m.kind for m in device.addressable_memories()}:
            note = f"jax has no page-locked memory for {name}"
            return [Measured(name=kind, outcome="absent", note=note)]
        here = SingleDeviceSharding(device, memory_kind="device")
        host = SingleDeviceSharding(device, memory_kind=_HOST_MEMORY)
        begin, end = (host, here) if kind == "host_to_device" else (here, host)
        source = jax.device_put(_words_on(count, device), begin)
        seconds = bench.time(lambda s=source, to=end: jax.device_put(s, to))
        arrived = jax.device_put(jax.device_put(source, end), here)
        wrong = {name: int(_count_wrong(arrived))}
        found.append(rate(f"{kind}.{name}", 4 * count / 1e9, seconds, wrong))
    return found


def pair(bench: Bench) -> list[Measured]:
    """Time copies between all pairs of devices, each in both directions."""
    if len(bench.devices) == 1:
        return [_alone("pair")]
    count, found = _count(bench, _CPU_BYTES, _LINK_BYTES), []
    for name, other in itertools.permutations(bench.devices, 2):
        source, to = _words_on(count, bench.devices[name]), bench.devices[other]
        seconds = bench.time(
            lambda s=source, to=to: jax.device_put(s, to), len(bench.devices) - 1
        )
        arrived = jax.device_put(source, to)
        check_place(arrived, to)
        wrong = {other: int(_count_wrong(arrived))}
        found.append(rate(f"pair.{name}.{other}", 4 * count / 1e9, seconds, wrong))
    return found


def all_to_all(bench: Bench) -> list[Measured]:
    """Time the exchange in which each device sends a part to every other device.

    A word encodes its sender, its receiver and its index in the part.
    """
    n = len(bench.devices)
    if n == 1:
        return [_alone("all_to_all")]
    count = _count(bench, _CPU_BYTES, _LINK_BYTES) // n

    def parts(is_received: bool) -> jax.Array:
        me = jax.lax.axis_index(AXIS).astype(jnp.uint32)
        other = jnp.arange(n, dtype=jnp.uint32)
        sender, receiver = (other, me) if is_received else (me, other)
        link = scatter(sender * n + receiver)
        return (link[:, None] + jnp.arange(count, dtype=jnp.uint32))[None]

    exchange = per_device(bench.mesh, lambda x: jax.lax.all_to_all(x, AXIS, 1, 1))
    wrong = per_device(bench.mesh, lambda x: jnp.sum(x != parts(True), keepdims=True))
    x = per_device(bench.mesh, lambda: parts(False))()
    seconds = bench.time(lambda: exchange(x))
    places = bench.wrong_words(wrong(exchange(x)))
    return [rate(f"all_to_all.{n}", 4 * count * (n - 1) / 1e9, seconds, places)]


def all_reduce(bench: Bench) -> list[Measured]:
    """Time the sum over all devices of this host."""
    n = len(bench.devices)
    if n == 1:
        return [_alone("all_reduce")]
    add, places = _reduction(bench, bench.mesh)
    seconds = bench.time(add)
    return [_reduced(bench, f"all_reduce.{n}", n, seconds, places())]


def all_reduce_hosts(bench: Bench) -> list[Measured]:
    """Time the sum over the devices of all processes."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    add, places = _reduction(bench, mesh)
    jax.block_until_ready(add())
    times = []
    for _ in range(_NETWORK_REPEATS[bench.task.form]):
        started_s = time.perf_counter()
        jax.block_until_ready(add())
        times.append(time.perf_counter() - started_s)
    n, seconds = mesh.size, statistics.median(times)
    return [_reduced(bench, f"all_reduce_hosts.{n}", n, seconds, places())]


def agree(value: float) -> float:
    """Return the largest value over all processes, all of which must call this."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    sharding = jax.NamedSharding(mesh, PartitionSpec(AXIS))
    mine = np.array([value], np.float32)
    x = jax.make_array_from_callback((mesh.size,), sharding, lambda _: mine)
    largest = per_device(mesh, lambda x: jax.lax.pmax(x, AXIS))(x)
    return float(np.asarray(largest.addressable_shards[0].data)[0])


def _reduction(
    bench: Bench, mesh: Mesh
) -> tuple[Callable[[], jax.Array], Callable[[], dict[str, int]]]:
    """Prepare a float32 sum over the devices of a mesh.

    Returns:
      a function that computes the sum, and one that computes it again and returns the
      number of wrong words on each device of this process, by name.
    """
    count, n = _count(bench, _CPU_BYTES, _REDUCE_BYTES), mesh.size

    def base() -> jax.Array:
        return jnp.arange(count, dtype=jnp.int32)

    def mine() -> jax.Array:
        device = jax.lax.axis_index(AXIS)
        return summands(base(), device, n).astype(jnp.float32)[None]

    def wrong(x: jax.Array) -> jax.Array:
        expected = totals(base(), n).astype(jnp.float32)
        return jnp.sum(x[0] != expected, keepdims=True)

    x = per_device(mesh, mine)()
    total = per_device(mesh, lambda x: jax.lax.psum(x, AXIS))
    check = per_device(mesh, wrong)
    return lambda: total(x), lambda: bench.wrong_words(check(total(x)))


def summands[A: (jax.Array, np.ndarray)](index: A, device: A, n: int) -> A:
    """Return the summands of a device, one for each word of a reduction.

    The sum over n devices is at most 2^24, and no summand is negative. So every partial
    sum is an integer that float32 represents, whatever the order of summation.

    Args:
      index: int32, indices of words; it is broadcast with `device`.
      device: int32, indices of devices.
      n: number of devices, at most 2^23.
    """
    period = _period(n)
    return index % period + device % period


def totals[A: (jax.Array, np.ndarray)](index: A, n: int) -> A:
    """Return the sums of `summands` over all n devices, int32 like `index`."""
    period = _period(n)
    return n * (index % period) + sum(device % period for device in range(n))


def _period(n: int) -> int:
    return min(_PERIOD, _EXACT // (2 * n))


def _reduced(
    bench: Bench, name: str, n: int, seconds: float, wrong: dict[str, int]
) -> Measured:
    size = 4 * _count(bench, _CPU_BYTES, _REDUCE_BYTES)
    return rate(name, size * 2 * (n - 1) / n / 1e9, seconds, wrong)


def _count(bench: Bench, cpu_bytes: int, gpu_bytes: int) -> int:
    return (cpu_bytes if bench.is_cpu else gpu_bytes) // 4


def _alone(kind: str) -> Measured:
    return Measured(name=kind, outcome="absent", note="there is only one device")


def _words_on(count: int, device: Device) -> jax.Array:
    with jax.default_device(device):
        return _words(count)


_words = functools.partial(jax.jit, static_argnums=0)(words)


@jax.jit
def _flip(x: jax.Array) -> jax.Array:
    return x ^ _KEY


@jax.jit
def _count_wrong(x: jax.Array) -> jax.Array:
    """Count the words that differ from `words`."""
    return jnp.sum(x != words(x.size))

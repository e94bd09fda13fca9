"""Choose the hosts that keep each block.

Every host computes the same table from the names of hosts and the names and sizes of
blocks, without communication.

Rendezvous hashing chooses the hosts. With few blocks the hosts are then unevenly
loaded. So single blocks move from the fullest to the emptiest host until the bytes of
all hosts are near the mean, or no move brings them nearer.

Source: rendezvous hashing: Thaler and Ravishankar 1998, "Using name-based mappings to
increase hit rates"; bounded load of a host: Mirrokni, Thorup and Zadimoghaddam 2018,
arXiv:1608.01350. Differs: the load is also bounded from below; and it is evened out
after hashing, because a block has several hosts, which must differ.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence

_IMBALANCE = 0.05  # largest deviation of a host's load, as a part of the mean


def replicas(
    blocks: Mapping[str, int], hosts: Sequence[str], num_replicas: int
) -> dict[str, tuple[str, ...]]:
    """Return block -> hosts that keep it; the first host reads it from the remote.

    Args:
      blocks: name of each block -> bytes.
      hosts: names of the hosts, without repeats, in any order.
      num_replicas: hosts per block; all hosts if there are fewer.
    Raises:
      ValueError: there is no host, a host is repeated, or num_replicas is below 1.
    """
    if not hosts or len(set(hosts)) < len(hosts):
        raise ValueError(
            "a mirror needs at least one host, and each host once, got hosts "
            f"{' '.join(hosts) or 'none'}"
        )
    if num_replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {num_replicas}")
    num_replicas = min(num_replicas, len(hosts))
    table = {}
    for block in sorted(blocks):
        ranked = sorted(hosts, key=lambda host: _weight(block, host))
        table[block] = ranked[:num_replicas]
    _even_out(table, blocks, hosts, num_replicas)
    if num_replicas > 1:
        _even_out(table, blocks, hosts, 1)
    return {block: tuple(kept) for block, kept in table.items()}


def _even_out(
    table: dict[str, list[str]],
    sizes: Mapping[str, int],
    hosts: Sequence[str],
    counted: int,
) -> None:
    """Change the table until each host has about the mean number of bytes.

    Args:
      table: block -> its hosts; changed in place.
      sizes: block -> bytes.
      hosts: all hosts.
      counted: the load of a host is the bytes of all blocks that have the host among
        their first `counted` hosts. If 1, the first host of a block is swapped with
        another of its hosts; if num_replicas, a host of a block is replaced.
    """
    own: dict[str, set[str]] = {host: set() for host in hosts}
    for block, kept in table.items():
        for host in kept[:counted]:
            own[host].add(block)
    load = {host: sum(map(sizes.__getitem__, own[host])) for host in hosts}
    mean = sum(load.values()) / len(hosts)
    is_swap = any(len(kept) > counted for kept in table.values())
    while True:
        by_load = sorted(hosts, key=lambda host: (load[host], host))
        far = max(mean - load[by_load[0]], load[by_load[-1]] - mean)
        if far <= _IMBALANCE * mean:
            return
        for full, empty in itertools.product(reversed(by_load), by_load):
            # Moving a block smaller than the difference lowers the sum of the squared
            # loads.
            gap = load[full] - load[empty]
            movable = [
                block
                for block in own[full]
                if sizes[block] < gap and (empty in table[block]) == is_swap
            ]
            if movable:
                break
        else:
            return
        # A block of half the difference would make both loads equal.
        block = min(movable, key=lambda b: (abs(2 * sizes[b] - gap), _weight(b, empty)))
        kept = table[block]
        if is_swap:
            place = kept.index(empty)
            kept[0], kept[place] = empty, full
        else:
            kept[kept.index(full)] = empty
        own[full].remove(block)
        own[empty].add(block)
        load[full] -= sizes[block]
        load[empty] += sizes[block]


def _weight(block: str, host: str) -> bytes:
    return hashlib.sha256(f"{len(host)}:{host}{block}".encode()).digest()

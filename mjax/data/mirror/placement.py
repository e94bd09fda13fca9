"""Choose the hosts that keep each block.

Every host computes the same table from the names alone; nothing is exchanged.

Rendezvous hashing chooses the hosts. If there are few blocks, this loads the hosts
unevenly; then single blocks move from the fullest to the emptiest host until all are
near the mean.

Source: rendezvous hashing, Thaler and Ravishankar 1998, "Using name-based mappings to
increase hit rates"; the idea of a bound on the load of a host, Mirrokni, Thorup and
Zadimoghaddam 2018, arXiv:1608.01350. Differs: the load is also bounded from below, and
repaired after hashing, because a block has several hosts and these must differ.
"""

import collections
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence

_IMBALANCE = 0.1  # of a host, against the mean


def replicas(
    blocks: Sequence[str], hosts: Sequence[str], num_replicas: int
) -> dict[str, tuple[str, ...]]:
    """Return for each block the hosts that keep it; the first reads the remote.

    Args:
      blocks: names of the blocks, without repeats.
      hosts: names of the hosts, without repeats, in any order.
      num_replicas: hosts per block; with fewer hosts, all of them.
    Raises:
      ValueError: there is no host, a name repeats, or num_replicas is below 1.
    """
    if not hosts or len(set(hosts)) < len(hosts) or len(set(blocks)) < len(blocks):
        raise ValueError(
            "a mirror needs at least one host, and each host and block once, got hosts "
            f"{' '.join(hosts) or 'none'} and {len(blocks)} blocks"
        )
    if num_replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {num_replicas}")
    num_replicas = min(num_replicas, len(hosts))
    table = {}
    for block in sorted(blocks):
        ranked = sorted(hosts, key=lambda host: _weight(block, host))
        table[block] = ranked[:num_replicas]
    _even_out(table, hosts, num_replicas)
    if num_replicas > 1:
        _even_out(table, hosts, 1)
    return {block: tuple(kept) for block, kept in table.items()}


def _even_out(table: dict[str, list[str]], hosts: Sequence[str], counted: int) -> None:
    """Change the table until each host has about the mean number of blocks.

    Args:
      table: hosts of each block; changed in place.
      hosts: all hosts.
      counted: 1 evens out the blocks of which a host is the first, by swapping it with
        another host of the block; the number of replicas evens out all its blocks.
    """
    load = collections.Counter(h for kept in table.values() for h in kept[:counted])
    mean = sum(load.values()) / len(hosts)
    most = max(math.ceil(mean), math.floor(mean * (1 + _IMBALANCE)))
    least = min(math.floor(mean), math.ceil(mean * (1 - _IMBALANCE)))
    is_swap = any(len(kept) > counted for kept in table.values())
    while True:
        by_load = sorted(hosts, key=lambda host: (load[host], host))
        if least <= load[by_load[0]] and load[by_load[-1]] <= most:
            return
        for full, empty in _unequal(by_load, load):
            # Each move needs a gap of two, so it lowers the sum of the squared loads.
            movable = [
                block
                for block, kept in table.items()
                if full in kept[:counted] and (empty in kept) == is_swap
            ]
            if movable:
                break
        else:
            return
        kept = table[min(movable, key=lambda block: _weight(block, empty))]
        if is_swap:
            place = kept.index(empty)
            kept[0], kept[place] = empty, full
        else:
            kept[kept.index(full)] = empty
        load[full] -= 1
        load[empty] += 1


def _unequal(
    by_load: list[str], load: collections.Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of a full and an emptier host, the largest difference first."""
    pairs = itertools.product(reversed(by_load), by_load)
    far = [(full, empty) for full, empty in pairs if load[full] - load[empty] > 1]
    yield from sorted(far, key=lambda pair: load[pair[1]] - load[pair[0]])


def _weight(block: str, host: str) -> bytes:
    return hashlib.sha256(f"{len(host)}:{host}{block}".encode()).digest()

"""Groups that are fixed before any outcome is known.

Input: a number of hosts, and the limits of a group's size. Output: lists of groups of
host indices.

Rows and columns: hosts form a nearly square grid. The first round tests the rows, the
second the columns; a single bad host is at the crossing of the failed row and column.
48 hosts are 6 rows of 8 and 8 columns of 6.

Pairs: every two hosts meet once, in as few rounds as possible.

Source: the horizontal and vertical groups of ByteRobust's replay, arXiv:2509.16293; the
circle method for round-robin tournaments, Lambrechts et al. 2017,
doi:10.1007/s10107-017-1115-x.
"""

import math
from collections.abc import Iterable, Sequence

Groups = list[tuple[int, ...]]


def grid_width(num_hosts: int) -> int:
    """Return the row length of a nearly square grid, with full rows if possible.

    48 gives 8, 96 gives 12. If the number has no divisor just below its square root,
    the number of rows is the root, rounded down, and some rows and columns are shorter
    by one host.
    """
    root = math.isqrt(num_hosts)
    for rows in range(root, math.isqrt(num_hosts // 2), -1):
        if num_hosts % rows == 0:
            return num_hosts // rows
    return max(1, math.ceil(num_hosts / root))


def crossed(
    num_hosts: int, *, least: int = 1, most: int | None = None, least_groups: int = 1
) -> tuple[Groups, Groups]:
    """Return the groups of the rows, and those of the columns.

    Args:
      num_hosts: number of hosts; they are laid out row by row, in their order.
      least: minimum number of hosts in a group. `most` takes precedence: groups may be
        smaller than `least`, and the caller fills them up.
      most: maximum number of hosts in a group; None: any number.
      least_groups: minimum number of groups in a round, as far as `least` allows.
    """
    largest = num_hosts if most is None else most
    width = max(1, min(grid_width(num_hosts), largest))
    height = math.ceil(num_hosts / width)
    hosts = range(num_hosts)
    by_column = sorted(hosts, key=lambda host: (host % width, host // width))
    limits = least, largest, least_groups
    rows = _split(list(hosts), width, *limits)
    columns = _split(by_column, height, *limits)
    return rows, columns


def _split(
    order: Sequence[int], size: int, least: int, most: int, least_groups: int
) -> Groups:
    """Split a sequence into groups of about this size; sizes differ by at most one."""
    num = len(order)
    count = max(math.ceil(num / size), least_groups)
    if num // count < least:
        count = max(1, num // least)
    count = max(count, math.ceil(num / most))
    sizes = [num // count + (index < num % count) for index in range(count)]
    starts = [sum(sizes[:index]) for index in range(count)]
    return [
        tuple(sorted(order[start : start + size]))
        for start, size in zip(starts, sizes, strict=True)
        if size
    ]


def round_robin(num_hosts: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs of host indices; every two hosts meet once.

    An even number takes num_hosts - 1 rounds. An odd number takes num_hosts rounds, and
    one host is idle in each.
    """
    places = num_hosts + num_hosts % 2
    rounds = []
    for turn in range(places - 1):
        circle = [(turn + offset) % (places - 1) for offset in range(places - 1)]
        facing = [(places - 1, circle[0])]
        facing += [(circle[k], circle[-k]) for k in range(1, places // 2)]
        pairs = [(min(pair), max(pair)) for pair in facing]
        rounds.append(sorted(pair for pair in pairs if pair[1] < num_hosts))
    return rounds


def waves(groups: Iterable[Sequence[object]], most: int) -> list[list[int]]:
    """Pack groups into waves; groups of a wave share no host and run concurrently.

    Args:
      groups: the hosts of each group.
      most: maximum number of groups in a wave.
    Returns:
      indices of the groups; each group is in the first wave that has room for it.
    """
    packed: list[tuple[list[int], set[object]]] = []
    for index, group in enumerate(groups):
        for wave, taken in packed:
            if len(wave) < most and not taken & set(group):
                wave.append(index)
                taken |= set(group)
                break
        else:
            packed.append(([index], set(group)))
    return [wave for wave, _ in packed]

"""Order hosts so that neighbours in the mesh share a leaf switch.

Input: a `Cluster`, the sizes of the mesh, and the hosts that can be used. Output: the
hosts in rank order, and the number of neighbours that cross a leaf or a spine, with the
same counts for the file's order and for random orders.

Devices are laid out as in `mjax.mesh.build`: host by host, with the axes pp,
dp_replicate, dp_shard (dp_node included) and tp, outermost first. Neighbours are
successive devices in a ring over dp_shard or dp_replicate, or in the chain of pipeline
stages. Tensor-parallel groups stay inside a host.

Two hosts share a leaf if on each rail their NICs are on the same leaf; they cross a
spine if on some rail no spine has cables to both leaves. The search tries rectangles of
stages and data-parallel positions on hosts sorted by leaf, and swaps pairs of hosts of
each candidate while that helps. The order of the file is one of the candidates, so the
result is never worse.
"""

import dataclasses
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from mjax.health.cluster.contradictions import few
from mjax.health.cluster.distances import Levels
from mjax.health.cluster.neighbours import Edges, MeshSizes, edges_of
from mjax.health.cluster.parts import Cluster

NUM_RANDOM = 100
"""Number of random orders. It gives their mean to a tenth of their standard
deviation."""
MAX_TRIES = 1_000_000
"""Number of swaps tried over all candidates. They take a few seconds of Python."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Crossings:
    """Numbers of pairs of neighbours on different hosts, by distance."""

    total: int
    """Sum of leaf and spine crossings; the search minimises it."""
    spine: int
    """Pairs that cross a spine; each of them also crosses a leaf."""
    leaf: int
    dp_leaf: int
    dp_spine: int
    pp_leaf: int
    pp_spine: int
    num_pairs: int
    """Pairs of neighbours on different hosts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """An order of hosts, and the crossings of the orders it is compared with."""

    hosts: tuple[str, ...]
    """Hosts in rank order."""
    spares: tuple[str, ...]
    """The remaining hosts, in the given order."""
    score: Crossings
    file_order: Crossings
    """Crossings of the first hosts in the given order."""
    random_mean: float
    """Mean of `total` over random orders of random hosts."""
    random_best: int
    num_random: int
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return the placement as a JSON object.

        Its keys are hosts, spares, score, and null, the crossings of the orders that
        this one is compared with.
        """
        return {
            "hosts": [*self.hosts],
            "spares": [*self.spares],
            "score": dataclasses.asdict(self.score),
            "null": {
                "file_order": dataclasses.asdict(self.file_order),
                "random": {
                    "num": self.num_random,
                    "seed": self.seed,
                    "mean_total": self.random_mean,
                    "best_total": self.random_best,
                },
            },
        }


def place(
    cluster: Cluster,
    sizes: MeshSizes,
    *,
    hosts: Sequence[str] | None = None,
    seed: int = 0,
) -> Placement:
    """Order hosts for a mesh.

    Args:
      cluster: contains the cables of all usable hosts.
      sizes: sizes of the mesh.
      hosts: usable hosts, the best of each leaf first; None: all, as in the file.
      seed: seed of the random orders.
    Raises:
      ValueError: the mesh does not fit on the hosts, or the file does not give their
        leaves.
    """
    names = [*cluster.hosts] if hosts is None else [*hosts]
    num_gpus = _check_hosts(cluster, names)
    num_slots = _check_sizes(sizes, num_gpus, len(names))
    edges = edges_of(sizes, num_gpus)
    levels = Levels(cluster, names)
    given = [*range(len(names))]
    best = _best(sizes, num_gpus, num_slots, edges, levels)
    generator = random.Random(seed)
    costs = []
    for _ in range(NUM_RANDOM):
        generator.shuffle(given)
        costs.append(_Order([*given], num_slots, edges, levels).total)
    return Placement(
        hosts=tuple(names[host] for host in best.hosts[:num_slots]),
        spares=tuple(names[host] for host in sorted(best.hosts[num_slots:])),
        score=_crossings(best.hosts, edges, levels),
        file_order=_crossings([*range(len(names))], edges, levels),
        random_mean=statistics.fmean(costs),
        random_best=min(costs),
        num_random=NUM_RANDOM,
        seed=seed,
    )


def _best(
    sizes: MeshSizes, num_gpus: int, num_slots: int, edges: Edges, levels: Levels
) -> "_Order":
    """Return the best order found; if several are equal, prefer the file's order."""
    given = [*range(len(levels.group_of))]
    orders = [given, *_candidates(sizes, num_gpus, num_slots, levels)]
    candidates = [_Order([*order], num_slots, edges, levels) for order in orders]
    tries = MAX_TRIES
    for candidate in sorted(candidates, key=lambda one: one.cost):
        while tries > 0 and (used := candidate.improve(tries)):
            tries -= used
    return min(candidates, key=lambda one: one.cost)


def _check_hosts(cluster: Cluster, names: Sequence[str]) -> int:
    """Return the number of GPUs of each host."""
    for index, name in enumerate(names):
        if name not in cluster.hosts:
            raise ValueError(f"--hosts: the cluster file has no host {name}")
        if name in names[:index]:
            raise ValueError(f"--hosts: {name} is named twice")
    counts = {cluster.hosts[name].num_gpus for name in names}
    if len(counts) != 1 or 0 in counts:
        shown = ", ".join(map(str, sorted(counts)))
        raise ValueError(
            f"all hosts must have the same number of GPUs, got {shown or 'no host'}; "
            "name equal ones with --hosts"
        )
    without = [name for name in names if not cluster.leaves[name]]
    if without:
        raise ValueError(
            f"the cluster file does not say on which leaves {few(without)} are; add "
            "their [[cables]]"
        )
    return counts.pop()


def _check_sizes(sizes: MeshSizes, num_gpus: int, num_hosts: int) -> int:
    """Return the number of hosts that the mesh needs."""
    if num_gpus % sizes.tp:
        raise ValueError(
            f"--tp must divide the {num_gpus} GPUs of a host, so that a group stays "
            f"inside it, got {sizes.tp}"
        )
    num_slots, rest = divmod(sizes.num_devices, num_gpus)
    if rest:
        raise ValueError(
            f"--pp {sizes.pp} x --dp {sizes.dp} x --tp {sizes.tp} = "
            f"{sizes.num_devices} devices must be a multiple of the {num_gpus} GPUs of "
            "a host"
        )
    if num_slots > num_hosts:
        raise ValueError(
            f"--pp {sizes.pp} x --dp {sizes.dp} x --tp {sizes.tp} needs {num_slots} "
            f"hosts, and there are {num_hosts}"
        )
    return num_slots


def _candidates(
    sizes: MeshSizes, num_gpus: int, num_slots: int, levels: Levels
) -> Iterator[list[int]]:
    """Yield orders of all hosts: hosts sorted by leaf fill rectangles of slots.

    The slots of a stage are consecutive. The grid of stages and data-parallel positions
    is divided into strips of several stages. In a strip, hosts fill the slots column by
    column, so that neighbours over both axes are near each other. With strips of one
    stage, hosts fill the slots in order.
    """
    hosts = _by_leaf(levels, num_slots)
    spares = [h for h in range(len(levels.group_of)) if h not in set(hosts)]
    per_stage, rest = divmod(sizes.dp * sizes.tp, num_gpus)
    if rest or not per_stage:
        yield [*hosts, *spares]
        return
    for height in range(1, sizes.pp + 1):
        slots = sorted(
            range(num_slots),
            key=lambda slot: (
                slot // per_stage // height,
                slot % per_stage,
                slot // per_stage,
            ),
        )
        order = [0] * num_slots
        for slot, host in zip(slots, hosts, strict=True):
            order[slot] = host
        yield [*order, *spares]


def _by_leaf(levels: Levels, num: int) -> list[int]:
    """Return this number of hosts, from as few leaves as possible, leaf by leaf.

    Leaves that share spines are consecutive, the largest first.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for host, group in enumerate(levels.group_of):
        members[group].append(host)
    pods: list[list[int]] = []
    for group in members:
        for pod in pods:
            if levels.between[pod[0]][group] < 2:
                pod.append(group)
                break
        else:
            pods.append([group])
    pods.sort(key=lambda pod: -sum(len(members[group]) for group in pod))
    found: list[int] = []
    for pod in pods:
        for group in sorted(pod, key=lambda one: -len(members[one])):
            found += members[group]
    return found[:num]


class _Order:
    """An order of hosts, its cost, and swaps that reduce the cost."""

    def __init__(
        self, hosts: list[int], num_slots: int, edges: Edges, levels: Levels
    ) -> None:
        self.hosts, self._num_slots = hosts, num_slots
        self._between = levels.between
        self._groups = [levels.group_of[host] for host in hosts]
        self._near: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._scale = 1 + 2 * sum(dp for _, _, dp, _ in edges)
        self.cost = 0
        """Crossings times a scale, plus the crossings over dp: of two orders with equal
        crossings, the one with fewer over dp is better, because dp sends the most."""
        for a, b, dp, pp in edges:
            weight = self._scale * (dp + pp) + dp
            self._near[a].append((b, weight))
            self._near[b].append((a, weight))
            self.cost += weight * self._between[self._groups[a]][self._groups[b]]

    @property
    def total(self) -> int:
        """The leaf and spine crossings."""
        return self.cost // self._scale

    def improve(self, tries: int) -> int:
        """Go once over all pairs, and swap those that reduce the cost.

        Returns:
          number of pairs tried; 0 if no swap helped.
        """
        num, has_changed = 0, False
        for a in range(self._num_slots):
            if not self._at(a, self._groups[a]):
                continue
            for b in range(len(self.hosts)):
                if self._groups[a] == self._groups[b]:
                    continue
                num += 1
                gain = self._gain(a, b)
                if gain > 0:
                    self._exchange(a, b)
                    self.cost -= gain
                    has_changed = True
            if num >= tries:
                break
        return num if has_changed else 0

    def _at(self, slot: int, group: int) -> int:
        """Return the cost of a slot's pairs if a host of this group is in the slot."""
        between, groups = self._between[group], self._groups
        return sum(w * between[groups[other]] for other, w in self._near[slot])

    def _gain(self, a: int, b: int) -> int:
        """Return the reduction of the cost if two hosts are swapped."""
        groups = self._groups
        before = self._at(a, groups[a]) + self._at(b, groups[b])
        groups[a], groups[b] = groups[b], groups[a]
        after = self._at(a, groups[a]) + self._at(b, groups[b])
        groups[a], groups[b] = groups[b], groups[a]
        # A pair between the two slots is counted twice in both sums; its cost stays
        # equal.
        return before - after

    def _exchange(self, a: int, b: int) -> None:
        for row in (self.hosts, self._groups):
            row[a], row[b] = row[b], row[a]


def _crossings(hosts: Sequence[int], edges: Edges, levels: Levels) -> Crossings:
    """Count the crossings between neighbours in an order."""
    counts: Counter[str] = Counter()
    for a, b, dp, pp in edges:
        level = levels.level(hosts[a], hosts[b])
        counts["pairs"] += dp + pp
        for name, num in (("dp", dp), ("pp", pp)):
            counts[f"{name}_leaf"] += num * (level > 0)
            counts[f"{name}_spine"] += num * (level > 1)
    leaf = counts["dp_leaf"] + counts["pp_leaf"]
    spine = counts["dp_spine"] + counts["pp_spine"]
    return Crossings(
        total=leaf + spine,
        spine=spine,
        leaf=leaf,
        dp_leaf=counts["dp_leaf"],
        dp_spine=counts["dp_spine"],
        pp_leaf=counts["pp_leaf"],
        pp_spine=counts["pp_spine"],
        num_pairs=counts["pairs"],
    )

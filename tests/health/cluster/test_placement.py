"""Orders of hosts that keep neighbours of the mesh under one leaf."""

import itertools
import json
import random

import pytest

from mjax.health.cluster import file as cluster_file
from mjax.health.cluster.distances import Levels
from mjax.health.cluster.neighbours import MeshSizes, edges_of
from mjax.health.cluster.parts import Cluster
from mjax.health.cluster.placement import Placement, place
from mjax.mesh.axes import AXES
from tests.health.cluster.fabrics import cluster


def random_cluster(generator: random.Random, num: int, leaves: int, pods: int):
    """Return a cluster whose hosts are on leaves in no order."""
    names = [f"h{index:03}" for index in range(num)]
    generator.shuffle(names)
    lines = [
        f'name = "random"\nislands = {pods}\n[[hosts]]\nnames = "h[000-{num - 1:03}]"',
        'gpus = 2\nwiring = "free"\nnics = [{ name = "a", rail = 0 }]',
    ]
    for tier, count in (("leaf", leaves), ("spine", pods)):
        lines.append(f'[[switches]]\nnames = "{tier}[0-{count - 1}]"')
        lines.append(f'tier = "{tier}"\nports = 600')
    for index, name in enumerate(names):
        leaf = index if index < leaves else generator.randrange(leaves)
        lines.append(f'[[cables]]\nends = ["{name}:a", "leaf{leaf}:*"]')
    for leaf in range(leaves):
        spine = f"spine{leaf % pods}:{leaf + 1}"
        lines.append(f'[[cables]]\nends = ["leaf{leaf}:600", "{spine}"]')
    return cluster_file.parse("\n".join(lines))


def check(found: Placement, made: Cluster, sizes: MeshSizes) -> None:
    """Check what every placement must be."""
    assert sorted([*found.hosts, *found.spares]) == sorted(made.hosts)
    assert len(found.hosts) * 2 == sizes.num_devices
    assert found.score.total <= found.file_order.total
    assert found.score.total <= found.random_best
    assert found.score.num_pairs == found.file_order.num_pairs
    alone = place(made, sizes, hosts=[*found.hosts])
    assert alone.file_order == found.score, "the score is that of the order"


def test_no_placement_is_worse_than_the_file_on_100_random_clusters():
    generator = random.Random(11)
    num_better, total, before = 0, 0, 0
    for _ in range(100):
        pods = generator.randrange(1, 4)
        leaves = generator.randrange(pods, 9)
        num = generator.randrange(leaves, 17)
        made = random_cluster(generator, num, leaves, pods)
        pp = generator.choice([1, 2, 3, 4])
        tp = generator.choice([1, 2])
        dp = max(1, num // pp) * 2 // tp
        if pp * dp * tp > 2 * num:
            pp, dp = 1, num * 2 // tp
        sizes = MeshSizes(pp=pp, dp=dp, tp=tp, pipeline_wraps=generator.random() < 0.3)
        found = place(made, sizes, seed=generator.randrange(10**6))
        check(found, made, sizes)
        num_better += found.score.total < found.file_order.total
        total, before = total + found.score.total, before + found.file_order.total
    # The file's order is random here: a placement that does nothing would be equal.
    assert num_better > 70
    assert total < 0.6 * before


def test_small_placements_are_as_good_as_the_best_of_all_orders():
    generator = random.Random(12)
    for _ in range(12):
        made = random_cluster(generator, 6, generator.randrange(2, 4), 2)
        sizes = generator.choice(
            [MeshSizes(dp=12), MeshSizes(pp=2, dp=6), MeshSizes(pp=3, dp=2, tp=2)]
        )
        names, edges = [*made.hosts], edges_of(sizes, 2)
        levels = Levels(made, names)
        best = min(
            sum((dp + pp) * levels.level(order[a], order[b]) for a, b, dp, pp in edges)
            for order in itertools.permutations(range(6), sizes.num_devices // 2)
        )
        assert place(made, sizes).score.total == best


def test_hosts_of_one_leaf_follow_each_other_and_the_others_are_spares():
    """Two leaves of four hosts, named in turn; four hosts fit under one leaf."""
    text = """
    name = "turns"
    [[hosts]]
    names = "h[1-8]"
    gpus = 8
    wiring = "host"
    nics = [{ name = "a" }]
    [[switches]]
    names = "leaf[1-2]"
    tier = "leaf"
    ports = 9
    [[switches]]
    names = "spine1"
    tier = "spine"
    ports = 2
    [[cables]]
    ends = ["h[1,3,5,7]:a", "leaf1:[1-4]"]
    [[cables]]
    ends = ["h[2,4,6,8]:a", "leaf2:[1-4]"]
    [[cables]]
    ends = ["leaf[1-2]:9", "spine1:[1-2]"]
    """
    made = cluster(text)
    four = place(made, MeshSizes(dp=4, tp=8))
    assert (four.hosts, four.spares) == (
        ("h1", "h3", "h5", "h7"),
        ("h2", "h4", "h6", "h8"),
    )
    assert (four.score.total, four.score.num_pairs) == (0, 32)
    # A ring of eight crosses twice; eight devices of each host are in it.
    eight = place(made, MeshSizes(dp=8, tp=8))
    assert (eight.score.dp_leaf, eight.score.dp_spine) == (16, 0)
    assert eight.file_order.dp_leaf == 64
    # Stages of four: the rings inside, the chain between them.
    staged = place(made, MeshSizes(pp=2, dp=4, tp=8))
    assert (staged.score.dp_leaf, staged.score.pp_leaf) == (0, 32)


def test_leaves_without_a_common_spine_are_farther_apart():
    generator = random.Random(13)
    made = random_cluster(generator, 8, 4, 2)
    levels = Levels(made, [*made.hosts])
    leaf = {name: made.leaves[name]["a"] for name in made.hosts}
    for (a, one), (b, other) in itertools.product(enumerate(made.hosts), repeat=2):
        same_pod = int(leaf[one][-1]) % 2 == int(leaf[other][-1]) % 2
        expected = 0 if leaf[one] == leaf[other] else 1 if same_pod else 2
        assert levels.level(a, b) == expected


def test_neighbours_are_those_of_the_mesh():
    """Counted again from a grid of devices, as `mjax.mesh.build` lays it out."""
    # dp_node has size 1 here: without it dp_shard has all shards.
    assert AXES == ("pp", "dp_replicate", "dp_node", "dp_shard", "tp")
    sizes = MeshSizes(pp=3, dp=6, dp_shard=3, tp=2, pipeline_wraps=True)
    shape, num_gpus = (3, 2, 3, 2), 4
    grid = {
        place: index
        for index, place in enumerate(itertools.product(*map(range, shape)))
    }
    pairs = {0: set(), 1: set(), 2: set()}
    for at in grid:
        for axis in (0, 1, 2):
            other = list(at)
            other[axis] = (other[axis] + 1) % shape[axis]
            pairs[axis].add(frozenset((grid[at], grid[tuple(other)])))
    expected: dict[tuple[int, int], list[int]] = {}
    for axis, found in pairs.items():
        for pair in found:
            a, b = sorted(device // num_gpus for device in pair)
            if a != b:
                expected.setdefault((a, b), [0, 0])[axis == 0] += 1
    edges = edges_of(sizes, num_gpus)
    assert {(a, b): [dp, pp] for a, b, dp, pp in edges} == expected


def test_state_that_is_not_sharded_has_one_ring_of_replicas():
    whole, replicas = MeshSizes(dp=8), MeshSizes(dp=8, dp_shard=1)
    assert edges_of(whole, 2) == edges_of(replicas, 2)
    halves = edges_of(MeshSizes(dp=8, dp_shard=4), 2)
    assert halves == [(0, 1, 2, 0), (0, 2, 2, 0), (1, 3, 2, 0), (2, 3, 2, 0)]


def test_the_same_seed_gives_the_same_random_orders():
    made = random_cluster(random.Random(14), 12, 4, 2)
    sizes = MeshSizes(dp=24)
    one, other = place(made, sizes, seed=3), place(made, sizes, seed=3)
    assert one == other
    assert place(made, sizes, seed=4).random_mean != one.random_mean
    null = json.loads(json.dumps(one.to_json()))["null"]
    assert null["random"] == {
        "num": 100,
        "seed": 3,
        "mean_total": one.random_mean,
        "best_total": one.random_best,
    }


@pytest.mark.parametrize(
    ("sizes", "hosts", "told"),
    [
        ({"dp": 3}, None, "= 3 devices must be a multiple of the 2 GPUs"),
        ({"dp": 2, "tp": 4}, None, "--tp must divide the 2 GPUs of a host"),
        ({"dp": 200}, None, "needs 100 hosts, and there are 8"),
        ({"dp": 4}, ["gpu01", "cpu"], "--hosts: the cluster file has no host cpu"),
        ({"dp": 4}, ["gpu01", "gpu01"], "--hosts: gpu01 is named twice"),
        ({"dp": 4}, [], "the same number of GPUs, got no host"),
        ({"dp": 0}, None, "--dp must be at least 1, got 0"),
        ({"dp": 4, "dp_shard": 0}, None, "--dp-shard must be a divisor of --dp 4"),
        ({"dp": 4, "dp_shard": 3}, None, "--dp-shard must be a divisor of --dp 4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(sizes, hosts, told: str):
    with pytest.raises(ValueError, match=told):
        place(cluster(), MeshSizes(**sizes), hosts=hosts)


def test_hosts_without_cables_cannot_be_placed():
    made = cluster('name = "bare"\n[[hosts]]\nnames = "h[1-4]"\ngpus = 2\n')
    with pytest.raises(ValueError, match=r"on which leaves h1, h2, h3 and 1 more are"):
        place(made, MeshSizes(dp=8))

"""The cluster file: a TOML file that specifies a cluster.

Input: the text, as in `deploy/cluster.example.toml`:

    name = "east"
    require = ["gpu.count"]        # checks that must be ok on every host

    [versions]                     # expected, by the names that hosts report
    nvidia_driver = "580.65.06"

    [[hosts]]                      # a group of equal hosts
    names = "gpu[001-032]"
    gpus = 8
    wiring = "rail"                # the group's NICs of one rail share a leaf
    [[hosts.nics]]
    name = "mlx5_0"
    rail = 0
    rate_gbps = 400

    [[switches]]
    names = "leaf[1-8]"
    tier = "leaf"
    ports = 64

    [[racks]]
    name = "r1"
    hosts = "gpu[001-004]"

    [[cables]]                     # both ends stand for the same number of ports
    ends = ["gpu[001-032]:mlx5_0", "leaf1:[1-32]"]

    [guids]                        # optional: port GUIDs of NICs, GUIDs of switches
    "gpu001:mlx5_0" = "0x946dae03005a3c10"

Output: a `Cluster`, or one `ClusterError` with all problems, each with its path in the
file.
"""

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path

from mjax.health.cluster import contradictions
from mjax.health.cluster.builder import Builder
from mjax.health.cluster.contradictions import Problems
from mjax.health.cluster.parts import Cluster
from mjax.health.cluster.tables import ClusterTable
from mjax.health.cluster.toml_tables import UNKNOWN_KEY, Problem, build

MAX_BYTES = 64 * 2**20
"""Maximum size of a file. A file of 10,000 hosts with all GUIDs has 5 MB."""


class ClusterError(ValueError):
    """A cluster file is invalid; the error lists all its problems."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        num = len(problems)
        head = f"{source} has {num} problem{'s' if num > 1 else ''}:"
        super().__init__("\n  ".join([head, *map(str, problems)]))
        self.problems = tuple(problems)


def read(path: Path, known_checks: Collection[str] | None = None) -> Cluster:
    """Read a cluster file.

    Args:
      path: path of the file.
      known_checks: names that `require` may name; None: any.

    Raises:
      ClusterError: an entry is invalid, or entries contradict each other.
      ValueError: it cannot be read, or is not TOML.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(
                f"{path} has {size} bytes; a cluster file has at most {MAX_BYTES}"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    return parse(text, str(path), known_checks)


def parse(
    text: str,
    source: str = "the cluster file",
    known_checks: Collection[str] | None = None,
) -> Cluster:
    """Parse a cluster file; raises as `read`.

    Args:
      text: TOML.
      source: name of the text in messages.
      known_checks: as for `read`.
    """
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{source} is not TOML: {error}") from error
    wrong: list[Problem] = []
    tables: ClusterTable | None = build(ClusterTable, table, "", wrong)
    problems = Problems()
    problems.found += wrong
    if tables is None:  # only its name is wrong; the rest can still be checked
        table["name"] = "?"
        tables = build(ClusterTable, table, "", [])
    assert tables is not None
    # If a table was skipped, all references to its hosts would look wrong.
    is_whole = all(one.kind == UNKNOWN_KEY for one in wrong)
    builder = Builder(tables, problems, is_whole=is_whole, known_checks=known_checks)
    cluster = builder.cluster()
    if builder.is_whole:
        contradictions.check(cluster, problems, has_all_cables=builder.has_all_cables)
    if problems.found:
        raise ClusterError(source, problems.limited())
    return cluster

"""Check that all processes of a run were started in the same way.

Process 0 posts its values (flags, environment, versions). Every process compares its
own values with them and answers only with the differences, so comparing thousands of
processes takes seconds. This happens before the processes synchronise and touches no
device, since processes with different meshes would deadlock.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import mjax
from mjax.processes.agreement import Agreement, name_processes

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_JAX_OPTIONS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion"),
    *("jax_default_prng_impl", "jax_threefry_partitionable"),
)
_VARIABLES = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "XLA_PYTHON_CLIENT_ALLOCATOR"),
    *("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
    *("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB"),
)
"""Environment variables that set how collectives run and how much memory is used."""
_NAMED_DIFFERENCES = 10


def code_facts() -> dict[str, Any]:
    """Return the hash of each file of mjax, versions of packages, and jax options."""
    folder = Path(mjax.__file__).parent
    files = {
        str(path.relative_to(folder.parent)): (
            hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        )
        for path in folder.rglob("*.py")
    }
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    options = {name: getattr(jax.config, name) for name in _JAX_OPTIONS}
    return {**files, **versions, **options, "python": platform.python_version()}


def environment_facts(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the environment variables that affect compilation or execution.

    XLA's dump flags are omitted, because each process may have its own folder.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    facts = {
        f"XLA_FLAGS {name}": value
        for name, _, value in (flag.partition("=") for flag in flags)
        if not name.startswith("--xla_dump_")
    }
    return facts | {name: environment.get(name) for name in _VARIABLES}


def check_same(agreement: Agreement, facts: Mapping[str, Any], fix: str) -> None:
    """Raise if any value differs between processes; every process must call this.

    Args:
      agreement: agreement of all processes.
      facts: names and JSON values to compare, the most informative first.
      fix: advice for the user.
    Raises:
      ValueError: in all processes. The message lists the names that differ, with
        their values and the processes.
    """
    ours = json.loads(json.dumps(facts))
    first = json.loads(agreement.from_rank(0, json.dumps(ours)))
    differing = {
        name: [first.get(name), ours.get(name)]
        for name in {**first, **ours}
        if first.get(name) != ours.get(name)
    }

    def refuse(texts: Sequence[str]) -> str:
        lines = _describe([json.loads(text) for text in texts])
        if lines:
            raise ValueError(
                "the processes of this run differ:\n" + "\n".join(lines) + f"\n{fix}"
            )
        return ""

    agreement.merge(json.dumps(differing), refuse)


def _describe(answers: Sequence[Mapping[str, Sequence[Any]]]) -> list[str]:
    """Format one line for each value that differs.

    Args:
      answers: for each rank, a mapping from the name of each value that differs to the
        values of process 0 and of the rank.
    """
    holders: dict[str, dict[str, list[int]]] = {}
    for rank, differing in enumerate(answers):
        for name, (first, own) in differing.items():
            values = holders.setdefault(name, {json.dumps(first): [0]})
            values.setdefault(json.dumps(own), []).append(rank)
    lines = []
    for name, values in holders.items():
        (first, _), *others = values.items()
        num_first = len(answers) - sum(len(ranks) for _, ranks in others)
        words = [f"{value} in {name_processes(ranks)}" for value, ranks in others]
        rest = "process 0" if num_first == 1 else f"the other {num_first}"
        lines.append(f"  {name}: {', '.join(words)}, {first} in {rest}")
    more = len(lines) - _NAMED_DIFFERENCES
    if more > 0:
        lines[_NAMED_DIFFERENCES:] = [f"  and {more} more"]
    return lines

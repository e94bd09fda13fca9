"""Candidate sizes of the attention kernels, and each kernel as a separate program.

Input: names of kernels and head widths. Output: candidates in the form that the compile
gate takes (`scripts.kernels.compiled_kernels`) and that a GPU can time.
"""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mjax.kernels.attention.mosaic_gpu import op
from mjax.kernels.attention.mosaic_gpu.dkv import key_value_gradients
from mjax.kernels.attention.mosaic_gpu.dq import query_gradient
from mjax.kernels.attention.mosaic_gpu.forward import forward
from mjax.kernels.attention.mosaic_gpu.tiles import Problem
from mjax.kernels.attention.tuning import LEAST_STAGES, MosaicKernel
from scripts.kernels.compiled_kernels import KernelCase

KERNELS = ("forward", "dq", "dkv")
HEAD_DIMS = (64, 128)
WARPGROUPS = (2, 3)
BLOCKS = (64, 128, 192, 256)
STAGES = (2, 3, 4)

LISTED_VARIABLE = "MJAX_LISTED_CANDIDATES"
"""Environment variable with the names for `listed_cases`, as a JSON list. The compile
gate calls that function in its own process, without arguments.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Sizes for one kernel at one head width."""

    kernel: str
    """A name in `KERNELS`."""
    head_dim: int
    config: MosaicKernel

    @property
    def name(self) -> str:
        """A name that `parse` reads back."""
        c = self.config
        return (
            f"{self.kernel} D={self.head_dim} warpgroups={c.warpgroups} "
            f"block={c.block} stages={c.stages}"
        )


def parse(name: str) -> Candidate:
    """Read the name of a candidate.

    Raises:
      ValueError: the text is not a candidate's name, or the sizes are invalid.
    """
    pattern = r"(\w+) D=(\d+) warpgroups=(\d+) block=(\d+) stages=(\d+)"
    match = re.fullmatch(pattern, name)
    if match is None or match[1] not in KERNELS:
        raise ValueError(
            f"a candidate is named like 'forward D=64 warpgroups=2 block=128 stages=2' "
            f"with one of {', '.join(KERNELS)}; got {name!r}"
        )
    head_dim, warpgroups, block, stages = map(int, match.groups()[1:])
    config = MosaicKernel(warpgroups=warpgroups, block=block, stages=stages)
    return Candidate(kernel=match[1], head_dim=head_dim, config=config)


def first_round(kernels: Sequence[str], head_dims: Sequence[int]) -> list[Candidate]:
    """List all tiles and blocks, with the fewest stages.

    Stages cost shared memory, not registers: a candidate that does not fit with the
    fewest stages does not fit with more.
    """
    return [
        Candidate(
            kernel=kernel,
            head_dim=head_dim,
            config=MosaicKernel(
                warpgroups=warpgroups, block=block, stages=LEAST_STAGES[kernel]
            ),
        )
        for kernel, head_dim, warpgroups, block in itertools.product(
            kernels, head_dims, WARPGROUPS, BLOCKS
        )
    ]


def second_round(survivors: Sequence[Candidate]) -> list[Candidate]:
    """List the survivors of the first round with every number of stages."""
    return [
        dataclasses.replace(c, config=dataclasses.replace(c.config, stages=stages))
        for c in survivors
        for stages in STAGES
        if stages >= LEAST_STAGES[c.kernel]
    ]


def listed_cases() -> dict[str, KernelCase]:
    """Return the candidates that the environment names, as cases of the compile gate.

    A name that ends in `FULL` is compiled with segments, a soft cap and 8 query heads
    per key head, which need the most registers; others without these.
    """
    cases = {}
    for listed in json.loads(os.environ[LISTED_VARIABLE]):
        name = listed.removesuffix(FULL)
        candidate = parse(name)
        full = name != listed
        problem = make_problem(
            candidate, seq_len=8192, window=1024, heads=8, kv_heads=1 if full else 8
        )
        if full:
            problem = dataclasses.replace(problem, soft_cap=30.0)
        cases[listed] = KernelCase(
            function=program(candidate, problem, segments=full),
            args=abstract_arguments(candidate, problem, segments=full),
        )
    return cases


FULL = " full"


def make_problem(
    candidate: Candidate,
    *,
    seq_len: int,
    window: int | None,
    heads: int,
    kv_heads: int,
) -> Problem:
    """Make the sizes of a call of the candidate alone."""
    return Problem(
        seq_len=seq_len,
        padded_len=op.padded_len(seq_len, candidate.config),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=candidate.head_dim,
        window=window,
        scale=1 / math.sqrt(candidate.head_dim),
        soft_cap=None,
    )


def program(
    candidate: Candidate, problem: Problem, *, segments: bool = False
) -> Callable[..., Any]:
    """Return the kernel as a function of its arrays, then of segment ids if any."""
    options: dict[str, Any] = {"problem": problem, "tuning": candidate.config}
    kernel, edges = _functions(candidate.kernel)

    def call(*arrays: Any) -> Any:
        if not segments:
            return kernel(*arrays, None, **options)
        *rest, ids = arrays
        return kernel(*rest, edges(problem, ids), **options)

    return call


def _functions(kernel: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a kernel, and the function that converts segments to its edges."""
    if kernel == "forward":
        return forward, op.first_keys
    if kernel == "dq":
        return query_gradient, op.first_keys
    assert kernel == "dkv", kernel
    return key_value_gradients, op.last_queries


def abstract_arguments(
    candidate: Candidate, problem: Problem, *, segments: bool = False, batch: int = 1
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return shapes and dtypes (bfloat16, sums float32) of the inputs of `program`."""
    p = problem
    q = jax.ShapeDtypeStruct((batch, p.seq_len, p.heads, p.head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((batch, p.seq_len, p.kv_heads, p.head_dim), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((batch, p.heads, p.padded_len), jnp.float32)
    ids = jax.ShapeDtypeStruct((batch, p.seq_len), jnp.int32)
    arrays = (q, k, k) if candidate.kernel == "forward" else (q, k, k, q, row, row)
    return (*arrays, ids) if segments else arrays

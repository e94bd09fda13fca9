"""Calls of attention whose schedule and speed are forecast, and the kernels' grids.

Output: shapes on one GPU, and the axes of a grid.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mjax.kernels.attention.mosaic_gpu.op import attention
from mjax.kernels.attention.tuning import FUSED_H200, MOSAIC_H200

KERNELS = ("forward", "dq", "dkv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Attention of one layer on one GPU."""

    name: str
    batch: int = 1
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    window: int | None = None
    mean_document: int | None = None
    """Mean length of packed documents; None if a sequence is one document."""

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.heads // self.kv_heads

    def segment_ids(self, seed: int = 0) -> np.ndarray | None:
        """Return segment ids [B, T], documents of log-normal lengths (sigma 1), or
        None.
        """
        if self.mean_document is None:
            return None
        random = np.random.default_rng(seed)
        rows = []
        for _ in range(self.batch):
            lengths = list[int]()
            while sum(lengths) < self.seq_len:
                # exp(mu + sigma^2 / 2) is the mean of a log-normal distribution.
                drawn = random.lognormal(np.log(self.mean_document) - 0.5, 1.0)
                lengths.append(max(1, int(drawn)))
            ids = np.repeat(np.arange(len(lengths)), lengths)
            rows.append(ids[: self.seq_len])
        return np.stack(rows).astype(np.int32)


def _shape(name: str, batch: int, seq_len: int, heads: int, kv: int, **rest) -> Shape:
    sizes = {"batch": batch, "seq_len": seq_len, "heads": heads, "kv_heads": kv}
    return Shape(name=name, **sizes, **rest)


SHAPES = (
    _shape("llama3-8b, T 8192", 1, 8192, 32, 8),
    _shape("llama3-8b, T 8192, tp 2", 1, 8192, 16, 4),
    _shape("llama3-8b, T 8192, tp 8", 1, 8192, 4, 1),
    _shape("llama3-70b, T 8192, tp 8", 1, 8192, 8, 1),
    _shape("175b, T 2048, tp 8", 1, 2048, 12, 12),
    _shape("175b, B 4, T 2048, tp 8", 4, 2048, 12, 12),
    _shape("gpt-1.3b, B 4, T 2048", 4, 2048, 16, 16),
    _shape("llama3-8b, T 8192, window 1024", 1, 8192, 32, 8, window=1024),
    _shape("llama3-8b, T 8192, documents", 1, 8192, 32, 8, mean_document=1024),
    _shape("llama3-8b, T 8192, documents, tp 8", 1, 8192, 4, 1, mean_document=1024),
    _shape("llama3-8b, T 32768, tp 8", 1, 32768, 4, 1),
    _shape("12 heads of 64, B 16, T 1024", 16, 1024, 12, 12, head_dim=64),
)
"""The twelve shapes, with B, T, query heads and key heads on one GPU."""


@functools.cache
def traced_grid(kernel: str, shape: Shape) -> dict[str, int]:
    """Return the axes of a kernel's grid with their sizes, the slowest first.

    Read from the program that jax traces.

    Raises:
      ValueError: the program has no such kernel.
    """
    q, k = (
        jax.ShapeDtypeStruct(
            (shape.batch, shape.seq_len, heads, shape.head_dim), jnp.bfloat16
        )
        for heads in (shape.heads, shape.kv_heads)
    )
    tuning = MOSAIC_H200[shape.head_dim]
    if kernel == "fused":
        tuning = dataclasses.replace(tuning, fused=FUSED_H200[shape.head_dim])
    call: Any = functools.partial(
        attention,
        window=shape.window,
        scale=1.0,
        soft_cap=None,
        tuning=tuning,
    )

    ids = jax.ShapeDtypeStruct((shape.batch, shape.seq_len), jnp.int32)

    def with_gradients(q, k, v, ids, d_out):
        out, pull = jax.vjp(lambda q, k, v: call(q, k, v, ids), q, k, v)
        return out, pull(d_out)

    documents = None if shape.mean_document is None else ids
    traced = jax.make_jaxpr(with_gradients)(q, k, k, documents, q)
    for name, mesh in _meshes(traced.jaxpr):
        if name == f"attention_{kernel}":
            return dict(zip(mesh.grid_names, mesh.grid, strict=True))
    raise ValueError(f"no kernel attention_{kernel} in the traced program")


def _meshes(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the mesh of each kernel, at any nesting depth."""
    for eqn in jaxpr.eqns:
        params = eqn.params
        meshes = params.get("meshes") or [params.get("mesh")]
        for mesh in meshes:
            if getattr(mesh, "grid_names", None):
                yield str(params.get("name")), mesh
        for value in params.values():
            for part in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _meshes(inner)

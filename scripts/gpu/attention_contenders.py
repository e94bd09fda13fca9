"""The attention implementations that are compared, behind one interface.

Input: a contender's name and the sizes of a case. Output: a JAX function of q, k, v, or
for PyTorch the two directions, ready to be timed. A contender that is missing or broken
raises ImportError on use; its row reports that.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax

from mjax.kernels.attention import api
from mjax.model.counts import visible_pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one call: always bfloat16 and causal."""

    batch: int
    seq_len: int
    window: int | None
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """Return T, W, D and query heads per key head."""
        return (
            f"T={self.seq_len} W={self.window or 'full'} D={self.head_dim} "
            f"GQA={self.heads // self.kv_heads}"
        )

    def flops(self, direction: str) -> float:
        """Count useful FLOPs: two matmuls per visible pair forward, five backward."""
        products = {"forward": 2, "both": 7}[direction]
        pairs = self.batch * self.heads * visible_pairs(self.seq_len, self.window)
        return 2.0 * products * self.head_dim * pairs


@functools.cache
def _import(name: str) -> ModuleType | str:
    """Import a package; if it is absent or broken, return the reason as text.

    Cached: a failed import is slow, and a second attempt fails differently.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # a missing library raises OSError or any other error
        return f"{name} cannot be imported: {type(error).__name__}: {error}"


def _imported(name: str) -> Any:
    """Return a package. Raises ImportError for any error of its import."""
    found = _import(name)
    if isinstance(found, str):
        raise ImportError(found)
    return found


FUSED = "ours, fused"
"""Ours with the fused backward pass, which is not deterministic."""
JAX = ("ours", FUSED, "cudnn", "tokamax", "blocked")
TORCH = ("torch sdpa", "torch flex")


def jax_attention(name: str, shape: Shape, ours: str) -> Callable[..., jax.Array]:
    """Return attention(q, k, v), [B, T, N or K, H] each.

    Args:
      name: one of `JAX`.
      shape: sizes; its window is applied.
      ours: the backend that "ours" stands for.
    Raises:
      ImportError: tokamax is not installed.
    """
    if name == "tokamax":
        tokamax = _imported("tokamax")
        window = None if shape.window is None else (shape.window - 1, 0)
        return functools.partial(
            tokamax.dot_product_attention,
            is_causal=True,
            local_window_size=window,
            implementation="mosaic",
        )
    backend = ours if name in ("ours", FUSED) else name
    return functools.partial(
        api.attention,
        window=shape.window,
        backend=backend,
        backward="fused" if name == FUSED else "deterministic",
    )


def torch_calls(
    name: str, shape: Shape, num_sets: int, device: str
) -> tuple[Mapping[str, Callable[[int], Any]], Callable[[Any], Any]]:
    """Return {direction: call(input set)} and a function that waits for a call.

    Args:
      name: one of `TORCH`; torch sdpa has no window.
      shape: sizes.
      num_sets: sets of inputs.
      device: cuda, or cpu to rehearse.
    Raises:
      ImportError: torch is not installed.
      ValueError: a window is given for sdpa.
    """
    torch = _imported("torch")
    attend = _torch_attention(torch, name, shape, device)
    sizes = [
        (shape.batch, heads, shape.seq_len, shape.head_dim)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    ]
    sets = []
    for _ in range(num_sets):
        q, k, v, d_out = (
            torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes
        )
        sets.append(([x.requires_grad_() for x in (q, k, v)], d_out))

    def forward(i: int) -> Any:
        with torch.no_grad():
            return attend(*sets[i][0])

    def both(i: int) -> Any:
        inputs, d_out = sets[i]
        return torch.autograd.grad(attend(*inputs), inputs, d_out)

    def wait(_: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    return {"forward": forward, "both": both}, wait


def _torch_attention(
    torch: Any, name: str, shape: Shape, device: str
) -> Callable[..., Any]:
    """Return attention(q, k, v), [B, N or K, T, H] each."""
    grouped = shape.heads != shape.kv_heads
    if name == "torch sdpa":
        if shape.window is not None:
            raise ValueError("torch sdpa has no sliding window")
        return functools.partial(
            torch.nn.functional.scaled_dot_product_attention,
            is_causal=True,
            enable_gqa=grouped,
        )
    flex = _imported("torch.nn.attention.flex_attention")
    reach = shape.seq_len if shape.window is None else shape.window

    def seen(_batch: Any, _head: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (i - j < reach)

    mask = flex.create_block_mask(
        seen, None, None, shape.seq_len, shape.seq_len, device=device
    )
    # Static shapes, with the cache cleared for each: after several shapes PyTorch stops
    # compiling and runs without fusion.
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=mask, enable_gqa=grouped)

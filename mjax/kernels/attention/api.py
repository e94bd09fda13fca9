"""Attention: one entry point, and a table of the capabilities of each backend.

Input: q, k, v and the visibility rules. Output: the attended values, computed by the
named backend or, for "auto", by the fastest one that supports the arguments. `choose`
selects the backend without arrays, so a program can print the choice first.

A new backend is one file with an `attention` function, one entry in `CAPABILITIES`, a
position in `_fastest_first`, and one case in `_run`.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention import blocked, cudnn, reference, saved, tuning
from mjax.kernels.target import Target, target

keep_core = saved.keep_core
"""Policy for jax.checkpoint. With it, the backward passes of `blocked`, `mosaic_gpu`
and `cudnn` do not repeat the forward pass; the backward pass of `reference` does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capability:
    """Capabilities of a backend.

    Every backend supports causal attention and grouped heads.
    """

    dtypes: tuple[str, ...]
    """Dtypes of q, k and v."""
    platforms: tuple[str, ...] | None = None
    """Values of `Target.platform`; None means any."""
    generations: tuple[str, ...] | None = None
    """Values of `Target.generation`; None means any."""
    head_dim_multiple: int = 1
    """H must be a multiple of this."""
    max_head_dim: int | None = None
    """Largest H; None means any."""
    max_head_dim_on: Mapping[str, int] = MappingProxyType({})
    """Generation -> largest H, if it differs from `max_head_dim`."""
    head_dims: tuple[tuple[int, int], ...] | None = None
    """Supported pairs of H and Hv; None means all within the limits."""
    other_value_dim: bool = True
    """Supports values of a width Hv that differs from H."""
    full: bool = True
    """Supports causal=False."""
    prefix: bool = True
    """Supports prefix_len."""
    window: bool = True
    """Supports a window shorter than the sequence."""
    two_sided_window: bool = True
    """Supports a window with causal=False."""
    segments: bool = True
    """Supports segment_ids."""
    soft_cap: bool = True
    """Supports soft_cap."""
    fused_head_dims: tuple[int, ...] = ()
    """Values of H with a fused backward pass, which is not deterministic."""


CAPABILITIES = MappingProxyType(
    {
        "reference": Capability(dtypes=("float32", "bfloat16", "float16")),
        "blocked": Capability(dtypes=("float32", "bfloat16", "float16")),
        # From the checks of jax 0.11.2 (jax/_src/cudnn/fused_attention_stablehlo.py,
        # and jax.nn.dot_product_attention, which requires v in the shape of k), and
        # from the support matrix of cuDNN 9.18: only Hopper has backward kernels for
        # widths above 128 (docs.nvidia.com/cudnn, operations/Attention).
        "cudnn": Capability(
            dtypes=("bfloat16", "float16"),
            platforms=("gpu",),
            head_dim_multiple=8,
            max_head_dim=128,
            max_head_dim_on=MappingProxyType({"hopper": 256}),
            other_value_dim=False,
            prefix=False,
            two_sided_window=False,
            segments=False,
            soft_cap=False,
        ),
        # wgmma, the matrix instruction of the kernels, exists only on Hopper (sm_90a).
        "mosaic_gpu": Capability(
            dtypes=("bfloat16", "float16"),
            platforms=("gpu",),
            generations=("hopper",),
            head_dims=tuple(
                (H, sizes.value_dim or H) for H, sizes in tuning.MOSAIC_H200.items()
            ),
            fused_head_dims=tuple(tuning.FUSED_H200),
        ),
    }
)
"""Backend name -> its limits, which are checked before it runs."""

# blocked beats reference at every size measured (docstring of tuning.BLOCKED_CPU).
# On an H200, mosaic_gpu takes 0.91 of cudnn's time forward and 0.86 with backward
# (geometric means over 35 shapes timed with both, docs/benchmarks/gpu_attention.md).
# For other head widths, and without causality, only cudnn's speed is known (Shah et al.
# 2024, arXiv:2407.08608, figures 5 and 6).
_TIMED_HEAD_DIMS = (64, 128)


def _fastest_first(head_dim: int, *, causal: bool) -> tuple[str, ...]:
    if causal and head_dim in _TIMED_HEAD_DIMS:
        return ("mosaic_gpu", "cudnn", "blocked", "reference")
    return ("cudnn", "mosaic_gpu", "blocked", "reference")


BACKWARD = ("deterministic", "fused")
"""Kinds of backward pass. "deterministic" computes all sums in a fixed order. "fused"
adds to dq in any order, and computes the scores once instead of twice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen backend, the reason for it, and the reasons against the others."""

    name: str
    reason: str
    rejected: dict[str, str]


def choose(
    *,
    target: Target,
    dtype: Any,
    head_dim: int,
    seq_len: int,
    value_dim: int | None = None,
    causal: bool = True,
    prefix: bool = False,
    window: int | None = None,
    segments: bool = False,
    soft_cap: float | None = None,
    backend: str = "auto",
    backward: str = "deterministic",
) -> Choice:
    """Choose the attention backend from shapes and descriptions of devices.

    No array or real device is needed.

    Args:
      target: the devices.
      dtype: dtype of q, k and v.
      head_dim: H.
      seq_len: T.
      value_dim: Hv; None is H.
      causal: as in `attention`.
      prefix: whether prefix_len will be passed.
      window: as in `attention`; a window of at least T is the same as None.
      segments: whether segment_ids will be passed.
      soft_cap: as in `attention`.
      backend: a name in `CAPABILITIES`, or "auto" for the fastest backend that supports
        the arguments.
      backward: a name in `BACKWARD`.

    Returns:
      The choice, with the reason against each other backend.

    Raises:
      ValueError: window or soft_cap is out of range, a prefix is requested without
        causality, the name of the backend or of the backward pass is unknown, or the
        backend does not support the arguments.
    """
    if backward not in BACKWARD:
        raise ValueError(
            f"attention backward must be one of {', '.join(BACKWARD)}, got {backward!r}"
        )
    if backend != "auto" and backend not in CAPABILITIES:
        raise ValueError(
            f"attention backend must be auto or one of {', '.join(CAPABILITIES)}, "
            f"got {backend!r}"
        )
    if window is not None and window < 1:
        raise ValueError(
            f"window must be at least 1 (it counts the query itself), got {window}; "
            "use None for full attention"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(
            f"soft_cap must be positive, got {soft_cap}; use None for no cap"
        )
    if prefix and not causal:
        raise ValueError(
            "prefix_len is for causal attention: with causal=False every position sees "
            "those after it anyway; leave one of the two out"
        )
    asked = _Asked(
        target=target,
        dtype=jnp.dtype(dtype).name,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        causal=causal,
        prefix=prefix,
        window=None if window is None or window >= seq_len else window,
        segments=segments,
        soft_cap=soft_cap,
        backward=backward,
    )
    obstacles = {name: _obstacle(CAPABILITIES[name], asked) for name in CAPABILITIES}
    order = _fastest_first(head_dim, causal=causal)
    able = [name for name in order if obstacles[name] is None]
    remedy = ""
    if backward == "fused":
        remedy = ". backward='fused' needs a fused kernel; 'deterministic' does not"
    if backend == "auto":
        if not able:
            raise ValueError(
                "no attention backend can do this: "
                + "; ".join(f"{name}: {why}" for name, why in obstacles.items())
                + remedy
            )
        name, reason = able[0], f"the fastest on {target.platform} that can do this"
    else:
        name, reason = backend, "asked for by name"
    if obstacles[name] is not None:
        raise ValueError(
            f"attention backend {name!r} cannot do this: {obstacles[name]}. "
            f"Use auto, or one that can: {', '.join(able) or 'there is none'}"
            f"{remedy}"
        )
    other = "not asked for" if backend != "auto" else f"slower than {name}"
    rejected = {n: why or other for n, why in obstacles.items() if n != name}
    return Choice(name=name, reason=reason, rejected=rejected)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    causal: bool = True,
    prefix_len: Int32[Array, "B"] | None = None,
    window: int | None = None,
    segment_ids: Int32[Array, "B T"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    backend: str = "auto",
    backward: str = "deterministic",
) -> Float[Array, "B T N Hv"]:
    """Attend to the visible keys: query i sees key j iff all requested rules allow it.

    - causal: j <= i, or j < prefix_len: the positions of the prefix see each other;
    - window: |i - j| < window;
    - segment_ids: i and j are in one document.

    Scores and softmax are float32. Inside shard_map the shapes are per device, and all
    arrays are cast to vary over every mesh axis over which any of them varies.

    Args:
      q: [B, T, N, H], queries, float32, bfloat16 or float16.
      k: [B, S, K, H], keys, dtype of q; N is a multiple of K, and query head n reads
        key head n * K // N. Query i is at the position of key i (S = T in training).
      v: [B, S, K, Hv], values, dtype of q; their width may differ from H.
      causal: whether the keys after a query are masked; if False, S must equal T.
      prefix_len: [B], number of positions in the prefix of each sequence. Causality
        hides none of these keys. Values above T count as T. S must be T. None means no
        prefix.
      window: number of keys that a query sees up to and including its own position. If
        not causal, the query also sees the window - 1 keys after its position. None
        means all keys.
      segment_ids: [B, T], any numbers. Positions see each other only within a run of
        consecutive equal numbers; the same number after a different one starts another
        document.
      scale: factor on the scores, positive; None is 1 / sqrt(H).
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None means no cap.
      backend: "auto", or a name in `CAPABILITIES`.
      backward: "deterministic" or "fused". The fused backward pass is predicted to be
        faster where it is supported, but its order of additions to dq is not fixed, so
        the last bits of dq differ between calls.

    Returns:
      [B, T, N, Hv], dtype of q.

    Raises:
      ValueError: shapes, dtypes or options do not fit together, or the named backend
        does not support them.
    Source: Vaswani et al. 2017, arXiv:1706.03762; prefix: Raffel et al. 2019,
      arXiv:1910.10683, section 3.2.1; Hv: DeepSeek-AI 2024, arXiv:2405.04434, 2.1.
    """
    _check(q, k, v, segment_ids, prefix_len, causal=causal)
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}; use None for 1/sqrt(H)")
    T, H = q.shape[1], q.shape[3]
    device = target()
    choice = choose(
        target=device,
        dtype=q.dtype,
        head_dim=H,
        seq_len=T,
        value_dim=v.shape[3],
        causal=causal,
        prefix=prefix_len is not None,
        window=window,
        segments=segment_ids is not None,
        soft_cap=soft_cap,
        backend=backend,
        backward=backward,
    )
    # Causality hides the keys from T on, so no backend needs S.
    k, v = k[:, :T], v[:, :T]
    if window is not None and window >= T:
        window = None
    segments = None if segment_ids is None else _runs(segment_ids)
    *arrays, prefix_len = _vary_alike(q, k, v, segments, prefix_len)
    scale = H**-0.5 if scale is None else scale
    options = {
        **{"causal": causal, "prefix_len": prefix_len, "window": window},
        **{"scale": scale, "soft_cap": soft_cap},
    }
    return _run(choice.name, device, arrays, options, backward)


def _run(
    name: str,
    device: Target,
    arrays: list[Any],
    options: dict[str, Any],
    backward: str,
):
    """Call the named backend."""
    if name == "cudnn":
        q, k, v, _ = arrays
        names = ("causal", "window", "scale")
        return cudnn.attention(q, k, v, **{n: options[n] for n in names})
    if name == "reference":
        return reference.attention(*arrays, **options)
    if name == "mosaic_gpu":
        # Imported here, not at the top, so that runs without a GPU save the 0.3 s of
        # this import.
        from mjax.kernels.attention.mosaic_gpu import fused, op

        q, k, _, segment_ids = arrays
        sizes = tuning.MOSAIC_H200[q.shape[-1]]
        if backward == "fused":
            kernel = tuning.FUSED_H200[q.shape[-1]]
            fused.refuse_few_blocks(
                *(q, k),
                window=options["window"],
                has_documents=segment_ids is not None,
                tuning=kernel,
            )
            sizes = dataclasses.replace(sizes, fused=kernel)
        return op.attention(*arrays, tuning=sizes, **options)
    assert name == "blocked", name
    on_cpu = device.platform == "cpu"
    sizes = tuning.BLOCKED_CPU if on_cpu else tuning.BLOCKED_GPU
    return blocked.attention(*arrays, tuning=sizes, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """The properties of a call that decide which backends support it."""

    target: Target
    dtype: str
    head_dim: int
    value_dim: int
    causal: bool
    prefix: bool
    window: int | None
    segments: bool
    soft_cap: float | None
    backward: str


def _obstacle(can: Capability, asked: _Asked) -> str | None:
    """Return why a backend does not support a call; None if it does."""
    platform, generation = asked.target.platform, asked.target.generation
    if can.platforms is not None and platform not in can.platforms:
        return f"the platform must be {' or '.join(can.platforms)}, got {platform}"
    if can.generations is not None and generation not in can.generations:
        return (
            f"the GPU must be of generation {' or '.join(can.generations)}, got "
            f"{generation} ({asked.target.device_kind})"
        )
    if asked.dtype not in can.dtypes:
        return f"the dtype must be {' or '.join(can.dtypes)}, got {asked.dtype}"
    return _width_obstacle(can, asked) or _mask_obstacle(can, asked)


def _width_obstacle(can: Capability, asked: _Asked) -> str | None:
    """Return why a backend does not support heads of these widths."""
    H, Hv = asked.head_dim, asked.value_dim
    if can.head_dims is not None and (H, Hv) not in can.head_dims:
        built = ", ".join(_widths(*pair) for pair in can.head_dims)
        return f"the head width must be one of {built}, got {_widths(H, Hv)}"
    if H % can.head_dim_multiple:
        return f"the head width must be a multiple of {can.head_dim_multiple}, got {H}"
    generation = asked.target.generation
    most = can.max_head_dim_on.get(generation, can.max_head_dim)
    if most is not None and most < H:
        of = f" on {generation}" if can.max_head_dim_on else ""
        return f"the head width must be at most {most}{of}, got {H}"
    if Hv != H and not can.other_value_dim:
        return f"the values must be as wide as queries and keys, got {_widths(H, Hv)}"
    return None


def _widths(H: int, Hv: int) -> str:
    """Format the widths H and Hv: "128" if they are equal, "192/128" if not."""
    return f"{H}" if Hv == H else f"{H}/{Hv}"


def _mask_obstacle(can: Capability, asked: _Asked) -> str | None:
    """Return why a backend does not support the visibility rules."""
    if not asked.causal and not can.full:
        return "it does not honour causal=False"
    if asked.prefix and not can.prefix:
        return "it does not honour prefix_len"
    if asked.window is not None and not can.window:
        return f"it does not honour window={asked.window}"
    if asked.window is not None and not asked.causal and not can.two_sided_window:
        return f"it does not honour window={asked.window} with causal=False"
    if asked.segments and not can.segments:
        return "it does not honour segment_ids"
    if asked.soft_cap is not None and not can.soft_cap:
        return f"it does not honour soft_cap={asked.soft_cap}"
    if asked.backward == "fused" and asked.head_dim not in can.fused_head_dims:
        widths = " or ".join(map(str, can.fused_head_dims))
        if not widths:
            return "it has no fused backward pass"
        return (
            f"its backward pass is fused for head width {widths} alone, got "
            f"{asked.head_dim}"
        )
    if asked.backward == "fused" and not (asked.causal and not asked.prefix):
        return "its fused backward pass is causal, without a prefix"
    return None


def _check(q, k, v, segment_ids, prefix_len, *, causal: bool) -> None:
    """Raise ValueError unless the arguments fit together."""
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            f"q, k, v must be [batch, position, head, width], got {shapes}"
        )
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    if k.shape[:3] != v.shape[:3] or (k.shape[0], k.shape[3]) != (B, H):
        raise ValueError(
            "q, k, v must agree in batch, q and k in head width, k and v in positions "
            f"and heads, got {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; "
            "cast them to the compute dtype first"
        )
    if N % K:
        raise ValueError(f"query heads must be a multiple of the {K} kv heads, got {N}")
    if T < 1 or S < T:
        raise ValueError(
            f"the query length must be at least 1 and at most the key length {S} "
            f"(query i has the position of key i), got {T}"
        )
    if not causal and S != T:
        raise ValueError(
            f"with causal=False the key length must equal the query length {T}, got "
            f"{S}: no mask excludes the keys after the last query"
        )
    for name, x, shape in (
        ("segment_ids", segment_ids, (B, T)),
        ("prefix_len", prefix_len, (B,)),
    ):
        if x is not None and (S != T or x.shape != shape):
            wanted = "[B, T]" if len(shape) == 2 else "[B]"
            raise ValueError(
                f"{name} must be {wanted} with equal query and key lengths, got "
                f"{x.shape} with {shapes}"
            )


def _runs(segment_ids: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Number the runs of consecutive equal ids, from 0."""
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    numbers = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    return jnp.pad(numbers, ((0, 0), (1, 0)))


def _vary_alike(*arrays: Array | None) -> list[Any]:
    """Cast arrays so that, inside shard_map, all vary over the same mesh axes."""
    axes = [
        set() if x is None else jax.typeof(x).manual_axis_type.varying for x in arrays
    ]
    union = set().union(*axes)
    return [
        x
        if x is None or own == union
        else lax.pcast(x, tuple(sorted(union - own)), to="varying")
        for x, own in zip(arrays, axes, strict=True)
    ]

"""Attention on the device against a float32 reference, forward and gradients.

Inputs are new in every run; their seed is in the row. Before each run the device's free
memory is filled with NaN, so that elements that a kernel does not write are seen. A
second run on memory filled with another number must give the same bits.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mjax.kernels.attention import api
from scripts.evidence import Table
from scripts.gpu.cells import fixed
from scripts.gpu.setting import Program, Row, Setting

RESULTS: tuple[str, ...] = ("out", "dq", "dk", "dv")
# Relative error of a whole array (Frobenius). A bfloat16 has 8 significant bits: one
# rounding costs at most 2^-9. The result, the probabilities and, backward, the output
# in delta are rounded. Blocked attention on a CPU has at most 0.31% in these cases. A
# float16 has 11 bits: an eighth of that error.
LIMITS = {"bfloat16": 1e-2, "float16": 1.5e-3}
# The same for the worst position (the H numbers of one head), since an error of one
# position among thousands is lost in the whole array. Where few keys are visible, sums
# cancel: blocked attention has up to 6% in dq of the first positions of a document. A
# position that is not written or has a wrong key has an error of its own size.
WORST_LIMITS = {"bfloat16": 0.25, "float16": 0.04}
# Results that are zero in exact arithmetic (dq of the first query, all of dq in a
# window of 1) have no relative error. So the size of a position is at least the first
# factor times the root mean square of all, and that of a number at least the second,
# the size of gradients in long windows.
_FLOOR = 0.25
_SMALL = 1e-2
_POISON_BYTES = 2**28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call."""

    seq_len: int = 320
    window: int | None = None
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    """Width of the values; None is `head_dim`."""
    dtype: str = "bfloat16"
    documents: int | None = None
    """Number of segments per sequence, of random lengths; None passes no segment
    ids."""
    soft_cap: float | None = None
    causal: bool = True
    prefix: bool = False
    """Whether sequences have a prefix, of random length, whose positions see each
    other."""
    backward: str = "deterministic"
    """Name in `api.BACKWARD`; with "fused" the bits of dq may differ between runs."""
    results: tuple[str, ...] = RESULTS
    """Results that are computed: with fewer, a fault points to one kernel."""

    @property
    def name(self) -> str:
        """Return the name of the call: the fields in which calls differ."""
        widths = (self.head_dim, self.value_dim)
        width = "/".join(str(w) for w in widths if w is not None)
        parts = [
            f"T={self.seq_len} W={self.window or 'full'} D={width}",
            f"heads={self.heads}/{self.kv_heads} {self.dtype}",
        ]
        if self.documents is not None:
            parts.append(f"documents={self.documents}")
        if self.soft_cap is not None:
            parts.append(f"cap={self.soft_cap:g}")
        parts += [
            word
            for word, holds in (
                ("not causal", not self.causal),
                ("prefix", self.prefix),
                (f"{self.backward} backward", self.backward != "deterministic"),
            )
            if holds
        ]
        if self.results != RESULTS:
            parts.append(f"only {', '.join(self.results)}")
        return " ".join(parts)


WINDOWS = (1, 2, 63, 64, 65, 77, 127, 128, 129, 400, None)
RAGGED = (1, 63, 65, 129, 200, 1000)


def cases(small: bool) -> dict[str, Case]:
    """List the calls: each kernel alone, every kind once, the windows, the rest."""
    if small:
        some = [
            Case(seq_len=96, window=40, head_dim=16, results=("dk", "dv")),
            Case(seq_len=96, window=40, head_dim=16, kv_heads=1),
            Case(seq_len=65, head_dim=16, documents=3, soft_cap=5.0, dtype="float16"),
        ]
        return {case.name: case for case in some}
    gqa: dict[str, Any] = {"heads": 4, "kv_heads": 2}
    found = [
        Case(window=128, head_dim=head_dim, results=results)
        for results in (("out",), ("dq",), ("dk", "dv"))
        for head_dim in (128, 64)
    ]
    found += [
        Case(window=128),
        Case(window=128, head_dim=128),
        Case(window=100, documents=4, head_dim=128, **gqa),
        Case(window=100, soft_cap=5.0, head_dim=128, **gqa),
        Case(window=100, documents=4, soft_cap=5.0, dtype="float16", **gqa),
        # As in training: these errors do not occur in short sequences.
        Case(seq_len=8192, window=1024, head_dim=128, batch=1, documents=6),
        Case(seq_len=4096, head_dim=128, batch=1, **gqa),
        Case(documents=3, causal=False, head_dim=128, **gqa),
        Case(window=100, causal=False),
        Case(prefix=True, head_dim=128, **gqa),
    ]
    # So many groups that dkv splits none; with few heads, as above, it does.
    whole: dict[str, Any] = {"seq_len": 2048, "batch": 4, "heads": 16, "kv_heads": 8}
    found += [Case(head_dim=128, **whole)]
    fused: dict[str, Any] = {"head_dim": 128, "backward": "fused"}
    found += [
        Case(**fused, **whole),
        Case(documents=4, **fused),
        Case(window=100, dtype="float16", **fused),
    ]
    for head_dim, value_dim in ((32, None), (96, None), (192, 128), (256, None)):
        widths: dict[str, Any] = {"head_dim": head_dim, "value_dim": value_dim}
        found += [
            Case(window=100, documents=4, **widths, **gqa),
            Case(seq_len=1000, soft_cap=5.0, **widths, dtype="float16"),
        ]
    for head_dim in (64, 128):
        sizes: dict[str, Any] = {"head_dim": head_dim}
        found += [Case(window=window, **sizes) for window in WINDOWS]
        found += [Case(seq_len=T, window=100, **sizes, **gqa) for T in RAGGED]
        found += [Case(heads=4, kv_heads=1, window=77, **sizes)]
        found += [Case(documents=n, **sizes) for n in (1, 2, 40)]
        found += [Case(soft_cap=5.0, **sizes)]
        found += [Case(window=w, dtype="float16", **sizes) for w in (1, 64, 129, None)]
        found += [Case(seq_len=2048, window=512, **sizes, **gqa)]
    return {case.name: case for case in found}


def process_of(case: Case) -> str:
    """Let all share a process."""
    return "jax"


def kind_of(case: Case) -> str:
    """Return a key of head width and kernels: each width has its own kernels."""
    return f"D={case.head_dim} {case.backward} {', '.join(case.results)}"


def _attend(
    case: Case, backend: str, q: Any, k: Any, v: Any, ids: Any, prefix_len: Any
) -> jax.Array:
    return api.attention(
        q,
        k,
        v,
        causal=case.causal,
        prefix_len=prefix_len if case.prefix else None,
        window=case.window,
        segment_ids=None if case.documents is None else ids,
        soft_cap=case.soft_cap,
        backend=backend,
        # The reference has one backward pass.
        backward=case.backward if backend == "mosaic_gpu" else "deterministic",
    )


def programs(case: Case, setting: Setting) -> dict[str, Program]:
    """Return attention with its gradients as one program.

    The program takes q, k, v, d_out, segment ids and the lengths of prefixes. It
    returns `case.results` and omits the kernels of other results.
    """

    def run(q: Any, k: Any, v: Any, d_out: Any, *rest: Any) -> tuple[Any, ...]:
        def attend(q: Any, k: Any, v: Any) -> jax.Array:
            return _attend(case, setting.ours, q, k, v, *rest)

        if case.results == ("out",):
            return (attend(q, k, v),)
        out, pullback = jax.vjp(attend, q, k, v)
        every = dict(zip(RESULTS, (out, *pullback(d_out)), strict=True))
        return tuple(every[name] for name in case.results)

    def array(heads: int, width: int) -> jax.ShapeDtypeStruct:
        shape = (case.batch, case.seq_len, heads, width)
        return jax.ShapeDtypeStruct(shape, case.dtype)

    q, k = (array(heads, case.head_dim) for heads in (case.heads, case.kv_heads))
    value_dim = case.value_dim or case.head_dim
    d_out, v = (array(heads, value_dim) for heads in (case.heads, case.kv_heads))
    ids = jax.ShapeDtypeStruct((case.batch, case.seq_len), jnp.int32)
    prefix_len = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
    return {"": Program(function=run, args=(q, k, v, d_out, ids, prefix_len))}


def truth(case: Case, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute the results in float32 from the same inputs, by the definition."""

    @jax.jit
    def run(q: Any, k: Any, v: Any, d_out: Any, *rest: Any) -> tuple[Any, ...]:
        def attend(q: Any, k: Any, v: Any) -> jax.Array:
            return _attend(case, "reference", q, k, v, *rest)

        wide = [x.astype(jnp.float32) for x in (q, k, v, d_out)]
        out, pullback = jax.vjp(attend, *wide[:3])
        every = dict(zip(RESULTS, (out, *pullback(wide[3])), strict=True))
        return tuple(every[name] for name in case.results)

    # On the CPU: other code on other hardware. It is too slow for long sequences.
    if case.seq_len <= 1024:
        cpu = jax.local_devices(backend="cpu")[0]
        inputs = tuple(jax.device_put(x, cpu) for x in inputs)
    return run(*inputs)


def errors(got: Any, want: Any) -> tuple[float, np.ndarray]:
    """Return the relative error of an array, and that of each position, [B, T, N]."""
    want = np.asarray(want, np.float64)
    wrong = np.linalg.norm(np.asarray(got, np.float64) - want, axis=-1)
    size = np.linalg.norm(want, axis=-1)
    rms = np.sqrt(np.mean(size * size))
    small = _SMALL * want.shape[-1] ** 0.5
    floor = max(_FLOOR * rms, small)
    total = np.linalg.norm(wrong) / (max(rms, small) * size.size**0.5)
    # NaN is kept: a comparison with the limit is then false.
    return float(total), wrong / np.maximum(size, floor)


def poison(sizes: Sequence[int], value: float) -> None:
    """Fill the free memory that is allocated next with a value.

    The allocator serves a request with the smallest free piece that is large enough,
    which may still hold the correct results of an earlier run. So pieces of exactly
    these sizes are allocated all at once, filled and freed.

    Args:
      sizes: bytes of each piece.
      value: written to each float32.
    """
    pieces = [jnp.full(-(-size // 4), value, jnp.float32) for size in sizes]
    jax.block_until_ready(pieces)
    for piece in pieces:
        piece.delete()


def judge(case: Case, first: Any, second: Any, want: Any) -> Row:
    """Compare two runs with the reference and with each other.

    Raises:
      RuntimeError: a result is wrong, not finite, or differs between the runs.
    """
    limit, worst_limit = LIMITS[case.dtype], WORST_LIMITS[case.dtype]
    row: Row = {"errors": {}, "worst": {}}
    faults = []
    for name, a, b, exact in zip(case.results, first, second, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        total, by_position = errors(a, exact)
        worst = float(np.max(by_position))
        row["errors"][name], row["worst"][name] = total, worst
        finite = np.isfinite(a.astype(np.float32))
        if not finite.all():
            faults.append(
                f"{name} is not finite: memory that no one wrote, or overflow; "
                f"{_where(~finite.all(-1))}"
            )
        elif not (total <= limit and worst <= worst_limit):
            faults.append(
                f"{name} is wrong: error {total:.2e} (limit {limit:.1e}), worst "
                f"position {worst:.2e} (limit {worst_limit:.1e}); "
                f"{_where(~(by_position <= limit))} have more than {limit:.1e}"
            )
        in_any_order = case.backward == "fused" and name == "dq"
        if a.tobytes() != b.tobytes() and not in_any_order:
            differs = (a.view(np.uint16) != b.view(np.uint16)).any(-1)
            faults.append(f"{name} differs between two runs; {_where(differs)}")
    if faults:
        raise RuntimeError("; ".join(faults))
    return row


def _where(faulty: np.ndarray) -> str:
    """Describe the faulty positions [B, T, N]: their number and ranges."""
    if not faulty.any():
        return "no position"
    ranges = (
        f"{axis} {index.min()} to {index.max()}"
        for axis, index in zip(("b", "t", "head"), np.nonzero(faulty), strict=True)
    )
    return f"{faulty.sum()} of {faulty.size} positions ({', '.join(ranges)})"


def measure(case: Case, setting: Setting) -> Row:
    """Run the case twice on poisoned memory and compare."""
    seed = time.time_ns() % 2**31
    program = programs(case, setting)[""]
    inputs = list(program.inputs(seed))
    rng = np.random.default_rng(seed)
    if case.documents is not None:
        ids = rng.integers(0, case.documents, (case.batch, case.seq_len))
        inputs[-2] = jnp.asarray(np.sort(ids, axis=1), jnp.int32)
    if case.prefix:
        inputs[-1] = jnp.asarray(
            rng.integers(0, case.seq_len + 1, case.batch), jnp.int32
        )
    function = jax.jit(program.function).lower(*inputs).compile()
    memory = function.memory_analysis()
    assert memory is not None
    rest = _POISON_BYTES // (2**14 if setting.small else 1)
    runs = []
    # Nothing is timed, but a kernel that hangs or faults must not affect other cases.
    with setting.exclusive():
        taken = [x.nbytes for x in jax.block_until_ready(function(*inputs))]
        taken.append(memory.temp_size_in_bytes)
        for value in (float("nan"), 1e30):
            poison([*(2 * taken), rest], value)
            runs.append(jax.device_get(function(*inputs)))
    try:
        want = jax.device_get(truth(case, tuple(inputs)))
        row = judge(case, runs[0], runs[1], want)
    except RuntimeError as error:
        raise RuntimeError(f"seed {seed}: {error}") from None
    return {"seed": seed, **row}


def tables(rows: Mapping[str, Row], small: bool) -> list[Table]:
    """Return the faults, then every case with its errors."""
    lines, right = [], 0
    for name in cases(small):
        row = rows.get(name, {"status": "not run", "why": ""})
        right += row["status"] == "ok"
        cells = [fixed(row.get("errors", {}).get(r), 5) for r in RESULTS]
        worst = max(row.get("worst", {}).values(), default=None)
        verdict = "right" if row["status"] == "ok" else f"{row['status']}: {row['why']}"
        lines.append(
            [name, verdict, *cells, fixed(worst, 4), str(row.get("seed", "-"))]
        )
    limits = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in LIMITS.items())
    return [
        Table(
            title="Attention against the float32 reference",
            text=(
                f"{right} of {len(lines)} cases are right: relative error of each "
                f"array at most {limits}, no position far off, all finite on memory "
                "filled with NaN before, and the same bits in a second run, except dq "
                "of a fused backward pass."
            ),
            header=("case", "verdict", *RESULTS, "worst position", "seed"),
            rows=lines,
        )
    ]

"""Bugs planted in the Mosaic GPU attention kernels, and the case that catches each."""

import concurrent.futures
import dataclasses
import re
from typing import Any

from tests.kernels.attention.mosaic_case import FUNCTION, Case
from tests.kernels.attention.mosaic_cases import name
from tests.kernels.interpreter.runner import CaseError, Pool

TIMEOUT_S = 90.0
"""Time limit of a case, for kernels that hang without being detected as a deadlock."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bug:
    """A change of the kernels' source that the tests must detect."""

    module: str
    """Name of the changed module in the package of the kernels."""
    edits: tuple[tuple[str, str], ...]
    """Pairs of a text, which must occur once (ignoring white space), and its
    replacement."""
    case: Case
    """A small case in which the bug has an effect."""


def submit(pool: Pool, bug: Bug) -> concurrent.futures.Future[Any]:
    """Queue the case of a bug on the changed source."""
    return pool.submit(
        FUNCTION,
        timeout_s=TIMEOUT_S,
        change=(bug.module, bug.edits),
        **dataclasses.asdict(bug.case),
    )


def how_caught(future: concurrent.futures.Future[Any]) -> str | None:
    """Return the check that caught a bug; None if none did.

    Raises:
      CaseError: the changed source is not a working program, which shows nothing.
    """
    try:
        errors = future.result()["errors"]
    except CaseError as error:
        if error.how == "raised":
            raise
        if error.how in ("hung", "died"):
            return error.how
        message = str(error)
        for start, name in _BY_MESSAGE.items():
            if message.startswith(start):
                return name
        # Omit the location, which is a path of this machine, and the ids of objects.
        line = message.splitlines()[0].partition(", called at")[0]
        return f"refused: {re.sub(r' [0-9]{9,}', '', line)[:100]}"
    wrong = {name: error for name, error in errors.items() if not error <= 1}
    if not wrong:
        return None
    return "numbers: " + ", ".join(f"{k} {v:.1f}" for k, v in wrong.items())


_BY_MESSAGE = {
    "RuntimeError: RACE DETECTED": "race",
    "RuntimeError: deadlock": "deadlock",
}


def controls() -> dict[str, Bug]:
    """Return the unchanged source on each case that a bug uses."""
    cases = {
        f"no change: {bug.case.kernel or 'all'}, {name(bug.case)}": bug.case
        for bug in BUGS.values()
    }
    return {key: Bug(module="op", edits=(), case=case) for key, case in cases.items()}


_FORWARD = Case(T=256, kernel="forward", tuning={"forward": {"block": 64}})
"""Four steps through two buffer entries."""
_SMALL = Case(T=64, kernel="forward")
_DRIFT = Case(T=192, kernel="forward", logits="drift", tuning=_FORWARD.tuning)
"""Rows whose later blocks exceed the first one's maximum, or are far below zero."""
_FORWARD_IDLE = Case(T=192, kernel="forward", window=1)
"""The last warpgroup has an idle step after its own."""
_FORWARD_MANY_IDLE = Case(
    T=384, kernel="forward", segments="last", tuning=_FORWARD.tuning
)
"""The last warpgroup skips five blocks after its own, through two buffer entries."""
_WIDE = Case(T=300, kernel="forward", window=210, tuning={"forward": {"block": 256}})
"""More columns than a mask has bits."""
_GROUPS = Case(T=130, N=3, kernel="forward", H=128)
_BATCH = Case(T=72, B=2, segments="sorted", kernel="forward")
_SECTIONS = Case(T=64, N=8, kernel="forward", cached_bytes=6_000)
"""Four sections of two heads; three would be enough, but would leave two heads out."""
_DOCUMENTS = Case(T=72, window=20, segments="sorted")
_WINDOW = Case(T=256, window=100)
_SEGMENTS = Case(T=256, segments="edge", tuning={"forward": {"block": 64}})
_SORTED = Case(T=192, segments="sorted", tuning={"forward": {"block": 64}})
_RAGGED = Case(T=200)
_DQ = Case(T=200, kernel="dq")
_DQ_RING = Case(T=256, kernel="dq", tuning={"dq": {"stages": 3}})
"""Four blocks through three buffer entries."""
_DQ_WINDOW = Case(T=128, kernel="dq", window=20)
_DQ_IDLE = Case(T=384, kernel="dq", segments="last", tuning={"dq": {"stages": 3}})
"""The last warpgroup skips five blocks before its own, through three buffer entries."""
_DQ_SATURATED = Case(T=72, kernel="dq", soft_cap=30.0, logits="saturated")
_DQ_SOFT_CAP = Case(T=64, kernel="dq", soft_cap=2.0)
_DKV = Case(T=192, kernel="dkv", N=2, parts=1)
_DKV_IDLE = Case(T=192, kernel="dkv", N=2, window=20, parts=1)
"""Warpgroups have idle steps after their own, and another head after these."""
_DKV_GROUPS = Case(T=64, kernel="dkv", N=4, K=2, parts=1)
_DKV_SPLIT = Case(T=64, kernel="dkv", N=8, K=2, parts=2)
"""Two parts of two query heads, for each of two key heads."""
_DKV_RING = Case(T=256, kernel="dkv", N=2, parts=1, tuning={"dkv": {"stages": 2}})
"""Twice four blocks through two buffer entries."""
_DKV_WINDOW = Case(T=192, kernel="dkv", window=50)
_DKV_SOFT_CAP = Case(T=64, kernel="dkv", soft_cap=2.0)
_FUSED = Case(T=256, H=128, kernel="fused", tuning={"fused": {"stages": 2}})
"""Two tiles that add to the same queries; four blocks through two buffer entries."""
_FUSED_WINDOW = Case(T=192, H=128, kernel="fused", window=20)
_FUSED_GROUPS = Case(T=64, H=128, kernel="fused", N=4, K=2)
_FUSED_SOFT_CAP = Case(T=64, H=128, kernel="fused", soft_cap=2.0)


def _bug(module: str, case: Case, *edits: tuple[str, str]) -> Bug:
    return Bug(module=module, edits=edits, case=case)


# A statement is removed by replacing it with "None", which does nothing.
_FORWARD_BUGS = {
    "forward: first slot of K released before the scores are made": _bug(
        "forward",
        _FORWARD,
        (
            "scores = pl.run_scoped(first_scores, scores_type) "
            "tiles.arrive(k_free, 0, stages)",
            "tiles.arrive(k_free, 0, stages); "
            "scores = pl.run_scoped(first_scores, scores_type)",
        ),
    ),
    "forward: slot of V released before its product is done": _bug(
        "forward",
        _FORWARD,
        (
            "plgpu.wgmma_wait(0) tiles.arrive(v_free, step - 1, stages)",
            "tiles.arrive(v_free, step - 1, stages); plgpu.wgmma_wait(0)",
        ),
    ),
    "forward: K read without waiting for it": _bug(
        "forward",
        _FORWARD,
        ("tiles.wait(k_full, step, stages) plgpu.barrier_wait(", "plgpu.barrier_wait("),
    ),
    "forward: V read without waiting for it": _bug(
        "forward", _FORWARD, ("tiles.wait(v_full, step - 1, stages)", "None")
    ),
    "forward: results stored without a fence": _bug(
        "forward", _FORWARD, ("plgpu.commit_smem()", "None")
    ),
    "forward: kernel ends while results are stored": _bug(
        "forward",
        _FORWARD,
        ("plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "None"),
    ),
    "forward: first turn not given": _bug(
        "forward",
        _FORWARD,
        ("pl.when(wg == wgs - 1)(lambda: plgpu.barrier_arrive(turns.at[0]))", "None"),
    ),
    "forward: turn not passed on": _bug(
        "forward", _FORWARD, ("tiles.arrive(turns, wg + 1, wgs) return", "return")
    ),
    "forward: scores read before they are there": _bug(
        "forward", _FORWARD, ("_load(acc, wait_n=1)", "_load(acc, wait_n=2)")
    ),
    "forward: sum not scaled to the new maximum": _bug(
        "forward", _FORWARD, ("* tiles.along_rows(shrink, out_type.shape)", "")
    ),
    "forward: log-sum-exp to the base 2": _bug(
        "forward", _FORWARD, ("+ p.offset) / tiles.LOG2_E", "+ p.offset)")
    ),
    "forward: last block left out": _bug(
        "forward",
        _FORWARD,
        (
            "plgpu.wgmma(out_acc, probs, v_s.at[tiles.slot(last, stages)])",
            "None",
        ),
    ),
    "forward: last V read without waiting for it": _bug(
        "forward", _SMALL, ("tiles.wait(v_full, last, stages)", "None")
    ),
    "forward: copy of the log-sum-exp in no group": _bug(
        "forward",
        _SMALL,
        ("lse_s.at[wg], lse_rows)", "lse_s.at[wg], lse_rows, commit_group=False)"),
    ),
    "forward: log-sum-exp of all warpgroups in one place": _bug(
        "forward", _FORWARD, ("lse_s[wg] =", "lse_s[0] =")
    ),
    "forward: maximum of the first block kept": _bug(
        "forward",
        _DRIFT,
        (
            "shrink = jnp.exp2(row_max - new_max)",
            "new_max = jnp.where(row_max > -1e29, row_max, new_max); "
            "shrink = jnp.exp2(row_max - new_max)",
        ),
    ),
    "forward: first maximum 0": _bug(
        "forward", _DRIFT, ("_LOWEST = -1e30", "_LOWEST = 0.0")
    ),
    "forward: first maximum infinite": _bug(
        "forward", _FORWARD, ("_LOWEST = -1e30", '_LOWEST = -float("inf")')
    ),
    "forward: idle warpgroup keeps V": _bug(
        "forward",
        _FORWARD_IDLE,
        (
            "tiles.wait(v_full, step, stages) tiles.arrive(v_free, step, stages)",
            "tiles.wait(v_full, step, stages)",
        ),
    ),
    "forward: idle warpgroup waits for no turn": _bug(
        "forward",
        _FORWARD_IDLE,
        (
            "plgpu.barrier_wait(turns.at[wg]) tiles.arrive(turns, wg + 1, wgs)",
            "None",
        ),
    ),
    "forward: idle warpgroup releases V unseen": _bug(
        "forward",
        _FORWARD_MANY_IDLE,
        (
            "tiles.wait(v_full, step, stages) tiles.arrive(v_free, step, stages)",
            "tiles.arrive(v_free, step, stages)",
        ),
    ),
    "forward: keys of another head": _bug(
        "forward", _GROUPS, ("tiles.floor_div(n, p.group)", "n")
    ),
    "forward: documents of another row of the batch": _bug(
        "forward", _BATCH, ("(first, last), b)", "(first, last), 0)")
    ),
}

_SHARED_BUGS = {
    "second half of a wide block masked like the first": _bug(
        "masks", _WIDE, ("e if e is None else e - start for e", "e for e")
    ),
    "last eighth of a row's columns not summed": _bug(
        "tiles",
        _FORWARD,
        ("range(0, x.shape[1], 8)", "range(0, x.shape[1] - 8, 8)"),
    ),
    "more sections than divide the heads": _bug(
        "tiles", _SECTIONS, ("if rows % n == 0 and (", "if (")
    ),
    "slots counted anew for each head": _bug(
        "tiles", _DKV_RING, ("total = g * steps + step", "total = step")
    ),
    "queries beyond the end visited": _bug(
        "masks",
        Case(T=72),
        (
            "jnp.minimum(self.at(j0 + rows - 1) + 1, self._p.seq_len)",
            "self.at(j0 + rows - 1) + 1",
        ),
    ),
    "blocks before the first visited": _bug(
        "masks",
        Case(T=256, window=150, kernel="dq"),
        ("if self._ref is not None else jnp.maximum(first, 0)", ""),
    ),
    "slope of a saturated soft cap as 1 - x * x": _bug(
        "tiles",
        _DQ_SATURATED,
        (
            "-4.0 * capped * (1.0 + capped)",
            "1.0 - (1.0 + 2.0 * capped) * (1.0 + 2.0 * capped)",
        ),
    ),
    "delta of another head": _bug(
        "op",
        Case(T=64, N=2, kernel="dq"),
        ("delta = jnp.pad(delta,", "delta = jnp.pad(delta[:, ::-1],"),
    ),
    "documents without the window": _bug(
        "op",
        _DOCUMENTS,
        ("jnp.minimum(ends, j + (problem.reach - 1))", "ends"),
    ),
    "last document ends one early": _bug(
        "op",
        _DOCUMENTS,
        (
            "beyond = problem.padded_len - 1",
            "beyond = problem.seq_len - 2",
        ),
    ),
    "window one too long": _bug(
        "masks",
        _WINDOW,
        ("return position - (self._p.reach - 1)", "return position - self._p.reach"),
    ),
    "window one too short": _bug(
        "masks",
        _WINDOW,
        (
            "return position - (self._p.reach - 1)",
            "return position - (self._p.reach - 2)",
        ),
    ),
    "window of keys one too long": _bug(
        "masks",
        _WINDOW,
        ("return position + (self._p.reach - 1)", "return position + self._p.reach"),
    ),
    "next key seen": _bug(
        "masks",
        _WINDOW,
        ("clip(last, -1, columns - 1), 8)", "clip(last, -1, columns - 1), 9)"),
    ),
    "a column before the first seen": _bug(
        "masks", _WINDOW, ("clip(first, 0, columns), 7)", "clip(first, 0, columns), 6)")
    ),
    "earlier documents seen": _bug(
        "forward",
        _SORTED,
        ("edges = keys.rows(i0) if", "edges = 0 * keys.rows(i0) if"),
    ),
    "first block of keys left out": _bug(
        "masks",
        _WINDOW,
        ("low=floor_div(first, block)", "low=ceil_div(first, block)"),
    ),
    "last block of queries left out": _bug(
        "masks",
        _WINDOW,
        ("high=ceil_div(end, block)", "high=floor_div(end, block)"),
    ),
    "tail of the sequence left out": _bug(
        "masks",
        _RAGGED,
        ("high=ceil_div(end, block)", "high=floor_div(end, block)"),
    ),
    "no mask on the diagonal": _bug(
        "masks",
        Case(T=256, tuning={"forward": {"block": 64}}, kernel="forward"),
        (
            "floor_div(self.near_at(i0) + 1, block)",
            "floor_div(self.near_at(i0) + block, block)",
        ),
    ),
    "no mask at the edge of the window": _bug(
        "masks",
        _WINDOW,
        (
            "jnp.minimum(ceil_div(last, block)",
            "jnp.minimum(floor_div(last, block)",
        ),
    ),
    "slots filled before they are released": _bug(
        "tiles",
        _FORWARD,
        (
            "pl.when(total >= stages)(lambda free=free: wait(free, total, stages))",
            "None",
        ),
    ),
    "slots filled one round before they are released": _bug(
        "tiles", _FORWARD, ("pl.when(total >= stages)", "pl.when(total > stages)")
    ),
    "first block of a document left out": _bug(
        "op",
        _SEGMENTS,
        ("jnp.where(begins, i, 0)", "jnp.where(begins, i + 1, 0)"),
    ),
    "last block of a document left out": _bug(
        "op",
        _SEGMENTS,
        ("jnp.where(is_last, j, beyond)", "jnp.where(is_last, j - 1, beyond)"),
    ),
    "documents begin where they end": _bug(
        "op", _SEGMENTS, ("jnp.where(begins, i, 0)", "jnp.where(begins, i - 1, 0)")
    ),
}

_DQ_BUGS = {
    "dq: first scores of the tile's first block": _bug(
        "dq", _DQ_WINDOW, ("own.low - low)", "0)")
    ),
    "dq: idle warpgroup releases V unseen": _bug(
        "dq",
        _DQ_IDLE,
        (
            "tiles.wait(v_full, step, stages) plgpu.wgmma_wait(0)",
            "plgpu.wgmma_wait(0)",
        ),
    ),
    "dq: result in no group": _bug(
        "dq",
        _DQ,
        ("dq_g.at[b, rows, n])", "dq_g.at[b, rows, n], commit_group=False)"),
    ),
    "dq: window not masked in the last block": _bug(
        "dq",
        _DQ_WINDOW,
        ("edges=edges, is_last=True", "edges=(None, edges[1]), is_last=True"),
    ),
    "dq: slot of K released before dq is added to": _bug(
        "dq",
        _DQ_RING,
        (
            "d_probs = plgpu.wgmma_accumulator_load(dp_acc, wait_n=after) "
            "tiles.release_before(k_free, step, stages)",
            "tiles.release_before(k_free, step, stages); "
            "d_probs = plgpu.wgmma_accumulator_load(dp_acc, wait_n=after)",
        ),
    ),
    "dq: slot of the last K never released": _bug(
        "dq", _DQ, ("tiles.release_before(k_free, high - low, stages)", "None")
    ),
    "dq: slot of V never released": _bug(
        "dq", _DQ, ("tiles.arrive(v_free, step, stages) d_scores", "d_scores")
    ),
    "dq: V read without waiting for it": _bug(
        "dq", _DQ, ("tiles.wait(v_full, step, stages) if is_last", "if is_last")
    ),
    "dq: K of the next block read without waiting for it": _bug(
        "dq", _DQ, ("tiles.wait(k_full, step + 1, stages)", "None")
    ),
    "dq: product read before it is there": _bug(
        "dq", _DQ, ("(dp_acc, wait_n=after)", "(dp_acc, wait_n=after + 1)")
    ),
    "dq: scores of the next block read before they are there": _bug(
        "dq", _DQ, ("(s_acc, wait_n=1)", "(s_acc, wait_n=2)")
    ),
    "dq: no mask on the diagonal": _bug(
        "dq", _DQ, ("edges=edges, is_last=True", "edges=(None, None), is_last=True")
    ),
    "dq: results stored without a fence": _bug(
        "dq", _DQ, ("plgpu.commit_smem()", "None")
    ),
    "dq: not scaled": _bug("dq", _DQ, ("dq * p.scale", "dq")),
    "dq: delta added": _bug("dq", _DQ, ("d_probs - delta", "d_probs + delta")),
    "dq: soft cap without its derivative": _bug(
        "dq", _DQ_SOFT_CAP, ("probs = p.times_slope(probs, capped)", "None")
    ),
    "dq: idle warpgroup releases nothing": _bug(
        "dq",
        _DQ_WINDOW,
        (
            "plgpu.wgmma_wait(0) tiles.release_before(k_free, step, stages)",
            "plgpu.wgmma_wait(0)",
        ),
    ),
}

_DKV_BUGS = {
    "dkv: loader begins at the first block": _bug(
        "dkv", _DKV, ("pl.ds((low + step) * block", "pl.ds(step * block")
    ),
    "dkv: log-sum-exp of another query head": _bug(
        "dkv", _DKV_GROUPS, ("lse_g.at[b, n, rows]", "lse_g.at[b, kv, rows]")
    ),
    "dkv: window not masked on the diagonal": _bug(
        "dkv",
        _DKV_WINDOW,
        ("own.parts(edges, ", "own.parts((edges[0], None), "),
    ),
    "dkv: idle warpgroup does not wait for Q": _bug(
        "dkv",
        _DKV_RING,
        (
            "tiles.wait(q_full, step, stages) tiles.wait(do_full, step, stages) plgpu",
            "tiles.wait(do_full, step, stages); plgpu",
        ),
    ),
    "dkv: dv in no group": _bug(
        "dkv",
        _DKV_SOFT_CAP,
        ("v_s.at[wg], dv_rows)", "v_s.at[wg], dv_rows, commit_group=False)"),
    ),
    "dkv: dk and dv exchanged": _bug(
        "dkv",
        _DKV,
        ("dk_acc[...], dv_acc[...]", "dv_acc[...], dk_acc[...]"),
    ),
    "dkv: no fence before lse and delta are overwritten": _bug(
        "dkv", _DKV, ("plgpu.commit_smem() n, rows", "n, rows")
    ),
    "dkv: slot released before its products are done": _bug(
        "dkv",
        _DKV,
        (
            "scores = pl.run_scoped(raw_scores, scores_type) "
            "tiles.release_before(free, step, stages)",
            "tiles.release_before(free, step, stages); "
            "scores = pl.run_scoped(raw_scores, scores_type)",
        ),
    ),
    "dkv: idle warpgroup releases before its products are done": _bug(
        "dkv", _DKV_IDLE, ("plgpu.wgmma_wait(0)", "None")
    ),
    "dkv: dO read without waiting for it": _bug(
        "dkv",
        _DKV,
        (
            "tiles.release_before(free, step, stages) "
            "tiles.wait(do_full, step, stages)",
            "tiles.release_before(free, step, stages)",
        ),
    ),
    "dkv: product read before it is there": _bug(
        "dkv", _DKV, ("_load(acc, wait_n=1)", "_load(acc, wait_n=2)")
    ),
    "dkv: not scaled": _bug(
        "dkv", _DKV, ("k_s[wg] = (dk * p.scale)", "k_s[wg] = (dk)")
    ),
    "dkv: delta added": _bug("dkv", _DKV, ("(d_probs - column(", "(d_probs + column(")),
    "dkv: soft cap without its derivative": _bug(
        "dkv", _DKV_SOFT_CAP, ("probs = p.times_slope(probs, capped)", "None")
    ),
    "dkv: only the first query head of a group": _bug(
        "dkv", _DKV, ("lax.fori_loop(0, heads, head", "lax.fori_loop(0, 1, head")
    ),
    "dkv: query heads of another group": _bug(
        "dkv", _DKV_GROUPS, ("share * heads + g", "share + p.kv_heads * g")
    ),
    "dkv: every part takes the first query heads of its group": _bug(
        "dkv", _DKV_SPLIT, ("share * heads + g", "kv * p.group + g")
    ),
    "dkv: parts of other key heads": _bug(
        "dkv",
        _DKV_SPLIT,
        ("kv, part = tiles.floor_div(share, parts)", "kv, part = lax.rem(share, 2)"),
    ),
    "dkv: the heaviest tile again and again": _bug(
        "dkv",
        Case(T=192, kernel="dkv", segments="sorted"),
        ("t = tiles_g[t]", "t = tiles_g[0]"),
    ),
    "dkv: parts in one place": _bug(
        "dkv", _DKV_SPLIT, ("dk_g[part, b, rows, kv]", "dk_g[0, b, rows, kv]")
    ),
    "dkv: rows of a part in another order": _bug(
        "dkv",
        Case(T=128, kernel="dkv", N=2, parts=2),
        (
            "dv_g[part, b, rows, kv]",
            "dv_g[part, b, pl.ds((wgs - 1 - wg) * ROWS, ROWS), kv]",
        ),
    ),
    "dkv: a part not added": _bug(
        "dkv", _DKV_SPLIT, ("in range(parts.shape[0])", "in range(1, parts.shape[0])")
    ),
    "dkv: sum of parts not scaled": _bug(
        "dkv",
        _DKV_SPLIT,
        ("(dk * p.scale).astype(k.dtype), dv", "dk.astype(k.dtype), dv"),
    ),
    "dkv: loader walks the whole group for a part": _bug(
        "dkv", _DKV_SPLIT, ("tiles.fill_rings(heads", "tiles.fill_rings(p.group")
    ),
    "dkv: idle warpgroup releases nothing": _bug(
        "dkv",
        _DKV_IDLE,
        ("tiles.release_before(free, step, stages) return step + 1", "return step + 1"),
    ),
}

_FUSED_BUGS = {
    "fused: no fence before gradients of scores are shared": _bug(
        "fused",
        _FUSED,
        ("plgpu.commit_smem() meet()", "meet()"),
    ),
    "fused: gradients of scores read without meeting": _bug(
        "fused",
        _FUSED,
        (
            "plgpu.commit_smem() meet()",
            "plgpu.commit_smem()",
        ),
    ),
    "fused: one buffer of gradients of scores": _bug(
        "fused", _FUSED, ("_BUFFERS = 2", "_BUFFERS = 1")
    ),
    "fused: keys overwritten while the other warpgroup reads them": _bug(
        "fused", _FUSED, ("sums_type, sums_type) meet()", "sums_type, sums_type)")
    ),
    "fused: keys read without waiting for them": _bug(
        "fused", _FUSED, ("plgpu.barrier_wait(rows_full)", "None")
    ),
    "fused: dq overwritten while it is added": _bug(
        "fused",
        _FUSED,
        (
            "plgpu.wait_smem_to_gmem(0, wait_read_only=True) dq_s[me] = dq",
            "dq_s[me] = dq",
        ),
    ),
    "fused: dq added without a fence": _bug(
        "fused", _FUSED, ("dq_s[me] = dq plgpu.commit_smem()", "dq_s[me] = dq")
    ),
    "fused: dq stored, not added": _bug(
        "fused", _FUSED, (', reduction_op="add")', ")")
    ),
    "fused: dq in the columns of the other warpgroup": _bug(
        "fused", _FUSED, ("pl.ds(me * width, width)", "pl.ds((1 - me) * width, width)")
    ),
    "fused: dq of one warpgroup's keys alone": _bug(
        "fused", _FUSED, ("for u in range(wgs)", "for u in range(1)")
    ),
    "fused: dq from keys that are not transposed": _bug(
        "fused", _FUSED, ("ds_s.at[buffer, u].T", "ds_s.at[buffer, u]")
    ),
    "fused: sums of dq not cleared": _bug(
        "fused", _FUSED, ("jnp.zeros(q.shape", "jnp.ones(q.shape")
    ),
    "fused: dq not scaled": _bug("fused", _FUSED, ("sums[...] * p.scale", "sums[...]")),
    "fused: dk not scaled": _bug("fused", _FUSED, ("part * p.scale", "part")),
    "fused: results stored without a fence": _bug(
        "fused",
        _FUSED,
        ("dv.astype(q.dtype) plgpu.commit_smem()", "dv.astype(q.dtype)"),
    ),
    "fused: kernel ends while results are stored": _bug(
        "fused",
        _FUSED,
        (
            "dv_g.at[b, rows, kv]) plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
            "dv_g.at[b, rows, kv])",
        ),
    ),
    "fused: slot released before its products are done": _bug(
        "fused",
        _FUSED,
        (
            "dq = pl.run_scoped(d_queries, tiles.accumulator(width)) "
            "tiles.arrive(free, step, stages)",
            "tiles.arrive(free, step, stages); "
            "dq = pl.run_scoped(d_queries, tiles.accumulator(width))",
        ),
    ),
    "fused: slot never released": _bug(
        "fused",
        _FUSED,
        ("tiles.arrive(free, step, stages) add(dq, n, qb)", "add(dq, n, qb)"),
    ),
    "fused: dO read without waiting for it": _bug(
        "fused", _FUSED, ("tiles.wait(do_full, step, stages)", "None")
    ),
    "fused: product read before it is there": _bug(
        "fused", _FUSED, ("_load(acc, wait_n=1)", "_load(acc, wait_n=2)")
    ),
    "fused: delta added": _bug(
        "fused", _FUSED, ("(d_probs - column(", "(d_probs + column(")
    ),
    "fused: no mask before the diagonal": _bug(
        "fused",
        _FUSED,
        ("functools.partial(edges, True)", "lambda: (None, None)"),
    ),
    "fused: no mask after the window": _bug(
        "fused",
        _FUSED_WINDOW,
        ("functools.partial(edges, False)", "lambda: (None, None)"),
    ),
    "fused: query heads of another group": _bug(
        "fused", _FUSED_GROUPS, ("kv * p.group + g, qb", "kv + p.kv_heads * g, qb")
    ),
    "fused: soft cap without its derivative": _bug(
        "fused", _FUSED_SOFT_CAP, ("probs = p.times_slope(probs, capped)", "None")
    ),
}

_DKV_WIDE = Case(T=192, kernel="dkv", H=256, N=2)
"""Three blocks and two heads through two buffer entries and two score buffers."""

_DKV_WIDE_BUGS = {
    "dkv_wide: operands given without a fence": _bug(
        "dkv_wide",
        _DKV_WIDE,
        ("plgpu.commit_smem() plgpu.barrier_arrive", "plgpu.barrier_arrive"),
    ),
    "dkv_wide: operands given before they are written": _bug(
        "dkv_wide",
        _DKV_WIDE,
        (
            "pl.run_scoped(scores, scores_type, scores_type)",
            "plgpu.barrier_arrive(exchange); "
            "pl.run_scoped(scores, scores_type, scores_type)",
        ),
        (
            "plgpu.barrier_arrive(exchange) plgpu.barrier_wait(exchange)",
            "plgpu.barrier_wait(exchange)",
        ),
    ),
    "dkv_wide: one buffer for what is given": _bug(
        "dkv_wide", _DKV_WIDE, ("tiles.slot(step, _HALVES)", "tiles.slot(step, 1)")
    ),
    "dkv_wide: scores read before they are there": _bug(
        "dkv_wide", _DKV_WIDE, ("wait_n=_HALVES)", "wait_n=2 * _HALVES)")
    ),
    "dkv_wide: the other half of the queries": _bug(
        "dkv_wide", _DKV_WIDE, ("do_s.at[s, half, me].T", "do_s.at[s, half, 1 - me].T")
    ),
    "dkv_wide: the other half of the width": _bug(
        "dkv_wide", _DKV_WIDE, ("q_s.at[s, me, half])", "q_s.at[s, 1 - me, half])")
    ),
    "dkv_wide: both halves masked like the first": _bug(
        "dkv_wide", _DKV_WIDE, ("qb * block + wg * rows", "qb * block")
    ),
}

_FULL = Case(T=130, causal=False)
_FULL_WINDOW = Case(T=77, causal=False, window=20)
_FULL_DOCUMENTS = Case(T=150, causal=False, segments="sorted")
_PREFIX = Case(T=150, prefixes=(70,))

_NEAR_EDGE_BUGS = {
    "keys beyond the end are seen": _bug(
        "masks",
        _FULL,
        (
            "jnp.minimum(position + (self._p.reach - 1), num_keys - 1)",
            "position + (self._p.reach - 1)",
        ),
    ),
    "keys beyond the end are seen by the last document": _bug(
        "op",
        _FULL_DOCUMENTS,
        (
            "jnp.minimum(i + (problem.reach - 1), num_keys - 1)",
            "i + (problem.reach - 1)",
        ),
    ),
    "queries beyond the end see nothing": _bug(
        "masks",
        Case(T=77, causal=False, window=1),
        ("return jnp.maximum(last, position)", "return last"),
    ),
    "window one too long towards the end": _bug(
        "masks",
        _FULL_WINDOW,
        ("jnp.minimum(position + (self._p.reach - 1),", "jnp.minimum(position + 20,"),
    ),
    "first query of a window one too late": _bug(
        "masks",
        _FULL_WINDOW,
        ("jnp.maximum(position - (self._p.reach - 1), 0)", "position - 18"),
    ),
    "documents see those that follow": _bug(
        "op",
        _FULL_DOCUMENTS,
        ("last = jnp.minimum(last, _ends(problem, segment_ids)[0])", "pass"),
    ),
    "prefix one too short for queries": _bug(
        "op", _PREFIX, ("prefix[:, None] - 1", "prefix[:, None] - 2")
    ),
    "prefix one too long for keys": _bug(
        "op", _PREFIX, ("j < prefix[:, None]", "j <= prefix[:, None]")
    ),
    "dq: last block not masked": _bug(
        "dq",
        Case(T=128, causal=False, window=50, kernel="dq"),
        ("share(end, scores, edges=edges", "share(end, scores, edges=(None, None)"),
    ),
    "dq: last block taken twice": _bug(
        "dq",
        Case(T=128, causal=False, segments="edge", kernel="dq"),
        ("jnp.minimum(x, end) for x", "x for x"),
    ),
    "forward: last keys masked in the first block alone": _bug(
        "forward",
        Case(T=256, causal=False, window=70, kernel="forward"),
        ("(keys.is_diagonal and block % tile == 0)", "True"),
    ),
}

BUGS = (
    _FORWARD_BUGS
    | _SHARED_BUGS
    | _DQ_BUGS
    | _DKV_BUGS
    | _DKV_WIDE_BUGS
    | _FUSED_BUGS
    | _NEAR_EDGE_BUGS
)
"""Name -> bug. Once a buffer entry is released, the loading warpgroup may overwrite
it."""

"""Bugs planted into the Mosaic GPU attention kernels, and how each is caught."""

import concurrent.futures
import dataclasses
from typing import Any

from tests.kernels.attention.mosaic_case import FUNCTION, Case
from tests.kernels.attention.mosaic_cases import name
from tests.kernels.interpreter.runner import CaseError, Pool

TIMEOUT_S = 90.0
"""For a kernel that hangs in a way that the interpreter does not notice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bug:
    """A change of the source that no test may let through."""

    module: str
    """Of the package of the kernels."""
    edits: tuple[tuple[str, str], ...]
    """Text, which must occur once (white space aside), and its replacement."""
    case: Case
    """Small, and such that the bug matters."""


def submit(pool: Pool, bug: Bug) -> concurrent.futures.Future[Any]:
    """Queue the case of a bug on the changed source."""
    return pool.submit(
        FUNCTION,
        timeout_s=TIMEOUT_S,
        change=(bug.module, bug.edits),
        **dataclasses.asdict(bug.case),
    )


def how_caught(future: concurrent.futures.Future[Any]) -> str | None:
    """Say what gave a bug away, or None where nothing did.

    Raises:
      CaseError: the changed source is no working program; that shows nothing.
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
        # Without the place, which is a path of this machine.
        return f"refused: {message.splitlines()[0].partition(', called at')[0][:100]}"
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
"""Four steps through two slots."""
_WINDOW = Case(T=256, window=100)
_SEGMENTS = Case(T=256, segments="edge", tuning={"forward": {"block": 64}})
_SORTED = Case(T=192, segments="sorted", tuning={"forward": {"block": 64}})
_RAGGED = Case(T=200)
_DQ = Case(T=200, kernel="dq")
_DQ_RING = Case(T=256, kernel="dq", tuning={"dq": {"stages": 3}})
"""Four blocks through three slots."""
_DQ_WINDOW = Case(T=128, kernel="dq", window=20)
_DQ_SOFT_CAP = Case(T=64, kernel="dq", soft_cap=2.0)
_DKV = Case(T=192, kernel="dkv", N=2)
_DKV_IDLE = Case(T=192, kernel="dkv", N=2, window=20)
"""Warpgroups have idle steps after their own, and another head after these."""
_DKV_GROUPS = Case(T=64, kernel="dkv", N=4, K=2)
_DKV_SOFT_CAP = Case(T=64, kernel="dkv", soft_cap=2.0)


def _bug(module: str, case: Case, *edits: tuple[str, str]) -> Bug:
    return Bug(module=module, edits=edits, case=case)


# A statement is taken out by "None", an expression that does nothing.
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
}

_SHARED_BUGS = {
    "window one too long": _bug(
        "tiles",
        _WINDOW,
        ("return position - (self._p.reach - 1)", "return position - self._p.reach"),
    ),
    "window one too short": _bug(
        "tiles",
        _WINDOW,
        (
            "return position - (self._p.reach - 1)",
            "return position - (self._p.reach - 2)",
        ),
    ),
    "window of keys one too long": _bug(
        "tiles",
        _WINDOW,
        ("return position + (self._p.reach - 1)", "return position + self._p.reach"),
    ),
    "next key seen": _bug(
        "tiles",
        _WINDOW,
        ("clip(last, -1, columns - 1), 8)", "clip(last, -1, columns - 1), 9)"),
    ),
    "a column before the first seen": _bug(
        "tiles", _WINDOW, ("clip(first, 0, columns), 7)", "clip(first, 0, columns), 6)")
    ),
    "earlier documents seen": _bug(
        "forward",
        _SORTED,
        ("edges = keys.rows(i0) if", "edges = 0 * keys.rows(i0) if"),
    ),
    "first block of keys left out": _bug(
        "tiles",
        _WINDOW,
        ("low=floor_div(first, block)", "low=ceil_div(first, block)"),
    ),
    "last block of queries left out": _bug(
        "tiles",
        _WINDOW,
        ("high=ceil_div(end, block)", "high=floor_div(end, block)"),
    ),
    "tail of the sequence left out": _bug(
        "tiles",
        _RAGGED,
        ("high=ceil_div(end, block)", "high=floor_div(end, block)"),
    ),
    "no mask on the diagonal": _bug(
        "tiles",
        Case(T=256, tuning={"forward": {"block": 64}}, kernel="forward"),
        ("floor_div(i0 + 1, block)", "floor_div(i0 + block, block)"),
    ),
    "no mask at the edge of the window": _bug(
        "tiles",
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
        ("jnp.where(is_last, j, problem", "jnp.where(is_last, j - 1, problem"),
    ),
    "documents begin where they end": _bug(
        "op", _SEGMENTS, ("jnp.where(begins, i, 0)", "jnp.where(begins, i - 1, 0)")
    ),
}

_DQ_BUGS = {
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
    "dkv: not scaled": _bug("dkv", _DKV, ("dk * p.scale", "dk")),
    "dkv: delta added": _bug("dkv", _DKV, ("(d_probs - column(", "(d_probs + column(")),
    "dkv: soft cap without its derivative": _bug(
        "dkv", _DKV_SOFT_CAP, ("probs = p.times_slope(probs, capped)", "None")
    ),
    "dkv: only the first query head of a group": _bug(
        "dkv", _DKV, ("lax.fori_loop(0, p.group, head", "lax.fori_loop(0, 1, head")
    ),
    "dkv: query heads of another group": _bug(
        "dkv", _DKV_GROUPS, ("kv * p.group + g", "kv + p.kv_heads * g")
    ),
    "dkv: idle warpgroup releases nothing": _bug(
        "dkv",
        _DKV_IDLE,
        ("tiles.release_before(free, step, stages) return step + 1", "return step + 1"),
    ),
}

BUGS = _FORWARD_BUGS | _SHARED_BUGS | _DQ_BUGS | _DKV_BUGS
"""Name -> bug. Once a slot is released, the loading warpgroup may overwrite it."""

"""The cases on which the Mosaic GPU attention kernels are compared with the reference.

Not every combination: each value of each option occurs, with both head widths and both
dtypes, and those that meet in the kernels (window and length, segments and window,
groups and window) occur together. Lengths stay small: the cost is per block.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.kernels.attention.mosaic_case import Case, Segments

BLOCK = 64
"""The smallest tile; the other tiles are twice as long."""
FEW_SLOTS = {"forward": {"block": BLOCK}, "dq": {"stages": 3}, "dkv": {"stages": 2}}
"""The fewest buffer entries that a kernel needs: beyond 192 positions each ring buffer
reuses one."""


def _cases() -> list[Case]:
    below = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 101)
    above = (2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 197, 10**6)
    kinds: tuple[Segments, ...] = ("sorted", "edge", "tokens")
    return [
        # Windows around the sizes of tiles, odd ones, none.
        *(Case(T=192, window=window) for window in below),
        *(Case(T=256, window=window) for window in above),
        Case(T=256),
        Case(T=192, window=BLOCK + 1, H=128),
        Case(T=192, window=1, H=128, dtype="float16"),
        Case(T=320, H=128),
        # As long as the sequence, and one off.
        *(Case(T=128, window=window, dtype="float16") for window in (127, 128, 129)),
        # Lengths: less than a tile, one off a tile, no multiple of anything.
        *(Case(T=T) for T in (1, 7, 63, 65, 129)),
        *(Case(T=T, window=50, H=128) for T in (31, 127, 203)),
        Case(T=257, window=70, dtype="float16"),
        # Grouped heads, a single key head, a batch.
        Case(T=130, N=4, K=2, window=90),
        Case(T=130, N=3, K=1, H=128, dtype="float16"),
        Case(T=100, N=2, K=2, B=2, window=33, dtype="float16"),
        # A group as a whole, in parts of several query heads, and with few heads as
        # shipped: a part for each.
        Case(T=130, N=4, K=2, window=90, parts=1),
        Case(T=130, N=4, parts=2, H=128, dtype="float16"),
        Case(T=100, N=8, K=2, B=2, parts=2, segments="sorted"),
        Case(T=100, N=4, window=40, segments="edge", soft_cap=2.0),
        # Sections: four of two heads each (all heads walk as much as 2.8 sections may),
        # for dkv one for each key head of a row.
        Case(T=130, N=4, K=2, B=2, window=90, cached_bytes=50_000),
        # Widths that few models have.
        Case(T=130, H=32, window=50),
        Case(T=100, H=96, segments="sorted", dtype="float16"),
        # Wide heads, and values of another width.
        Case(T=200, H=256),
        Case(T=130, H=256, N=2, window=50, segments="sorted", dtype="float16"),
        Case(T=150, H=256, soft_cap=2.0, segments="edge"),
        Case(T=200, H=192),
        Case(T=130, H=192, N=2, window=50, segments="sorted", dtype="float16"),
        Case(T=100, H=192, soft_cap=2.0),
        # What follows is seen: everywhere, within a window, a document, a prefix. Ends
        # that blocks and copies of 8 divide, and others.
        *(Case(T=T, causal=False) for T in (128, 130, 203)),
        *(
            Case(T=T, causal=False, window=w)
            for T, w in ((203, 1), (192, 70), (77, 20))
        ),
        Case(T=150, causal=False, segments="sorted", N=2, dtype="float16"),
        Case(T=192, causal=False, segments="edge", window=40, soft_cap=2.0, H=128),
        Case(T=193, causal=False, H=256, segments="sorted"),
        Case(T=130, causal=False, H=192, window=50, dtype="float16"),
        Case(T=200, prefixes=(70,)),
        Case(T=150, prefixes=(0, 150), B=2, N=2, window=40, H=128),
        Case(T=140, prefixes=(100, 500), B=2, segments="sorted", dtype="float16"),
        Case(T=130, prefixes=(90,), H=256),
        # Documents.
        *(Case(T=192, segments=kind) for kind in kinds),
        *(Case(T=150, segments=kind, window=40, H=128, B=2) for kind in kinds[:2]),
        Case(T=201, segments="sorted", window=65, N=2, dtype="float16"),
        Case(T=90, segments="tokens", window=1, dtype="float16"),
        # Soft cap and scale.
        Case(T=150, soft_cap=1.5),
        Case(T=210, soft_cap=20.0, window=64, segments="sorted", H=128),
        Case(T=100, soft_cap=2.0, N=2, dtype="float16", scale=0.5),
        Case(T=72, soft_cap=30.0, logits="saturated"),
        Case(T=136, soft_cap=30.0, logits="saturated", window=70, H=128),
        # Rows of large logits, of both signs, that rise or fall along the keys.
        Case(T=256, logits="drift"),
        Case(T=200, logits="drift", dtype="float16", tuning=FEW_SLOTS),
        Case(T=256, logits="drift", window=150, H=128, tuning=FEW_SLOTS),
        # Buffer entries that are reused.
        Case(T=256, N=2, tuning=FEW_SLOTS),
        Case(T=260, segments="sorted", H=128, tuning=FEW_SLOTS),
        # A warpgroup skips five blocks that the others of its tile see.
        Case(T=384, segments="last", tuning=FEW_SLOTS),
        # A block of more columns than a mask has bits.
        Case(T=300, window=210, segments="sorted", tuning={"forward": {"block": 256}}),
        # The fused backward kernel, which is built for one width.
        *(
            Case(T=T, H=128, kernel="fused", window=window)
            for T, window in ((1, None), (63, 5), (129, 64), (200, 65), (256, 1))
        ),
        Case(T=320, H=128, kernel="fused", dtype="float16"),
        Case(T=203, H=128, kernel="fused", N=4, K=2, window=90),
        Case(T=130, H=128, kernel="fused", N=3, dtype="float16", cached_bytes=40_000),
        *(Case(T=192, H=128, kernel="fused", segments=kind) for kind in kinds),
        Case(T=150, H=128, kernel="fused", B=2, N=2, segments="sorted", window=40),
        Case(T=100, H=128, kernel="fused", soft_cap=1.5, dtype="float16"),
        Case(T=210, H=128, kernel="fused", soft_cap=20.0, window=64, segments="sorted"),
    ]


def name(case: Case) -> str:
    """Return the fields in which a case differs from the default."""
    plain = Case(T=case.T)
    parts = [f"T{case.T}"]
    for field, value in vars(case).items():
        if field != "tuning" and value != getattr(plain, field):
            parts.append(f"{value}" if isinstance(value, str) else f"{field}{value}")
    for kernel, fields in case.tuning.items():
        parts += [f"{kernel}_{field}{value}" for field, value in fields.items()]
    return "-".join(parts)


CASES = {name(case): case for case in _cases()}
SHORT = (
    *("T1", "T203-H128-window50", "T100-B2-N2-K2-window33-float16"),
    *("T130-N2-H256-window50-sorted-float16", "T130-N2-H192-window50-sorted-float16"),
    *("T100-H96-sorted-float16", "T192-edge", "T90-window1-tokens-float16"),
    *("T210-H128-window64-sorted-soft_cap20.0", "T72-soft_cap30.0-saturated"),
    name(Case(T=256, logits="drift", window=150, H=128, tuning=FEW_SLOTS)),
    name(Case(T=384, segments="last", tuning=FEW_SLOTS)),
    "T130-N4-H128-float16-parts2",
    "T203-N4-K2-H128-window90-fused",
    "T150-B2-N2-H128-window40-sorted-fused",
    "T100-H128-soft_cap1.5-float16-fused",
    "T77-causalFalse-window20",
    *("T193-H256-causalFalse-sorted", "T130-causalFalse"),
    "T140-B2-prefixes(100, 500)-sorted-float16",
)
"""Names of cases that together cover each option at least once."""


def short(names: Iterable[str], chosen: Collection[str]) -> list[Any]:
    """Return names as parameters of a test, marked slow unless they are chosen."""
    return [
        name if name in chosen else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]

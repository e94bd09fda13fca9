"""The grid of pipelines that `pipeline_parity` compares with one device.

Stages P of 2, 4, 8 x 1, 2, 3 virtual stages (`chunks`) x P, 2P, 3P + 1 microbatches.
All other choices are distributed over the cases, so that each one is combined with
several others.
"""

import dataclasses
from typing import Any

from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from tests.training import EVERY_OPTION, TINY, Layout

FLOAT32_BOUND = 2e-5
"""Relative bound for float32 sums of up to 50 sequences and 48 layers that are added in
another order."""
BFLOAT16_BOUND = 4e-2
"""Relative bound in bfloat16, which keeps 8 bits: each of 8 layers rounds at 2^-9, and
XLA fuses the two programs differently, so they round differently.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One pipelined program, and its reference."""

    model: ModelConfig
    layout: Layout
    rows: int
    """Number of sequences of the batch."""
    compute: str = "float32"

    @property
    def bound(self) -> float:
        """Bound of the relative error of each leaf of the gradients."""
        return FLOAT32_BOUND if self.compute == "float32" else BFLOAT16_BOUND


def _model(layers: int, base: ModelConfig = TINY, **options: Any) -> ModelConfig:
    full_attention: dict[str, Any] = {"window": (None,), "rope": (True,)}
    return dataclasses.replace(base, layers=layers, **(full_attention | options))


def _case(
    p: int,
    v: int,
    m: int,
    mesh: tuple[int, int, int],
    zero: int,
    model: ModelConfig,
    compute: str = "float32",
    **pipeline: Any,
) -> Case:
    """Make a case; mesh is (dp_replicate, dp_shard, tp)."""
    config = PipelineConfig(chunks=v, **pipeline)
    layout = Layout((p, *mesh), zero, m, config)
    rows_of_microbatch = 2 if m <= 4 else 1
    rows = m * mesh[0] * mesh[1] * rows_of_microbatch
    return Case(model=model, layout=layout, rows=rows, compute=compute)


SKIP: dict[str, Any] = {"idle": "skip"}
COMPUTE: dict[str, Any] = {"idle": "compute"}
INPUT: dict[str, Any] = {"stash": "input"}
UNEVEN: dict[str, Any] = {"uneven_layers": True}

WINDOWS: dict[str, Any] = {"window": (6, None)}
SERIAL: dict[str, Any] = {"block": "serial"}
TIED: dict[str, Any] = {"tie_embeddings": True}
BIASES: dict[str, Any] = {
    **{"attn_bias": True, "mlp_bias": True, "norm_bias": True},
    "head_bias": True,
}
GQA: dict[str, Any] = {"kv_heads": 2}
DROPOUT: dict[str, Any] = {"dropout": 0.1}
NONE: dict[str, Any] = {"remat": "none"}
DOTS: dict[str, Any] = {"remat": "dots"}
ATTENTION: dict[str, Any] = {"remat": "attention"}
LLAMA: dict[str, Any] = {**SERIAL, "norm": "rmsnorm", "activation": "swiglu"}


def cases() -> list[Case]:
    """List the valid cases of the grid, then some more."""
    windows, serial = _model(8, **WINDOWS), _model(8, **SERIAL)
    return [
        _case(2, 1, 2, (1, 2, 2), 2, windows, **SKIP),
        _case(
            2,
            1,
            4,
            (2, 2, 1),
            2,
            _model(8, **LLAMA, **TIED, **GQA, **NONE),
            **INPUT,
            **COMPUTE,
        ),
        _case(
            2,
            1,
            7,
            (1, 1, 4),
            0,
            _model(4, **WINDOWS, **GQA, **BIASES, **DROPOUT, **DOTS),
            schedule="gpipe",
            **COMPUTE,
        ),
        _case(
            2,
            2,
            2,
            (1, 4, 1),
            1,
            _model(5, **LLAMA, **TIED, **ATTENTION),
            **UNEVEN,
            **COMPUTE,
        ),
        _case(
            2,
            2,
            4,
            (2, 1, 2),
            2,
            _model(8, **WINDOWS, **DROPOUT, **DOTS),
            **INPUT,
            **SKIP,
        ),
        _case(2, 3, 2, (1, 2, 2), 2, _model(6, **SERIAL, **NONE), **SKIP),
        _case(
            2,
            3,
            4,
            (2, 2, 1),
            2,
            _model(14, EVERY_OPTION, **WINDOWS, rope=(True, False)),
            **UNEVEN,
            **SKIP,
        ),
        _case(
            4, 1, 4, (1, 1, 2), 0, _model(8, **WINDOWS, **TIED, **ATTENTION), **COMPUTE
        ),
        _case(
            4,
            1,
            8,
            (1, 2, 1),
            2,
            _model(5, **DROPOUT, **NONE),
            **UNEVEN,
            **INPUT,
            **COMPUTE,
        ),
        _case(4, 1, 13, (2, 1, 1), 1, _model(4, **SERIAL, **GQA), **SKIP),
        _case(
            4, 2, 4, (1, 2, 1), 2, _model(16, **WINDOWS, **BIASES, **DOTS), **COMPUTE
        ),
        _case(4, 2, 8, (1, 1, 2), 2, _model(8, **TIED, **DROPOUT, **GQA), **COMPUTE),
        _case(4, 3, 4, (2, 1, 1), 2, _model(24, **WINDOWS), **INPUT, **SKIP),
        _case(
            4,
            3,
            8,
            (1, 2, 1),
            1,
            _model(13, **LLAMA, **TIED, **DROPOUT, **DOTS),
            **UNEVEN,
            **COMPUTE,
        ),
        _case(8, 1, 8, (1, 1, 1), 2, _model(16, **WINDOWS, **NONE), **COMPUTE),
        _case(
            8,
            1,
            16,
            (1, 1, 1),
            0,
            _model(8, **SERIAL, **TIED, **GQA, **DROPOUT),
            **INPUT,
            **SKIP,
        ),
        _case(
            8, 1, 25, (1, 1, 1), 1, _model(9, **BIASES, **ATTENTION), **UNEVEN, **SKIP
        ),
        _case(8, 2, 8, (1, 1, 1), 2, _model(32, **WINDOWS, **TIED, **DOTS), **COMPUTE),
        _case(8, 2, 16, (1, 1, 1), 2, _model(16, **LLAMA, **GQA), **SKIP),
        _case(
            8,
            3,
            8,
            (1, 1, 1),
            0,
            _model(24, **DROPOUT, **BIASES, **NONE),
            **INPUT,
            **COMPUTE,
        ),
        _case(
            8, 3, 16, (1, 1, 1), 2, _model(48, **WINDOWS, **SERIAL, **TIED), **COMPUTE
        ),
        # Beyond the grid: one stage, fewer microbatches than stages, bfloat16.
        _case(1, 4, 3, (1, 4, 2), 2, serial, **COMPUTE),
        _case(4, 1, 2, (1, 1, 2), 1, windows, **SKIP),
        _case(4, 2, 4, (1, 1, 2), 2, serial, "bfloat16", **COMPUTE),
    ]


REFUSED = [(p, v, 3 * p + 1) for p in (2, 4, 8) for v in (2, 3)]
"""Refused numbers of the grid: with several virtual stages per stage, the number of
microbatches must be a multiple of P.
"""

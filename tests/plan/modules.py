"""Modules for the tests: recorded ones, and small ones written from a few words."""

import pathlib

from mjax.mesh.axes import AxisSizes
from mjax.plan.hlo.analysis import Analysis, analyse
from mjax.plan.hlo.parse import Module, parse

# layers.txt: recorded from XLA for H200s (jax 0.11.2), without the tables of source
# lines and shortened; the others are written by hand after such text.
RECORDED = pathlib.Path(__file__).parent / "recorded"
MESHES = {
    "layers": (AxisSizes(pp=1, dp_replicate=1, dp_shard=2, tp=8), 8),
    "groups": (AxisSizes(pp=2, dp_replicate=2, dp_shard=2, tp=2), 8),
    "async": (AxisSizes(pp=1, dp_replicate=2, dp_shard=1, tp=2), 2),
    "pipeline": (AxisSizes(pp=2, dp_replicate=1, dp_shard=2, tp=2), 4),
}
"""Of each recorded module, its mesh and the GPUs of a node."""


def text_of(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def recorded(name: str) -> tuple[Module, Analysis]:
    """Return a recorded module and its analysis."""
    module = parse(text_of(name))
    return module, analyse(module, *MESHES[name])


def written(entry: str, body: str = "", turns: int = 2) -> tuple[Module, Analysis]:
    """Write a module of two devices of a tp group from lines of its instructions.

    The lines see %x and %y, which are bf16[10,10], and two computations: `body`, with
    its own %x, and `other`, which holds two products.
    """
    text = f"""HloModule written, is_scheduled=true, num_partitions=2

%body (x: bf16[10,10]) -> bf16[10,10] {{
  %x = bf16[10,10]{{1,0}} parameter(0)
{_lines(body)}  ROOT %root = bf16[10,10]{{1,0}} bitcast(%x)
}}

%other (x: bf16[10,10]) -> bf16[10,10] {{
  %x = bf16[10,10]{{1,0}} parameter(0)
{_lines("product; product")}  ROOT %root = bf16[10,10]{{1,0}} bitcast(%x)
}}

%more (x: bf16[10,10]) -> pred[] {{
  %x = bf16[10,10]{{1,0}} parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (x: bf16[10,10]) -> bf16[10,10] {{
  %x = bf16[10,10]{{1,0}} parameter(0)
{_lines(entry, turns)}  ROOT %out = bf16[10,10]{{1,0}} bitcast(%x)
}}
"""
    module = parse(text)
    return module, analyse(module, AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=2))


_ARRAY = "bf16[10,10]{1,0}"
_PAIRS = "source_target_pairs={{0,1},{1,0}}"
_MEANINGS = {
    "product": "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "permute": f"collective-permute(%x), {_PAIRS}",
    "kernel": 'custom-call(%x), custom_call_target="mosaic_gpu_v2", '
    'metadata={op_name="f/attention/call"}',
    "either": "conditional(%x, %x, %x), branch_computations={%body, %other}",
    "call": "call(%x), to_apply=%body",
}


def _lines(words: str, turns: int = 0) -> str:
    lines = []
    for place, word in enumerate(w.strip() for w in words.split(";") if w.strip()):
        name = f"i{place}"
        shape, meaning = _ARRAY, _MEANINGS.get(word, "")
        if word.startswith("start "):
            name, shape = word.removeprefix("start "), f"(({_ARRAY}), {_ARRAY})"
            meaning = f"collective-permute-start(%x), {_PAIRS}"
        elif word.startswith("done "):
            meaning = f"collective-permute-done(%{word.removeprefix('done ')})"
        elif word == "loop":
            meaning = "while(%x), condition=%more, body=%body, backend_config="
            meaning += f'{{"known_trip_count":{{"n":"{turns}"}}}}'
        elif not meaning:
            raise ValueError(f"no instruction is called {word!r}")
        lines.append(f"  %{name} = {shape} {meaning}\n")
    return "".join(lines)

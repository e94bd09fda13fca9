"""Modules for the tests: recorded ones, and small ones written from a few words."""

import pathlib

from mjax.mesh.axes import AxisSizes
from mjax.pipeline.schedule import build
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


LOSS_OF_TICK = "branch_computations={%idle, %loss, %norm}"
TICKS = "jit(train_step)/phase.forward/shard_map/ticks.0.1.5/while/body"
"""Scopes around the body of the recorded pipeline's loop over ticks."""
SCHEDULE = build("interleaved-1f1b", num_stages=2, num_chunks=2, num_microbatches=2)
"""Five ticks have forward slots; the loss is in the last two of them."""


def with_choice(op_name: str, after: str = "") -> tuple[Module, Analysis]:
    """Return the recorded pipeline with a name for the choice that holds the loss.

    Args:
      op_name: name of the conditional's operation.
      after: instructions after the loop over ticks, of which the last is the root.
    """
    text = text_of("pipeline").replace(
        LOSS_OF_TICK, f'{LOSS_OF_TICK}, metadata={{op_name="{op_name}"}}'
    )
    if after:
        text = text.replace("ROOT %ticks", "%ticks").removesuffix("}\n")
        text = f"{text}{after}}}\n"
    module = parse(text)
    return module, analyse(module, *MESHES["pipeline"])


def written(entry: str, body: str = "", turns: int = 2) -> tuple[Module, Analysis]:
    """Write a module of two nodes, each a tp group of two devices, from its lines.

    A collective is over tp (inside a node), over dp (between the nodes), or over all
    four devices: `start a`, `start a dp`, `start a all`. `store a` starts a copy
    to the host, `stored a` awaits it. The lines see %x and %y, which are bf16[10,10],
    and two computations: `body`, with its own %x, and `other`, which has two matmuls.
    """
    text = f"""HloModule written, is_scheduled=true, num_partitions=4

%sum (p: bf16[], q: bf16[]) -> bf16[] {{
  %p = bf16[] parameter(0)
  %q = bf16[] parameter(1)
  ROOT %r = bf16[] add(%p, %q)
}}

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
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=2, tp=2)
    return module, analyse(module, sizes, gpus_per_node=2)


_ARRAY = "bf16[10,10]{1,0}"
_ON_HOST = "bf16[10,10]{1,0:S(5)}"
_PAIRS = "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"
_PERMUTE = f"collective-permute-start(%x), {_PAIRS}"
_STARTS = {
    "": _PERMUTE,
    "dp": _PERMUTE.replace(_PAIRS, "source_target_pairs={{0,2},{2,0},{1,3},{3,1}}"),
    "all": "all-reduce-start(%x), replica_groups={{0,1,2,3}}, to_apply=%sum",
}
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
            name, _, over = word.removeprefix("start ").partition(" ")
            shape = _ARRAY if over == "all" else f"(({_ARRAY}), {_ARRAY})"
            meaning = _STARTS[over]
        elif word.startswith("done "):
            name, _, over = word.removeprefix("done ").partition(" ")
            kind = "all-reduce" if over == "all" else "collective-permute"
            name, meaning = f"i{place}", f"{kind}-done(%{name})"
        elif word.startswith("store "):
            name = word.removeprefix("store ")
            shape = f"({_ON_HOST}, {_ARRAY}, u32[])"
            meaning = "copy-start(%x)"
        elif word.startswith("stored "):
            shape, meaning = _ON_HOST, f"copy-done(%{word.removeprefix('stored ')})"
        elif word == "loop":
            meaning = "while(%x), condition=%more, body=%body, backend_config="
            meaning += f'{{"known_trip_count":{{"n":"{turns}"}}}}'
        elif not meaning:
            raise ValueError(f"no instruction is called {word!r}")
        lines.append(f"  %{name} = {shape} {meaning}\n")
    return "".join(lines)

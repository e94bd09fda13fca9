"""Count what XLA makes of norms, activations and the head: kernels and bytes moved.

    python -m scripts.overlap.xla_bytes --part norm

Programs are compiled for a described H200 (the `[plan]` extra; no GPU is needed) and
read, never run. `minimum` is the bytes if each input is read once and each output
written once. Two times are computed from the counts, not measured. `moved` is the bytes
of all kernels except matmuls over the bandwidth. `floor` adds, for each matmul, the
larger of its bytes over the bandwidth and its FLOPs over the peak.

Without a device XLA cannot time alternative matmul kernels. On a GPU it may choose
other kernels, and fuse other operations into them.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.hardware.described import described_mesh
from mjax.hardware.gpus import GPUS
from mjax.layers.adapters import column_parallel, row_parallel
from mjax.layers.block import Context, ParallelBlock, SerialBlock
from mjax.layers.config import Activation, LayerKind, NormConfig
from mjax.layers.embed import Embedding, Head
from mjax.layers.mlp import Mlp
from mjax.layers.norm import Norm
from mjax.mesh import collectives
from mjax.mesh.axes import AXES, TP, AxisSizes
from mjax.model.config import ModelConfig
from mjax.plan.hlo.counts import Kernel, kernels
from mjax.recipes.gpt import gpt_1b3
from mjax.recipes.llama import llama3_8b
from mjax.recipes.megascale import megascale_175b

GPU = GPUS["h200"]
POSITIONS = 8192
"""Positions of one microbatch on one device: one sequence of 8192, or four of 2048."""
MIB = 2**20
BF16 = jnp.bfloat16
WHOLE = P()
# Results vary over the axes of size 1 too; the spec of their first dim must say so.
VARYING = P(AXES)
OTHERS = tuple(axis for axis in AXES if axis != TP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A function of one device, and the mesh and arguments that it is compiled for."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    """Global arguments: pytrees of jax.ShapeDtypeStruct."""
    in_specs: Any = WHOLE
    out_specs: Any = VARYING
    tp: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
    """What one compiled program does on each device."""

    kernels: list[Kernel]
    minimum_bytes: int
    temp_bytes: int

    def of(self, *kinds: str) -> tuple[int, int]:
        """Return launches and bytes moved of the kernels of some kinds."""
        chosen = [k for k in self.kernels if k.kind in kinds]
        return sum(k.runs for k in chosen), sum(k.moved_bytes for k in chosen)

    @property
    def floor_s(self) -> float:
        """Minimum time that bytes and FLOPs allow if kernels run one after another."""
        return sum(_floor_s(k) for k in self.kernels if k.kind != "collective")


def _floor_s(kernel: Kernel) -> float:
    # float32 operands are multiplied in TF32, at half the rate (NVIDIA H200 data
    # sheet).
    peak = GPU.peak_bf16_flops_per_s / (2 if kernel.product_dtype == "f32" else 1)
    memory_s = kernel.moved_bytes / GPU.memory_bytes_per_s
    return max(memory_s, kernel.runs * kernel.flops / peak)


def count(case: Case) -> Count:
    """Compile a case for its mesh of described GPUs and read the program."""
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=case.tp)
    mesh = described_mesh(sizes, gpu="h200")

    def per_device(*args: Any) -> Any:
        return case.function(*jax.tree.map(collectives.vary, args))

    mapped = jax.shard_map(
        per_device, mesh=mesh, in_specs=case.in_specs, out_specs=case.out_specs
    )
    specs = jax.tree.broadcast(
        case.in_specs, case.shapes, is_leaf=lambda x: isinstance(x, P)
    )
    shapes = jax.tree.map(
        lambda s, spec: jax.ShapeDtypeStruct(
            s.shape, s.dtype, sharding=NamedSharding(mesh, spec)
        ),
        case.shapes,
        specs,
    )
    compiled = jax.jit(mapped).lower(*shapes).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    return Count(
        kernels=kernels(text),
        minimum_bytes=memory.argument_size_in_bytes + memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


def abstract(make: Callable[[], nnx.Module]) -> tuple[Any, Any]:
    """Return a module's graph definition and its bfloat16 parameters, as shapes."""
    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, BF16), nnx.to_pure_dict(state)
    )


def activations(width: int) -> jax.ShapeDtypeStruct:
    """Return the shape of activations of some width."""
    return jax.ShapeDtypeStruct((1, POSITIONS, width), BF16)


def norm_cases() -> Iterator[Case]:
    """Yield norms, alone and with the sums of the residual stream around them."""
    for kind in ("layernorm", "rmsnorm"):
        for d in (2048, 5120, 12288):
            yield from norm_cases_of(kind, d)


def norm_cases_of(kind: Any, d: int) -> Iterator[Case]:
    """Yield the cases of one norm, layernorm or rmsnorm, at one width."""
    config = NormConfig(kind=kind, eps=1e-5, use_bias=False)
    graph, params = abstract(lambda: Norm(d, config))
    x = activations(d)

    def norm(params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x)

    def branch(params: Any, x: jax.Array) -> Any:
        return nnx.merge(graph, params).branch(x)

    def after_sum(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return branch(params, x + y)

    def backward(params: Any, x: jax.Array, g: jax.Array) -> Any:
        return jax.vjp(norm, params, x)[1](g)

    def before_sum(params: Any, x: jax.Array, g: jax.Array, g_x: jax.Array) -> Any:
        return jax.vjp(branch, params, x)[1]((g_x, g))

    name = f"{kind} D={d}"
    yield Case(name=f"{name} forward", function=norm, shapes=(params, x))
    yield Case(
        name=f"{name} forward, with x + y", function=after_sum, shapes=(params, x, x)
    )
    yield Case(name=f"{name} backward", function=backward, shapes=(params, x, x))
    yield Case(
        name=f"{name} backward, with dx + g",
        function=before_sum,
        shapes=(params, x, x, x),
    )


def activation_cases() -> Iterator[Case]:
    """Yield the operations between the two projections of a feed-forward layer."""
    kinds: tuple[Activation, ...] = ("gelu", "gelu_tanh", "swiglu")
    for kind in kinds:
        for use_bias in (False, True):
            yield from _activation_cases(kind, use_bias)


def _activation_cases(kind: Activation, use_bias: bool) -> Iterator[Case]:
    width = 8192

    def make() -> Mlp:
        options: Any = {"activation": kind, "use_bias": use_bias}
        return Mlp(8, width, std=1.0, out_std=1.0, rngs=nnx.Rngs(0), **options)

    graph, params = abstract(make)
    biases = {k: params.pop(k) for k in ("b_in", "b_gate") if k in params}

    def activate(biases: Any, *parts: jax.Array) -> jax.Array:
        # The weights are not read.
        rest = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), params)
        return nnx.merge(graph, biases | rest).activate(parts)

    def backward(biases: Any, g: jax.Array, *parts: jax.Array) -> Any:
        return jax.vjp(activate, biases, *parts)[1](g)

    h = activations(width)
    parts = (h, h) if kind == "swiglu" else (h,)
    name = f"{kind} F={width}{', with bias' if use_bias else ''}"
    yield Case(name=f"{name} forward", function=activate, shapes=(biases, *parts))
    yield Case(name=f"{name} backward", function=backward, shapes=(biases, h, *parts))


def head_cases() -> Iterator[Case]:
    """Yield the output projection with its loss, without and with gradients."""
    for vocab in (32768, 131072):
        for tp in (1, 8):
            yield from _head_cases(vocab, tp)


def _head_cases(vocab: int, tp: int) -> Iterator[Case]:
    d = 2048

    def make() -> Head:
        options: Any = {"tied": False, "use_bias": False, "scale": 1.0, "std": 1.0}
        return Head(vocab, d, rngs=nnx.Rngs(0), **options)

    graph, params = abstract(make)
    # A head with its own table does not read the embedding's.
    untied = Embedding(1, 1, std=1.0, rngs=nnx.Rngs(0))

    def mean_nll(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        nll = nnx.merge(graph, params).nll(x, untied, targets, vocab - 100)
        return nll / POSITIONS

    def loss(*args: Any) -> jax.Array:
        return collectives.sum_over_mesh(mean_nll(*args))

    def train(*args: Any) -> Any:
        nll, (d_params, dx) = jax.value_and_grad(mean_nll, (0, 1))(*args)
        # The dtype in which the step accumulates and reduces gradients.
        d_params = jax.tree.map(lambda g: g.astype(jnp.float32), d_params)
        return collectives.sum_over_mesh(nll), d_params, dx

    targets = jax.ShapeDtypeStruct((1, POSITIONS), jnp.int32)
    shared: Any = {
        "shapes": (params, activations(d), targets),
        "in_specs": ({"table": P(TP)}, P(None, TP), WHOLE),
        "tp": tp,
    }
    name = f"head D={d} V={vocab} tp={tp}"
    yield Case(name=f"{name}, loss", function=loss, out_specs=WHOLE, **shared)
    yield Case(
        name=f"{name}, loss and gradients",
        function=train,
        out_specs=(WHOLE, {"table": VARYING}, P(OTHERS, TP)),
        **shared,
    )


def block_cases() -> Iterator[Case]:
    """Yield parallel blocks, forward and backward, with and without remat."""
    gpt: Any = {"norm": "layernorm", "activation": "gelu"}
    llama: Any = {"norm": "rmsnorm", "activation": "swiglu"}
    for options in (gpt, llama):
        for recompute in (False, True):
            yield _block_case(options, recompute)


def _block_case(options: Any, recompute: bool) -> Case:
    config = ModelConfig(d_model=2048, heads=16, d_ff=8192, **options)
    graph, params = abstract(
        lambda: ParallelBlock(config.block_config, rngs=nnx.Rngs(0))
    )

    def block(params: Any, x: jax.Array) -> jax.Array:
        """Run the block, with q + k + v in place of attention, which has its own
        kernels."""
        block = nnx.merge(graph, params)
        weights = block.attention.in_weights() + block.mlp.in_weights()
        x, normed = block.norm.branch(x)
        q, k, v, *up = column_parallel(normed, weights, 1)
        weights = [block.attention.out_weight(), block.mlp.out_weight()]
        return x + row_parallel([q + k + v, block.mlp.activate(up)], weights, 1)

    def train(params: Any, x: jax.Array, g: jax.Array) -> Any:
        layer = jax.checkpoint(block) if recompute else block
        y, back = jax.vjp(layer, params, x)
        # The backward pass of a layer begins long after its forward pass ended.
        y, g, back = jax.lax.optimization_barrier((y, g, back))
        return y, *back(g)

    x = activations(2048)
    name = f"block {config.norm} {config.activation} D=2048"
    return Case(
        name=f"{name}, remat {'full' if recompute else 'none'}",
        function=train,
        shapes=(params, x, x),
    )


def rope_cases() -> Iterator[Case]:
    """Yield blocks of recipes, forward and backward, with and without rotation.

    Attention and its documents are included. The cost of rotation is the difference of
    the two floors. `--kernels` shows which kernels read or write queries and keys.
    """
    for rotate in (True, False):
        yield rope_case("gpt-1b3", rotate)
        yield rope_case("llama3-8b", rotate)
        yield rope_case("megascale-175b", rotate)


def rope_case(recipe: str, rotate: bool) -> Case:
    """Return the block of one recipe: `POSITIONS`, tp as in the recipe's docstring."""
    config, tp = {
        "gpt-1b3": (gpt_1b3(), 1),
        "llama3-8b": (llama3_8b(), 1),
        "megascale-175b": (megascale_175b(), 8),
    }[recipe]
    model, length = config.model, config.data.seq_len
    block = ParallelBlock if model.block == "parallel" else SerialBlock
    # The backend that compiles without a GPU's libraries; documents need it anyway.
    options = dataclasses.replace(model, attention="mosaic_gpu").block_config
    graph, params = abstract(lambda: block(options, rngs=nnx.Rngs(0), tp_chunks=tp))
    window = model.window[0] if model.window else None
    kind = LayerKind(window=window, rotate=rotate)

    def train(params: Any, x: jax.Array, g: jax.Array, *shared: jax.Array) -> Any:
        def layer(params: Any, x: jax.Array) -> jax.Array:
            cos, sin, segments = shared
            context = Context(cos_sin=(cos, sin), segments=segments)
            return nnx.merge(graph, params)(x, kind, context, None)

        y, back = jax.vjp(layer, params, x)
        y, g, back = jax.lax.optimization_barrier((y, g, back))
        return y, *back(g)

    rows = POSITIONS // length
    x = jax.ShapeDtypeStruct((rows, length, model.d_model), BF16)
    half = options.attention.rope.rotated_width // 2
    angle = jax.ShapeDtypeStruct((rows, length, half), jnp.float32)
    segments = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: _BLOCK_SPECS.get(path[-1].key, WHOLE) if tp > 1 else WHOLE,
        params,
    )
    varying = jax.tree.map(
        lambda spec: P(OTHERS, *spec[1:]) if spec and spec[0] is None else VARYING,
        specs,
        is_leaf=lambda spec: isinstance(spec, P),
    )
    sequence = P(None, TP)
    return Case(
        name=f"block of {recipe}, tp={tp}{'' if rotate else ', without rotation'}",
        function=train,
        shapes=(params, x, x, angle, angle, segments),
        in_specs=(specs, sequence, sequence, WHOLE, WHOLE, WHOLE),
        out_specs=(P(OTHERS, TP), varying, P(OTHERS, TP)),
        tp=tp,
    )


_BLOCK_SPECS = {name: P(None, TP) for name in ("wq", "wk", "wv", "w_in", "w_gate")}
_BLOCK_SPECS |= {name: P(TP) for name in ("wo", "w_out")}
"""Of a block's weights over tp; all others are whole."""

PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "norm": norm_cases,
    "activation": activation_cases,
    "head": head_cases,
    "block": block_cases,
    "rope": rope_cases,
}


def print_counts(cases: Iterator[Case], *, show_kernels: bool) -> None:
    """Print a table with one row per case, and on request a line for each kernel."""
    columns = (
        "op | kernels | GEMMs | MiB moved | MiB of GEMMs | minimum MiB | ratio "
        "| moved, us | floor, us | temporary MiB"
    )
    print(f"| {columns} |\n|---|{'--:|' * columns.count('|')}")
    for case in cases:
        c = count(case)
        num_kernels, moved = c.of("elementwise", "call")
        num_gemms, moved_by_gemms = c.of("gemm")
        row = [
            *(case.name, num_kernels, num_gemms),
            *(f"{n / MIB:.0f}" for n in (moved, moved_by_gemms, c.minimum_bytes)),
            f"{(moved + moved_by_gemms) / c.minimum_bytes:.2f}",
            f"{moved / GPU.memory_bytes_per_s * 1e6:.0f}",
            f"{c.floor_s * 1e6:.0f}",
            f"{c.temp_bytes / MIB:.0f}",
        ]
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        for k in c.kernels if show_kernels else ():
            print(
                f"    {k.runs} x {k.kind} {k.name}: {k.read_bytes / MIB:.1f} MiB in, "
                f"{k.written_bytes / MIB:.1f} out, {k.flops / 1e9:.0f} GFLOP "
                f"{k.product_dtype or ''} {k.source}"
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--kernels", action="store_true", help="list every kernel")
    args = parser.parse_args()
    for part in args.part or PARTS:
        device = f"{GPU.device_kind}, {POSITIONS} positions, bfloat16"
        print(f"\n{part}: {device}, jax {jax.__version__}\n")
        print_counts(PARTS[part](), show_kernels=args.kernels)


if __name__ == "__main__":
    main()

"""Attention inside the sharded step: compiled for 8 GPUs, it gathers no q, k or v.

A compiler that does not know how to split a kernel gathers what it reads, and the step
is right and slow. The first test shows that this would be seen.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.kernels.attention.api import attention
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.plan.hlo.collectives import PlacedCollective, list_collectives
from mjax.plan.hlo.parse import Array, parse
from mjax.step.program import build_program
from tests.kernels.planted_kernels import twice

pytestmark = pytest.mark.plan

TP8 = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=8)
# Sizes at which q, k and v have other numbers of elements than anything else.
B, T, D, N, K, H, V = 2, 256, 256, 16, 8, 64, 512
KERNEL_CALL = 'custom_call_target="mosaic_gpu'
BY_HEAD = PartitionSpec(None, None, "tp", None)


def collectives(text: str) -> list[PlacedCollective]:
    return list(list_collectives(parse(text), TP8))


def num_elements(arrays: Iterable[Array]) -> list[int]:
    return [array.size for array in arrays]


def that_move_heads(found: list[PlacedCollective]) -> list[PlacedCollective]:
    """Pick the collectives of arrays as large as q, k or v, whole or one device's."""
    sizes = {B * T * heads * H // part for heads in (N, K) for part in (1, 8)}
    return [c for c in found if sizes & set(num_elements((*c.operands, *c.results)))]


def compiled_text(lowered: jax.stages.Lowered) -> str:
    text = lowered.compile().as_text()
    assert text is not None
    return text


def test_a_kernel_outside_shard_map_gathers_its_operands():
    mesh = described_mesh(TP8)
    heads = NamedSharding(mesh, BY_HEAD)
    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16, sharding=heads)
    with use_abstract_mesh(mesh.abstract_mesh):
        plain = compiled_text(jax.jit(twice, out_shardings=heads).lower(q))
    assert plain.count(KERNEL_CALL) == 1
    (gather,) = that_move_heads(collectives(plain))
    assert (gather.kind, gather.axes) == ("all-gather", ("tp",))
    assert num_elements(gather.operands) == [B * T * N // 8 * H]
    assert num_elements(gather.results) == [B * T * N * H]
    mapped = jax.shard_map(twice, mesh=mesh, in_specs=BY_HEAD, out_specs=BY_HEAD)
    text = compiled_text(jax.jit(mapped).lower(q))
    assert text.count(KERNEL_CALL) == 1
    assert collectives(text) == []


def test_the_fused_backward_pass_adds_to_sums_of_its_own_device():
    def gradients(q, k, v, d_out):
        def attend(q, k, v):
            return attention(q, k, v, backend="mosaic_gpu", backward="fused")

        return jax.vjp(attend, q, k, v)[1](d_out)

    mesh = described_mesh(TP8)
    q = jax.ShapeDtypeStruct(
        (B, T, N, 128), jnp.bfloat16, sharding=NamedSharding(mesh, BY_HEAD)
    )
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=BY_HEAD, out_specs=BY_HEAD)
    with use_abstract_mesh(mesh.abstract_mesh):
        text = compiled_text(jax.jit(mapped).lower(q, q, q, q))
    assert text.count(KERNEL_CALL) == 2
    assert collectives(text) == []


# The backward pass of the norm is a kernel too; attention has three, of which remat
# runs the forward one twice.
# A whole step, with Optax.
@pytest.mark.promotion(dtype="standard", rank="allow")
@pytest.mark.parametrize(
    ("backend", "num_kernels"),
    [("blocked", 1), pytest.param("mosaic_gpu", 5, marks=pytest.mark.slow)],
)
def test_the_step_with_tp_8_sends_activations_and_no_heads(backend, num_kernels):
    program = build_program(
        model=ModelConfig(
            layers=2,
            d_model=D,
            heads=N,
            kv_heads=K,
            head_dim=H,
            d_ff=1024,
            vocab_size=V,
            window=(100,),
            attention=backend,
        ),
        optimizer=OptimConfig(),
        batch=BatchConfig(size=B),
        precision=PrecisionConfig(),
        seq_len=T,
        num_steps=10,
        seed=0,
        zero_level=2,
        isolate_documents=True,
        mesh=described_mesh(TP8),
    )
    step = program.trace().lower()
    text = compiled_text(step)
    assert text.count(KERNEL_CALL) == num_kernels
    found = collectives(text)
    assert that_move_heads(found) == []
    gathers = [c for c in found if c.kind == "all-gather"]
    # The sequence: in the layers and, for logits and embedding, outside.
    assert {c.num_loops for c in gathers} == {0, 1}
    assert {n for c in gathers for n in num_elements(c.results)} == {B * T * D}

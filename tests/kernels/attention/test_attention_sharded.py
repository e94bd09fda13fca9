"""Attention inside shard_map over all mesh axes = attention on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.kernels.attention import api

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def loss(q, k, v, segments, backend):
    """Two layers under scan and remat; the output of one is the query of the next."""

    @jax.checkpoint
    def layer(x, _):
        options = {"segment_ids": segments, "window": 70, "backend": backend}
        return api.attention(x, k, v, **options), None

    x, _ = jax.lax.scan(layer, q, None, length=2)
    return jnp.sum(jnp.sin(x))


@pytest.mark.parametrize(
    ("backend", "kv_over_tp"),
    [("blocked", True), ("blocked", False), ("reference", False)],
)
def test_gradients_inside_shard_map_agree_with_one_device(backend, kv_over_tp):
    B, T, N, K, H = 4, 150, 4, 2, 8
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, T, N, H))
    # Where tp does not split the kv heads, each device reads all of one kv head.
    k, v = (jax.random.normal(x, (B, T, K if kv_over_tp else 1, H)) for x in keys[1:])
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (B, T)), axis=1)
    segments = jnp.asarray(ids, jnp.int32)

    mesh = jax.make_mesh(
        (1, 2, 2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4
    )
    rows = ("dp_replicate", "dp_shard")
    q_spec = P(rows, None, "tp", None)
    kv_spec = q_spec if kv_over_tp else P(rows, None, None, None)
    specs = (q_spec, kv_spec, kv_spec)

    # segments and unsplit kv heads do not vary over tp: attention casts them, and the
    # cast is where their gradients are summed over tp.
    sharded = jax.shard_map(
        lambda q, k, v, s: jax.grad(loss, argnums=(0, 1, 2))(q, k, v, s, backend),
        mesh=mesh,
        in_specs=(*specs, P(rows, None)),
        out_specs=specs,
        check_vma=True,
    )
    got = jax.jit(sharded)(q, k, v, segments)
    want = jax.grad(loss, argnums=(0, 1, 2))(q, k, v, segments, "reference")
    for name, a, b in zip("qkv", got, want, strict=True):
        # float32 sums of at most 2 x 150 products of order 1, in another order.
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5, err_msg=name)

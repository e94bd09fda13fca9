"""The choice of a backend, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention import api
from mjax.kernels.attention.mosaic_gpu.fused import refuse_few_blocks
from mjax.kernels.attention.tuning import FUSED_H200, MOSAIC_H200, BlockedTuning
from mjax.kernels.target import Target, target

HOPPER = Target(platform="gpu", device_kind="NVIDIA H200")
AMPERE = Target(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB")
GPU = {"target": HOPPER, "dtype": jnp.bfloat16, "head_dim": 64, "seq_len": 128}
CPU = {**GPU, "target": Target(platform="cpu", device_kind="cpu")}


def test_auto_takes_blocked_on_cpu_and_says_why_not_the_others():
    choice = api.choose(**CPU)
    assert choice.name == "blocked"
    assert "cpu" in choice.reason
    assert choice.rejected == {
        "cudnn": "the platform must be gpu, got cpu",
        "mosaic_gpu": "the platform must be gpu, got cpu",
        "reference": "slower than blocked",
    }


def test_auto_takes_mosaic_gpu_at_the_head_widths_at_which_it_was_faster():
    choice = api.choose(**GPU, window=16)
    assert choice.name == "mosaic_gpu"
    assert choice.rejected["cudnn"] == "slower than mosaic_gpu"
    assert api.choose(**{**GPU, "head_dim": 128}).name == "mosaic_gpu"


def test_auto_takes_cudnn_on_gpu_where_mosaic_gpu_was_not_timed():
    assert api.choose(**{**GPU, "head_dim": 96}).name == "cudnn"
    assert api.choose(**{**GPU, "target": AMPERE}).name == "cudnn"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "got float32"),
        ({"head_dim": 60}, "multiple of 8, got 60"),
        ({"head_dim": 136}, "at most 128 on ampere, got 136"),
        ({"value_dim": 32}, "as wide as queries and keys, got 64/32"),
        ({"prefix": True}, "it does not honour prefix_len"),
        ({"causal": False, "window": 9}, "honour window=9 with causal=False"),
        ({"segments": True}, "segment_ids"),
        ({"soft_cap": 30.0}, "soft_cap=30.0"),
        ({"target": CPU["target"]}, "got cpu"),
    ],
)
def test_what_cudnn_cannot_do_is_refused_by_name_and_avoided_by_auto(change, reason):
    asked = {**GPU, "target": AMPERE, **change}
    with pytest.raises(ValueError, match=reason) as refusal:
        api.choose(**asked, backend="cudnn")
    assert "blocked, reference" in str(refusal.value)
    choice = api.choose(**asked)
    assert choice.name == "blocked"
    assert reason in choice.rejected["cudnn"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "got float32"),
        ({"head_dim": 80}, "one of .*, 128, 192/128, 256, got 80"),
        ({"head_dim": 192}, "192/128, 256, got 192"),
        ({"value_dim": 128}, "192/128, 256, got 64/128"),
        ({"target": AMPERE}, "hopper, got ampere .NVIDIA A100-SXM4-80GB."),
        ({"target": CPU["target"]}, "got cpu"),
    ],
)
def test_what_mosaic_gpu_cannot_do_is_refused_by_name_and_avoided(change, reason):
    asked = {**GPU, "segments": True, **change}
    with pytest.raises(ValueError, match=reason):
        api.choose(**asked, backend="mosaic_gpu")
    assert api.choose(**asked).name == "blocked"


def test_auto_takes_mosaic_gpu_on_hopper_for_what_cudnn_cannot():
    choice = api.choose(**GPU, segments=True)
    assert choice.name == "mosaic_gpu"
    assert choice.rejected["cudnn"] == "it does not honour segment_ids"
    assert api.choose(**GPU, soft_cap=30.0).name == "mosaic_gpu"


def test_a_fused_backward_pass_is_refused_where_there_is_none():
    wide = {**GPU, "head_dim": 128, "backward": "fused"}
    choice = api.choose(**wide)
    assert choice.name == "mosaic_gpu"
    assert choice.rejected["cudnn"] == "it has no fused backward pass"
    assert api.choose(**{**wide, "backward": "deterministic"}).name == "mosaic_gpu"
    remedy = ". backward='fused' needs a fused kernel; 'deterministic' does not"
    on_cpu = {**wide, "target": CPU["target"]}
    with pytest.raises(ValueError, match=f"no attention backend can do.*{remedy}"):
        api.choose(**on_cpu)
    with pytest.raises(ValueError, match=f"'blocked' cannot do this.*{remedy}"):
        api.choose(**on_cpu, backend="blocked")
    with pytest.raises(ValueError, match=r"fused for head width 128 alone, got 64"):
        api.choose(**GPU, backward="fused", backend="mosaic_gpu")
    with pytest.raises(ValueError, match=r"'cudnn' cannot .* no fused backward pass"):
        api.choose(**wide, backend="cudnn")
    with pytest.raises(ValueError, match=r"one of deterministic, fused, got 'atomic'"):
        api.choose(**{**wide, "backward": "atomic"})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "documents", "parts"),
    [
        (32, 8, None, False, None),  # llama3-8b
        (4, 1, None, False, 4),  # over tp 8
        (12, 12, None, False, None),  # too few blocks, and nothing to divide
        (16, 4, None, True, 2),
        (8, 1, 1024, False, 2),
    ],
)
def test_a_fused_backward_pass_of_few_thread_blocks_is_refused(
    heads, kv_heads, window, documents, parts
):
    q, k = (jnp.zeros((1, 8192, n, 128), jnp.bfloat16) for n in (heads, kv_heads))
    options = {"window": window, "has_documents": documents}
    options["tuning"] = FUSED_H200[128]
    if parts is None:
        refuse_few_blocks(q, k, **options)
        return
    message = rf"{kv_heads} key heads .* into {parts} parts; .*backward deterministic"
    with pytest.raises(ValueError, match=message):
        refuse_few_blocks(q, k, **options)


def test_mosaic_gpu_has_sizes_for_every_width_that_it_takes():
    built = api.CAPABILITIES["mosaic_gpu"].head_dims
    assert built is not None
    assert [H for H, _ in built] == list(MOSAIC_H200)
    for H, Hv in built:
        asked = {**GPU, "head_dim": H, "value_dim": Hv}
        assert api.choose(**asked, backend="mosaic_gpu").name == "mosaic_gpu"


@pytest.mark.parametrize(
    ("kind", "most"),
    [("NVIDIA H200", 256), ("NVIDIA B200", 128), ("NVIDIA A100-SXM4-80GB", 128)],
)
def test_cudnn_takes_heads_as_wide_as_the_generation_does(kind, most):
    device = Target(platform="gpu", device_kind=kind)
    asked = {**GPU, "target": device, "backend": "cudnn"}
    assert api.choose(**{**asked, "head_dim": most}).name == "cudnn"
    with pytest.raises(ValueError, match=f"at most {most} on {device.generation}"):
        api.choose(**{**asked, "head_dim": most + 8})


def test_cudnn_attends_without_a_mask_but_not_with_one_on_both_sides():
    assert api.choose(**GPU, causal=False).name == "cudnn"
    assert api.choose(**GPU, causal=False, window=GPU["seq_len"]).name == "cudnn"
    choice = api.choose(**GPU, causal=False, window=16)
    assert choice.name == "mosaic_gpu"
    assert "causal=False" in choice.rejected["cudnn"]


@pytest.mark.parametrize("change", [{"causal": False}, {"prefix": True}])
def test_the_fused_backward_pass_is_refused_where_it_is_not_causal(change):
    asked = {**GPU, "head_dim": 128, "backward": "fused", "backend": "mosaic_gpu"}
    assert api.choose(**asked).name == "mosaic_gpu"
    with pytest.raises(ValueError, match="fused backward pass is causal"):
        api.choose(**asked, **change)


def test_a_prefix_without_causality_is_refused():
    with pytest.raises(ValueError, match="leave one of the two out"):
        api.choose(**CPU, causal=False, prefix=True)


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "Tesla V9"])
def test_other_generations_get_cudnn_and_hear_why(kind):
    device = Target(platform="gpu", device_kind=kind)
    choice = api.choose(**{**GPU, "target": device})
    assert choice.name == "cudnn"
    assert kind in choice.rejected["mosaic_gpu"]


@pytest.mark.parametrize(
    ("kind", "generation"),
    [
        ("NVIDIA H200", "hopper"),
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA H100 PCIe", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("NVIDIA A100-SXM4-80GB", "ampere"),
        ("NVIDIA A10G", "unknown"),
        ("NVIDIA B200", "blackwell"),
        ("NVIDIA GB200", "blackwell"),
        ("NVIDIA RTX 4000 Ada Generation", "unknown"),
        ("cpu", "unknown"),
    ],
)
def test_a_generation_is_known_by_the_name_of_the_device(kind, generation):
    assert Target(platform="gpu", device_kind=kind).generation == generation


def test_the_target_is_the_device_that_runs():
    assert target() == Target(platform="cpu", device_kind="cpu")


def test_the_table_decides_about_masks_that_are_not_causal(monkeypatch):
    causal = api.Capability(dtypes=("bfloat16",), full=False, prefix=False)
    table = {**api.CAPABILITIES, "cudnn": causal}
    monkeypatch.setattr(api, "CAPABILITIES", table)
    choice = api.choose(**GPU, causal=False)
    assert choice.name == "mosaic_gpu"
    assert choice.rejected["cudnn"] == "it does not honour causal=False"
    choice = api.choose(**GPU, prefix=True)
    assert choice.rejected["cudnn"] == "it does not honour prefix_len"


@pytest.mark.parametrize("H", [128, 256])
def test_the_models_of_gemma_get_a_kernel_on_hopper(H):
    asked = {**GPU, "head_dim": H, "soft_cap": 50.0, "segments": True}
    assert api.choose(**asked).name == "mosaic_gpu"
    faster = {128: "mosaic_gpu", 256: "cudnn"}[H]
    assert api.choose(**{**GPU, "head_dim": H}).name == faster


def test_the_table_decides_about_windows_shorter_than_the_sequence(monkeypatch):
    windowless = api.Capability(dtypes=("bfloat16",), window=False)
    table = {**api.CAPABILITIES, "cudnn": windowless}
    monkeypatch.setattr(api, "CAPABILITIES", table)
    wide = {**GPU, "head_dim": 96}
    assert api.choose(**wide, window=128).name == "cudnn"
    choice = api.choose(**wide, window=127)
    assert choice.name == "mosaic_gpu"
    assert choice.rejected["cudnn"] == "it does not honour window=127"


def test_every_backend_has_its_place_in_the_order():
    for head_dim in (96, 128):
        order = api._fastest_first(head_dim, causal=True)
        assert sorted(order) == sorted(api.CAPABILITIES)


def test_a_named_backend_is_taken():
    choice = api.choose(**CPU, backend="reference")
    assert choice.name == "reference"
    assert choice.rejected["blocked"] == "not asked for"


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"blocked, cudnn, mosaic_gpu, got 'flash'"):
        api.choose(**CPU, backend="flash")


def test_a_dtype_that_no_backend_takes_is_refused():
    with pytest.raises(ValueError, match="no attention backend can do this"):
        api.choose(**{**CPU, "dtype": jnp.int8})


@pytest.mark.parametrize("window", [0, -3])
def test_choose_refuses_a_window_below_one(window):
    with pytest.raises(ValueError, match="window must be at least 1"):
        api.choose(**CPU, window=window)


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("q", "kv", "options", "message"),
    [
        ((2, 8, 3, 4), (2, 8, 2, 4), {}, "multiple of the 2 kv heads, got 3"),
        (
            (2, 8, 2, 4),
            (2, 7, 2, 4),
            {},
            "query length must be .* key length 7 .*, got 8",
        ),
        ((2, 8, 2, 4), (2, 8, 2, 4), {"window": 0}, "use None for full"),
        ((2, 8, 2, 4), (2, 8, 2, 4), {"soft_cap": 0.0}, "use None for no cap"),
        ((2, 8, 2, 4), (2, 8, 2, 4), {"scale": -1.0}, "positive, got -1.0"),
        (
            (2, 8, 2, 4),
            (2, 9, 2, 4),
            {"segment_ids": jnp.zeros((2, 8), jnp.int32)},
            "segment_ids must be .B, T. with equal query and key lengths",
        ),
        (
            (2, 8, 2, 4),
            (2, 9, 2, 4),
            {"causal": False},
            "key length must equal the query length 8, got 9",
        ),
        (
            (2, 8, 2, 4),
            (2, 9, 2, 4),
            {"prefix_len": jnp.zeros((2,), jnp.int32)},
            "prefix_len must be .B. with equal query and key lengths",
        ),
        (
            (2, 8, 2, 4),
            (2, 8, 2, 4),
            {"prefix_len": jnp.zeros((2,), jnp.int32), "causal": False},
            "leave one of the two out",
        ),
        ((2, 8, 2, 4), (2, 8, 2, 4), {"backend": "cudnn"}, "platform must be gpu"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(q, kv, options, message):
    with pytest.raises(ValueError, match=message):
        api.attention(zeros(*q), zeros(*kv), zeros(*kv), **options)


def test_mixed_dtypes_are_refused():
    q, k = zeros(2, 8, 2, 4), zeros(2, 8, 2, 4, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="float32, bfloat16, bfloat16; cast"):
        api.attention(q, k, k)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 8, 2, 4), (2, 8, 2, 4), (2, 8, 1, 4)),
        ((2, 8, 2, 4), (3, 8, 2, 4), (3, 8, 2, 4)),
        ((2, 8, 2, 4), (2, 8, 2, 5), (2, 8, 2, 5)),
        ((2, 8, 2, 4), (2, 8, 2, 4), (2, 7, 2, 4)),
        ((8, 2, 4), (8, 2, 4), (8, 2, 4)),
    ],
)
def test_shapes_that_disagree_are_refused_with_the_shapes(q, k, v):
    # The annotations catch these first in tests; users get the message.
    with pytest.raises(ValueError, match="got q"):
        api._check(zeros(*q), zeros(*k), zeros(*v), None, None, causal=True)


def test_a_block_below_one_is_refused():
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        BlockedTuning(block=0)


# jax.nn promotes both inside.
@pytest.mark.promotion(dtype="standard", rank="allow")
@pytest.mark.parametrize(("window", "causal"), [(None, True), (5, True), (None, False)])
def test_cudnn_gets_the_window_together_with_the_mask(monkeypatch, window, causal):
    real, calls = jax.nn.dot_product_attention, []

    def on_cpu(*args, implementation, **options):
        calls.append((implementation, options["is_causal"]))
        return real(*args, implementation="xla", **options)

    q, k, v = (
        jax.random.normal(key, (2, 20, heads, 8), jnp.bfloat16)
        for key, heads in zip(
            jax.random.split(jax.random.key(0), 3), (4, 2, 2), strict=True
        )
    )
    options = {"window": window, "causal": causal}
    want = api.attention(q, k, v, **options, backend="reference")
    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    monkeypatch.setattr(api, "target", lambda: HOPPER)
    got = api.attention(q, k, v, **options)
    assert calls == [("cudnn", causal)]
    # The probabilities are rounded to bfloat16 (2^-9) before they meet the values.
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), atol=3e-2
    )
